// Attention over the pages of the KV cache: one query at a time for decodes, tiles of queries for chunks.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "elementwise.h"
#include "packed_formats.h"
#include "thread_pool.h"

namespace quire {

// One layer of the store [blocks, 2, block_size, kv_heads, dim]; strides in numbers. With kInt8 each head of a token has a scale,
// a float32 behind its codes: [..., dim + kKvScaleBytes].
struct KvLayer {
    uint8_t* data;
    int64_t block_stride, value_stride, token_stride, head_stride;
    int32_t format;  // kFloat32, kFloat16, kBfloat16 or kInt8
    int32_t block_size;
};

constexpr int kKvScaleBytes = 4;

struct Heads {
    int32_t queries, keys, dim;
    float scale, softcap;
};

struct Sequence {  // a run of tokens of one sequence
    int64_t first_token;
    int32_t num_tokens, num_keys;  // num_keys: what the last token sees
    const int32_t* table;
};

constexpr int kMaxDim = 512;        // of a head
constexpr int kKeys = 64;           // keys in a tile
constexpr int kKeysPerSplit = 512;  // keys that one softmax covers; splits are then added in order
constexpr int kMaxTileRows = 192;   // queries times heads in a tile
constexpr int kRowsAtOnce = 96;     // whose scores are in the cache of a core beside keys and values; a multiple of kLanes
constexpr int kFewTokens = 4;       // sequences with up to so many queries are computed query by query

static inline __attribute__((always_inline)) void load_numbers(const uint8_t* p, int32_t format, int width, float* out) {
    int i = 0;
    if (format == kFloat32) {
        std::memcpy(out, p, sizeof(float) * width);
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

static inline float soft_cap(float score, float cap) { return cap > 0.0f ? cap * std::tanh(score / cap) : score; }

static inline void scale_row(float* x, float factor, int width) {
    int i = 0;
    for (; i + Simd::kLanes <= width; i += Simd::kLanes) Simd::store(x + i, Simd::multiply(Simd::load(x + i), Simd::set(factor)));
    for (; i < width; i++) x[i] *= factor;
}

static inline void add_scaled(float* out, const float* x, float factor, int width) {
    int i = 0;
    for (; i + Simd::kLanes <= width; i += Simd::kLanes)
        Simd::store(out + i, Simd::multiply_add(Simd::load(x + i), factor, Simd::load(out + i)));
    for (; i < width; i++) out[i] += factor * x[i];
}

struct Seen { int hidden, visible; };  // of the keys of a tile, a row sees [hidden, visible)

static inline Seen seen_keys(int position, int window, int base, int keys) {
    const int visible = std::max(0, std::min(keys, position + 1 - base));
    return {window > 0 ? std::min(visible, std::max(0, position - window + 1 - base)) : 0, visible};
}

// The highest score of a row so far. NaN is left out; its weight shows it.
static inline float peak_of(float* scores, Seen seen, float highest) {
    if (seen.hidden > 0) std::fill(scores, scores + seen.hidden, -std::numeric_limits<float>::infinity());
    if (seen.visible < kKeys) std::fill(scores + seen.visible, scores + kKeys, -std::numeric_limits<float>::infinity());
    Simd::Float high = Simd::load(scores);
#pragma GCC unroll 8
    for (int i = Simd::kLanes; i < kKeys; i += Simd::kLanes) high = Simd::maximum(high, Simd::load(scores + i));
    return std::max(highest, Simd::highest(high));
}

// Scores of a row become weights, e to (score - peak). Returns their sums, lane by lane.
static inline Simd::Float weigh(float* scores, Seen seen, float peak) {
    constexpr int kVectors = kKeys / Simd::kLanes;
    Simd::Float weights[kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; i++) weights[i] = exponential(Simd::subtract(Simd::load(scores + i * Simd::kLanes), Simd::set(peak)));
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; i++) Simd::store(scores + i * Simd::kLanes, weights[i]);
    if (seen.hidden > 0 || seen.visible < kKeys) {  // exponential() gives e to -87 at the least; hidden keys are exactly 0
        std::fill(scores, scores + seen.hidden, 0.0f);
        std::fill(scores + seen.visible, scores + kKeys, 0.0f);
        for (int i = 0; i < kVectors; i++) weights[i] = Simd::load(scores + i * Simd::kLanes);
    }
    Simd::Float sum = weights[0];
#pragma GCC unroll 8
    for (int i = 1; i < kVectors; i++) sum = Simd::add(sum, weights[i]);
    return sum;
}

struct Softmax {  // so far: the highest score, and the sum of e to (score - highest)
    float highest = std::numeric_limits<float>::lowest(), total = 0.0f;
};

struct SoftmaxRows {  // the softmax of some rows so far
    float* highest;
    float* factors;
    float* sums;  // [rows, kLanes]
};

struct TileBuffers {
    std::vector<float> keys, values, scores, queries, split, output;
    std::vector<float> highest, factors, sums;  // of the softmax of a split, as `SoftmaxRows`
    std::vector<Seen> seen;
    std::vector<Softmax> split_softmax, softmax;
    void reserve(int rows, int padded) {
        const size_t whole = (size_t)(rows + Simd::kLanes - 1) / Simd::kLanes * Simd::kLanes;
        highest.resize(whole);
        factors.resize(whole);
        sums.resize((size_t)rows * Simd::kLanes);
        seen.resize(rows);
        keys.resize((size_t)padded * kKeys);
        values.resize((size_t)padded * kKeys);
        scores.resize((size_t)std::min(rows, kRowsAtOnce) * kKeys);
        queries.resize((size_t)rows * padded);
        split.resize((size_t)rows * padded);
        output.resize((size_t)rows * padded);
        split_softmax.resize(rows);
        softmax.resize(rows);
    }
};

// c[rows, columns] = a[rows, depth] b[depth, columns], b and c with a stride; columns are a multiple of kLanes. kAdd: plus what
// c was, each row times its factor.
template <bool kAdd, int kRows, int kColumns>
static inline void product_tile(const float* a, int64_t stride_a, const float* b, int64_t stride_b, int depth, float* c, int64_t stride_c, const float* factors) {
    Simd::Float total[kRows][kColumns];
#pragma GCC unroll 6
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < kColumns; j++) total[r][j] = kAdd ? Simd::multiply(Simd::load(c + r * stride_c + j * Simd::kLanes), Simd::set(factors[r])) : Simd::zero();
    for (int k = 0; k < depth; k++) {
        Simd::Float right[kColumns];
#pragma GCC unroll 4
        for (int j = 0; j < kColumns; j++) right[j] = Simd::load(b + k * stride_b + j * Simd::kLanes);
#pragma GCC unroll 6
        for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
            for (int j = 0; j < kColumns; j++) total[r][j] = Simd::multiply_add(right[j], a[r * stride_a + k], total[r][j]);
    }
#pragma GCC unroll 6
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < kColumns; j++) Simd::store(c + r * stride_c + j * Simd::kLanes, total[r][j]);
}

