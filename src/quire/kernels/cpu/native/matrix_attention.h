// The two products of attention for many rows of queries on the matrix unit.
#pragma once
#include <vector>

#include "kv_pages.h"
#include "matrix_unit.h"

namespace quire {

constexpr int kFewestMatrixRows = 16;  // of a tile of queries

// Tiles of one key head. Queries: [rows / 16, dim / 32]; keys: [2 halves, dim / 32, 2]; values: [dim / 32, 2 halves of the keys, 2];
// weights: [rows / 16, 2 halves].
class MatrixAttention {
public:
#if defined(QUIRE_MATRIX_UNIT)
    static bool possible(int rows, int dim) { return rows >= kFewestMatrixRows && dim % kTileDepth == 0; }

    void set_queries(const float* queries, int rows, int dim) {
        depth_ = dim / kTileDepth;
        to_tiles(queries, rows, dim, dim, queries_);
    }
    // keys: [dim, kKeys]; values: [kKeys, dim], of which `count` are there.
    void set_keys_and_values(const float* keys, const float* values, int count) {
        const int dim = depth_ * kTileDepth;
        uint16_t* out = sized(keys_, 4 * depth_);
        for (int half = 0; half < 2; half++)
            for (int g = 0; g < depth_; g++)
                for (int v = 0; v < 2; v++, out += kTileNumbers)
                    store_tile(keys + g * kTileDepth * kKeys + half * kTileDepth + v * kTileColumns, kKeys, kTileDepth, out);
        out = sized(values_, 4 * depth_);
        for (int g = 0; g < depth_; g++)
            for (int half = 0; half < 2; half++)
                for (int v = 0; v < 2; v++, out += kTileNumbers)
                    store_tile(values + half * kTileDepth * dim + g * kTileDepth + v * kTileColumns, dim, count - half * kTileDepth, out);
    }
    // Scores of rows [first, first + count) with the first `visible` keys, and some behind them. scores: [count, kKeys]
    void score(int first, int count, int visible, float* scores) const {
        const TileScope tiles;
        for (int r = 0; r < count; r += kMatrixTokens)
            for (int half = 0; half * kTileDepth < visible; half++)
                products(numbers(keys_) + half * depth_ * 2 * kTileNumbers, numbers(queries_) + (first + r) / kTileTokens * depth_ * kTileNumbers, depth_, count - r,
                         true, scores + r * kKeys + half * kTileDepth, kKeys);
    }
    // Adds the values of rows by their weights, [count, kKeys], to out, [count, dim].
    void add_values(const float* weights, int count, int visible, float* out) {
        const int halves = visible > kTileDepth ? 2 : 1;
        to_tiles(weights, count, kKeys, kKeys, weights_);
        const TileScope tiles;
        for (int r = 0; r < count; r += kMatrixTokens)
            for (int g = 0; g < depth_; g++)
                products(numbers(values_) + g * 4 * kTileNumbers, numbers(weights_) + r / kTileTokens * 2 * kTileNumbers, 2, count - r, false,
                         out + r * depth_ * kTileDepth + g * kTileDepth, depth_ * kTileDepth, halves);
    }

private:
    struct alignas(64) Line { uint16_t numbers[kTileDepth]; };
    using Tiles = std::vector<Line>;

    static const uint16_t* numbers(const Tiles& tiles) { return tiles.data()->numbers; }
    static uint16_t* sized(Tiles& tiles, int count) {
        tiles.resize((size_t)count * kTileTokens);
        return tiles.data()->numbers;
    }
    static void to_tiles(const float* x, int rows, int width, int64_t stride, Tiles& tiles) {
        uint16_t* out = sized(tiles, (rows + kTileTokens - 1) / kTileTokens * (width / kTileDepth));
        for (int r = 0; r < rows; r += kTileTokens, out += width * kTileTokens) tile_tokens(x + r * stride, std::min(kTileTokens, rows - r), width, stride, out);
    }
    // x: [32, stride], of which `count` rows are there: others may hold anything.
    static void store_tile(const float* x, int64_t stride, int count, uint16_t* out) {
        for (int i = 0; i < kTileDepth; i += 2, out += 2 * kTileColumns) {
            const Simd::Float even = i < count ? Simd::load(x + i * stride) : Simd::zero();
            store_pair(even, i + 1 < count ? Simd::load(x + (i + 1) * stride) : Simd::zero(), out);
        }
    }
    static void products(const uint16_t* right, const uint16_t* left, int left_depth, int rows, bool first, float* out, int64_t stride, int depth = 0) {
        const int64_t strip = (int64_t)left_depth * kTileNumbers;
        depth = depth ? depth : left_depth;
        if (rows > kTileTokens) tile_products<2, 2>(right, left, strip, depth, first, out, stride);
        else tile_products<2, 1>(right, left, strip, depth, first, out, stride);
    }

    int depth_ = 0;
    Tiles queries_, keys_, values_, weights_;
#else
    static bool possible(int, int) { return false; }
    void set_queries(const float*, int, int) {}
    void set_keys_and_values(const float*, const float*, int) {}
    void score(int, int, int, float*) const {}
    void add_values(const float*, int, int, float*) {}
#endif
};

}  // namespace quire
