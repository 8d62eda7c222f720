// Products of many tokens on x86: a few groups of some rows become words in the first cache once, for all strips of tokens.
//
// A strip is as many tokens as have their sums in registers, beside two vectors of rows. Integers and the order of the
// floats are those of `quantized_tile`: the same bits, whatever the number of tokens.
#pragma once
#include <limits>

#include "elementwise.h"
#include "gemm_tiles.h"

namespace quire {

constexpr int kStripTokens = Simd::kLanes == 16 ? 12 : 6;
constexpr int kPairs = kGroup / 2;       // of inputs, in a group
constexpr int kStripWords = kPairs + 2;  // of 32 bits, for a token and a group

// A group of the activations of n tokens.
template <int n>
struct StripGroup {
    int32_t pairs[kPairs][n];  // codes of two inputs, as words
    float scales[n], sums[n];  // as in `Quantized`
};

template <class F>
static void strip_panels(const uint8_t* panels, int count, const Rows& x, int64_t token, int64_t end, float* out, int64_t stride);
template <class F>
static void strip_gate(const uint8_t* gates, const uint8_t* values, int32_t activation, const Rows& x, int64_t token, int64_t end, float* out, int64_t stride);
template <int n>
static inline void quantize_strip(const float* x, int64_t width, StripGroup<n>* out);
// Calls body(n, token) for each strip of n tokens from `token` to `end`.
template <class Body>
static inline void each_strip(int64_t token, int64_t end, const Body& body) {
    auto strips = [&](auto n) {
        for (; token + n <= end; token += n) body(n, token);
    };
    strips(std::integral_constant<int, kStripTokens>{});
    if constexpr (kStripTokens > 8) strips(std::integral_constant<int, 8>{}), strips(std::integral_constant<int, 6>{});
    strips(std::integral_constant<int, 4>{});
    strips(std::integral_constant<int, 3>{});
    strips(std::integral_constant<int, 2>{});
    strips(std::integral_constant<int, 1>{});
}

#if defined(__AVX2__)

constexpr bool kStripProducts = true;
constexpr int kStripVectors = 2;
constexpr int kStripPanels = kStripVectors * Simd::kLanes / kPanelRows;
constexpr int kStripGroups = 6;          // whose words, and the activations of a strip, fit the first cache
constexpr int kFewestStripTokens = 3;    // of a step: fewer are as fast without
#if defined(QUIRE_MATRIX_UNIT)
constexpr int kTokensAtOnce = 240;       // whole tiles of the matrix unit, too
#else
constexpr int kTokensAtOnce = 120;       // whose activations stay in the cache of a core
#endif
static_assert(kTokensAtOnce % kStripTokens == 0, "strips are laid out from the first token on");

// A group of the weights of kVectors vectors of rows: codes as words, two inputs in a lane.
template <int kVectors>
struct WideGroup {
    Simd::Dots pairs[kPairs][kVectors];
    Simd::Float scales[2][kVectors];  // the second: of the other half, or the minimum
};

// Where the rows of some vectors lie: a panel, and the first row in it; and the panel after it of this thread.
template <int kVectors>
struct PanelRows {
    const uint8_t* panels[kVectors];
    int rows[kVectors];
    const uint8_t* next[kVectors];
};

template <class F, int quad, int kVectors>
static inline void widen_quads(const PanelRows<kVectors>& from, int64_t at, WideGroup<kVectors>& out) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; v++) {
        const auto codes = Simd::widen<F::kSigned>(F::template codes<quad>(from.panels[v] + at, 4 * from.rows[v]));
        out.pairs[2 * quad][v] = F::kOffset == 0 ? codes.even : Simd::subtract_words(codes.even, F::kOffset);
        out.pairs[2 * quad + 1][v] = F::kOffset == 0 ? codes.odd : Simd::subtract_words(codes.odd, F::kOffset);
    }
    if constexpr (quad + 1 < kGroup / 4) widen_quads<F, quad + 1>(from, at, out);
}

template <class F, int kVectors>
static inline void widen_group(const PanelRows<kVectors>& from, int group, WideGroup<kVectors>& out) {
    const int64_t at = (int64_t)group * F::kBytes;
    widen_quads<F, 0>(from, at, out);
    for (int v = 0; v < kVectors; v++) {
        const auto* scales = reinterpret_cast<const uint16_t*>(from.panels[v] + at) + from.rows[v];
        out.scales[0][v] = Simd::load_float16(scales);
        if constexpr (F::kScales == 2 || F::kMinimum) out.scales[1][v] = Simd::load_float16(scales + kPanelRows);
    }
}