// All rows of some columns, as many at once as registers allow. Each sum is in the order of the depth, whatever the tile.
template <bool kAdd, int kColumns>
static inline void product_strip(const float* a, int64_t stride_a, int rows, const float* b, int64_t stride_b, int depth, float* c, int64_t stride_c, const float* factors) {
    auto strip = [&](auto count) {
        constexpr int n = decltype(count)::value;
        for (; rows >= n; rows -= n, a += n * stride_a, c += n * stride_c, factors += kAdd ? n : 0)
            product_tile<kAdd, n, kColumns>(a, stride_a, b, stride_b, depth, c, stride_c, factors);
    };
    if constexpr (Simd::kProductRows >= 6) strip(std::integral_constant<int, 6>{});
    strip(std::integral_constant<int, 4>{});
    strip(std::integral_constant<int, 3>{});
    strip(std::integral_constant<int, 2>{});
    strip(std::integral_constant<int, 1>{});
}

template <bool kAdd>
static void product(const float* a, int64_t stride_a, int rows, const float* b, int64_t stride_b, int depth, float* c, int64_t stride_c, int columns,
                    const float* factors = nullptr) {
    int j = 0;
    auto strips = [&](auto count) {
        constexpr int n = decltype(count)::value;
        for (; j + n * Simd::kLanes <= columns; j += n * Simd::kLanes)
            product_strip<kAdd, n>(a, stride_a, rows, b + j, stride_b, depth, c + j, stride_c, factors);
    };
    if constexpr (Simd::kProductColumns >= 4) strips(std::integral_constant<int, 4>{});
    strips(std::integral_constant<int, 2>{});
    strips(std::integral_constant<int, 1>{});
}

