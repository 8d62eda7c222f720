// Products of the same codes in float32, for many tokens on cores whose integer products are slower: AVX-512 without
// VNNI, where the products of 16 pairs of words take two instructions with their sums, and 16 of float32 one.
//
// All codes are integers, and every sum of a group is below 2^24 in formats with small codes. So the sums are exact, and
// the bits of the result are those of the integer products, whatever the number of tokens.
#pragma once
#include "gemm_tiles.h"

namespace quire {

template <class F>
constexpr bool kExactInFloat = F::kScales == 1 && (double)F::kLargest * kMaxCode * kGroup < (double)(1 << 24);

// `count` panels for some tokens, strip by strip. out: [tokens, stride].
template <class F>
static void float_panels(const uint8_t* panels, int count, const Rows& x, int64_t token, int64_t end, float* out, int64_t stride);

#if defined(__AVX512F__) && !defined(__AVX512VNNI__)

constexpr bool kFloatProducts = true;
constexpr int kStripTokens = 12;        // with a sum and a total each, in registers
constexpr int kStripGroups = 6;         // whose activations stay in the first cache for all panels
constexpr int kFewestStripTokens = 12;  // of a step: integer products are as fast for fewer
constexpr int kTokensAtOnce = 120;      // whole strips, so that their activations stay in the cache of a core

// The code of input i of a quad for all 16 rows: a row's four inputs are the bytes of one 32-bit lane.
template <class F, int quad, int i>
struct FloatCodes {
    static inline Simd::Float load(const uint8_t* block) {
        const __m512i bytes = _mm512_srli_epi32(F::template codes<quad>(block, 0), 8 * i);
        const Simd::Float codes = _mm512_cvtepi32_ps(_mm512_and_si512(bytes, _mm512_set1_epi32(255)));
        return F::kOffset == 0 ? codes : Simd::subtract(codes, Simd::set((float)F::kOffset));
    }
};

// Four bits choose one of sixteen numbers in one instruction, which reads no higher bits.
template <int offset, bool minimum, int quad, int i>
struct FloatCodes<FourBits<offset, minimum>, quad, i> {
    static inline Simd::Float load(const uint8_t* block) {
        const __m512i count = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        const Simd::Float table = _mm512_cvtepi32_ps(_mm512_sub_epi32(count, _mm512_set1_epi32(offset)));
        const __m512i both = Simd::load_bytes(block + FourBits<offset, minimum>::kCodes + quad % 4 * kQuadBytes);
        return _mm512_permutexvar_ps(_mm512_srli_epi32(both, 8 * i + (quad < 4 ? 0 : 4)), table);
    }
};

template <class F, int input, int kTokens>
static inline void add_inputs(const uint8_t* block, const float* x, Simd::Float (&sums)[kTokens]) {
    const Simd::Float codes = FloatCodes<F, input / 4, input % 4>::load(block);
#pragma GCC unroll 12
    for (int t = 0; t < kTokens; t++) sums[t] = Simd::multiply_add(codes, x[input * kTokens + t], sums[t]);
    if constexpr (input + 1 < kGroup) add_inputs<F, input + 1>(block, x, sums);
}

// The groups [first, last) of a panel for a strip of tokens; `out` has the totals of those before. x: codes as float32,
// [width, kTokens].
template <class F, int kTokens>
static inline void float_tile(const uint8_t* panel, const float* x, const Quantized& tokens, int first, int last, int groups, float* out, int64_t stride) {
    Simd::Float total[kTokens];
#pragma GCC unroll 12
    for (int t = 0; t < kTokens; t++) total[t] = first == 0 ? Simd::zero() : Simd::load(out + t * stride);
    panel += (int64_t)first * F::kBytes;
    x += (int64_t)first * kGroup * kTokens;
    for (int g = first; g < last; g++, panel += F::kBytes, x += kGroup * kTokens) {
        Simd::Float sums[kTokens];
#pragma GCC unroll 12
        for (int t = 0; t < kTokens; t++) sums[t] = Simd::zero();
        add_inputs<F, 0>(panel, x, sums);
        const auto* scales = reinterpret_cast<const uint16_t*>(panel);
        const Simd::Float scale = Simd::load_float16(scales);
        const Simd::Float minimum = F::kMinimum ? Simd::load_float16(scales + kPanelRows) : scale;
#pragma GCC unroll 12
        for (int t = 0; t < kTokens; t++) {
            total[t] = Simd::multiply_add(Simd::multiply(sums[t], scale), tokens.scales[t * groups + g], total[t]);
            if constexpr (F::kMinimum) total[t] = Simd::multiply_add(minimum, tokens.sums[t * groups + g], total[t]);
        }
    }
#pragma GCC unroll 12
    for (int t = 0; t < kTokens; t++) Simd::store(out + t * stride, total[t]);
}

// Calls body(n, token) for each strip of n tokens from `token` to `end`.
template <class Body>
static inline void each_strip(int64_t token, int64_t end, const Body& body) {
    auto strips = [&](auto n) {
        for (; token + n <= end; token += n) body(n, token);
    };
    strips(std::integral_constant<int, kStripTokens>{});
    strips(std::integral_constant<int, 8>{});
    strips(std::integral_constant<int, 4>{});
    strips(std::integral_constant<int, 2>{});
    strips(std::integral_constant<int, 1>{});
}

template <class F>
static void float_panels(const uint8_t* panels, int count, const Rows& x, int64_t token, int64_t end, float* out, int64_t stride) {
    const int groups = x.width / kGroup;
    const int64_t bytes = (int64_t)F::kBytes * groups;
    each_strip(token, end, [&](auto n, int64_t first) {
        const Quantized tokens = x.quantized.from(first, x.width);
        float* rows = out + (first - token) * stride;
        for (int g = 0; g < groups; g += kStripGroups)
            for (int p = 0; p < count; p++)
                float_tile<F, n>(panels + p * bytes, x.quantized.strips + first * x.width, tokens, g, std::min(g + kStripGroups, groups), groups, rows + p * kPanelRows, stride);
    });
}

// The codes of one strip of tokens, [n, width] as words, as float32, [width, n].
template <int n>
static inline void write_strip(const Quantized& tokens, int width, float* out) {
    constexpr int place[4] = {0, 2, 1, 3};  // of an input among the words of its quad
    for (int t = 0; t < n; t++) {
        const auto* words = reinterpret_cast<const int16_t*>(tokens.codes + (int64_t)t * width * Simd::kCodeBytes);
        for (int i = 0; i < width; i++) out[(int64_t)i * n + t] = (float)words[i / 4 * 4 + place[i % 4]];
    }
}

#else

constexpr bool kFloatProducts = false;
constexpr int kTokensAtOnce = 128;  // so that their activations stay in the cache of a core

#endif

}  // namespace quire
