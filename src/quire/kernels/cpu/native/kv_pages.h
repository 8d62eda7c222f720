// How keys and values lie in the pages of the KV cache: written head by head, read as float32.
#pragma once
#include <algorithm>

#include "elementwise.h"
#include "packed_formats.h"

namespace quire {

constexpr int kMaxDim = 512;  // of a head
constexpr int kKeys = 64;     // keys in a tile

// One layer of the store [blocks, 2, block_size, kv_heads, dim]; strides in numbers. With kInt8 each head of a token has a scale,
// a float32 behind its codes: [..., dim + kKvScaleBytes].
struct KvLayer {
    uint8_t* data;
    int64_t block_stride, value_stride, token_stride, head_stride;
    int32_t format;  // kFloat32, kFloat16, kBfloat16 or kInt8
    int32_t block_size;
};

constexpr int kKvScaleBytes = 4;

static inline __attribute__((always_inline)) void load_numbers(const uint8_t* p, int32_t format, int width, float* out) {
    int i = 0;
    if (format == kFloat32) {
        std::memcpy(out, p, sizeof(float) * width);
        return;
    }
    if (format == kInt8) {
        for (; i + Simd::kLanes <= width; i += Simd::kLanes) Simd::store(out + i, Simd::load_int8(p + i));
        for (; i < width; i++) out[i] = (float)(int8_t)p[i];
        return;
    }
    const auto* words = reinterpret_cast<const uint16_t*>(p);
    if (format == kFloat16) {
        for (; i + Simd::kLanes <= width; i += Simd::kLanes) Simd::store(out + i, Simd::load_float16(words + i));
        for (; i < width; i++) out[i] = half_to_float(words[i]);
    } else {
        for (; i + Simd::kLanes <= width; i += Simd::kLanes) Simd::store(out + i, Simd::load_bfloat16(words + i));
        for (; i < width; i++) out[i] = bfloat_to_float(words[i]);
    }
}

static inline void store_numbers(const float* x, int32_t format, int width, uint8_t* p) {
    if (format == kFloat32) {
        std::memcpy(p, x, sizeof(float) * width);
        return;
    }
    auto* words = reinterpret_cast<uint16_t*>(p);
    int i = 0;
    if (format == kFloat16) {  // values beyond its range are clamped instead of becoming infinite
        const Simd::Float limit = Simd::set(65504.0f), low = Simd::set(-65504.0f);
        for (; i + Simd::kLanes <= width; i += Simd::kLanes) {
            const Simd::Float values = Simd::load(x + i);
            const Simd::Float invalid = Simd::multiply(values, Simd::zero());  // NaN stays NaN
            Simd::store_float16(words + i, Simd::add(Simd::maximum(Simd::minimum(values, limit), low), invalid));
        }
        for (; i < width; i++) words[i] = float_to_half(x[i] != x[i] ? x[i] : std::min(std::max(x[i], -65504.0f), 65504.0f));
    } else {
        for (; i < width; i++) words[i] = float_to_bfloat(x[i]);
    }
}

// Codes -127 to 127 of a head; returns their scale. Where a number is not finite the scale is NaN, so that all of the head is.
static inline float store_codes(const float* x, int width, uint8_t* codes) {
    Simd::Float high = Simd::zero(), invalid = Simd::zero();
    int i = 0;
    for (; i + Simd::kLanes <= width; i += Simd::kLanes) {
        const Simd::Float values = Simd::load(x + i);
        high = Simd::maximum(high, Simd::absolute(values));
        invalid = Simd::multiply_add(values, Simd::zero(), invalid);
    }
    float highest = Simd::highest(high), nothing = Simd::sum(invalid);
    for (; i < width; i++) {
        highest = std::max(highest, std::fabs(x[i]));
        nothing += x[i] * 0.0f;
    }
    const float scale = highest / 127.0f + nothing;
    if (!(scale > 0.0f)) {
        std::memset(codes, 0, width);
        return scale;
    }
    const Simd::Float limit = Simd::set(127.0f), low = Simd::set(-127.0f);  // a scale below the normal range is not exact
    for (i = 0; i + Simd::kLanes <= width; i += Simd::kLanes) {
        const Simd::Float scaled = Simd::divide(Simd::load(x + i), Simd::set(scale));
        Simd::store_int8(codes + i, Simd::round_to_int(Simd::maximum(Simd::minimum(scaled, limit), low)));
    }
    for (; i < width; i++) codes[i] = (uint8_t)(int8_t)std::nearbyint(std::min(std::max(x[i] / scale, -127.0f), 127.0f));
    return scale;
}

// kLanes numbers as they are stored; codes without their scale.
template <int32_t format>
static inline Simd::Float load_stored(const uint8_t* p) {
    if constexpr (format == kFloat32) return Simd::load(reinterpret_cast<const float*>(p));
    else if constexpr (format == kFloat16) return Simd::load_float16(reinterpret_cast<const uint16_t*>(p));
    else if constexpr (format == kBfloat16) return Simd::load_bfloat16(reinterpret_cast<const uint16_t*>(p));
    else return Simd::load_int8(p);
}

static inline int64_t number_bytes(int32_t format) { return format == kFloat32 ? 4 : format == kInt8 ? 1 : 2; }

// A block's keys are stored dimension by dimension, [kv_heads, dim, block_size], so that a vector holds several keys;
// its values token by token, [block_size, kv_heads, dim]. The scales of a head's keys lie behind them, [block_size]; that of a
// value behind the value.
static inline uint8_t* keys_of(const KvLayer& kv, int64_t block, int head, int dim) {
    const int64_t width = dim + (kv.format == kInt8 ? kKvScaleBytes : 0);
    return kv.data + (block * kv.block_stride + head * width * kv.block_size) * number_bytes(kv.format);
}

static inline uint8_t* value_of(const KvLayer& kv, int64_t block, int offset, int head) {
    return kv.data + (block * kv.block_stride + kv.value_stride + offset * kv.token_stride + head * kv.head_stride) * number_bytes(kv.format);
}

// Requests cache lines of keys and values: they were read a step ago, and the weights have taken their place since. Few of
// them follow each other, so that the processor's own prefetching helps little.
struct PageRequests {
    const KvLayer& kv;
    const int32_t* table;
    int head, dim, last;  // last: behind the last key