static inline int padded_dim(int dim) { return (dim + Simd::kLanes - 1) / Simd::kLanes * Simd::kLanes; }

// Keys [offset, offset + run) of a block as float32: [dim, kKeys].
template <int32_t format>
static inline void load_keys(const KvLayer& kv, int64_t block, int head, int dim, int offset, int run, float* to) {
    const uint8_t* keys = keys_of(kv, block, head, dim);
    const int64_t stride = kv.block_size * number_bytes(format);
    if constexpr (format == kInt8) {
        const uint8_t* scales = keys + dim * stride + offset * kKvScaleBytes;
        keys += offset;
        int i = 0;
        for (; i + Simd::kLanes <= run; i += Simd::kLanes) {
            const Simd::Float scale = Simd::load(reinterpret_cast<const float*>(scales) + i);
            for (int d = 0; d < dim; d++) Simd::store(to + d * kKeys + i, Simd::multiply(Simd::load_int8(keys + d * stride + i), scale));
        }
        for (; i < run; i++) {
            float scale;
            std::memcpy(&scale, scales + i * kKvScaleBytes, kKvScaleBytes);
            for (int d = 0; d < dim; d++) to[d * kKeys + i] = (float)(int8_t)keys[d * stride + i] * scale;
        }
    } else {
        keys += offset * number_bytes(format);
        if (run == Simd::kLanes)
            for (int d = 0; d < dim; d++) load_numbers(keys + d * stride, format, Simd::kLanes, to + d * kKeys);
        else
            for (int d = 0; d < dim; d++) load_numbers(keys + d * stride, format, run, to + d * kKeys);
    }
}

template <int32_t format>
static inline void load_value(const uint8_t* value, int dim, float* to) {
    if constexpr (format == kInt8) {
        float scale;
        std::memcpy(&scale, value + dim, kKvScaleBytes);
        int d = 0;
        for (; d + Simd::kLanes <= dim; d += Simd::kLanes) Simd::store(to + d, Simd::multiply(Simd::load_int8(value + d), Simd::set(scale)));
        for (; d < dim; d++) to[d] = (float)(int8_t)value[d] * scale;
    } else {
        load_numbers(value, format, dim, to);
    }
}

// Keys [base + begin, base + count) as float32: keys [dim, kKeys], values [kKeys, padded]. base is a multiple of kKeys.
// Those before them are zeros: their blocks may hold anything.
template <int32_t format>
static void load_tile_of(const KvLayer& kv, const int32_t* table, int head, int dim, int base, int begin, int count, TileBuffers& buffers) {
    const int padded = padded_dim(dim);
    if (begin > 0) {
        for (int d = 0; d < dim; d++) std::fill(buffers.keys.data() + d * kKeys, buffers.keys.data() + d * kKeys + begin, 0.0f);
        std::fill(buffers.values.data(), buffers.values.data() + (size_t)begin * padded, 0.0f);
    }
    for (int i = begin; i < count;) {
        const int key = base + i, offset = key % kv.block_size, run = std::min(kv.block_size - offset, count - i);
        const int64_t block = table[key / kv.block_size];
        load_keys<format>(kv, block, head, dim, offset, run, buffers.keys.data() + i);
        for (int j = 0; j < run; j++)
            load_value<format>(value_of(kv, block, offset + j, head), dim, buffers.values.data() + (i + j) * padded);
        i += run;
    }
    if (count < kKeys)
        for (int d = 0; d < dim; d++) std::fill(buffers.keys.data() + d * kKeys + count, buffers.keys.data() + (d + 1) * kKeys, 0.0f);
}

static inline void load_tile(const KvLayer& kv, const int32_t* table, int head, int dim, int base, int begin, int count, TileBuffers& buffers) {
    switch (kv.format) {
        case kFloat32: return load_tile_of<kFloat32>(kv, table, head, dim, base, begin, count, buffers);
        case kFloat16: return load_tile_of<kFloat16>(kv, table, head, dim, base, begin, count, buffers);
        case kInt8: return load_tile_of<kInt8>(kv, table, head, dim, base, begin, count, buffers);
        default: return load_tile_of<kBfloat16>(kv, table, head, dim, base, begin, count, buffers);
    }
}

