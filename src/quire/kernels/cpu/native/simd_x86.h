// Vectors of output rows on x86: 16 with AVX-512, 8 with AVX2. With VNNI a dot product is one instruction.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace quire {

static inline int32_t four_bytes(const int8_t* p) {
    int32_t word;
    std::memcpy(&word, p, 4);
    return word;
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

struct Simd {
    static constexpr int kLanes = 16;
    static constexpr int kMaxTokens = 8;
    static constexpr int kMaxPlainTokens = 8;
#if defined(__AVX512VNNI__)
    static constexpr bool kUnsignedCodes = true;
#else
    static constexpr bool kUnsignedCodes = false;
#endif
    using Int = __m512i;
    using Float = __m512;
    using Bytes = __m512i;
    struct Half { const int8_t* p; };

    static inline Int set_int(int32_t x) { return _mm512_set1_epi32(x); }
    static inline Float set(float x) { return _mm512_set1_ps(x); }
    static inline Float zero() { return _mm512_setzero_ps(); }
    static inline Half load_half(const int8_t* p) { return {p}; }
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
    static inline Bytes flip_sign(Bytes x) { return _mm512_xor_si512(x, _mm512_set1_epi8((char)0x80)); }
    static inline Bytes look_up(const int8_t* table, Bytes x) {
        const __m512i t = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
        return _mm512_shuffle_epi8(t, x);
    }
    template <int quad>
    static inline Int dot(Int total, Bytes codes, Half x) {
        const __m512i values = _mm512_set1_epi32(four_bytes(x.p + 4 * quad));
#if defined(__AVX512VNNI__)
        return _mm512_dpbusd_epi32(total, codes, values);
#else
        // Signed codes: |code| times the activation with the code's sign, so that pairs never saturate.
        const __mmask64 negative = _mm512_movepi8_mask(codes);
        const __m512i signed_values = _mm512_mask_sub_epi8(values, negative, _mm512_setzero_si512(), values);
        const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(codes), signed_values);
        return _mm512_add_epi32(total, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#endif
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
    static inline Float round(Float x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT); }
    static inline Float absolute(Float x) { return _mm512_abs_ps(x); }
    static inline Int round_to_int(Float x) { return _mm512_cvtps_epi32(x); }
    static inline void store_bytes(int8_t* p, Int x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(x)); }
    static inline Float power_of_two(Int exponent) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(exponent, _mm512_set1_epi32(127)), 23));
    }
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
    static inline Float load_bfloat16(const uint16_t* p) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
    }
};

#else

struct Simd {
    static constexpr int kLanes = 8;
    static constexpr int kMaxTokens = 4;
    static constexpr int kMaxPlainTokens = 4;
#if defined(__AVXVNNI__)
    static constexpr bool kUnsignedCodes = true;
#else
    static constexpr bool kUnsignedCodes = false;
#endif
    using Int = __m256i;
    using Float = __m256;
    using Bytes = __m256i;
    struct Half { const int8_t* p; };

    static inline Int set_int(int32_t x) { return _mm256_set1_epi32(x); }
    static inline Float set(float x) { return _mm256_set1_ps(x); }
    static inline Float zero() { return _mm256_setzero_ps(); }
    static inline Half load_half(const int8_t* p) { return {p}; }
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
    static inline Bytes flip_sign(Bytes x) { return _mm256_xor_si256(x, _mm256_set1_epi8((char)0x80)); }
    static inline Bytes look_up(const int8_t* table, Bytes x) {
        const __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
        return _mm256_shuffle_epi8(t, x);
    }
    template <int quad>
    static inline Int dot(Int total, Bytes codes, Half x) {
        const __m256i values = _mm256_set1_epi32(four_bytes(x.p + 4 * quad));
#if defined(__AVXVNNI__)
        return _mm256_dpbusd_avx_epi32(total, codes, values);
#else
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(values, codes));
        return _mm256_add_epi32(total, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
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
    static inline Float round(Float x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static inline Float absolute(Float x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
    static inline Int round_to_int(Float x) { return _mm256_cvtps_epi32(x); }
    static inline void store_bytes(int8_t* p, Int x) {
        const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
        _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
    }
    static inline Float power_of_two(Int exponent) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23));
    }
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
    static inline Float load_bfloat16(const uint16_t* p) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
    }
};

#endif

}  // namespace quire