// Sums of the products of some pairs of a group.
template <int n, int kVectors>
static inline void strip_dots(const WideGroup<kVectors>& weights, const StripGroup<n>& x, int first, int last, Simd::Dots (&dots)[n][kVectors]) {
#pragma GCC unroll 12
    for (int t = 0; t < n; t++)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; v++) dots[t][v] = Simd::set_dots(0);
#pragma GCC unroll Simd::kPairsUnrolled
    for (int pair = first; pair < last; pair++) {
#pragma GCC unroll 12
        for (int t = 0; t < n; t++) {
            const Simd::Dots values = Simd::set_dots(x.pairs[pair][t]);
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; v++) Simd::add_pairs(dots[t][v], weights.pairs[pair][v], values);
        }
    }
}

// Requests a group of each panel: those that are widened next, while products are computed.
template <class F, int kVectors>
static inline void prefetch_group(const uint8_t* const (&panels)[kVectors], int group) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; v++)
        if (v == 0 || panels[v] != panels[v - 1])
#pragma GCC unroll 16
            for (int i = 0; i < F::kBytes; i += kLine) __builtin_prefetch(panels[v] + (int64_t)group * F::kBytes + i);
}

// Adds the products of `count` groups to the totals of a strip. totals: [n, kVectors, kLanes]. `ahead`: groups to request, or null.
template <class F, int n, int kVectors>
static inline void strip_tile(const WideGroup<kVectors>* weights, const StripGroup<n>* x, int count, float* totals, const uint8_t* const (*ahead)[kVectors]) {
    for (int g = 0; g < count; g++, weights++, x++) {
        asm volatile("" ::: "memory");
        if (ahead) prefetch_group<F>(*ahead, g);
        Simd::Dots dots[n][kVectors];
        Simd::Float products[n][kVectors];
        strip_dots(*weights, *x, 0, kPairs / F::kScales, dots);
#pragma GCC unroll 12
        for (int t = 0; t < n; t++)
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; v++) products[t][v] = Simd::multiply(Simd::to_float(dots[t][v]), weights->scales[0][v]);
        if constexpr (F::kScales == 2) {
            strip_dots(*weights, *x, kPairs / 2, kPairs, dots);
#pragma GCC unroll 12
            for (int t = 0; t < n; t++)
#pragma GCC unroll 2
                for (int v = 0; v < kVectors; v++) products[t][v] = Simd::multiply_add(Simd::to_float(dots[t][v]), weights->scales[1][v], products[t][v]);
        }
#pragma GCC unroll 12
        for (int t = 0; t < n; t++)
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; v++) {
                float* at = totals + (t * kVectors + v) * Simd::kLanes;
                Simd::Float total = Simd::multiply_add(products[t][v], x->scales[t], Simd::load(at));
                if constexpr (F::kMinimum) total = Simd::multiply_add(weights->scales[1][v], x->sums[t], total);
                Simd::store(at, total);
            }
    }
}

// Some vectors of rows for some tokens: calls finish(products, out) for each, [kVectors, kLanes] and its row of `out`,
// [tokens, stride]. Its lines are requested before the last products: they are mostly in no near cache.
template <class F, int kVectors, class Finish>
static inline void strip_rows(const PanelRows<kVectors>& from, const Rows& x, int64_t token, int64_t end, float* out, int64_t stride, const Finish& finish) {
    constexpr int kRows = kVectors * Simd::kLanes;
    const int groups = x.width / kGroup;
    WideGroup<kVectors> wide[kStripGroups];
    alignas(64) float totals[kTokensAtOnce * kRows];
    std::fill(totals, totals + (end - token) * kRows, 0.0f);
    for (int first = 0; first < groups; first += kStripGroups) {
        const int count = std::min(kStripGroups, groups - first);
        for (int g = 0; g < count; g++) widen_group<F>(from, first + g, wide[g]);
        const uint8_t* ahead[kVectors];
        for (int v = 0; v < kVectors; v++) ahead[v] = first + count < groups ? from.panels[v] + (int64_t)(first + count) * F::kBytes : from.next[v];
        each_strip(token, end, [&](auto n, int64_t t) {
            const auto* strip = reinterpret_cast<const StripGroup<n>*>(x.strips + t * groups * kStripWords);
            float* products = totals + (t - token) * kRows;
            float* rows = out + (t - token) * stride;
            const bool last = first + count == groups;
            for (int i = 0; last && i < n; i++) finish.prefetch(rows + i * stride);
            strip_tile<F, n>(wide, strip + first, count, products, t == token ? &ahead : nullptr);
            for (int i = 0; last && i < n; i++) finish(products + i * kRows, rows + i * stride);
        });
    }
}

