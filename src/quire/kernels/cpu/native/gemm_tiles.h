// Products of a few tokens with the rows of a panel, in registers. Each output is summed in one order, whatever the
// number of tokens: batch-invariant.
#pragma once
#include <algorithm>
#include <type_traits>

#include "packed_formats.h"

namespace quire {

// Activations as integers: x = scale * code, one scale for each group of 32.
struct Quantized {
    int8_t* codes;       // [tokens, groups, kGroup * Simd::kCodeBytes], as `Simd::store_codes` lays them
    float* scales;       // [tokens, groups]
    float* sums;         // [tokens, groups]: scale * sum of codes
    int32_t* half_sums;  // [tokens, groups, 2]: sums of codes of each half

    Quantized from(int64_t token, int width) const {
        const int64_t groups = token * (width / kGroup);
        return {codes + token * width * Simd::kCodeBytes, scales + groups, sums + groups, half_sums + 2 * groups};
    }
};

struct Rows {
    const float* values;   // [tokens, width]
    Quantized quantized;   // where some weight is quantized
    const int32_t* strips;  // or these, of many tokens: `StripGroup`s, strip by strip
    const uint16_t* tiles;   // or these, for the matrix unit: bfloat16, [tokens / 16, groups, 16, 32]
    int width;
};

constexpr int kGroupBytes = kGroup * Simd::kCodeBytes;
constexpr float kMaxCode = 127 * 256 + 127;  // so that a code is 256 * high + low with two signed bytes

static inline void quantize_row(const float* x, int width, Quantized out) {
    for (int g = 0; g < width / kGroup; g++) {
        const float* p = x + g * kGroup;
        Simd::Float high = Simd::zero(), invalid = Simd::zero();  // invalid: NaN if some x is infinite or NaN
        for (int i = 0; i < kGroup; i += Simd::kLanes) {
            const Simd::Float values = Simd::load(p + i);
            high = Simd::maximum(high, Simd::absolute(values));
            invalid = Simd::multiply_add(values, Simd::zero(), invalid);
        }
        const float scale = Simd::highest(high) / kMaxCode + Simd::sum(invalid);
        const Simd::Float inverse = Simd::set(scale > 1e-37f ? 1.0f / scale : 0.0f);  // of less, it would be infinite
        int32_t sums[2] = {0, 0};
        for (int i = 0; i < kGroup; i += Simd::kLanes) {
            const Simd::Int codes = Simd::round_to_int(Simd::multiply(Simd::load(p + i), inverse));
            Simd::store_codes(out.codes + g * kGroupBytes, i, codes);
            sums[i / (kGroup / 2)] += Simd::sum(codes);
        }
        out.scales[g] = scale;
        out.sums[g] = scale * (float)(sums[0] + sums[1]);
        out.half_sums[2 * g] = sums[0];
        out.half_sums[2 * g + 1] = sums[1];
    }
}

// Weights behind those in use: a step of a few rows waits for memory, and the processor's own prefetching, which begins anew at
// each page, comes too late for it.
constexpr int kBytesAhead = 1280, kLine = 64;

template <int kBytes>
static inline void prefetch_weights(const void* weights) {
    const char* ahead = static_cast<const char*>(weights) + kBytesAhead;
#pragma GCC unroll 16
    for (int i = 0; i < kBytes; i += kLine) __builtin_prefetch(ahead + i);
}

// Adds the products of one half of a group: four quads of codes, each used for all tokens.
template <class F, int half, int kTokens, int kVectors>
static inline void half_dots(const uint8_t* block, int at, const int8_t* x, int64_t stride, Simd::Dots (&total)[kTokens][kVectors]) {
    constexpr int kBytes = 4 * Simd::kLanes;
    Simd::Codes codes[4][kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) {
        codes[0][v] = Simd::widen<F::kSigned>(F::template codes<4 * half>(block, at + v * kBytes));
        codes[1][v] = Simd::widen<F::kSigned>(F::template codes<4 * half + 1>(block, at + v * kBytes));
        codes[2][v] = Simd::widen<F::kSigned>(F::template codes<4 * half + 2>(block, at + v * kBytes));
        codes[3][v] = Simd::widen<F::kSigned>(F::template codes<4 * half + 3>(block, at + v * kBytes));
    }
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; t++) {
        const Simd::Half values = Simd::load_half<half>(x + t * stride);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) {
            total[t][v] = Simd::dot<0>(total[t][v], codes[0][v], codes[1][v], values);
            total[t][v] = Simd::dot<2>(total[t][v], codes[2][v], codes[3][v], values);
        }
    }
}

