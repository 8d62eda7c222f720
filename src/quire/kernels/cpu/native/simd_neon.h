// Vectors of 8 output rows on Arm: NEON, with the dot-product instructions where they are compiled in.
//
// With them, an activation's code is two bytes, 256 * high + low, in a plane each, and sums are kept for each plane. With
// the instructions for matrices (i8mm) one of them multiplies two rows with both planes. Without either, codes are multiplied as 16-bit words, and the four lanes of a row's sum are added at the end of the group.
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace quire {

struct Simd {
    static constexpr int kLanes = 8;             // output rows in a vector
#if defined(__ARM_FEATURE_DOTPROD)
    static constexpr int kMaxTokens = 4;  // tokens whose sums fit the registers
#else
    static constexpr int kMaxTokens = 2;
#endif
    static constexpr int kMaxPlainTokens = 4;  // the same for weights that are not quantized
    static constexpr int kProductRows = 4, kProductColumns = 2;  // sums of a float32 product, in registers
    static constexpr int kCodeBytes = 2;  // of an activation

    struct Int { int32x4_t v[2]; };
    struct Float { float32x4_t v[2]; };
    struct Bytes { int8x16_t v[2]; };
#if defined(__ARM_FEATURE_DOTPROD)
    using Codes = Bytes;
#if defined(__ARM_FEATURE_MATMUL_INT8)
    struct Dots { int32x4_t v[4]; };  // of two rows each: high, low, high, low
    struct Half { int8x16_t v[2]; };  // 8 quantized activations each: high bytes, then low ones
#else
    struct Dots { Int high, low; };
    struct Half { int8x16_t high, low; };  // 16 quantized activations
#endif
#else
    struct Dots { int32x4_t v[8]; };  // by row
    struct Half { const int8_t* p; };
    struct Codes { int16x8_t v[4]; };  // two rows each
#endif

    static inline Float set(float x) { return {{vdupq_n_f32(x), vdupq_n_f32(x)}}; }
    static inline Float zero() { return set(0.0f); }
    static inline Bytes load_bytes(const uint8_t* p) {
        return {{vreinterpretq_s8_u8(vld1q_u8(p)), vreinterpretq_s8_u8(vld1q_u8(p + 16))}};
    }
    static inline Bytes low_nibbles(Bytes x) {
        const int8x16_t mask = vdupq_n_s8(15);
        return {{vandq_s8(x.v[0], mask), vandq_s8(x.v[1], mask)}};
    }
    static inline Bytes high_nibbles(Bytes x) {
        return {{shift_right<4>(x.v[0]), shift_right<4>(x.v[1])}};
    }
    // (x >> shift) & mask, then << left.
    template <int shift, int left>
    static inline Bytes bits(Bytes x, int mask) {
        const int8x16_t m = vdupq_n_s8((int8_t)mask);
        return {{vshlq_n_s8(vandq_s8(shift_right<shift>(x.v[0]), m), left),
                 vshlq_n_s8(vandq_s8(shift_right<shift>(x.v[1]), m), left)}};
    }
    static inline Bytes either(Bytes x, Bytes y) {
        return {{vorrq_s8(x.v[0], y.v[0]), vorrq_s8(x.v[1], y.v[1])}};
    }
    static inline Bytes look_up(const int8_t* table, Bytes x) {
        const int8x16_t t = vld1q_s8(table);
        return {{vqtbl1q_s8(t, vreinterpretq_u8_s8(x.v[0])), vqtbl1q_s8(t, vreinterpretq_u8_s8(x.v[1]))}};
    }
#if defined(__ARM_FEATURE_MATMUL_INT8)
    static inline Dots set_dots(int32_t x) {
        const int32x4_t start = vsetq_lane_s32(x, vsetq_lane_s32(x, vdupq_n_s32(0), 1), 3);
        return {{start, start, start, start}};
    }
    template <bool kSigned>
    static inline Codes widen(Bytes x) { return x; }
    template <int half>
    static inline Half load_half(const int8_t* group) { return {{vld1q_s8(group + 32 * half), vld1q_s8(group + 32 * half + 16)}}; }
    template <int quad>
    static inline Dots dot(Dots total, Codes codes, Codes next, Half x) {
        for (int i = 0; i < 2; i++) {
            const int32x4_t first = vreinterpretq_s32_s8(codes.v[i]), second = vreinterpretq_s32_s8(next.v[i]);
            total.v[2 * i] = vmmlaq_s32(total.v[2 * i], vreinterpretq_s8_s32(vzip1q_s32(first, second)), x.v[quad / 2]);
            total.v[2 * i + 1] = vmmlaq_s32(total.v[2 * i + 1], vreinterpretq_s8_s32(vzip2q_s32(first, second)), x.v[quad / 2]);
        }
        return total;
    }
    static inline Float to_float(Dots x) { return {{four_rows(x.v[0], x.v[1]), four_rows(x.v[2], x.v[3])}}; }
    static inline float32x4_t four_rows(int32x4_t first, int32x4_t second) {
        return vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(vuzp1q_s32(first, second), 8), vuzp2q_s32(first, second)));
    }
    static inline void store_codes(int8_t* group, int at, Int x) {
        const int16x8_t words = vcombine_s16(vmovn_s32(x.v[0]), vmovn_s32(x.v[1]));
        vst1_s8(group + 2 * at, vshrn_n_s16(vaddq_s16(words, vdupq_n_s16(128)), 8));
        vst1_s8(group + 2 * at + 8, vmovn_s16(words));
    }
