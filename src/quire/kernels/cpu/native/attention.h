// Attention over the pages of the KV cache: all queries of a sequence by splits of its keys for decodes, tiles of queries for chunks.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "kv_pages.h"
#include "matrix_attention.h"
#include "thread_pool.h"

namespace quire {

struct Heads {
    int32_t queries, keys, dim;
    float scale, softcap;
};

struct Sequence {  // a run of tokens of one sequence
    int64_t first_token;
    int32_t num_tokens, num_keys;  // num_keys: what the last token sees
    const int32_t* table;
};

constexpr int kKeysPerSplit = 512;  // keys that one softmax covers; splits are then added in order
constexpr int kMaxTileRows = 192;   // queries times heads in a tile
constexpr int kRowsAtOnce = 96;     // whose scores are in the cache of a core beside keys and values; a multiple of kLanes
constexpr int kDirectRows = 8;      // up to so many, keys and values are converted in registers instead of once for all rows
constexpr int kFewTokens = 16;      // sequences with up to so many queries are cut by keys, not by queries
constexpr int kFewMatrixTokens = 4;  // the same where the matrix unit computes tiles

static inline float soft_cap(float score, float cap) { return cap > 0.0f ? cap * std::tanh(score / cap) : score; }

static inline void scale_row(float* x, float factor, int width) {
    int i = 0;
    for (; i + Simd::kLanes <= width; i += Simd::kLanes) Simd::store(x + i, Simd::multiply(Simd::load(x + i), Simd::set(factor)));
    for (; i < width; i++) x[i] *= factor;
}

// width: a multiple of kLanes.
static inline void multiply_row(float* x, const float* factors, int width) {
    for (int i = 0; i < width; i += Simd::kLanes) Simd::store(x + i, Simd::multiply(Simd::load(x + i), Simd::load(factors + i)));
}

static inline void add_scaled(float* out, const float* x, float factor, int width) {
    int i = 0;
    for (; i + Simd::kLanes <= width; i += Simd::kLanes)
        Simd::store(out + i, Simd::multiply_add(Simd::load(x + i), factor, Simd::load(out + i)));
    for (; i < width; i++) out[i] += factor * x[i];
}

struct Seen { int hidden, visible; };  // of the keys of a tile, a row sees [hidden, visible)

static inline Seen seen_keys(int position, int window, int base, int keys) {
    const int visible = std::max(0, std::min(keys, position + 1 - base));
    return {window > 0 ? std::min(visible, std::max(0, position - window + 1 - base)) : 0, visible};
}

// The highest score of a row so far. NaN is left out; its weight shows it.
static inline float peak_of(float* scores, Seen seen, float highest) {
    if (seen.hidden > 0) std::fill(scores, scores + seen.hidden, -std::numeric_limits<float>::infinity());
    if (seen.visible < kKeys) std::fill(scores + seen.visible, scores + kKeys, -std::numeric_limits<float>::infinity());
    Simd::Float high = Simd::load(scores);
#pragma GCC unroll 8
    for (int i = Simd::kLanes; i < kKeys; i += Simd::kLanes) high = Simd::maximum(high, Simd::load(scores + i));
    return std::max(highest, Simd::highest(high));
}

// Scores of a row become weights, e to (score - peak). Returns their sums, lane by lane.
static inline Simd::Float weigh(float* scores, Seen seen, float peak) {
    constexpr int kVectors = kKeys / Simd::kLanes;
    Simd::Float weights[kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; i++) weights[i] = exponential(Simd::subtract(Simd::load(scores + i * Simd::kLanes), Simd::set(peak)));
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; i++) Simd::store(scores + i * Simd::kLanes, weights[i]);
    if (seen.hidden > 0 || seen.visible < kKeys) {  // exponential() gives e to -87 at the least; hidden keys are exactly 0
        std::fill(scores, scores + seen.hidden, 0.0f);
        std::fill(scores + seen.visible, scores + kKeys, 0.0f);
        for (int i = 0; i < kVectors; i++) weights[i] = Simd::load(scores + i * Simd::kLanes);
    }
    Simd::Float sum = weights[0];
#pragma GCC unroll 8
    for (int i = 1; i < kVectors; i++) sum = Simd::add(sum, weights[i]);
    return sum;
}

struct Softmax {  // so far: the highest score, and the sum of e to (score - highest)
    float highest = std::numeric_limits<float>::lowest(), total = 0.0f;
};