// Calls body(first, count, keys) for rows that are computed together, and the keys that the last of them sees. Near the end
// of a chunk, rows see some of the keys of a tile: others are not computed.
template <class Body>
static inline void each_rows(const Seen* seen, int rows, int keys, const Body& body) {
    if (seen[0].visible == keys) return body(0, rows, keys);
    for (int r = 0; r < rows; r += Simd::kProductRows) {
        const int count = std::min(Simd::kProductRows, rows - r);
        body(r, count, seen[r + count - 1].visible);
    }
}

// One step of the softmax of some rows: scores become weights, and `factors` what the output so far is multiplied with.
static inline void weigh_rows(float* scores, const Seen* seen, int rows, float softcap, const SoftmaxRows& softmax) {
    for (int r = 0; r < rows; r++) {
        float* row = scores + r * kKeys;
        if (softcap > 0.0f)
            for (int i = 0; i < seen[r].visible; i++) row[i] = soft_cap(row[i], softcap);
        softmax.factors[r] = peak_of(row, seen[r], softmax.highest[r]);
    }
    for (int r = 0; r < rows; r += Simd::kLanes) {
        const Simd::Float peaks = Simd::load(softmax.factors + r);
        Simd::store(softmax.factors + r, exponential(Simd::subtract(Simd::load(softmax.highest + r), peaks)));
        Simd::store(softmax.highest + r, peaks);
    }
    for (int r = 0; r < rows; r++) {
        float* sums = softmax.sums + r * Simd::kLanes;
        const Simd::Float sum = weigh(scores + r * kKeys, seen[r], softmax.highest[r]);
        Simd::store(sums, Simd::multiply_add(Simd::load(sums), softmax.factors[r], sum));
    }
}

// Rows of queries over keys [first, last) of one split. Row r is at position + r / group. queries: [rows, padded],
// scaled; out: [rows, padded], not divided by the total.
static void attend_split(const KvLayer& kv, const Heads& heads, const int32_t* table, int key_head, int window, int position, const float* queries,
                         int rows, int first, int last, TileBuffers& buffers, float* out, Softmax* softmax) {
    const int group = heads.queries / heads.keys, padded = padded_dim(heads.dim);
    std::fill(out, out + (size_t)rows * padded, 0.0f);
    std::fill(buffers.highest.begin(), buffers.highest.end(), Softmax().highest);
    std::fill(buffers.sums.begin(), buffers.sums.end(), 0.0f);
    for (int base = first / kKeys * kKeys; base < last; base += kKeys) {
        const int keys = std::min(kKeys, last - base);
        load_tile(kv, table, key_head, heads.dim, base, std::max(0, first - base), keys, buffers);
        for (int r = 0, at = position; r < rows; r += group, at++) std::fill_n(buffers.seen.begin() + r, group, seen_keys(at, window, base, keys));
        for (int r = 0; r < rows; r += kRowsAtOnce) {
            const Seen* seen = buffers.seen.data() + r;
            const int some = std::min(kRowsAtOnce, rows - r);
            const SoftmaxRows state{buffers.highest.data() + r, buffers.factors.data() + r, buffers.sums.data() + r * Simd::kLanes};
            float* scores = buffers.scores.data();
            each_rows(seen, some, kKeys, [&](int i, int count, int visible) {
                product<false>(queries + (int64_t)(r + i) * padded, padded, count, buffers.keys.data(), kKeys, heads.dim, scores + i * kKeys, kKeys,
                               (visible + Simd::kLanes - 1) / Simd::kLanes * Simd::kLanes);
            });
            weigh_rows(scores, seen, some, heads.softcap, state);
            each_rows(seen, some, keys, [&](int i, int count, int visible) {
                product<true>(scores + i * kKeys, kKeys, count, buffers.values.data(), padded, visible, out + (int64_t)(r + i) * padded, padded, padded,
                              state.factors + i);
            });
        }
    }
    for (int r = 0; r < rows; r++) softmax[r] = {buffers.highest[r], Simd::sum(Simd::load(buffers.sums.data() + r * Simd::kLanes))};
}

// Adds a split to what the splits before it gave. The order is that of the keys, in chunks and decodes alike.
static inline void add_split(const Softmax& split, const float* split_output, Softmax& softmax, float* output, int width) {
    if (split.total == 0.0f) return;  // all its keys are hidden
    if (softmax.total == 0.0f) {
        std::copy(split_output, split_output + width, output);
        softmax = split;
        return;
    }
    const float highest = std::max(softmax.highest, split.highest);
    const float before = std::exp(softmax.highest - highest), now = std::exp(split.highest - highest);
    scale_row(output, before, width);
    add_scaled(output, split_output, now, width);
    softmax = {highest, softmax.total * before + split.total * now};
}