#elif defined(__ARM_FEATURE_DOTPROD)
    static inline Dots set_dots(int32_t x) {
        const int32x4_t zero = vdupq_n_s32(0), start = vdupq_n_s32(x);
        return {{{zero, zero}}, {{start, start}}};
    }
    template <bool kSigned>
    static inline Codes widen(Bytes x) { return x; }
    // One half of a group's activations.
    template <int half>
    static inline Half load_half(const int8_t* group) { return {vld1q_s8(group + 16 * half), vld1q_s8(group + 32 + 16 * half)}; }
    // Adds the products of 8 codes of each row, a quad and the next, with those activations of the half.
    template <int quad>
    static inline Dots dot(Dots total, Codes codes, Codes next, Half x) {
        for (int i = 0; i < 2; i++) {
            total.high.v[i] = vdotq_laneq_s32(total.high.v[i], codes.v[i], x.high, quad);
            total.low.v[i] = vdotq_laneq_s32(total.low.v[i], codes.v[i], x.low, quad);
            total.high.v[i] = vdotq_laneq_s32(total.high.v[i], next.v[i], x.high, quad + 1);
            total.low.v[i] = vdotq_laneq_s32(total.low.v[i], next.v[i], x.low, quad + 1);
        }
        return total;
    }
    static inline Float to_float(Dots x) {
        return {{vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(x.high.v[0], 8), x.low.v[0])),
                 vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(x.high.v[1], 8), x.low.v[1]))}};
    }
    static inline void store_codes(int8_t* group, int at, Int x) {
        const int16x8_t words = vcombine_s16(vmovn_s32(x.v[0]), vmovn_s32(x.v[1]));
        vst1_s8(group + at, vshrn_n_s16(vaddq_s16(words, vdupq_n_s16(128)), 8));
        vst1_s8(group + 32 + at, vmovn_s16(words));
    }
#else
    static inline Dots set_dots(int32_t x) {
        const int32x4_t start = vsetq_lane_s32(x, vdupq_n_s32(0), 0);
        return {{start, start, start, start, start, start, start, start}};
    }
    template <bool kSigned>
    static inline Codes widen(Bytes x) {
        return {{vmovl_s8(vget_low_s8(x.v[0])), vmovl_high_s8(x.v[0]), vmovl_s8(vget_low_s8(x.v[1])), vmovl_high_s8(x.v[1])}};
    }
    template <int half>
    static inline Half load_half(const int8_t* group) { return {group + 32 * half}; }
    template <int quad>
    static inline Dots dot(Dots total, Codes codes, Codes next, Half x) { return dot_quad(dot_quad(total, codes, x.p + 8 * quad), next, x.p + 8 * quad + 8); }
    static inline Dots dot_quad(Dots total, Codes codes, const int8_t* x) {
        const int16x4_t four = vreinterpret_s16_s8(vld1_s8(x));
        const int16x8_t twice = vcombine_s16(four, four);
        for (int i = 0; i < 4; i++) {
            total.v[2 * i] = vmlal_s16(total.v[2 * i], vget_low_s16(codes.v[i]), four);
            total.v[2 * i + 1] = vmlal_high_s16(total.v[2 * i + 1], codes.v[i], twice);
        }
        return total;
    }
    static inline Float to_float(Dots x) {
        return {{vcvtq_f32_s32(vpaddq_s32(vpaddq_s32(x.v[0], x.v[1]), vpaddq_s32(x.v[2], x.v[3]))),
                 vcvtq_f32_s32(vpaddq_s32(vpaddq_s32(x.v[4], x.v[5]), vpaddq_s32(x.v[6], x.v[7])))}};
    }
    static inline void store_codes(int8_t* group, int at, Int x) {
        vst1q_s8(group + 2 * at, vreinterpretq_s8_s16(vcombine_s16(vmovn_s32(x.v[0]), vmovn_s32(x.v[1]))));
    }