struct SoftmaxRows {  // the softmax of some rows so far
    float* highest;
    float* factors;
    float* sums;  // [rows, kLanes]
};

struct KvScales {  // of the keys and values of a tile, with kInt8: they multiply scores and weights
    alignas(64) float keys[kKeys];
    alignas(64) float values[kKeys];
};

struct TileBuffers {
    std::vector<float> keys, values, scores, queries, split, output;
    KvScales scales;
    std::vector<float> highest, factors, sums;  // of the softmax of a split, as `SoftmaxRows`
    std::vector<Seen> seen;
    std::vector<Softmax> split_softmax, softmax;
    MatrixAttention matrix;
    void reserve(int rows, int padded) {
        const size_t whole = (size_t)(rows + Simd::kLanes - 1) / Simd::kLanes * Simd::kLanes;
        highest.resize(whole);
        factors.resize(whole);
        sums.resize((size_t)rows * Simd::kLanes);
        seen.resize(rows);
        keys.resize((size_t)padded * kKeys);
        values.resize((size_t)padded * kKeys);
        const size_t tiles = (size_t)(rows + kTileTokens - 1) / kTileTokens * kTileTokens;  // whole tiles are stored
        scores.resize(std::min<size_t>(tiles, kRowsAtOnce) * kKeys);
        queries.resize((size_t)rows * padded);
        split.resize(tiles * padded);
        output.resize(tiles * padded);
        split_softmax.resize(rows);
        softmax.resize(rows);
    }
};

// c[rows, columns] = a[rows, depth] b[depth, columns], b and c with a stride; columns are a multiple of kLanes. kAdd: plus what
// c was, each row times its factor.
template <bool kAdd, int kRows, int kColumns>
static inline void product_tile(const float* a, int64_t stride_a, const float* b, int64_t stride_b, int depth, float* c, int64_t stride_c, const float* factors) {
    Simd::Float total[kRows][kColumns];
#pragma GCC unroll 6
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < kColumns; j++) total[r][j] = kAdd ? Simd::multiply(Simd::load(c + r * stride_c + j * Simd::kLanes), Simd::set(factors[r])) : Simd::zero();
    for (int k = 0; k < depth; k++) {
        Simd::Float right[kColumns];
#pragma GCC unroll 4
        for (int j = 0; j < kColumns; j++) right[j] = Simd::load(b + k * stride_b + j * Simd::kLanes);
#pragma GCC unroll 6
        for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
            for (int j = 0; j < kColumns; j++) total[r][j] = Simd::multiply_add(right[j], a[r * stride_a + k], total[r][j]);
    }
#pragma GCC unroll 6
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < kColumns; j++) Simd::store(c + r * stride_c + j * Simd::kLanes, total[r][j]);
}

// All rows of some columns, as many at once as registers allow. Each sum is in the order of the depth, whatever the tile.
template <bool kAdd, int kColumns>
static inline void product_strip(const float* a, int64_t stride_a, int rows, const float* b, int64_t stride_b, int depth, float* c, int64_t stride_c, const float* factors) {
    auto strip = [&](auto count) {
        constexpr int n = decltype(count)::value;
        for (; rows >= n; rows -= n, a += n * stride_a, c += n * stride_c, factors += kAdd ? n : 0)
            product_tile<kAdd, n, kColumns>(a, stride_a, b, stride_b, depth, c, stride_c, factors);
    };
    if constexpr (Simd::kProductRows >= 6) strip(std::integral_constant<int, 6>{});
    strip(std::integral_constant<int, 4>{});
    strip(std::integral_constant<int, 3>{});
    strip(std::integral_constant<int, 2>{});
    strip(std::integral_constant<int, 1>{});
}

template <bool kAdd>
static void product(const float* a, int64_t stride_a, int rows, const float* b, int64_t stride_b, int depth, float* c, int64_t stride_c, int columns,
                    const float* factors = nullptr) {
    int j = 0;
    auto strips = [&](auto count) {
        constexpr int n = decltype(count)::value;
        for (; j + n * Simd::kLanes <= columns; j += n * Simd::kLanes)
            product_strip<kAdd, n>(a, stride_a, rows, b + j, stride_b, depth, c + j, stride_c, factors);
    };
    if constexpr (Simd::kProductColumns >= 4) strips(std::integral_constant<int, 4>{});
    strips(std::integral_constant<int, 2>{});
    strips(std::integral_constant<int, 1>{});
}

