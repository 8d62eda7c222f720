// Vectors of output rows on x86: 16 with AVX-512, 8 with AVX2.
//
// Codes of weights and of activations are multiplied as 16-bit words, two at a time: with VNNI in one instruction. In
// each quad of activations the even ones lie before the odd ones, as the codes of weights do once they are words. For one
// token or two, whose products do not pay for such words, an activation's code is also two bytes, 256 * high + low.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#if defined(__AMX_BF16__)
#define QUIRE_MATRIX_UNIT
#endif

namespace quire {

static inline int32_t four_bytes(const int8_t* p) {
    int32_t bytes;
    std::memcpy(&bytes, p, 4);
    return bytes;
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

struct Simd {
    static constexpr int kLanes = 16;
    static constexpr int kMaxTokens = 4;  // more are strips
    static constexpr int kMaxPlainTokens = 8;
    static constexpr int kProductRows = 6, kProductColumns = 4;  // sums of a float32 product, in registers
    static constexpr int kCodeBytes = 4;       // of an activation: words of a group, then bytes
    static constexpr int kWordBytes = 2 * 32;  // of a group
    using Int = __m512i;
    using Float = __m512;
    using Bytes = __m512i;
    using Dots = __m512i;
    struct Codes { __m512i even, odd; };
    struct Quad { __m512i high, low; };      // bytes of four activations, for all rows
    struct ByteDots { __m512i high, low; };  // sums of products with each
    struct Half { const int8_t* p; };

    static inline Dots set_dots(int32_t x) { return _mm512_set1_epi32(x); }
    static inline Float set(float x) { return _mm512_set1_ps(x); }
    static inline Float zero() { return _mm512_setzero_ps(); }
    template <int half>
    static inline Half load_half(const int8_t* group) { return {group + 32 * half}; }
    static inline Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
    static inline Bytes low_nibbles(Bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
    static inline Bytes high_nibbles(Bytes x) {
        return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15));
    }
    template <int shift, int left>
    static inline Bytes bits(Bytes x, int mask) {
        return _mm512_slli_epi16(_mm512_and_si512(_mm512_srli_epi16(x, shift), _mm512_set1_epi8((char)mask)), left);
    }
    static inline Bytes either(Bytes x, Bytes y) { return _mm512_or_si512(x, y); }
    static inline Bytes look_up(const int8_t* table, Bytes x) {
        const __m512i t = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
        return _mm512_shuffle_epi8(t, x);
    }
    template <bool kSigned>
    static inline Codes widen(Bytes x) {
        if constexpr (kSigned) return {_mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8), _mm512_srai_epi16(x, 8)};
        else return {_mm512_and_si512(x, _mm512_set1_epi16(255)), _mm512_srli_epi16(x, 8)};
    }
    static inline Bytes subtract_words(Bytes x, int y) { return _mm512_sub_epi16(x, _mm512_set1_epi16((short)y)); }
    static inline Bytes add_128(Bytes x) { return _mm512_xor_si512(x, _mm512_set1_epi8((char)128)); }
#if defined(__AVX512VNNI__)
    static constexpr bool kAnyByteProducts = true;
    template <int kHighest>
    static constexpr int kQuadsAtOnce = 8;
    template <bool kFirst>
    static inline ByteDots dot_bytes(ByteDots total, Bytes codes, Quad x) {
        if constexpr (kFirst) total = {set_dots(0), set_dots(0)};
        return {_mm512_dpbusd_epi32(total.high, codes, x.high), _mm512_dpbusd_epi32(total.low, codes, x.low)};
    }
    static inline Dots add_dots(Dots total, ByteDots x) {
        return _mm512_add_epi32(_mm512_add_epi32(total, x.low), _mm512_slli_epi32(x.high, 8));
    }
#else
    static constexpr bool kAnyByteProducts = false;  // only of codes without a sign
    template <int kHighest>
    static constexpr int kQuadsAtOnce = 32767 / (2 * 128 * kHighest);  // whose sums fit 16 bits
    template <bool kFirst>
    static inline ByteDots dot_bytes(ByteDots total, Bytes codes, Quad x) {
        const __m512i high = _mm512_maddubs_epi16(codes, x.high), low = _mm512_maddubs_epi16(codes, x.low);
        if constexpr (kFirst) total = {high, low};
        else total = {_mm512_add_epi16(total.high, high), _mm512_add_epi16(total.low, low)};
        asm volatile("" : "+v"(total.high), "+v"(total.low));  // in this order: a compiler's own needs more registers
        return total;
    }
    static inline Dots add_dots(Dots total, ByteDots x) {
        const __m512i high = _mm512_madd_epi16(x.high, _mm512_set1_epi16(256)), low = _mm512_madd_epi16(x.low, _mm512_set1_epi16(1));
        return _mm512_add_epi32(total, _mm512_add_epi32(high, low));
    }
#endif
    static inline Quad load_quad(const int8_t* group, int quad) {
        const int8_t* p = group + kWordBytes + 8 * quad;
        return {_mm512_set1_epi32(four_bytes(p)), _mm512_set1_epi32(four_bytes(p + 4))};
    }
    template <int quad>
    static inline Dots dot(Dots total, Codes codes, Codes next, Half x) {
        total = dot_pairs(total, codes.even, _mm512_set1_epi32(four_bytes(x.p + 8 * quad)));
        total = dot_pairs(total, codes.odd, _mm512_set1_epi32(four_bytes(x.p + 8 * quad + 4)));
        total = dot_pairs(total, next.even, _mm512_set1_epi32(four_bytes(x.p + 8 * quad + 8)));
        return dot_pairs(total, next.odd, _mm512_set1_epi32(four_bytes(x.p + 8 * quad + 12)));
    }
    static inline __m512i dot_pairs(__m512i total, __m512i codes, __m512i values) {
#if defined(__AVX512VNNI__)
        return _mm512_dpwssd_epi32(total, codes, values);
#else
        return _mm512_add_epi32(total, _mm512_madd_epi16(codes, values));
#endif
    }
    static constexpr int kPairsUnrolled = 1;
    static inline void add_pairs(__m512i& total, __m512i codes, __m512i values) {
        total = dot_pairs(total, codes, values);
        asm volatile("" : "+v"(total));
    }
    static inline Float to_float(Int x) { return _mm512_cvtepi32_ps(x); }
    static inline Float multiply(Float x, Float y) { return _mm512_mul_ps(x, y); }
    static inline Float multiply_add(Float x, Float y, Float z) { return _mm512_fmadd_ps(x, y, z); }
    static inline Float multiply_add(Float x, float y, Float z) { return _mm512_fmadd_ps(x, _mm512_set1_ps(y), z); }
    static inline Float add(Float x, Float y) { return _mm512_add_ps(x, y); }
    static inline Float subtract(Float x, Float y) { return _mm512_sub_ps(x, y); }
    static inline Float maximum(Float x, Float y) { return _mm512_max_ps(x, y); }
    static inline Float minimum(Float x, Float y) { return _mm512_min_ps(x, y); }
    static inline Float divide(Float x, Float y) { return _mm512_div_ps(x, y); }
    static inline Float absolute(Float x) { return _mm512_abs_ps(x); }
    static inline Int round_to_int(Float x) { return _mm512_cvtps_epi32(x); }
    static inline Int add(Int x, Int y) { return _mm512_add_epi32(x, y); }
    static inline int32_t sum(Int x) { return _mm512_reduce_add_epi32(x); }
    static inline bool any_nan(Float x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0; }
    static inline void store_words(int8_t* group, int at, Int x) {
        const __m256i words = _mm512_cvtsepi32_epi16(x);
        _mm256_storeu_si256((__m256i*)(group + 2 * at), _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xD8), 0xD8));
    }
    static inline void store_codes(int8_t* group, int at, Int x) {
        store_words(group, at, x);
        const __m256i words = _mm512_cvtsepi32_epi16(x);
        const __m256i high = _mm256_srai_epi16(_mm256_add_epi16(words, _mm256_set1_epi16(128)), 8);
        const __m256i low = _mm256_srai_epi16(_mm256_slli_epi16(words, 8), 8);
        _mm256_storeu_si256((__m256i*)(group + kWordBytes + 2 * at), _mm256_shuffle_epi32(_mm256_packs_epi16(high, low), 0xD8));
    }
    static inline Float low_bits_as_exponent(Float x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), 23)); }
    static inline float sum(Float x) { return _mm512_reduce_add_ps(x); }
    static inline float highest(Float x) { return _mm512_reduce_max_ps(x); }

    static inline Float load(const float* p) { return _mm512_loadu_ps(p); }
    static inline void store(float* p, Float x) { _mm512_storeu_ps(p, x); }
    static inline Float load_float16(const uint16_t* p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
    }
    static inline void store_float16(uint16_t* p, Float x) {
        _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
    static inline void load_bfloat16_pair(const uint16_t* p, Float& first, Float& second) {
        const __m512i words = _mm512_loadu_si512(p);
        first = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
        second = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32((int)0xFFFF0000u)));
    }
    static inline Float load_int8(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
    static inline void store_int8(uint8_t* p, Int x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(x)); }
    static inline Float load_bfloat16(const uint16_t* p) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
    }
};