    static constexpr int kLine = 64, kKeysOfLine = 16;  // of 16 bits each

    void keys(int first, int count) const {
        const int64_t stride = kv.block_size * number_bytes(kv.format), step = stride > kLine ? stride : kLine;
        for (int key = first; key < std::min(first + count, last); key += kKeysOfLine) {
            const uint8_t* at = keys_of(kv, table[key / kv.block_size], head, dim) + key % kv.block_size * number_bytes(kv.format);
            for (int64_t i = 0; i < dim * stride; i += step) __builtin_prefetch(at + i);
        }
    }
    void values(const uint8_t* const* rows, int count) const {
        for (int i = 0; i < count; i++)
            for (int64_t byte = 0; byte < dim * number_bytes(kv.format); byte += kLine) __builtin_prefetch(rows[i] + byte);
    }
};

// Keys [offset, offset + run) of a block as float32: [dim, kKeys]. Codes are without their scale.
template <int32_t format>
static inline void load_keys(const KvLayer& kv, int64_t block, int head, int dim, int offset, int run, float* to) {
    const uint8_t* keys = keys_of(kv, block, head, dim) + offset * number_bytes(format);
    const int64_t stride = kv.block_size * number_bytes(format);
    if (run == Simd::kLanes)
        for (int d = 0; d < dim; d++) load_numbers(keys + d * stride, format, Simd::kLanes, to + d * kKeys);
    else
        for (int d = 0; d < dim; d++) load_numbers(keys + d * stride, format, run, to + d * kKeys);
}

// The scales of keys [offset, offset + run) of a block, and of their values.
static inline void load_scales(const KvLayer& kv, int64_t block, int head, int dim, int offset, int run, float* keys, float* values) {
    std::memcpy(keys, keys_of(kv, block, head, dim) + (int64_t)dim * kv.block_size + offset * kKvScaleBytes, run * sizeof(float));
    const uint8_t* value = value_of(kv, block, offset, head) + dim;
    for (int i = 0; i < run; i++, value += kv.token_stride) std::memcpy(values + i, value, kKvScaleBytes);
}

}  // namespace quire