static inline int padded_dim(int dim) { return (dim + Simd::kLanes - 1) / Simd::kLanes * Simd::kLanes; }

// Keys [base + begin, base + count) as float32: keys [dim, kKeys], values [kKeys, padded]. base is a multiple of kKeys.
// Those before them are zeros: their blocks may hold anything.
template <int32_t format>
static void load_tile_of(const KvLayer& kv, const int32_t* table, int head, int dim, int base, int begin, int count, TileBuffers& buffers) {
    const int padded = padded_dim(dim);
    if (begin > 0) {
        for (int d = 0; d < dim; d++) std::fill(buffers.keys.data() + d * kKeys, buffers.keys.data() + d * kKeys + begin, 0.0f);
        std::fill(buffers.values.data(), buffers.values.data() + (size_t)begin * padded, 0.0f);
        std::fill(buffers.scales.keys, buffers.scales.keys + begin, 0.0f);
        std::fill(buffers.scales.values, buffers.scales.values + begin, 0.0f);
    }
    for (int i = begin; i < count;) {
        const int key = base + i, offset = key % kv.block_size, run = std::min(kv.block_size - offset, count - i);
        const int64_t block = table[key / kv.block_size];
        load_keys<format>(kv, block, head, dim, offset, run, buffers.keys.data() + i);
        for (int j = 0; j < run; j++)
            load_numbers(value_of(kv, block, offset + j, head), format, dim, buffers.values.data() + (i + j) * padded);
        if constexpr (format == kInt8) load_scales(kv, block, head, dim, offset, run, buffers.scales.keys + i, buffers.scales.values + i);
        i += run;
    }
    if (count < kKeys)
        for (int d = 0; d < dim; d++) std::fill(buffers.keys.data() + d * kKeys + count, buffers.keys.data() + (d + 1) * kKeys, 0.0f);
}

static inline void load_tile(const KvLayer& kv, const int32_t* table, int head, int dim, int base, int begin, int count, TileBuffers& buffers) {
    switch (kv.format) {
        case kFloat32: return load_tile_of<kFloat32>(kv, table, head, dim, base, begin, count, buffers);
        case kFloat16: return load_tile_of<kFloat16>(kv, table, head, dim, base, begin, count, buffers);
        case kInt8: return load_tile_of<kInt8>(kv, table, head, dim, base, begin, count, buffers);
        default: return load_tile_of<kBfloat16>(kv, table, head, dim, base, begin, count, buffers);
    }
}

// One step of the softmax of some rows: scores become weights, and `factors` what the output so far is multiplied with.
// scales: null where there are none.
static inline void weigh_rows(float* scores, const Seen* seen, int rows, float softcap, const KvScales* scales, const SoftmaxRows& softmax) {
    for (int r = 0; r < rows; r++) {
        float* row = scores + r * kKeys;
        if (scales) multiply_row(row, scales->keys, kKeys);
        if (softcap > 0.0f)
            for (int i = 0; i < seen[r].visible; i++) row[i] = soft_cap(row[i], softcap);
        softmax.factors[r] = peak_of(row, seen[r], softmax.highest[r]);
    }
    for (int r = 0; r < rows; r += Simd::kLanes) {
        const Simd::Float peaks = Simd::load(softmax.factors + r);
        Simd::store(softmax.factors + r, exponential(Simd::subtract(Simd::load(softmax.highest + r), peaks)));
        Simd::store(softmax.highest + r, peaks);
    }
    for (int r = 0; r < rows; r++) {
        float* sums = softmax.sums + r * Simd::kLanes;
        const Simd::Float sum = weigh(scores + r * kKeys, seen[r], softmax.highest[r]);
        Simd::store(sums, Simd::multiply_add(Simd::load(sums), softmax.factors[r], sum));
        if (scales) multiply_row(scores + r * kKeys, scales->values, kKeys);
    }
}

// Where the keys and values of a tile lie: a pointer for each vector of keys, and for each value.
struct TilePages {
    const uint8_t* keys[kKeys / Simd::kLanes];
    const uint8_t* values[kKeys];
};

