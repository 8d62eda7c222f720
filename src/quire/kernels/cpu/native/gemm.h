// y = x W^T for packed weights. Each output is summed in one order, whatever the number of tokens: batch-invariant.
#pragma once
#include <algorithm>

#include "packed_formats.h"
#include "thread_pool.h"

namespace quire {

// Activations as 8-bit codes: x = scale * code, one scale for each group of 32.
struct Quantized {
    int8_t* codes;       // [tokens, width]
    float* scales;       // [tokens, groups]
    float* sums;         // [tokens, groups]: scale * sum of codes
    int32_t* half_sums;  // [tokens, groups, 2]: sums of codes of each half

    Quantized from(int64_t token, int width) const {
        const int64_t groups = token * (width / kGroup);
        return {codes + token * width, scales + groups, sums + groups, half_sums + 2 * groups};
    }
};

struct Rows {
    const float* values;  // [tokens, width]
    Quantized quantized;  // where some weight is quantized
    int width;
};

struct Segment {  // some output rows of a matrix, in one format
    int32_t format;
    int32_t first_row;
    int32_t num_rows;
    int32_t reserved;
    const uint8_t* data;
};

struct Linear {
    int32_t width_in;
    int32_t width_out;
    int32_t num_segments;
    int32_t quantized;  // whether some segment needs quantized activations
    const Segment* segments;
    const float* bias;  // or null
};

static inline void quantize_row(const float* x, int width, Quantized out) {
    for (int g = 0; g < width / kGroup; g++) {
        const float* p = x + g * kGroup;
        Simd::Float high = Simd::zero(), invalid = Simd::zero();  // invalid: NaN if some x is infinite or NaN
        for (int i = 0; i < kGroup; i += Simd::kLanes) {
            const Simd::Float values = Simd::load(p + i);
            high = Simd::maximum(high, Simd::absolute(values));
            invalid = Simd::multiply_add(values, Simd::zero(), invalid);
        }
        const float scale = Simd::highest(high) / 127.0f + Simd::sum(invalid);
        const Simd::Float inverse = Simd::set(scale > 0.0f ? 1.0f / scale : 0.0f);
        int8_t* codes = out.codes + g * kGroup;
        for (int i = 0; i < kGroup; i += Simd::kLanes)
            Simd::store_bytes(codes + i, Simd::round_to_int(Simd::multiply(Simd::load(p + i), inverse)));
        int32_t first = 0, second = 0;
        for (int i = 0; i < kGroup / 2; i++) {
            first += codes[i];
            second += codes[i + kGroup / 2];
        }
        out.scales[g] = scale;
        out.sums[g] = scale * (float)(first + second);
        out.half_sums[2 * g] = first;
        out.half_sums[2 * g + 1] = second;
    }
}

// Adds the products of one half of a group: four quads of codes, each used for all tokens.
template <class F, int half, int kTokens, int kVectors>
static inline void half_dots(const uint8_t* block, int at, const int8_t* x, int64_t stride, Simd::Int (&total)[kTokens][kVectors]) {
    constexpr int kBytes = 4 * Simd::kLanes;
    Simd::Bytes codes[4][kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) {
        codes[0][v] = F::template codes<4 * half>(block, at + v * kBytes);
        codes[1][v] = F::template codes<4 * half + 1>(block, at + v * kBytes);
        codes[2][v] = F::template codes<4 * half + 2>(block, at + v * kBytes);
        codes[3][v] = F::template codes<4 * half + 3>(block, at + v * kBytes);
    }
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; t++) {
        const Simd::Half values = Simd::load_half(x + t * stride + half * kGroup / 2);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) {
            total[t][v] = Simd::dot<0>(total[t][v], codes[0][v], values);
            total[t][v] = Simd::dot<1>(total[t][v], codes[1][v], values);
            total[t][v] = Simd::dot<2>(total[t][v], codes[2][v], values);
            total[t][v] = Simd::dot<3>(total[t][v], codes[3][v], values);
        }
    }
}