#else

struct Simd {
    static constexpr int kLanes = 8;
    static constexpr int kMaxTokens = 4;
    static constexpr int kMaxPlainTokens = 4;
    static constexpr int kProductRows = 6, kProductColumns = 2;
    static constexpr int kCodeBytes = 4;
    static constexpr int kWordBytes = 2 * 32;
    using Int = __m256i;
    using Float = __m256;
    using Bytes = __m256i;
    using Dots = __m256i;
    struct Codes { __m256i even, odd; };
    struct Quad { __m256i high, low; };      // bytes of four activations, for all rows
    struct ByteDots { __m256i high, low; };  // sums of products with each
    struct Half { const int8_t* p; };

    static inline Dots set_dots(int32_t x) { return _mm256_set1_epi32(x); }
    static inline Float set(float x) { return _mm256_set1_ps(x); }
    static inline Float zero() { return _mm256_setzero_ps(); }
    template <int half>
    static inline Half load_half(const int8_t* group) { return {group + 32 * half}; }
    static inline Bytes load_bytes(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
    static inline Bytes low_nibbles(Bytes x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
    static inline Bytes high_nibbles(Bytes x) {
        return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15));
    }
    template <int shift, int left>
    static inline Bytes bits(Bytes x, int mask) {
        return _mm256_slli_epi16(_mm256_and_si256(_mm256_srli_epi16(x, shift), _mm256_set1_epi8((char)mask)), left);
    }
    static inline Bytes either(Bytes x, Bytes y) { return _mm256_or_si256(x, y); }
    static inline Bytes look_up(const int8_t* table, Bytes x) {
        const __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
        return _mm256_shuffle_epi8(t, x);
    }
    template <bool kSigned>
    static inline Codes widen(Bytes x) {
        if constexpr (kSigned) return {_mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), _mm256_srai_epi16(x, 8)};
        else return {_mm256_and_si256(x, _mm256_set1_epi16(255)), _mm256_srli_epi16(x, 8)};
    }
    static inline Bytes subtract_words(Bytes x, int y) { return _mm256_sub_epi16(x, _mm256_set1_epi16((short)y)); }
    static inline Bytes add_128(Bytes x) { return _mm256_xor_si256(x, _mm256_set1_epi8((char)128)); }