// Vectors behind the last key repeat its own: their scores are hidden.
static inline TilePages locate_tile(const KvLayer& kv, const int32_t* table, int head, int dim, int base, int count, KvScales& scales) {
    TilePages pages;
    const int64_t bytes = number_bytes(kv.format);
    for (int i = 0; i < kKeys / Simd::kLanes; i++) {
        const int key = base + std::min(i * Simd::kLanes, (count - 1) / Simd::kLanes * Simd::kLanes), offset = key % kv.block_size;
        const int64_t block = table[key / kv.block_size];
        pages.keys[i] = keys_of(kv, block, head, dim) + offset * bytes;
        if (kv.format == kInt8 && i * Simd::kLanes < count)
            load_scales(kv, block, head, dim, offset, std::min(Simd::kLanes, base + count - key), scales.keys + key - base, scales.values + key - base);
    }
    for (int i = 0; i < count; i++) {
        const bool same = i > 0 && (base + i) % kv.block_size != 0;
        pages.values[i] = same ? pages.values[i - 1] + kv.token_stride * bytes : value_of(kv, table[(base + i) / kv.block_size], (base + i) % kv.block_size, head);
    }
    return pages;
}

// Scores of some rows with some vectors of keys, which are converted in registers.
template <int32_t format, int kRows, int kColumns>
static inline void score_pages(const float* queries, int64_t query_stride, int dim, const uint8_t* const* keys, int64_t stride, float* scores) {
    Simd::Float total[kRows][kColumns];
#pragma GCC unroll 6
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < kColumns; j++) total[r][j] = Simd::zero();
    for (int d = 0; d < dim; d++) {
        Simd::Float right[kColumns];
#pragma GCC unroll 4
        for (int j = 0; j < kColumns; j++) right[j] = load_stored<format>(keys[j] + d * stride);
#pragma GCC unroll 6
        for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
            for (int j = 0; j < kColumns; j++) total[r][j] = Simd::multiply_add(right[j], queries[r * query_stride + d], total[r][j]);
    }
#pragma GCC unroll 6
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < kColumns; j++) Simd::store(scores + r * kKeys + j * Simd::kLanes, total[r][j]);
}

// What rows had, times their factors, plus their weights times some columns of the values.
template <int32_t format, int kRows, int kColumns>
static inline void add_pages(const float* weights, const uint8_t* const* values, int count, int first, float* out, int64_t stride, const float* factors) {
    Simd::Float total[kRows][kColumns];
#pragma GCC unroll 6
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < kColumns; j++) total[r][j] = Simd::multiply(Simd::load(out + r * stride + first + j * Simd::kLanes), Simd::set(factors[r]));
    for (int k = 0; k < count; k++) {
        Simd::Float right[kColumns];
#pragma GCC unroll 4
        for (int j = 0; j < kColumns; j++) right[j] = load_stored<format>(values[k] + (first + j * Simd::kLanes) * number_bytes(format));
#pragma GCC unroll 6
        for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
            for (int j = 0; j < kColumns; j++) total[r][j] = Simd::multiply_add(right[j], weights[r * kKeys + k], total[r][j]);
    }
#pragma GCC unroll 6
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < kColumns; j++) Simd::store(out + r * stride + first + j * Simd::kLanes, total[r][j]);
}

// Calls body(number of rows, first row) for strips whose sums fit the registers.
template <class Body>
static inline void each_strip(int rows, const Body& body) {
    int r = 0;
    auto strips = [&](auto count) {
        for (; rows - r >= decltype(count)::value; r += decltype(count)::value) body(count, r);
    };
    strips(std::integral_constant<int, 4>{});
    strips(std::integral_constant<int, 3>{});
    strips(std::integral_constant<int, 2>{});
    strips(std::integral_constant<int, 1>{});
}

constexpr float kOne = 1.0f;

// Calls body(row, first, last) for the keys that a row sees and the first of these rows does not. What a row does not see,
// it does not multiply by zero either: it may be NaN.
template <class Body>
static inline void each_rest(const Seen* seen, int rows, const Body& body) {
    for (int r = 1; r < rows; r++)
        if (seen[r].visible > seen[0].visible) body(r, seen[0].visible, seen[r].visible);
}