constexpr int kTokensAhead = 4;  // whose rows are requested: each lies on a page of its own

static inline void prefetch_row(const float* row, int width) {
    for (int i = 0; i < width; i += 16) __builtin_prefetch(row + i, 1);
}

static inline void finish_row(const float* output, const Softmax& softmax, int dim, float* out) {
    const float inverse = 1.0f / softmax.total;
    for (int d = 0; d < dim; d++) out[d] = output[d] * inverse;
}

static inline void load_queries(const float* query, int64_t stride, const Heads& heads, int key_head, int rows, float* out) {
    const int group = heads.queries / heads.keys, padded = padded_dim(heads.dim);
    for (int r = 0; r < rows; r += group, query += stride)
        for (int h = 0; h < group; h++) {
            const float* source = query + (key_head * group + h) * heads.dim;
            if (r + kTokensAhead * group < rows) prefetch_row(source + kTokensAhead * stride, heads.dim);
            float* row = out + (r + h) * padded;
            int d = 0;
            for (; d + Simd::kLanes <= heads.dim; d += Simd::kLanes) Simd::store(row + d, Simd::multiply(Simd::load(source + d), Simd::set(heads.scale)));
            for (; d < heads.dim; d++) row[d] = source[d] * heads.scale;
        }
}

// Tokens [first, first + count) of a sequence, with all query heads of a key head. query, out: [tokens, stride].
static void attend_tile(const KvLayer& kv, const Heads& heads, const Sequence& sequence, int window, int key_head, int first, int count,
                        const float* query, int64_t query_stride, float* out, int64_t out_stride, TileBuffers& buffers) {
    const int group = heads.queries / heads.keys, padded = padded_dim(heads.dim), rows = group * count;
    buffers.reserve(rows, padded);
    const int position = sequence.num_keys - sequence.num_tokens + first, last = position + count;
    const int lowest = window > 0 ? std::max(0, position - window + 1) : 0;
    load_queries(query + first * query_stride, query_stride, heads, key_head, rows, buffers.queries.data());
    const int begin = lowest / kKeysPerSplit * kKeysPerSplit;
    for (int base = begin; base < last; base += kKeysPerSplit) {
        float* output = (base == begin ? buffers.output : buffers.split).data();
        Softmax* softmax = (base == begin ? buffers.softmax : buffers.split_softmax).data();
        attend_split(kv, heads, sequence.table, key_head, window, position, buffers.queries.data(), rows, std::max(base, lowest),
                     std::min(base + kKeysPerSplit, last), buffers, output, softmax);
        for (int r = 0; base != begin && r < rows; r++)
            add_split(buffers.split_softmax[r], buffers.split.data() + r * padded, buffers.softmax[r], buffers.output.data() + r * padded, padded);
    }
    out += first * out_stride + (int64_t)key_head * group * heads.dim;
    for (int r = 0; r < rows; r += group, out += out_stride) {
        if (r + kTokensAhead * group < rows) prefetch_row(out + kTokensAhead * out_stride, group * heads.dim);
        for (int h = 0; h < group; h++) finish_row(buffers.output.data() + (r + h) * padded, buffers.softmax[r + h], heads.dim, out + h * heads.dim);
    }
}

// What a step computes for each layer: its sequences cut into tasks, once. A long chunk is cut into tiles of queries;
// a few queries are cut by keys, so that one decode keeps several threads busy.
class StepAttention {
public:
    // tables: [sequences, width]; starts: [sequences + 1]; lengths: [sequences], 0 for padding.
    StepAttention(const Heads& heads, int num_sequences, const int32_t* tables, int64_t width, const int32_t* starts, const int32_t* lengths)
        : heads_(heads), padded_(padded_dim(heads.dim)) {
        const int tokens_per_tile = std::max(1, kMaxTileRows / (heads.queries / heads.keys));
        for (int s = 0; s < num_sequences; s++) {
            const Sequence sequence{starts[s], starts[s + 1] - starts[s], lengths[s], tables + s * width};
            if (sequence.num_keys == 0 || sequence.num_tokens == 0) continue;
            if (sequence.num_tokens <= kFewTokens) {
                for (int t = 0; t < sequence.num_tokens; t++) add_query(sequence, t);
                continue;
            }
            for (int t = 0; t < sequence.num_tokens; t += tokens_per_tile)
                for (int k = 0; k < heads.keys; k++)
                    tiles_.push_back({sequence, k, t, std::min(tokens_per_tile, sequence.num_tokens - t)});
        }
        // The longest first, so that the threads end together.
        std::stable_sort(tiles_.begin(), tiles_.end(), [](const Tile& x, const Tile& y) { return x.position() > y.position(); });
    }