#if defined(__AVXVNNI__)
    static constexpr bool kAnyByteProducts = true;
    template <int kHighest>
    static constexpr int kQuadsAtOnce = 8;
    template <bool kFirst>
    static inline ByteDots dot_bytes(ByteDots total, Bytes codes, Quad x) {
        if constexpr (kFirst) total = {set_dots(0), set_dots(0)};
        return {_mm256_dpbusd_avx_epi32(total.high, codes, x.high), _mm256_dpbusd_avx_epi32(total.low, codes, x.low)};
    }
    static inline Dots add_dots(Dots total, ByteDots x) {
        return _mm256_add_epi32(_mm256_add_epi32(total, x.low), _mm256_slli_epi32(x.high, 8));
    }
#else
    static constexpr bool kAnyByteProducts = false;  // only of codes without a sign
    template <int kHighest>
    static constexpr int kQuadsAtOnce = 32767 / (2 * 128 * kHighest);  // whose sums fit 16 bits
    template <bool kFirst>
    static inline ByteDots dot_bytes(ByteDots total, Bytes codes, Quad x) {
        const __m256i high = _mm256_maddubs_epi16(codes, x.high), low = _mm256_maddubs_epi16(codes, x.low);
        if constexpr (kFirst) total = {high, low};
        else total = {_mm256_add_epi16(total.high, high), _mm256_add_epi16(total.low, low)};
        asm volatile("" : "+v"(total.high), "+v"(total.low));  // in this order: a compiler's own needs more registers
        return total;
    }
    static inline Dots add_dots(Dots total, ByteDots x) {
        const __m256i high = _mm256_madd_epi16(x.high, _mm256_set1_epi16(256)), low = _mm256_madd_epi16(x.low, _mm256_set1_epi16(1));
        return _mm256_add_epi32(total, _mm256_add_epi32(high, low));
    }