// A tile of few rows, straight from the pages: each sum has the numbers and the order that it has by way of the buffers.
template <int32_t format>
static void attend_pages(const PageRequests& requests, const Heads& heads, const TilePages& pages, const float* queries, int rows, int padded, int base,
                         const Seen* seen, const KvScales& scales, float* scores, const SoftmaxRows& state, float* out) {
    constexpr int kColumns = Simd::kProductColumns, kAtOnce = kColumns * Simd::kLanes;
    const int64_t stride = requests.kv.block_size * number_bytes(format);
    const int keys = seen[rows - 1].visible;
    each_strip(rows, [&](auto count, int r) {
        for (int j = 0, key = 0; key < keys; j += kColumns, key += kAtOnce) {
            if (r == 0) {
                requests.values(pages.values + key, std::min(kAtOnce, keys - key));
                requests.keys(base + key + kAtOnce, kAtOnce);
            }
            score_pages<format, decltype(count)::value, kColumns>(queries + r * padded, padded, heads.dim, pages.keys + j, stride, scores + r * kKeys + key);
        }
    });
    weigh_rows(scores, seen, rows, heads.softcap, format == kInt8 ? &scales : nullptr, state);
    auto add = [&](auto count, int r, int key, int last, const float* factors) {
        constexpr int n = decltype(count)::value;
        int first = 0;
        for (; first + kColumns * Simd::kLanes <= heads.dim; first += kColumns * Simd::kLanes)
            add_pages<format, n, kColumns>(scores + r * kKeys + key, pages.values + key, last - key, first, out + r * padded, padded, factors);
        for (; first < heads.dim; first += Simd::kLanes)
            add_pages<format, n, 1>(scores + r * kKeys + key, pages.values + key, last - key, first, out + r * padded, padded, factors);
    };
    each_strip(rows, [&](auto count, int r) {
        add(count, r, 0, seen[r].visible, state.factors + r);
        each_rest(seen + r, decltype(count)::value, [&](int i, int key, int last) { add(std::integral_constant<int, 1>{}, r + i, key, last, &kOne); });
    });
}

static inline void attend_pages(const PageRequests& requests, const Heads& heads, int base, int keys, const float* queries, int rows, const Seen* seen,
                                KvScales& scales, float* scores, const SoftmaxRows& state, float* out) {
    const KvLayer& kv = requests.kv;
    const TilePages pages = locate_tile(kv, requests.table, requests.head, heads.dim, base, keys, scales);
    const int padded = padded_dim(heads.dim);
    switch (kv.format) {
        case kFloat32: return attend_pages<kFloat32>(requests, heads, pages, queries, rows, padded, base, seen, scales, scores, state, out);
        case kFloat16: return attend_pages<kFloat16>(requests, heads, pages, queries, rows, padded, base, seen, scales, scores, state, out);
        case kInt8: return attend_pages<kInt8>(requests, heads, pages, queries, rows, padded, base, seen, scales, scores, state, out);
        default: return attend_pages<kBfloat16>(requests, heads, pages, queries, rows, padded, base, seen, scales, scores, state, out);
    }
}
// Calls body(first, count, keys) for rows that are computed together, and the keys that the last of them sees. Near the end
// of a chunk, rows see some of the keys of a tile: others are not computed.
template <class Body>
static inline void each_rows(const Seen* seen, int rows, int keys, const Body& body) {
    if (seen[0].visible == keys) return body(0, rows, keys);
    for (int r = 0; r < rows; r += Simd::kProductRows) {
        const int count = std::min(Simd::kProductRows, rows - r);
        body(r, count, seen[r + count - 1].visible);
    }
}