struct StoreRows {
    int count;
    void prefetch(const float* out) const {
        __builtin_prefetch(out, 1);
        if (count > kPanelRows) __builtin_prefetch(out + kPanelRows, 1);
    }
    void operator()(const float* products, float* out) const {
        if (count % Simd::kLanes) std::copy(products, products + count, out);
        else
            for (int i = 0; i < count; i += Simd::kLanes) Simd::store(out + i, Simd::load(products + i));
    }
};

struct GateRows {
    int32_t activation;
    void prefetch(const float* out) const { __builtin_prefetch(out, 1); }
    void operator()(const float* products, float* out) const { gate(products, Simd::kLanes, activation, out); }
};

// Panels with `count` rows in all. out: [tokens, stride], from the first of these tokens on.
template <class F>
static void strip_panels(const uint8_t* panels, int count, const Rows& x, int64_t token, int64_t end, float* out, int64_t stride) {
    const int64_t bytes = (int64_t)F::kBytes * (x.width / kGroup);
    auto vectors = [&](auto n, int row) {
        PanelRows<n> from;
        for (int v = 0; v < n; v++) {
            from.panels[v] = panels + (row + v * Simd::kLanes) / kPanelRows * bytes;
            from.rows[v] = v * Simd::kLanes % kPanelRows;
            from.next[v] = from.panels[v] + (row + kStripVectors * Simd::kLanes < count ? kStripPanels * bytes : 0);
        }
        strip_rows<F, n>(from, x, token, end, out + row, stride, StoreRows{std::min(n * Simd::kLanes, count - row)});
    };
    for (int row = 0; row < count; row += kStripVectors * Simd::kLanes)
        if (count - row > kPanelRows || kStripPanels == 1) vectors(std::integral_constant<int, kStripVectors>{}, row);
        else vectors(std::integral_constant<int, kVectorsPerPanel>{}, row);
}

// A panel of gates and one of the values beside them: activation(gate) * value. out: [tokens, stride].
template <class F>
static void strip_gate(const uint8_t* gates, const uint8_t* values, int32_t activation, const Rows& x, int64_t token, int64_t end, float* out, int64_t stride) {
    const int64_t bytes = (int64_t)F::kBytes * (x.width / kGroup);
    for (int row = 0; row < kPanelRows; row += Simd::kLanes)
        strip_rows<F, 2>(PanelRows<2>{{gates, values}, {row, row}, {gates + bytes, values + bytes}}, x, token, end, out + row, stride, GateRows{activation});
}

// The activations of one strip, as `quantize_row` has them. x: [n, width]; out: [groups]. Each stage for all tokens, so
// that none waits for the one before it.
template <int n>
static inline void quantize_strip(const float* x, int64_t width, StripGroup<n>* out) {
    for (int g = 0; g < width / kGroup; g++, x += kGroup, out++) {
        float highest[n], inverse[n], sums[n];
        for (int t = 0; t < n; t++) {
            Simd::Float high = Simd::zero(), invalid = Simd::zero();
            for (int i = 0; i < kGroup; i += Simd::kLanes) {
                const Simd::Float values = Simd::load(x + t * width + i);
                high = Simd::maximum(high, Simd::absolute(values));
                invalid = Simd::multiply_add(values, Simd::zero(), invalid);
            }
            highest[t] = Simd::any_nan(invalid) ? std::numeric_limits<float>::quiet_NaN() : Simd::highest(high);
        }
        for (int t = 0; t < n; t++) out->scales[t] = highest[t] / kMaxCode;
        for (int t = 0; t < n; t++) inverse[t] = out->scales[t] > 1e-37f ? 1.0f / out->scales[t] : 0.0f;
        for (int t = 0; t < n; t++) {
            alignas(64) int32_t pairs[kPairs];
            Simd::Int sum = Simd::set_dots(0);
            for (int i = 0; i < kGroup; i += Simd::kLanes) {
                const Simd::Int codes = Simd::round_to_int(Simd::multiply(Simd::load(x + t * width + i), Simd::set(inverse[t])));
                Simd::store_words(reinterpret_cast<int8_t*>(pairs), i, codes);
                sum = Simd::add(sum, codes);
            }
            sums[t] = (float)Simd::sum(sum);
            for (int pair = 0; pair < kPairs; pair++) out->pairs[pair][t] = pairs[pair];
        }
        for (int t = 0; t < n; t++) out->sums[t] = out->scales[t] * sums[t];
    }
}

#else

constexpr bool kStripProducts = false;  // of the above, nothing is used
constexpr int kStripPanels = 1, kFewestStripTokens = 1;
constexpr int kTokensAtOnce = 128;  // so that their activations stay in the cache of a core

#endif

}  // namespace quire
