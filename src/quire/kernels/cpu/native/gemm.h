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

template <class F, int kTokens, int kVectors>
static inline void group_dots(const uint8_t* block, int at, const Simd::Group (&x)[kTokens],
                              Simd::Int (&low)[kTokens][kVectors], Simd::Int (&high)[kTokens][kVectors]) {
    constexpr int kBytes = 4 * Simd::kLanes;
    auto chunk = [&](auto index) __attribute__((always_inline)) {
        constexpr int c = decltype(index)::value;
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) {
            const CodePair pair = F::template codes<c>(block, at + v * kBytes);
#pragma GCC unroll 8
            for (int t = 0; t < kTokens; t++) {
                low[t][v] = Simd::dot<c>(low[t][v], pair.low, x[t]);
                if constexpr (F::kScales == 1) low[t][v] = Simd::dot<c + 4>(low[t][v], pair.high, x[t]);
                else high[t][v] = Simd::dot<c + 4>(high[t][v], pair.high, x[t]);
            }
        }
    };
    chunk(std::integral_constant<int, 0>{});
    chunk(std::integral_constant<int, 1>{});
    chunk(std::integral_constant<int, 2>{});
    chunk(std::integral_constant<int, 3>{});
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
        Simd::Group values[kTokens];
        Simd::Int low[kTokens][kVectors], high[kTokens][kVectors];
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; t++) {
            values[t] = Simd::load_group(x.codes + (int64_t)t * width + g * kGroup);
            const int32_t* sums = x.half_sums + 2 * (t * groups + g);
            const Simd::Int first = Simd::set_int(F::kOffset == 0 ? 0 : F::kScales == 2 ? -F::kOffset * sums[0] : -F::kOffset * (sums[0] + sums[1]));
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; v++) {
                low[t][v] = first;
                if constexpr (F::kScales == 2) high[t][v] = Simd::set_int(-F::kOffset * sums[1]);
            }
        }
        group_dots<F, kTokens, kVectors>(block, at, values, low, high);
        const uint16_t* scales = reinterpret_cast<const uint16_t*>(block) + at / 4;
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) {
            const Simd::Float scale = Simd::load_float16(scales + v * Simd::kLanes);
            Simd::Float second;  // the other half's scale, or the minimum
            if constexpr (F::kScales == 2 || F::kMinimum) second = Simd::load_float16(scales + kPanelRows + v * Simd::kLanes);
#pragma GCC unroll 8
            for (int t = 0; t < kTokens; t++) {
                const float d = x.scales[t * groups + g];
                Simd::Float product = Simd::multiply(Simd::to_float(low[t][v]), scale);
                if constexpr (F::kScales == 2) product = Simd::multiply_add(Simd::to_float(high[t][v]), second, product);
                total[t][v] = Simd::multiply_add(product, d, total[t][v]);
                if constexpr (F::kMinimum) total[t][v] = Simd::multiply_add(second, x.sums[t * groups + g], total[t][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; t++)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v++) Simd::store(out + t * stride + v * Simd::kLanes, total[t][v]);
}

struct F32 {
    using Word = float;
    static inline Simd::Float load(const float* p) { return Simd::load(p); }
};
struct F16 {
    using Word = uint16_t;
    static inline Simd::Float load(const uint16_t* p) { return Simd::load_float16(p); }
};
struct BF16 {
    using Word = uint16_t;
    static inline Simd::Float load(const uint16_t* p) { return Simd::load_bfloat16(p); }
};

// The same for a panel of plain numbers, [in, 16 rows]. Even and odd inputs have sums of their own.
template <class F, int kTokens, int kVectors>
static inline void plain_tile(const uint8_t* panel, int at, const float* x, int width, float* out, int64_t stride) {
    Simd::Float total[2][kTokens][kVectors];
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; odd++)
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; t++)
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; v++) total[odd][t][v] = Simd::zero();
    const auto* words = reinterpret_cast<const typename F::Word*>(panel) + at / 4;
    for (int i = 0; i + 1 < width; i += 2, words += 2 * kPanelRows) {
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++)
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; v++) {
                const Simd::Float weight = F::load(words + odd * kPanelRows + v * Simd::kLanes);
#pragma GCC unroll 8
                for (int t = 0; t < kTokens; t++)
                    total[odd][t][v] = Simd::multiply_add(weight, x[(int64_t)t * width + i + odd], total[odd][t][v]);
            }
    }
    for (int v = 0; v < kVectors; v++)
        for (int t = 0; t < kTokens; t++) {
            Simd::Float sum = Simd::add(total[0][t][v], total[1][t][v]);
            if (width % 2) sum = Simd::multiply_add(F::load(words + v * Simd::kLanes), x[(int64_t)t * width + width - 1], sum);
            Simd::store(out + t * stride + v * Simd::kLanes, sum);
        }
}

template <class F>
struct QuantizedPanel {
    static int64_t bytes(int width) { return (int64_t)F::kBytes * (width / kGroup); }
    template <int kTokens, int kVectors>
    static inline void tile(const uint8_t* panel, int at, const Rows& x, int64_t token, float* out, int64_t stride) {
        quantized_tile<F, kTokens, kVectors>(panel, at, x.quantized.from(token, x.width), x.width, out, stride);
    }
};

template <class F>
struct PlainPanel {
    static int64_t bytes(int width) { return (int64_t)sizeof(typename F::Word) * kPanelRows * width; }
    template <int kTokens, int kVectors>
    static inline void tile(const uint8_t* panel, int at, const Rows& x, int64_t token, float* out, int64_t stride) {
        plain_tile<F, kTokens, kVectors>(panel, at, x.values + token * x.width, x.width, out, stride);
    }
};

constexpr int kVectorsPerPanel = kPanelRows / Simd::kLanes;

// A panel for all tokens from `token` to `end`: as many at once as registers allow.
template <class Panel>
static void multiply_panel(const uint8_t* panel, const Rows& x, int64_t token, int64_t end, float* out, int64_t stride) {
    constexpr int kBytes = 4 * Simd::kLanes;
    auto strips = [&](auto count) {
        constexpr int n = decltype(count)::value;
        for (; token + n <= end; token += n, out += n * stride)
            for (int v = 0; v < kVectorsPerPanel; v++)
                Panel::template tile<n, 1>(panel, v * kBytes, x, token, out + v * Simd::kLanes, stride);
    };
    if constexpr (Simd::kMaxTokens >= 8) strips(std::integral_constant<int, 8>{});
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
