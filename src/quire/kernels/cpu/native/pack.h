// From stored rows (ggml's encodings, or plain numbers) to panels, and back to float32.
#pragma once
#include "elementwise.h"
#include "packed_formats.h"

namespace quire {

// Numbers that the Python side knows (`StoredEncoding`). The last two quantize rows of float32.
enum Encoding : int32_t {
    kStoredF32, kStoredF16, kStoredBF16, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ4_K, kQ5_K, kQ6_K, kIQ4_NL, kIQ4_XS, kQ3_K, kToInt8, kToInt4,
};

struct DecodedGroup {
    uint8_t codes[kGroup];
    float scales[2];  // the second where each half has its own
    float minimum;
};

struct Layout { int scales, codes, nibbles, plane, bytes; };  // offsets in a block; -1: not there

static inline Layout layout_of(int32_t format) {
    constexpr int s = kScaleBytes, n = kNibbleBytes;
    switch (format) {
        case kInt8: return {0, s, -1, -1, EightBits::kBytes};
        case kInt4: case kInt4NonLinear: return {0, -1, s, -1, s + n};
        case kInt4Minimum: case kInt4Halves: return {0, -1, 2 * s, -1, 2 * s + n};
        case kInt5: return {0, -1, s, s + n, s + n + kQuadBytes};
        case kInt5Minimum: return {0, -1, 2 * s, 2 * s + n, 2 * s + n + kQuadBytes};
        default: return {0, -1, 2 * s, 2 * s + n, SixBits::kBytes};
    }
}

static inline bool has_half_scales(int32_t format) { return format == kInt6 || format == kInt4Halves; }
static inline bool two_per_row(int32_t format) { return format == kInt4Minimum || format == kInt5Minimum || has_half_scales(format); }

static inline int64_t panel_bytes(int32_t format, int width) {
    const int64_t even = (width + 1) / 2 * 2;
    if (format == kFloat32) return 4 * kPanelRows * even;
    if (format == kFloat16 || format == kBfloat16) return 2 * kPanelRows * even;
    return (int64_t)layout_of(format).bytes * (width / kGroup);
}

static inline float stored_half(const uint8_t* p) {
    uint16_t bits;
    std::memcpy(&bits, p, 2);
    return half_to_float(bits);
}

static inline void nibbles(const uint8_t* p, uint8_t* codes) {  // the low ones are the first half of the group
    for (int i = 0; i < 16; i++) {
        codes[i] = p[i] & 15;
        codes[i + 16] = p[i] >> 4;
    }
}

static inline void fifth_bits(const uint8_t* p, uint8_t* codes) {
    uint32_t bits;
    std::memcpy(&bits, p, 4);
    for (int i = 0; i < kGroup; i++) codes[i] |= (uint8_t)((bits >> i & 1) << 4);
}

// Scale and minimum, of 6 bits each, of one of the eight groups of a super-block (Q4_K, Q5_K).
static inline void six_bit_pair(const uint8_t* p, int group, int& scale, int& minimum) {
    if (group < 4) {
        scale = p[group] & 63;
        minimum = p[group + 4] & 63;
    } else {
        scale = (p[group + 4] & 15) | (p[group - 4] >> 6) << 4;
        minimum = p[group + 4] >> 4 | (p[group] >> 6) << 4;
    }
}

static inline void decode_k(const uint8_t* block, int group, bool five, DecodedGroup& out) {
    int scale, minimum;
    six_bit_pair(block + 4, group, scale, minimum);
    out.scales[0] = stored_half(block) * (float)scale;
    out.minimum = -stored_half(block + 2) * (float)minimum;
    const uint8_t* low = block + 16 + (five ? 32 : 0) + group / 2 * 32;
    for (int i = 0; i < kGroup; i++) {
        out.codes[i] = group % 2 ? low[i] >> 4 : low[i] & 15;
        if (five) out.codes[i] |= (uint8_t)((block[16 + i] >> group & 1) << 4);
    }
}

static inline void decode_q6(const uint8_t* block, int group, DecodedGroup& out) {
    const int half = group / 4, quarter = group % 4;  // 128 codes each: four groups share bytes
    const uint8_t* low = block + 64 * half + (quarter % 2 ? 32 : 0);
    const uint8_t* high = block + 128 + 32 * half;
    const float d = stored_half(block + 208);
    for (int i = 0; i < kGroup; i++)
        out.codes[i] = (uint8_t)((quarter < 2 ? low[i] & 15 : low[i] >> 4) | (high[i] >> 2 * quarter & 3) << 4);
    for (int h = 0; h < 2; h++) out.scales[h] = d * (float)(int8_t)block[192 + 8 * half + 2 * quarter + h];
}

// The high bits of the sixteen scales, of 6 bits each, are behind their low ones.
static inline void decode_q3(const uint8_t* block, int group, DecodedGroup& out) {
    const uint8_t *low = block + 32 + group / 4 * 32, *scales = block + 96;
    const float d = stored_half(block + 108);
    for (int i = 0; i < kGroup; i++)
        out.codes[i] = (uint8_t)((low[i] >> 2 * (group % 4) & 3) + (block[i] >> group & 1 ? 8 : 4));
    for (int h = 0; h < 2; h++) {
        const int s = 2 * group + h;
        const int bits = (s < 8 ? scales[s] & 15 : scales[s - 8] >> 4) | (scales[8 + s % 4] >> 2 * (s / 4) & 3) << 4;
        out.scales[h] = d * (float)(bits - 32);
    }
}

static inline void decode_iq4_xs(const uint8_t* block, int group, DecodedGroup& out) {
    const int low = block[4 + group / 2] >> 4 * (group % 2) & 15, high = (block[2] | block[3] << 8) >> 2 * group & 3;
    out.scales[0] = stored_half(block) * (float)((low | high << 4) - 32);
    nibbles(block + 8 + 16 * group, out.codes);
}

static inline void to_int8(const float* x, DecodedGroup& out) {
    float high = 0.0f;
    for (int i = 0; i < kGroup; i++) high = std::max(high, std::fabs(x[i]));
    out.scales[0] = half_to_float(float_to_half(high / 127.0f));
    const float inverse = out.scales[0] > 0.0f ? 1.0f / out.scales[0] : 0.0f;
    for (int i = 0; i < kGroup; i++)
        out.codes[i] = (uint8_t)(int8_t)std::min(127.0f, std::max(-127.0f, std::nearbyint(x[i] * inverse)));
}

// Minimum and scale are tried around the range of the group; the pair with the smallest squared error is kept.
static inline void to_int4(const float* x, DecodedGroup& out) {
    float low = x[0], high = x[0];
    for (int i = 1; i < kGroup; i++) {
        low = std::min(low, x[i]);
        high = std::max(high, x[i]);
    }
    float best = std::numeric_limits<float>::infinity();
    for (int inset = 0; inset <= 8; inset++) {  // a range smaller by up to a sixth clips the ends, and is finer between
        const float edge = (high - low) * (float)inset / 96.0f;
        DecodedGroup tried;
        tried.scales[0] = half_to_float(float_to_half((high - low - 2.0f * edge) / 15.0f));
        tried.minimum = half_to_float(float_to_half(low + edge));
        const float inverse = tried.scales[0] > 0.0f ? 1.0f / tried.scales[0] : 0.0f;
        float error = 0.0f;
        for (int i = 0; i < kGroup; i++) {
            const float code = std::min(15.0f, std::max(0.0f, std::nearbyint((x[i] - tried.minimum) * inverse)));
            tried.codes[i] = (uint8_t)code;
            const float off = x[i] - tried.minimum - tried.scales[0] * code;
            error += off * off;
        }
        if (!(error >= best)) {
            best = error;
            out = tried;
        }
    }
}

static inline void decode_group(int32_t encoding, const uint8_t* row, int g, DecodedGroup& out) {
    out.minimum = 0.0f;
    switch (encoding) {
        case kQ4_0: case kIQ4_NL: row += 18 * g; out.scales[0] = stored_half(row); nibbles(row + 2, out.codes); break;
        case kQ4_1: row += 20 * g; out.scales[0] = stored_half(row); out.minimum = stored_half(row + 2); nibbles(row + 4, out.codes); break;
        case kQ5_0: row += 22 * g; out.scales[0] = stored_half(row); nibbles(row + 6, out.codes); fifth_bits(row + 2, out.codes); break;
        case kQ5_1:
            row += 24 * g;
            out.scales[0] = stored_half(row);
            out.minimum = stored_half(row + 2);
            nibbles(row + 8, out.codes);
            fifth_bits(row + 4, out.codes);
            break;
        case kQ8_0: row += 34 * g; out.scales[0] = stored_half(row); std::memcpy(out.codes, row + 2, kGroup); break;
        case kQ4_K: decode_k(row + 144 * (g / 8), g % 8, false, out); break;
        case kQ5_K: decode_k(row + 176 * (g / 8), g % 8, true, out); break;
        case kQ6_K: decode_q6(row + 210 * (g / 8), g % 8, out); break;
        case kIQ4_XS: decode_iq4_xs(row + 136 * (g / 8), g % 8, out); break;
        case kQ3_K: decode_q3(row + 110 * (g / 8), g % 8, out); break;
        case kToInt8: to_int8(reinterpret_cast<const float*>(row) + g * kGroup, out); break;
        default: to_int4(reinterpret_cast<const float*>(row) + g * kGroup, out); break;
    }
}

// Where the code of input i of a row lies in a quad's bytes.
static inline int place_in_quad(int row, int i) { return 4 * row + i % 4; }

static inline void write_group(int32_t format, const DecodedGroup& group, int row, uint8_t* block) {
    const Layout layout = layout_of(format);
    auto* scales = reinterpret_cast<uint16_t*>(block);
    scales[row] = float_to_half(group.scales[0]);
    if (two_per_row(format)) scales[kPanelRows + row] = float_to_half(has_half_scales(format) ? group.scales[1] : group.minimum);
    for (int i = 0; i < kGroup; i++) {
        const int quad = i / 4, at = place_in_quad(row, i);
        if (format == kInt8) {
            block[layout.codes + quad * kQuadBytes + at] = group.codes[i];
            continue;
        }
        block[layout.nibbles + quad % 4 * kQuadBytes + at] |= (uint8_t)((group.codes[i] & 15) << (quad < 4 ? 0 : 4));
        if (format == kInt5 || format == kInt5Minimum)
            block[layout.plane + at] |= (uint8_t)((group.codes[i] >> 4) << quad);
        if (format == kInt6)
            block[layout.plane + quad / 4 * kQuadBytes + at] |= (uint8_t)((group.codes[i] >> 4) << 2 * (quad % 4));
    }
}

// Blocks whose codes lie in words of 4 as the file has them: scales and words are copied. Returns false for others.
static inline bool copy_row(int32_t format, int32_t encoding, const uint8_t* source, int width, int row, uint8_t* panel) {
    if (encoding != kQ4_0 && encoding != kQ4_1 && encoding != kIQ4_NL && encoding != kQ8_0) return false;
    const Layout layout = layout_of(format);
    const int num_scales = encoding == kQ4_1 ? 2 : 1, num_words = encoding == kQ8_0 ? 8 : 4;
    const int codes = encoding == kQ8_0 ? layout.codes : layout.nibbles;
    for (int g = 0; g < width / kGroup; g++, panel += layout.bytes) {
        for (int s = 0; s < num_scales; s++, source += 2) std::memcpy(panel + s * kScaleBytes + 2 * row, source, 2);
        for (int w = 0; w < num_words; w++, source += 4) std::memcpy(panel + codes + w * kQuadBytes + 4 * row, source, 4);
    }
    return true;
}

// Where the number of input i of a row lies in a panel of plain numbers.
static inline int64_t place_in_panel(int32_t format, int row, int64_t i) {
    return format == kBfloat16 ? (i / 2 * kPanelRows + row) * 2 + i % 2 : i * kPanelRows + row;
}

// One stored row becomes row `row` of a panel, which was filled with zeros.
static inline void pack_row(int32_t format, int32_t encoding, const uint8_t* source, int width, int row, uint8_t* panel) {
    if (format == kFloat32) {
        for (int i = 0; i < width; i++) std::memcpy(panel + 4 * place_in_panel(format, row, i), source + 4 * (int64_t)i, 4);
    } else if (format == kFloat16 || format == kBfloat16) {
        for (int i = 0; i < width; i++) std::memcpy(panel + 2 * place_in_panel(format, row, i), source + 2 * (int64_t)i, 2);
    } else if (!copy_row(format, encoding, source, width, row, panel)) {
        const int bytes = layout_of(format).bytes;
        for (int g = 0; g < width / kGroup; g++) {
            DecodedGroup group;
            decode_group(encoding, source, g, group);
            write_group(format, group, row, panel + (int64_t)g * bytes);
        }
    }
}

// The float32 values of one row of a panel.
static inline void unpack_row(int32_t format, const uint8_t* panel, int width, int row, float* out) {
    if (format == kFloat32) {
        for (int i = 0; i < width; i++) std::memcpy(out + i, panel + 4 * place_in_panel(format, row, i), 4);
        return;
    }
    if (format == kFloat16 || format == kBfloat16) {
        const auto* words = reinterpret_cast<const uint16_t*>(panel);
        for (int i = 0; i < width; i++) {
            const uint16_t word = words[place_in_panel(format, row, i)];
            out[i] = format == kFloat16 ? half_to_float(word) : bfloat_to_float(word);
        }
        return;
    }
    const Layout layout = layout_of(format);
    for (int g = 0; g < width / kGroup; g++) {
        const uint8_t* block = panel + (int64_t)g * layout.bytes;
        const auto* scales = reinterpret_cast<const uint16_t*>(block);
        const float scale = half_to_float(scales[row]);
        const float second = two_per_row(format) ? half_to_float(scales[kPanelRows + row]) : 0.0f;
        for (int i = 0; i < kGroup; i++) {
            const int quad = i / 4, at = place_in_quad(row, i);
            float& value = out[g * kGroup + i];
            if (format == kInt8) {
                value = scale * (float)(int8_t)block[layout.codes + quad * kQuadBytes + at];
                continue;
            }
            int code = block[layout.nibbles + quad % 4 * kQuadBytes + at] >> (quad < 4 ? 0 : 4) & 15;
            if (format == kInt5 || format == kInt5Minimum) code |= (block[layout.plane + at] >> quad & 1) << 4;
            if (format == kInt6) code |= (block[layout.plane + quad / 4 * kQuadBytes + at] >> 2 * (quad % 4) & 3) << 4;
            switch (format) {
                case kInt4: value = scale * (float)(code - 8); break;
                case kInt5: value = scale * (float)(code - 16); break;
                case kInt4Halves: value = (i < kGroup / 2 ? scale : second) * (float)(code - 8); break;
                case kInt6: value = (i < kGroup / 2 ? scale : second) * (float)(code - 32); break;
                case kInt4NonLinear: value = scale * (float)kNonLinear[code]; break;
                default: value = scale * (float)code + second;
            }
        }
    }
}

}  // namespace quire