// kVectors vectors of rows of a panel, from byte `at` of each quad on, for kTokens tokens.
template <class F, int kTokens, int kVectors>
static inline void quantized_tile(const uint8_t* panel, int at, const Quantized& x, int width, float* out, int64_t stride) {
    const int groups = width / kGroup;
    Simd::Float total[kTokens][kVectors];
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; t++)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) total[t][v] = Simd::zero();
    const uint8_t* block = panel;
    for (int g = 0; g < groups; g++, block += F::kBytes) {
        Simd::Int dots[F::kScales][kTokens][kVectors];
#pragma GCC unroll 2
        for (int h = 0; h < F::kScales; h++)
#pragma GCC unroll 8
            for (int t = 0; t < kTokens; t++) {
                const int32_t* sums = x.half_sums + 2 * (t * groups + g);
                const int32_t sum = F::kOffset == 0 ? 0 : F::kScales == 2 ? sums[h] : sums[0] + sums[1];
#pragma GCC unroll 4
                for (int v = 0; v < kVectors; v++) dots[h][t][v] = Simd::set_int(-F::kOffset * sum);
            }
        half_dots<F, 0, kTokens, kVectors>(block, at, x.codes + g * kGroup, width, dots[0]);
        half_dots<F, 1, kTokens, kVectors>(block, at, x.codes + g * kGroup, width, dots[F::kScales - 1]);
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

template <class F>
struct QuantizedPanel {
    static constexpr int kMaxTokens = F::kScales == 2 ? Simd::kMaxTokens / 2 : Simd::kMaxTokens;
    static int64_t bytes(int width) { return (int64_t)F::kBytes * (width / kGroup); }
    template <int kTokens, int kVectors>
    static inline void tile(const uint8_t* panel, int row, const Rows& x, int64_t token, float* out, int64_t stride) {
        quantized_tile<F, kTokens, kVectors>(panel, 4 * row, x.quantized.from(token, x.width), x.width, out, stride);
    }
};

template <class F>
struct PlainPanel {
    static constexpr int kMaxTokens = Simd::kMaxPlainTokens;
    static int64_t bytes(int width) { return (int64_t)sizeof(typename F::Word) * kPanelRows * ((width + 1) / 2 * 2); }
    template <int kTokens, int kVectors>
    static inline void tile(const uint8_t* panel, int row, const Rows& x, int64_t token, float* out, int64_t stride) {
        plain_tile<F, kTokens, kVectors>(panel, row, x.values + token * x.width, x.width, out, stride);
    }
};

constexpr int kVectorsPerPanel = kPanelRows / Simd::kLanes;

// A panel for all tokens from `token` to `end`: as many at once as registers allow.
template <class Panel>
static void multiply_panel(const uint8_t* panel, const Rows& x, int64_t token, int64_t end, float* out, int64_t stride) {
    auto strips = [&](auto count) {
        constexpr int n = decltype(count)::value;
        for (; token + n <= end; token += n, out += n * stride)
            for (int v = 0; v < kVectorsPerPanel; v++)
                Panel::template tile<n, 1>(panel, v * Simd::kLanes, x, token, out + v * Simd::kLanes, stride);
    };
    if constexpr (Panel::kMaxTokens >= 8) strips(std::integral_constant<int, 8>{});
    strips(std::integral_constant<int, 4>{});
    strips(std::integral_constant<int, 2>{});
    if (token < end) Panel::template tile<1, kVectorsPerPanel>(panel, 0, x, token, out, stride);
}

// Some panels of a segment, for some tokens. out: [tokens, stride], from the segment's first row on.
template <class Panel>
static void multiply_panels(const Segment& segment, int first, int last, const Rows& x, int64_t token, int64_t end, float* out, int64_t stride) {
    const int64_t bytes = Panel::bytes(x.width);
    for (int panel = first; panel < last; panel++) {
        const int rows = std::min(kPanelRows, segment.num_rows - panel * kPanelRows);
        float* target = out + token * stride + panel * kPanelRows;
        if (rows == kPanelRows) {
            multiply_panel<Panel>(segment.data + panel * bytes, x, token, end, target, stride);
            continue;
        }
        for (int64_t t = token; t < end; t++, target += stride) {  // the last rows are padded with zeros
            float whole[kPanelRows];
            multiply_panel<Panel>(segment.data + panel * bytes, x, t, t + 1, whole, kPanelRows);
            std::copy(whole, whole + rows, target);
        }
    }
}

using Multiply = void (*)(const Segment&, int, int, const Rows&, int64_t, int64_t, float*, int64_t);

static inline Multiply multiply_for(int32_t format) {
    switch (format) {
        case kFloat32: return multiply_panels<PlainPanel<F32>>;
        case kFloat16: return multiply_panels<PlainPanel<F16>>;
        case kBfloat16: return multiply_panels<PlainPanel<BF16>>;
        case kInt8: return multiply_panels<QuantizedPanel<EightBits>>;
        case kInt4: return multiply_panels<QuantizedPanel<FourBits<8, false>>>;
        case kInt4Minimum: return multiply_panels<QuantizedPanel<FourBits<0, true>>>;
        case kInt4NonLinear: return multiply_panels<QuantizedPanel<NonLinearFourBits>>;
        case kInt5: return multiply_panels<QuantizedPanel<FiveBits<16, false>>>;
        case kInt5Minimum: return multiply_panels<QuantizedPanel<FiveBits<0, true>>>;
        default: return multiply_panels<QuantizedPanel<SixBits>>;
    }
}

constexpr int kTokensAtOnce = 128;  // so that their activations stay in the cache of a core

// out: [tokens, width_out]
static inline void linear(ThreadPool& pool, const Linear& weight, const Rows& x, int64_t tokens, float* out) {
    const int64_t stride = weight.width_out;
    for (int64_t token = 0; token < tokens; token += kTokensAtOnce) {
        const int64_t end = std::min<int64_t>(token + kTokensAtOnce, tokens);
        int num_panels = 0;
        for (int s = 0; s < weight.num_segments; s++) num_panels += (weight.segments[s].num_rows + kPanelRows - 1) / kPanelRows;
        const int share = std::max(1, num_panels / (pool.num_active() * 8));
        const int num_tasks = (num_panels + share - 1) / share;
        pool.run(num_tasks, [&](int task, int) {
            int first = task * share, last = std::min(first + share, num_panels);
            for (int s = 0; s < weight.num_segments && first < last; s++) {
                const Segment& segment = weight.segments[s];
                const int panels = (segment.num_rows + kPanelRows - 1) / kPanelRows;
                if (first < panels)
                    multiply_for(segment.format)(segment, first, std::min(last, panels), x, token, end, out + segment.first_row, stride);
                first = std::max(first - panels, 0);
                last -= panels;
            }
        });
    }
    if (weight.bias)
        for (int64_t t = 0; t < tokens; t++)
            for (int i = 0; i < weight.width_out; i++) out[t * stride + i] += weight.bias[i];
}

}  // namespace quire
