// Vectors of 8 output rows on Arm: NEON, with the dot-product instructions where they are compiled in.
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace quire {

struct Simd {
    static constexpr int kLanes = 8;             // output rows in a vector
    static constexpr int kMaxTokens = 8;         // tokens whose sums fit the registers
    static constexpr int kMaxPlainTokens = 4;      // the same for weights that are not quantized
    static constexpr bool kUnsignedCodes = false;  // whether `dot` wants codes as 0 to 255

    struct Int { int32x4_t v[2]; };
    struct Float { float32x4_t v[2]; };
    struct Bytes { int8x16_t v[2]; };
    using Half = int8x16_t;  // 16 quantized activations

    static inline Int set_int(int32_t x) { return {{vdupq_n_s32(x), vdupq_n_s32(x)}}; }
    static inline Float set(float x) { return {{vdupq_n_f32(x), vdupq_n_f32(x)}}; }
    static inline Float zero() { return set(0.0f); }
    static inline Half load_half(const int8_t* p) { return vld1q_s8(p); }
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
    static inline Bytes flip_sign(Bytes x) {
        const int8x16_t sign = vdupq_n_s8((int8_t)0x80);
        return {{veorq_s8(x.v[0], sign), veorq_s8(x.v[1], sign)}};
    }
    static inline Bytes look_up(const int8_t* table, Bytes x) {
        const int8x16_t t = vld1q_s8(table);
        return {{vqtbl1q_s8(t, vreinterpretq_u8_s8(x.v[0])), vqtbl1q_s8(t, vreinterpretq_u8_s8(x.v[1]))}};
    }
    // Adds the products of 4 codes of each row with activations 4 * quad to 4 * quad + 3 of the half.
    template <int quad>
    static inline Int dot(Int total, Bytes codes, Half x) {
        return {{dot4<quad>(total.v[0], codes.v[0], x), dot4<quad>(total.v[1], codes.v[1], x)}};
    }
    static inline Float to_float(Int x) { return {{vcvtq_f32_s32(x.v[0]), vcvtq_f32_s32(x.v[1])}}; }
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
    static inline Float round(Float x) { return {{vrndnq_f32(x.v[0]), vrndnq_f32(x.v[1])}}; }
    static inline Float absolute(Float x) { return {{vabsq_f32(x.v[0]), vabsq_f32(x.v[1])}}; }
    static inline Int round_to_int(Float x) { return {{vcvtnq_s32_f32(x.v[0]), vcvtnq_s32_f32(x.v[1])}}; }
    static inline void store_bytes(int8_t* p, Int x) {  // 8 of them, saturated
        vst1_s8(p, vqmovn_s16(vcombine_s16(vqmovn_s32(x.v[0]), vqmovn_s32(x.v[1]))));
    }
    static inline Float power_of_two(Int exponent) {
        return {{vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(exponent.v[0], vdupq_n_s32(127)), 23)),
                 vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(exponent.v[1], vdupq_n_s32(127)), 23))}};
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
    template <int lane>
    static inline int32x4_t dot4(int32x4_t total, int8x16_t codes, int8x16_t x) {
#if defined(__ARM_FEATURE_DOTPROD)
        return vdotq_laneq_s32(total, codes, x, lane);
#else
        const int8x16_t repeated = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(x), lane));
        const int16x8_t low = vmull_s8(vget_low_s8(codes), vget_low_s8(repeated));
        const int16x8_t high = vmull_s8(vget_high_s8(codes), vget_high_s8(repeated));
        return vaddq_s32(total, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
    }
};

}  // namespace quire