#if defined(__AVX2__)
template <class F>
constexpr bool kByteProducts = F::kHighest < 127 || Simd::kAnyByteProducts;

// Adds the products of a quad: to sums of bytes, and those to the total where 16 bits hold no more, or no quad is left.
template <class F, int quad, int kTokens, int kVectors>
static inline void quad_dots(const uint8_t* block, int at, const int8_t* x, int64_t stride, Simd::ByteDots (&sums)[kTokens][kVectors], Simd::Dots (&total)[kTokens][kVectors]) {
    constexpr int kTurn = F::kScales == 2 ? quad % 4 : quad % 4 * 2 + quad / 4, kTurns = 8 / F::kScales;
    constexpr int kMost = Simd::kQuadsAtOnce<F::kHighest>;
    Simd::Bytes codes[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) {
        codes[v] = F::template codes<quad>(block, at + v * 4 * Simd::kLanes);
        if constexpr (F::kSigned) codes[v] = Simd::add_128(codes[v]);
    }
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; t++) {
        const Simd::Quad values = Simd::load_quad(x + t * stride, quad);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) {
            sums[t][v] = Simd::dot_bytes<kTurn % kMost == 0>(sums[t][v], codes[v], values);
            if constexpr (kTurn % kMost == kMost - 1 || kTurn == kTurns - 1) total[t][v] = Simd::add_dots(total[t][v], sums[t][v]);
        }
    }
}

// All quads of a group, those whose codes lie in the same bytes together.
template <class F, int quad, int kTokens, int kVectors>
static inline void byte_dots(const uint8_t* block, int at, const int8_t* x, int64_t stride, Simd::ByteDots (&sums)[F::kScales][kTokens][kVectors], Simd::Dots (&total)[F::kScales][kTokens][kVectors]) {
    quad_dots<F, quad>(block, at, x, stride, sums[0], total[0]);
    quad_dots<F, quad + 4>(block, at, x, stride, sums[F::kScales - 1], total[F::kScales - 1]);
    if constexpr (quad < 3) byte_dots<F, quad + 1>(block, at, x, stride, sums, total);
}
#else
template <class F>
constexpr bool kByteProducts = false;
#endif

// All products of a group.
template <class F, int kTokens, int kVectors>
static inline void group_dots(const uint8_t* block, int at, const int8_t* x, int64_t stride, Simd::Dots (&total)[F::kScales][kTokens][kVectors]) {
    if constexpr (kByteProducts<F>) {
#if defined(__AVX2__)
        Simd::ByteDots sums[F::kScales][kTokens][kVectors];
        byte_dots<F, 0>(block, at, x, stride, sums, total);
#endif
    } else {
        half_dots<F, 0, kTokens, kVectors>(block, at, x, stride, total[0]);
        half_dots<F, 1, kTokens, kVectors>(block, at, x, stride, total[F::kScales - 1]);
    }
}