#endif
    static inline Quad load_quad(const int8_t* group, int quad) {
        const int8_t* p = group + kWordBytes + 8 * quad;
        return {_mm256_set1_epi32(four_bytes(p)), _mm256_set1_epi32(four_bytes(p + 4))};
    }
    template <int quad>
    static inline Dots dot(Dots total, Codes codes, Codes next, Half x) {
        total = dot_pairs(total, codes.even, _mm256_set1_epi32(four_bytes(x.p + 8 * quad)));
        total = dot_pairs(total, codes.odd, _mm256_set1_epi32(four_bytes(x.p + 8 * quad + 4)));
        total = dot_pairs(total, next.even, _mm256_set1_epi32(four_bytes(x.p + 8 * quad + 8)));
        return dot_pairs(total, next.odd, _mm256_set1_epi32(four_bytes(x.p + 8 * quad + 12)));
    }
    static inline __m256i dot_pairs(__m256i total, __m256i codes, __m256i values) {
#if defined(__AVXVNNI__)
        return _mm256_dpwssd_avx_epi32(total, codes, values);
#else
        return _mm256_add_epi32(total, _mm256_madd_epi16(codes, values));
#endif
    }
    static constexpr int kPairsUnrolled = 4;
    static inline void add_pairs(__m256i& total, __m256i codes, __m256i values) {
#if defined(__AVXVNNI__)
        total = dot_pairs(total, codes, values);
        asm volatile("" : "+v"(total));
#else  // written out: a compiler copies most of the totals
        __m256i product;
        asm volatile("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(total), "=&x"(product) : "x"(values), "x"(codes));
#endif
    }
    static inline Float to_float(Int x) { return _mm256_cvtepi32_ps(x); }
    static inline Float multiply(Float x, Float y) { return _mm256_mul_ps(x, y); }
    static inline Float multiply_add(Float x, Float y, Float z) { return _mm256_fmadd_ps(x, y, z); }
    static inline Float multiply_add(Float x, float y, Float z) { return _mm256_fmadd_ps(x, _mm256_set1_ps(y), z); }
    static inline Float add(Float x, Float y) { return _mm256_add_ps(x, y); }
    static inline Float subtract(Float x, Float y) { return _mm256_sub_ps(x, y); }
    static inline Float maximum(Float x, Float y) { return _mm256_max_ps(x, y); }
    static inline Float minimum(Float x, Float y) { return _mm256_min_ps(x, y); }
    static inline Float divide(Float x, Float y) { return _mm256_div_ps(x, y); }
    static inline Float absolute(Float x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
    static inline Int round_to_int(Float x) { return _mm256_cvtps_epi32(x); }
    static inline bool any_nan(Float x) { return _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)) != 0; }
    static inline Int add(Int x, Int y) { return _mm256_add_epi32(x, y); }
    static inline int32_t sum(Int x) {
        __m128i v = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
        v = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0x4E));
        return _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32(v, 0xB1)));
    }
    static inline __m128i to_words(Int x) { return _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)); }
    static inline void store_words(int8_t* group, int at, Int x) {
        _mm_storeu_si128((__m128i*)(group + 2 * at), _mm_shufflehi_epi16(_mm_shufflelo_epi16(to_words(x), 0xD8), 0xD8));
    }
    static inline void store_codes(int8_t* group, int at, Int x) {
        store_words(group, at, x);
        const __m128i words = to_words(x);
        const __m128i high = _mm_srai_epi16(_mm_add_epi16(words, _mm_set1_epi16(128)), 8), low = _mm_srai_epi16(_mm_slli_epi16(words, 8), 8);
        _mm_storeu_si128((__m128i*)(group + kWordBytes + 2 * at), _mm_shuffle_epi32(_mm_packs_epi16(high, low), 0xD8));
    }
    static inline Float low_bits_as_exponent(Float x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x), 23)); }
    static inline __m128 halves(Float x) { return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)); }
    static inline float sum(Float x) {
        __m128 v = halves(x);
        v = _mm_add_ps(v, _mm_movehl_ps(v, v));
        return _mm_cvtss_f32(_mm_add_ss(v, _mm_shuffle_ps(v, v, 1)));
    }
    static inline float highest(Float x) {
        __m128 v = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        v = _mm_max_ps(v, _mm_movehl_ps(v, v));
        return _mm_cvtss_f32(_mm_max_ss(v, _mm_shuffle_ps(v, v, 1)));
    }

    static inline Float load(const float* p) { return _mm256_loadu_ps(p); }
    static inline void store(float* p, Float x) { _mm256_storeu_ps(p, x); }
    static inline Float load_float16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
    static inline void store_float16(uint16_t* p, Float x) {
        _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
    static inline void load_bfloat16_pair(const uint16_t* p, Float& first, Float& second) {
        const __m256i words = _mm256_loadu_si256((const __m256i*)p);
        first = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
        second = _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32((int)0xFFFF0000u)));
    }
    static inline Float load_int8(const uint8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
    static inline void store_int8(uint8_t* p, Int x) {
        const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
        _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
    }
    static inline Float load_bfloat16(const uint16_t* p) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
    }
};

#endif

}  // namespace quire
