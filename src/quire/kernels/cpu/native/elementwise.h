// Norms, RoPE, gates and the exponential, in float32.
#pragma once
#include <cmath>
#include <cstring>

#include "simd.h"

namespace quire {

static inline float half_to_float(uint16_t bits) {
    const uint32_t sign = (uint32_t)(bits & 0x8000) << 16;
    const uint32_t exponent = (bits >> 10) & 31, mantissa = bits & 1023;
    uint32_t word;
    float value;
    if (exponent == 0) {
        value = (float)mantissa * 5.9604644775390625e-8f;
        std::memcpy(&word, &value, 4);
        word |= sign;
    } else {
        word = sign | (exponent == 31 ? 0x7F800000u : (exponent + 112) << 23) | mantissa << 13;
    }
    std::memcpy(&value, &word, 4);
    return value;
}

static inline uint16_t float_to_half(float x) {
#if defined(__aarch64__)
    return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(x))), 0);
#else
    return (uint16_t)_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#endif
}

static inline float bfloat_to_float(uint16_t bits) {
    const uint32_t word = (uint32_t)bits << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
}

static inline uint16_t float_to_bfloat(float x) {
    uint32_t word;
    std::memcpy(&word, &x, 4);
    if (x != x) return 0x7FC0;
    return (uint16_t)((word + 0x7FFF + ((word >> 16) & 1)) >> 16);
}

// e to x, for x up to 88; 1 for 0; NaN stays NaN. The polynomial has the smallest relative error for 2 to -0.5 … 0.5: 9e-8.
static inline Simd::Float exponential(Simd::Float x) {
    const Simd::Float biased = Simd::set(12582912.0f + 127.0f);  // 1.5 * 2^23: the low bits of a sum with it are an integer
    const Simd::Float twos = Simd::multiply(Simd::maximum(Simd::set(-87.0f), x), Simd::set(1.44269504f));
    const Simd::Float exponent = Simd::add(twos, biased);
    const Simd::Float rest = Simd::subtract(twos, Simd::subtract(exponent, biased));
    Simd::Float series = Simd::set(1.326472731e-3f);
    series = Simd::multiply_add(series, rest, Simd::set(9.671512991e-3f));
    series = Simd::multiply_add(series, rest, Simd::set(5.550733581e-2f));
    series = Simd::multiply_add(series, rest, Simd::set(2.402224243e-1f));
    series = Simd::multiply_add(series, rest, Simd::set(6.931470037e-1f));
    series = Simd::multiply_add(series, rest, Simd::set(1.0f));
    return Simd::multiply(series, Simd::low_bits_as_exponent(exponent));
}

static inline void rms_norm(const float* x, const float* weight, int width, float epsilon, float* out) {
    Simd::Float squares = Simd::zero();
    int i = 0;
    for (; i + Simd::kLanes <= width; i += Simd::kLanes) {
        const Simd::Float values = Simd::load(x + i);
        squares = Simd::multiply_add(values, values, squares);
    }
    float total = Simd::sum(squares);
    for (; i < width; i++) total += x[i] * x[i];
    const float inverse = 1.0f / std::sqrt(total / (float)width + epsilon);
    for (i = 0; i + Simd::kLanes <= width; i += Simd::kLanes)
        Simd::store(out + i, Simd::multiply(Simd::multiply(Simd::load(x + i), Simd::set(inverse)), Simd::load(weight + i)));
    for (; i < width; i++) out[i] = x[i] * inverse * weight[i];
}

static inline void add_row(float* residual, const float* x, int width) {
    int i = 0;
    for (; i + Simd::kLanes <= width; i += Simd::kLanes) Simd::store(residual + i, Simd::add(Simd::load(residual + i), Simd::load(x + i)));
    for (; i < width; i++) residual[i] += x[i];
}

// RoPE on one head, in place: x * cos + swap_halves(x) * sin, where sin's first half is negated.
static inline void rotate(float* x, const float* cos, const float* sin, int width) {
    const int half = width / 2;
    int i = 0;
    for (; i + Simd::kLanes <= half; i += Simd::kLanes) {
        const Simd::Float low = Simd::load(x + i), high = Simd::load(x + half + i);
        Simd::store(x + i, Simd::multiply_add(high, Simd::load(sin + i), Simd::multiply(low, Simd::load(cos + i))));
        Simd::store(x + half + i, Simd::multiply_add(low, Simd::load(sin + half + i), Simd::multiply(high, Simd::load(cos + half + i))));
    }
    for (; i < half; i++) {
        const float low = x[i], high = x[half + i];
        x[i] = low * cos[i] + high * sin[i];
        x[half + i] = high * cos[half + i] + low * sin[half + i];
    }
}

enum Activation : int32_t { kSilu, kGeluTanh };

// activation(gate) * up, for one token. silu(x) = x * sigmoid(x); gelu_tanh(x) = x * sigmoid(2 * inner(x)).
static inline void gate(const float* gate_up, int width, int32_t activation, float* out) {
    auto scaled = [&](float x) {
        const float inner = activation == kSilu ? x : 1.5957691216f * (x + 0.044715f * x * x * x);
        return x / (1.0f + std::exp(-inner));
    };
    const float* up = gate_up + width;
    int i = 0;
    for (; i + Simd::kLanes <= width; i += Simd::kLanes) {
        const Simd::Float x = Simd::load(gate_up + i);
        Simd::Float inner = x;
        if (activation == kGeluTanh) {
            const Simd::Float cubic = Simd::multiply(Simd::multiply(x, x), Simd::multiply(x, Simd::set(0.044715f)));
            inner = Simd::multiply(Simd::add(x, cubic), Simd::set(1.5957691216f));
        }
        const Simd::Float limited = Simd::minimum(Simd::subtract(Simd::zero(), inner), Simd::set(80.0f));
        const Simd::Float denominator = Simd::add(Simd::set(1.0f), exponential(limited));
        Simd::store(out + i, Simd::multiply(Simd::divide(x, denominator), Simd::load(up + i)));
    }
    for (; i < width; i++) out[i] = scaled(gate_up[i]) * up[i];
}

}  // namespace quire