// Rows of queries over keys [first, last) of one split. Row r is at position + r / group. queries: [rows, padded],
// scaled; out: [rows, padded], not divided by the total.
static void attend_split(const KvLayer& kv, const Heads& heads, const int32_t* table, int key_head, int window, int position, const float* queries,
                         int rows, int first, int last, bool matrix_unit, TileBuffers& buffers, float* out, Softmax* softmax) {
    const int group = heads.queries / heads.keys, padded = padded_dim(heads.dim);
    const bool direct = rows <= kDirectRows && kv.block_size % Simd::kLanes == 0 && heads.dim % Simd::kLanes == 0;
    const PageRequests requests{kv, table, key_head, heads.dim, last};
    if (direct) requests.keys(first, Simd::kProductColumns * Simd::kLanes);
    matrix_unit = matrix_unit && MatrixAttention::possible(rows, heads.dim);
    if (matrix_unit) buffers.matrix.set_queries(queries, rows, heads.dim);
    std::fill(out, out + (size_t)rows * padded, 0.0f);
    std::fill(buffers.highest.begin(), buffers.highest.end(), Softmax().highest);
    std::fill(buffers.sums.begin(), buffers.sums.end(), 0.0f);
    for (int base = first / kKeys * kKeys; base < last; base += kKeys) {
        const int keys = std::min(kKeys, last - base);
        for (int r = 0, at = position; r < rows; r += group, at++) std::fill_n(buffers.seen.begin() + r, group, seen_keys(at, window, base, keys));
        if (direct && first <= base) {
            attend_pages(requests, heads, base, keys, queries, rows, buffers.seen.data(), buffers.scales, buffers.scores.data(),
                         {buffers.highest.data(), buffers.factors.data(), buffers.sums.data()}, out);
            continue;
        }
        load_tile(kv, table, key_head, heads.dim, base, std::max(0, first - base), keys, buffers);
        if (matrix_unit) buffers.matrix.set_keys_and_values(buffers.keys.data(), buffers.values.data(), keys);
        for (int r = 0; r < rows; r += kRowsAtOnce) {
            const Seen* seen = buffers.seen.data() + r;
            const int some = std::min(kRowsAtOnce, rows - r);
            const SoftmaxRows state{buffers.highest.data() + r, buffers.factors.data() + r, buffers.sums.data() + r * Simd::kLanes};
            float* scores = buffers.scores.data();
            if (matrix_unit) {
                const int visible = seen[some - 1].visible;
                buffers.matrix.score(r, some, visible, scores);
                weigh_rows(scores, seen, some, heads.softcap, kv.format == kInt8 ? &buffers.scales : nullptr, state);
                for (int i = 0; i < some; i++) scale_row(out + (int64_t)(r + i) * padded, state.factors[i], padded);
                buffers.matrix.add_values(scores, some, visible, out + (int64_t)r * padded);
                continue;
            }
            each_rows(seen, some, kKeys, [&](int i, int count, int visible) {
                product<false>(queries + (int64_t)(r + i) * padded, padded, count, buffers.keys.data(), kKeys, heads.dim, scores + i * kKeys, kKeys,
                               (visible + Simd::kLanes - 1) / Simd::kLanes * Simd::kLanes);
            });
            weigh_rows(scores, seen, some, heads.softcap, kv.format == kInt8 ? &buffers.scales : nullptr, state);
            each_rows(seen, some, keys, [&](int i, int count, int /* the last row sees */) {
                float* rows_out = out + (int64_t)(r + i) * padded;
                product<true>(scores + i * kKeys, kKeys, count, buffers.values.data(), padded, seen[i].visible, rows_out, padded, padded, state.factors + i);
                each_rest(seen + i, count, [&](int row, int key, int last) {
                    product<true>(scores + (i + row) * kKeys + key, kKeys, 1, buffers.values.data() + (int64_t)key * padded, padded, last - key,
                                  rows_out + (int64_t)row * padded, padded, padded, &kOne);
                });
            });
        }
    }
    for (int r = 0; r < rows; r++) softmax[r] = {buffers.highest[r], Simd::sum(Simd::load(buffers.sums.data() + r * Simd::kLanes))};
}

// Adds a split to what the splits before it gave. The order is that of the keys, in chunks and decodes alike.
static inline void add_split(const Softmax& split, const float* split_output, Softmax& softmax, float* output, int width) {
    if (split.total == 0.0f) return;  // all its keys are hidden
    if (softmax.total == 0.0f) {
        std::copy(split_output, split_output + width, output);
        softmax = split;
        return;
    }
    const float highest = std::max(softmax.highest, split.highest);
    const float before = std::exp(softmax.highest - highest), now = std::exp(split.highest - highest);
    scale_row(output, before, width);
    add_scaled(output, split_output, now, width);
    softmax = {highest, softmax.total * before + split.total * now};
}

constexpr int kTokensAhead = 4;  // whose rows are requested: each lies on a page of its own

static inline void prefetch_row(const float* row, int width) {
    for (int i = 0; i < width; i += 16) __builtin_prefetch(row + i, 1);
}

static inline void finish_row(const float* output, const Softmax& softmax, int dim, float* out) {
    const float inverse = 1.0f / softmax.total;
    for (int d = 0; d < dim; d++) out[d] = output[d] * inverse;
}

