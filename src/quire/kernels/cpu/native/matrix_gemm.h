// Products of many tokens with packed weights on the matrix unit.
//
// Weights become bfloat16 in the first cache, once for all tokens of a block. Each output is summed in one order, whatever
// the number of tokens, but activations have 8 bits of precision here and 16 in the vector kernels, which steps of few
// tokens use: where results must not depend on the batch, this file is not used.
#pragma once
#include "matrix_unit.h"
#include "strip_tiles.h"

namespace quire {

constexpr int kFewestMatrixTokens = 32;  // of a step: fewer are as fast as strips

template <class F>
static void matrix_panels(const uint8_t* panels, int count, const Rows& x, int64_t token, int64_t end, float* out, int64_t stride);
template <class F>
static void matrix_gate(const uint8_t* gates, const uint8_t* values, int32_t activation, const Rows& x, int64_t token, int64_t end, float* out, int64_t stride);

#if defined(QUIRE_MATRIX_UNIT)

constexpr int kMatrixGroups = 12;  // whose weights fit the first cache

// How a group of a panel becomes a tile, [16 pairs, 16 rows, 2].
template <class F>
struct MatrixWeights {
    static int64_t panel_stride(int width) { return (int64_t)F::kBytes * (width / kGroup); }

    template <int quad>
    static inline void convert_quads(const uint8_t* block, const __m512 (&scales)[2], const __m512 (&offsets)[2], uint16_t* out) {
        constexpr int half = F::kScales == 2 ? quad / 4 : 0;
        const __m512i codes = F::template codes<quad>(block, 0);  // four inputs in each lane
        __m512 inputs[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const __m512i first = _mm512_slli_epi32(codes, 24 - 8 * i);
            const __m512i code = F::kSigned ? _mm512_srai_epi32(first, 24) : _mm512_srli_epi32(first, 24);
            inputs[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(code), scales[half], offsets[half]);
        }
        store_pair(inputs[0], inputs[1], out);
        store_pair(inputs[2], inputs[3], out + 2 * kPanelRows);
        if constexpr (quad + 1 < kGroup / 4) convert_quads<quad + 1>(block, scales, offsets, out + 4 * kPanelRows);
    }
    static inline void convert(const uint8_t* panel, int group, uint16_t* out) {
        const uint8_t* block = panel + (int64_t)group * F::kBytes;
        const auto* stored = reinterpret_cast<const uint16_t*>(block);
        __m512 scales[2], offsets[2];
        scales[0] = scales[1] = Simd::load_float16(stored);
        if constexpr (F::kScales == 2) scales[1] = Simd::load_float16(stored + kPanelRows);
        for (int half = 0; half < 2; half++) offsets[half] = _mm512_mul_ps(scales[half], _mm512_set1_ps(-(float)F::kOffset));
        if constexpr (F::kMinimum) offsets[0] = offsets[1] = Simd::load_float16(stored + kPanelRows);
        convert_quads<0>(block, scales, offsets, out);
    }
};

template <>
struct MatrixWeights<BF16> {  // a panel has the order of tiles
    static int64_t panel_stride(int width) { return 2 * kPanelRows * (int64_t)width; }
    static inline void convert(const uint8_t* panel, int group, uint16_t* out) { std::memcpy(out, panel + (int64_t)group * 2 * kTileNumbers, 2 * kTileNumbers); }
};

template <>
struct MatrixWeights<F16> {
    static int64_t panel_stride(int width) { return 2 * kPanelRows * (int64_t)width; }
    static inline void convert(const uint8_t* panel, int group, uint16_t* out) {
        const auto* words = reinterpret_cast<const uint16_t*>(panel) + (int64_t)group * kTileNumbers;
        for (int pair = 0; pair < kPairs; pair++, words += 2 * kPanelRows, out += 2 * kPanelRows)
            store_pair(Simd::load_float16(words), Simd::load_float16(words + kPanelRows), out);
    }
};

// Some panels for some tokens, of which the first is the first of a tile. As `strip_rows`.
template <class F, int kVectors, class Finish>
static inline void matrix_rows(const uint8_t* const (&panels)[kVectors], const Rows& x, int64_t token, int64_t end, float* out, int64_t stride, const Finish& finish) {
    constexpr int kRows = kVectors * kPanelRows;
    const int groups = x.width / kGroup;
    const int64_t strip = (int64_t)groups * kTileNumbers;
    alignas(64) uint16_t weights[kMatrixGroups][kVectors][kTileNumbers];
    alignas(64) float totals[kTokensAtOnce * kRows];
    const TileScope tiles;
    for (int first = 0; first < groups; first += kMatrixGroups) {
        const int count = std::min(kMatrixGroups, groups - first);
        const bool last = first + count == groups;
        for (int g = 0; g < count; g++)
            for (int v = 0; v < kVectors; v++) MatrixWeights<F>::convert(panels[v], first + g, weights[g][v]);
        for (int64_t t = token; t < end; t += kMatrixTokens) {
            const uint16_t* activations = x.tiles + t / kTileTokens * strip + (int64_t)first * kTileNumbers;
            float* products = totals + (t - token) * kRows;
            float* rows = out + (t - token) * stride;
            const int present = (int)std::min<int64_t>(kMatrixTokens, end - t);
            for (int i = 0; last && i < present; i++) finish.prefetch(rows + i * stride);
            if (present > kTileTokens) tile_products<kVectors, 2>(weights[0][0], activations, strip, count, first == 0, products, kRows);
            else tile_products<kVectors, 1>(weights[0][0], activations, strip, count, first == 0, products, kRows);
            for (int i = 0; last && i < present; i++) finish(products + i * kRows, rows + i * stride);
        }
    }
}

// Panels with `count` rows in all. out: [tokens, stride], from the first of these tokens on.
template <class F>
static void matrix_panels(const uint8_t* panels, int count, const Rows& x, int64_t token, int64_t end, float* out, int64_t stride) {
    const int64_t bytes = MatrixWeights<F>::panel_stride(x.width);
    for (int row = 0; row < count; row += 2 * kPanelRows, panels += 2 * bytes) {
        const StoreRows store{std::min(2 * kPanelRows, count - row)};
        if (count - row > kPanelRows) matrix_rows<F, 2>({panels, panels + bytes}, x, token, end, out + row, stride, store);
        else matrix_rows<F, 1>({panels}, x, token, end, out + row, stride, store);
    }
}

// A panel of gates and one of the values beside them: activation(gate) * value. out: [tokens, stride].
template <class F>
static void matrix_gate(const uint8_t* gates, const uint8_t* values, int32_t activation, const Rows& x, int64_t token, int64_t end, float* out, int64_t stride) {
    matrix_rows<F, 2>({gates, values}, x, token, end, out, stride, GateRows{activation});
}

#endif

}  // namespace quire