// kVectors vectors of rows of a panel, from byte `at` of each quad on, for kTokens tokens.
template <class F, int kTokens, int kVectors>
static inline void quantized_tile(const uint8_t* panel, int at, const Quantized& x, int width, float* out, int64_t stride) {
    constexpr int kOffset = F::kOffset + (F::kSigned && kByteProducts<F> ? 128 : 0);
    const int groups = width / kGroup;
    Simd::Float total[kTokens][kVectors];
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; t++)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) total[t][v] = Simd::zero();
    const uint8_t* block = panel;
    for (int g = 0; g < groups; g++, block += F::kBytes) {
        if constexpr (kTokens <= 4) prefetch_weights<F::kBytes>(block);
        Simd::Dots dots[F::kScales][kTokens][kVectors];
#pragma GCC unroll 2
        for (int h = 0; h < F::kScales; h++)
#pragma GCC unroll 8
            for (int t = 0; t < kTokens; t++) {
                const int32_t* sums = x.half_sums + 2 * (t * groups + g);
                const int32_t sum = kOffset == 0 ? 0 : F::kScales == 2 ? sums[h] : sums[0] + sums[1];
#pragma GCC unroll 4
                for (int v = 0; v < kVectors; v++) dots[h][t][v] = Simd::set_dots(-kOffset * sum);
            }
        group_dots<F>(block, at, x.codes + g * kGroupBytes, groups * kGroupBytes, dots);
        const uint16_t* scales = reinterpret_cast<const uint16_t*>(block) + at / 4;
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) {
            const Simd::Float scale = Simd::load_float16(scales + v * Simd::kLanes);
            Simd::Float second;  // the other half's scale, or the minimum
            if constexpr (F::kScales == 2 || F::kMinimum) second = Simd::load_float16(scales + kPanelRows + v * Simd::kLanes);
#pragma GCC unroll 8
            for (int t = 0; t < kTokens; t++) {
                Simd::Float product = Simd::multiply(Simd::to_float(dots[0][t][v]), scale);
                if constexpr (F::kScales == 2) product = Simd::multiply_add(Simd::to_float(dots[1][t][v]), second, product);
                total[t][v] = Simd::multiply_add(product, x.scales[t * groups + g], total[t][v]);
                if constexpr (F::kMinimum) total[t][v] = Simd::multiply_add(second, x.sums[t * groups + g], total[t][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; t++)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) Simd::store(out + t * stride + v * Simd::kLanes, total[t][v]);
}

// Weights of two inputs, the even one first. F32, F16: [in, 16 rows]; BF16: [in / 2, 16 rows, 2].
struct WeightPair { Simd::Float even, odd; };

struct F32 {
    using Word = float;
    static inline WeightPair load(const float* p) { return {Simd::load(p), Simd::load(p + kPanelRows)}; }
    static int rows_to_words(int row) { return row; }
};
struct F16 {
    using Word = uint16_t;
    static inline WeightPair load(const uint16_t* p) { return {Simd::load_float16(p), Simd::load_float16(p + kPanelRows)}; }
    static int rows_to_words(int row) { return row; }
};
struct BF16 {
    using Word = uint16_t;
    static inline WeightPair load(const uint16_t* p) {
        WeightPair pair;
        Simd::load_bfloat16_pair(p, pair.even, pair.odd);
        return pair;
    }
    static int rows_to_words(int row) { return 2 * row; }
};

// The same for a panel of plain numbers, whose width is padded to an even one. Even and odd inputs have their own sums.
template <class F, int kTokens, int kVectors>
static inline void plain_tile(const uint8_t* panel, int row, const float* x, int width, float* out, int64_t stride) {
    Simd::Float even[kTokens][kVectors], odd[kTokens][kVectors];
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; t++)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) even[t][v] = odd[t][v] = Simd::zero();
    const auto* words = reinterpret_cast<const typename F::Word*>(panel) + F::rows_to_words(row);
    for (int i = 0; i < width; i += 2, words += 2 * kPanelRows) {
        const bool last = i + 1 == width;  // the weight behind it is a zero
        if constexpr (kTokens <= 4) prefetch_weights<2 * kPanelRows * sizeof(typename F::Word)>(words);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) {
            const WeightPair pair = F::load(words + F::rows_to_words(v * Simd::kLanes));
#pragma GCC unroll 8
            for (int t = 0; t < kTokens; t++) {
                const float* values = x + (int64_t)t * width + i;
                even[t][v] = Simd::multiply_add(pair.even, values[0], even[t][v]);
                if (!last) odd[t][v] = Simd::multiply_add(pair.odd, values[1], odd[t][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; t++)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) Simd::store(out + t * stride + v * Simd::kLanes, Simd::add(even[t][v], odd[t][v]));
}

}  // namespace quire