    // query: [tokens, query_stride], the heads of a token side by side; out: [tokens, heads * dim].
    void attend(ThreadPool& pool, const KvLayer& kv, int window, const float* query, int64_t query_stride, float* out) {
        const int64_t out_stride = (int64_t)heads_.queries * heads_.dim;
        buffers_.resize(pool.num_threads());
        split_outputs_.resize(splits_.size() * heads_.queries * padded_);
        split_softmax_.resize(splits_.size() * heads_.queries);
        const int num_tiles = (int)tiles_.size(), num_tasks = num_tiles + (int)splits_.size() * heads_.keys;
        pool.run(num_tasks, [&](int task, int thread) {
            if (task < num_tiles) {
                const Tile& tile = tiles_[task];
                attend_tile(kv, heads_, tile.sequence, window, tile.key_head, tile.first, tile.count,
                            query + tile.sequence.first_token * query_stride, query_stride,
                            out + tile.sequence.first_token * out_stride, out_stride, buffers_[thread]);
            } else {
                const int split = (task - num_tiles) / heads_.keys, key_head = (task - num_tiles) % heads_.keys;
                attend_query_split(kv, window, split, key_head, query, query_stride, buffers_[thread]);
            }
        });
        for (const Query& each : queries_)
            for (int h = 0; h < heads_.queries; h++) merge(each, h, out + each.token * out_stride + h * heads_.dim);
    }

private:
    struct Query { int64_t token; int first_split, num_splits; };
    struct Split { int64_t token; const int32_t* table; int position, first, last; };
    struct Tile {
        Sequence sequence;
        int key_head, first, count;
        int position() const { return sequence.num_keys - sequence.num_tokens + first; }
    };

    void add_query(const Sequence& sequence, int t) {
        const int keys = sequence.num_keys - sequence.num_tokens + t + 1;
        const int64_t token = sequence.first_token + t;
        queries_.push_back({token, (int)splits_.size(), (keys + kKeysPerSplit - 1) / kKeysPerSplit});
        for (int first = 0; first < keys; first += kKeysPerSplit)
            splits_.push_back({token, sequence.table, keys - 1, first, std::min(first + kKeysPerSplit, keys)});
    }
    size_t head_of_split(int split, int head) const { return (size_t)split * heads_.queries + head; }

    void attend_query_split(const KvLayer& kv, int window, int index, int key_head, const float* query, int64_t query_stride, TileBuffers& buffers) {
        const Split& split = splits_[index];
        const int group = heads_.queries / heads_.keys;
        const size_t place = head_of_split(index, key_head * group);
        buffers.reserve(group, padded_);
        load_queries(query + split.token * query_stride, query_stride, heads_, key_head, group, buffers.queries.data());
        const int first = window > 0 ? std::max(split.first, split.position - window + 1) : split.first;
        attend_split(kv, heads_, split.table, key_head, window, split.position, buffers.queries.data(), group, std::min(first, split.last), split.last,
                     buffers, split_outputs_.data() + place * padded_, split_softmax_.data() + place);
    }
    void merge(const Query& query, int head, float* out) {
        float* first = split_outputs_.data() + head_of_split(query.first_split, head) * padded_;
        Softmax& softmax = split_softmax_[head_of_split(query.first_split, head)];
        for (int s = query.first_split + 1; s < query.first_split + query.num_splits; s++)
            add_split(split_softmax_[head_of_split(s, head)], split_outputs_.data() + head_of_split(s, head) * padded_, softmax, first, padded_);
        finish_row(first, softmax, heads_.dim, out);
    }

    const Heads heads_;
    const int padded_;
    std::vector<Tile> tiles_;
    std::vector<Query> queries_;
    std::vector<Split> splits_;
    std::vector<TileBuffers> buffers_;
    std::vector<float> split_outputs_;
    std::vector<Softmax> split_softmax_;
};

}  // namespace quire
