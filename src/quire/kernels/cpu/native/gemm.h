// y = x W^T for packed weights, on all threads.
#pragma once
#include <vector>

#include "matrix_gemm.h"
#include "pack.h"
#include "thread_pool.h"

namespace quire {

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

template <class F>
struct QuantizedPanel {
    static constexpr int kMaxTokens = F::kScales == 2 && Simd::kMaxTokens > 4 ? Simd::kMaxTokens / 2 : Simd::kMaxTokens;
    static int64_t bytes(int width) { return (int64_t)F::kBytes * (width / kGroup); }
    template <int kTokens, int kVectors>
    static inline void tile(const uint8_t* panel, int row, const Rows& x, int64_t token, float* out, int64_t stride) {
        quantized_tile<F, kTokens, kVectors>(panel, 4 * row, x.quantized.from(token, x.width), x.width, out, stride);
    }
    // Whether panels with `rows` rows in all are done, for many tokens at once.
    static bool at_once(const uint8_t* panels, int rows, const Rows& x, int64_t token, int64_t end, float* out, int64_t stride) {
        if constexpr (kMatrixProducts)
            if (x.tiles) matrix_panels<F>(panels, rows, x, token, end, out, stride);
        if constexpr (kStripProducts)
            if (x.strips) strip_panels<F>(panels, rows, x, token, end, out, stride);
        return x.tiles || x.strips;
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
    static bool at_once(const uint8_t* panels, int rows, const Rows& x, int64_t token, int64_t end, float* out, int64_t stride) {
        if constexpr (kMatrixProducts && !std::is_same_v<F, F32>)
            if (x.tiles) {
                matrix_panels<F>(panels, rows, x, token, end, out, stride);
                return true;
            }
        return false;
    }
};

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
    if constexpr (Panel::kMaxTokens >= 4) strips(std::integral_constant<int, 4>{});
    strips(std::integral_constant<int, 2>{});
    if (token < end) Panel::template tile<1, kVectorsPerPanel>(panel, 0, x, token, out, stride);
}

// Some panels of a segment, for some tokens. out: [tokens, stride], from the segment's first row on.
template <class Panel>
static void multiply_panels(const Segment& segment, int first, int last, const Rows& x, int64_t token, int64_t end, float* out, int64_t stride) {
    const int64_t bytes = Panel::bytes(x.width);
    const int all = std::min(last * kPanelRows, segment.num_rows) - first * kPanelRows;
    if (Panel::at_once(segment.data + first * bytes, all, x, token, end, out + token * stride + first * kPanelRows, stride)) return;
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
        case kInt6: return multiply_panels<QuantizedPanel<SixBits>>;
        default: return multiply_panels<QuantizedPanel<FourBitHalves>>;
    }
}

template <class F>
static void gate_at_once(const uint8_t* gates, const uint8_t* values, int32_t activation, const Rows& x, int64_t token, int64_t end, float* out, int64_t stride) {
    if constexpr (kMatrixProducts)
        if (x.tiles) return matrix_gate<F>(gates, values, activation, x, token, end, out, stride);
    strip_gate<F>(gates, values, activation, x, token, end, out, stride);
}

using Gate = void (*)(const uint8_t*, const uint8_t*, int32_t, const Rows&, int64_t, int64_t, float*, int64_t);

// Null for formats whose gates are computed after the products.
static inline Gate gate_for(int32_t format) {
    if constexpr (kStripProducts) switch (format) {
        case kInt8: return gate_at_once<EightBits>;
        case kInt4: return gate_at_once<FourBits<8, false>>;
        case kInt4Minimum: return gate_at_once<FourBits<0, true>>;
        case kInt4NonLinear: return gate_at_once<NonLinearFourBits>;
        case kInt5: return gate_at_once<FiveBits<16, false>>;
        case kInt5Minimum: return gate_at_once<FiveBits<0, true>>;
        case kInt6: return gate_at_once<SixBits>;
        case kInt4Halves: return gate_at_once<FourBitHalves>;
    }
    return nullptr;
}

// activation(x G^T) * (x V^T), where the first half of the weight's rows is G; false, and nothing done, where it cannot be
// computed at once. out: [tokens, width_out / 2]
template <class Pool>
static inline bool gated_linear(Pool& pool, const Linear& weight, const Rows& x, int64_t tokens, int32_t activation, float* out) {
    const int width = weight.width_out / 2, num_panels = width / kPanelRows;
    const Gate gate = weight.num_segments == 1 ? gate_for(weight.segments->format) : nullptr;
    if (!(x.strips || x.tiles) || !gate || weight.bias || width % kPanelRows) return false;
    const int64_t bytes = panel_bytes(weight.segments->format, weight.width_in);
    for (int64_t token = 0; token < tokens; token += kTokensAtOnce) {
        const int64_t end = std::min<int64_t>(token + kTokensAtOnce, tokens);
        pool.run(num_panels, [&](int panel, int) {
            const uint8_t* gates = weight.segments->data + panel * bytes;
            gate(gates, gates + num_panels * bytes, activation, x, token, end, out + token * width + panel * kPanelRows, width);
        });
    }
    return true;
}

// out: [tokens, width_out]
template <class Pool>
static inline void linear(Pool& pool, const Linear& weight, const Rows& x, int64_t tokens, float* out) {
    const int64_t stride = weight.width_out;
    for (int64_t token = 0; token < tokens; token += kTokensAtOnce) {
        const int64_t end = std::min<int64_t>(token + kTokensAtOnce, tokens);
        int num_panels = 0;
        for (int s = 0; s < weight.num_segments; s++) num_panels += (weight.segments[s].num_rows + kPanelRows - 1) / kPanelRows;
        const int unit = x.tiles ? 2 : x.strips ? kStripPanels : 1;
        const int share = std::max(1, num_panels / (pool.num_active() * 8 * unit)) * unit;
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