#endif
    static inline Float multiply(Float x, Float y) { return {{vmulq_f32(x.v[0], y.v[0]), vmulq_f32(x.v[1], y.v[1])}}; }
    static inline Float multiply_add(Float x, Float y, Float z) {
        return {{vfmaq_f32(z.v[0], x.v[0], y.v[0]), vfmaq_f32(z.v[1], x.v[1], y.v[1])}};
    }
    static inline Float multiply_add(Float x, float y, Float z) {
        return {{vfmaq_n_f32(z.v[0], x.v[0], y), vfmaq_n_f32(z.v[1], x.v[1], y)}};
    }
    static inline Float add(Float x, Float y) { return {{vaddq_f32(x.v[0], y.v[0]), vaddq_f32(x.v[1], y.v[1])}}; }
    static inline Float subtract(Float x, Float y) { return {{vsubq_f32(x.v[0], y.v[0]), vsubq_f32(x.v[1], y.v[1])}}; }
    static inline Float maximum(Float x, Float y) { return {{vmaxq_f32(x.v[0], y.v[0]), vmaxq_f32(x.v[1], y.v[1])}}; }
    static inline Float minimum(Float x, Float y) { return {{vminq_f32(x.v[0], y.v[0]), vminq_f32(x.v[1], y.v[1])}}; }
    static inline Float divide(Float x, Float y) { return {{vdivq_f32(x.v[0], y.v[0]), vdivq_f32(x.v[1], y.v[1])}}; }
    static inline Float absolute(Float x) { return {{vabsq_f32(x.v[0]), vabsq_f32(x.v[1])}}; }
    static inline Int round_to_int(Float x) { return {{vcvtnq_s32_f32(x.v[0]), vcvtnq_s32_f32(x.v[1])}}; }
    static inline int32_t sum(Int x) { return vaddvq_s32(vaddq_s32(x.v[0], x.v[1])); }
    static inline Float low_bits_as_exponent(Float x) {
        return {{vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(x.v[0]), 23)), vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(x.v[1]), 23))}};
    }
    static inline float sum(Float x) { return vaddvq_f32(vaddq_f32(x.v[0], x.v[1])); }
    static inline float highest(Float x) { return vmaxvq_f32(vmaxq_f32(x.v[0], x.v[1])); }

    static inline Float load(const float* p) { return {{vld1q_f32(p), vld1q_f32(p + 4)}}; }
    static inline void store(float* p, Float x) { vst1q_f32(p, x.v[0]); vst1q_f32(p + 4, x.v[1]); }
    static inline Float load_float16(const uint16_t* p) {
        const float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(p));
        return {{vcvt_f32_f16(vget_low_f16(h)), vcvt_f32_f16(vget_high_f16(h))}};
    }
    static inline void store_float16(uint16_t* p, Float x) {
        vst1q_u16(p, vreinterpretq_u16_f16(vcombine_f16(vcvt_f16_f32(x.v[0]), vcvt_f16_f32(x.v[1]))));
    }
    // Of 8 pairs the first ones and the second ones.
    static inline void load_bfloat16_pair(const uint16_t* p, Float& first, Float& second) {
        const uint32x4_t high = vdupq_n_u32(0xFFFF0000u);
        for (int i = 0; i < 2; i++) {
            const uint32x4_t words = vreinterpretq_u32_u16(vld1q_u16(p + 8 * i));
            first.v[i] = vreinterpretq_f32_u32(vshlq_n_u32(words, 16));
            second.v[i] = vreinterpretq_f32_u32(vandq_u32(words, high));
        }
    }
    static inline Float load_int8(const uint8_t* p) {
        const int16x8_t words = vmovl_s8(vreinterpret_s8_u8(vld1_u8(p)));
        return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(words))), vcvtq_f32_s32(vmovl_high_s16(words))}};
    }
    static inline void store_int8(uint8_t* p, Int x) {
        vst1_u8(p, vreinterpret_u8_s8(vqmovn_s16(vcombine_s16(vqmovn_s32(x.v[0]), vqmovn_s32(x.v[1])))));
    }
    static inline Float load_bfloat16(const uint16_t* p) {
        const uint16x8_t h = vld1q_u16(p);
        return {{vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(h), 16)),
                 vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(h), 16))}};
    }

private:
    template <int count>
    static inline int8x16_t shift_right(int8x16_t x) {
        if constexpr (count == 0) return x;
        else return vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(x), count));
    }
};

}  // namespace quire