static inline void load_queries(const float* query, int64_t stride, const Heads& heads, int key_head, int rows, float* out) {
    const int group = heads.queries / heads.keys, padded = padded_dim(heads.dim);
    for (int r = 0; r < rows; r += group, query += stride)
        for (int h = 0; h < group; h++) {
            const float* source = query + (key_head * group + h) * heads.dim;
            if (r + kTokensAhead * group < rows) prefetch_row(source + kTokensAhead * stride, heads.dim);
            float* row = out + (r + h) * padded;
            int d = 0;
            for (; d + Simd::kLanes <= heads.dim; d += Simd::kLanes) Simd::store(row + d, Simd::multiply(Simd::load(source + d), Simd::set(heads.scale)));
            for (; d < heads.dim; d++) row[d] = source[d] * heads.scale;
        }
}

// Tokens [first, first + count) of a sequence, with all query heads of a key head. query, out: [tokens, stride].
static void attend_tile(const KvLayer& kv, const Heads& heads, const Sequence& sequence, int window, int key_head, int first, int count, bool matrix_unit,
                        const float* query, int64_t query_stride, float* out, int64_t out_stride, TileBuffers& buffers) {
    const int group = heads.queries / heads.keys, padded = padded_dim(heads.dim), rows = group * count;
    buffers.reserve(rows, padded);
    const int position = sequence.num_keys - sequence.num_tokens + first, last = position + count;
    const int lowest = window > 0 ? std::max(0, position - window + 1) : 0;
    load_queries(query + first * query_stride, query_stride, heads, key_head, rows, buffers.queries.data());
    const int begin = lowest / kKeysPerSplit * kKeysPerSplit;
    for (int base = begin; base < last; base += kKeysPerSplit) {
        float* output = (base == begin ? buffers.output : buffers.split).data();
        Softmax* softmax = (base == begin ? buffers.softmax : buffers.split_softmax).data();
        attend_split(kv, heads, sequence.table, key_head, window, position, buffers.queries.data(), rows, std::max(base, lowest),
                     std::min(base + kKeysPerSplit, last), matrix_unit, buffers, output, softmax);
        for (int r = 0; base != begin && r < rows; r++)
            add_split(buffers.split_softmax[r], buffers.split.data() + r * padded, buffers.softmax[r], buffers.output.data() + r * padded, padded);
    }
    out += first * out_stride + (int64_t)key_head * group * heads.dim;
    for (int r = 0; r < rows; r += group, out += out_stride) {
        if (r + kTokensAhead * group < rows) prefetch_row(out + kTokensAhead * out_stride, group * heads.dim);
        for (int h = 0; h < group; h++) finish_row(buffers.output.data() + (r + h) * padded, buffers.softmax[r + h], heads.dim, out + h * heads.dim);
    }
}

// What a step computes for each layer: its sequences cut into tasks, once. A long chunk is cut into tiles of queries;
// a few queries are cut by keys, so that one decode keeps several threads busy.
class StepAttention {
public:
    // tables: [sequences, width]; starts: [sequences + 1]; lengths: [sequences], 0 for padding.
    StepAttention(const Heads& heads, int num_sequences, const int32_t* tables, int64_t width, const int32_t* starts, const int32_t* lengths,
                  bool matrix_unit)
        : heads_(heads), padded_(padded_dim(heads.dim)), matrix_unit_(matrix_unit) {
        const int tokens_per_tile = std::max(1, kMaxTileRows / (heads.queries / heads.keys));
        for (int s = 0; s < num_sequences; s++) {
            const Sequence sequence{starts[s], starts[s + 1] - starts[s], lengths[s], tables + s * width};
            if (sequence.num_keys == 0 || sequence.num_tokens == 0) continue;
            if (sequence.num_tokens <= (matrix_unit ? kFewMatrixTokens : kFewTokens)) {
                add_queries(sequence);
                continue;
            }
            for (int t = 0; t < sequence.num_tokens; t += tokens_per_tile)
                for (int k = 0; k < heads.keys; k++)
                    tiles_.push_back({sequence, k, t, std::min(tokens_per_tile, sequence.num_tokens - t)});
        }
        // The longest first, so that the threads end together.
        std::stable_sort(tiles_.begin(), tiles_.end(), [](const Tile& x, const Tile& y) { return x.position() > y.position(); });
    }

    // query: [tokens, query_stride], the heads of a token side by side; out: [tokens, heads * dim].
    void attend(ThreadPool& pool, const KvLayer& kv, int window, const float* query, int64_t query_stride, float* out) {
        const int64_t out_stride = (int64_t)heads_.queries * heads_.dim;
        buffers_.resize(pool.num_threads());
        split_outputs_.resize(num_outputs_ * padded_);
        split_softmax_.resize(num_outputs_);
        const int num_tiles = (int)tiles_.size(), num_tasks = num_tiles + (int)splits_.size() * heads_.keys;
        pool.run(num_tasks, [&](int task, int thread) {
            if (task < num_tiles) {
                const Tile& tile = tiles_[task];
                attend_tile(kv, heads_, tile.sequence, window, tile.key_head, tile.first, tile.count, matrix_unit_,
                            query + tile.sequence.first_token * query_stride, query_stride,
                            out + tile.sequence.first_token * out_stride, out_stride, buffers_[thread]);
            } else {
                const int split = (task - num_tiles) / heads_.keys, key_head = (task - num_tiles) % heads_.keys;
                attend_query_split(kv, window, split, key_head, query, query_stride, buffers_[thread]);
            }
        });
        for (const Queries& each : queries_)
            for (int t = 0; t < each.count; t++)
                for (int h = 0; h < heads_.queries; h++) merge(each, t, h, out + (each.token + t) * out_stride + h * heads_.dim);
    }

private:
    // Of some tokens of a sequence. Outputs of a split: [heads of keys, tokens, heads of a group, padded].
    struct Queries { int64_t token; int count; int64_t outputs; int num_splits; };
    struct Split { int64_t token; int count; const int32_t* table; int position, first, last; int64_t outputs; };
    struct Tile {
        Sequence sequence;
        int key_head, first, count;
        int position() const { return sequence.num_keys - sequence.num_tokens + first; }
    };

    void add_queries(const Sequence& sequence) {
        const int count = sequence.num_tokens, keys = sequence.num_keys;
        queries_.push_back({sequence.first_token, count, num_outputs_, (keys + kKeysPerSplit - 1) / kKeysPerSplit});
        for (int first = 0; first < keys; first += kKeysPerSplit, num_outputs_ += (int64_t)count * heads_.queries)
            splits_.push_back({sequence.first_token, count, sequence.table, keys - count, first, std::min(first + kKeysPerSplit, keys), num_outputs_});
    }

    void attend_query_split(const KvLayer& kv, int window, int index, int key_head, const float* query, int64_t query_stride, TileBuffers& buffers) {
        const Split& split = splits_[index];
        const int group = heads_.queries / heads_.keys, rows = group * split.count;
        const size_t place = split.outputs + (size_t)key_head * rows;
        buffers.reserve(rows, padded_);
        load_queries(query + split.token * query_stride, query_stride, heads_, key_head, rows, buffers.queries.data());
        const int first = window > 0 ? std::max(split.first, split.position - window + 1) : split.first;
        attend_split(kv, heads_, split.table, key_head, window, split.position, buffers.queries.data(), rows, std::min(first, split.last), split.last,
                     false, buffers, split_outputs_.data() + place * padded_, split_softmax_.data() + place);
    }
    void merge(const Queries& queries, int t, int head, float* out) {
        const int group = heads_.queries / heads_.keys;
        const size_t inside = (size_t)head / group * group * queries.count + t * group + head % group;
        float* first = split_outputs_.data() + (queries.outputs + inside) * padded_;
        Softmax& softmax = split_softmax_[queries.outputs + inside];
        for (int s = 1; s < queries.num_splits; s++) {
            const size_t place = queries.outputs + (size_t)s * queries.count * heads_.queries + inside;
            add_split(split_softmax_[place], split_outputs_.data() + place * padded_, softmax, first, padded_);
        }
        finish_row(first, softmax, heads_.dim, out);
    }

    const Heads heads_;
    const int padded_;
    const bool matrix_unit_;  // for tiles of queries
    std::vector<Tile> tiles_;
    std::vector<Queries> queries_;
    std::vector<Split> splits_;
    int64_t num_outputs_ = 0;  // of all splits, a row of one head each
    std::vector<TileBuffers> buffers_;
    std::vector<float> split_outputs_;
    std::vector<Softmax> split_softmax_;
};

}  // namespace quire
