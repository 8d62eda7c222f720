// How packed weights lie in memory. Sixteen output rows form a panel; a block holds 32 inputs of a panel.
//
// In a block the codes of 4 inputs ("a quad") of all 16 rows are 64 bytes: row by row, 4 inputs each. A format with
// less than 8 bits has the low nibbles of quads c and c + 4 in the same bytes, then planes with the higher bits.
#pragma once
#include "simd.h"

namespace quire {

constexpr int kPanelRows = 16;
constexpr int kGroup = 32;  // inputs with one scale for activations
constexpr int kQuadBytes = 4 * kPanelRows;
constexpr int kNibbleBytes = 4 * kQuadBytes;
constexpr int kScaleBytes = 2 * kPanelRows;
constexpr int kVectorsPerPanel = kPanelRows / Simd::kLanes;

// The values of IQ4_NL's sixteen codes (ggml's format).
alignas(16) static const int8_t kNonLinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// weight = scale * (code - kOffset) + minimum. kScales: 2 where each half of the group has its own scale. kSigned: whether codes are
// -128 to 127; others are 0 to kHighest.
// codes<quad>: of kLanes rows, from byte `at` of the quad on.
template <int quad>
static inline Simd::Bytes nibbles_of(const uint8_t* nibbles, int at) {
    const Simd::Bytes both = Simd::load_bytes(nibbles + quad % 4 * kQuadBytes + at);
    if constexpr (quad < 4) return Simd::low_nibbles(both);
    else return Simd::high_nibbles(both);
}

template <int offset, bool minimum>
struct FourBits {
    static constexpr int kOffset = offset, kScales = 1;
    static constexpr bool kMinimum = minimum, kSigned = false;
    static constexpr int kHighest = 15;
    static constexpr int kCodes = kScaleBytes * (minimum ? 2 : 1);
    static constexpr int kBytes = kCodes + kNibbleBytes;
    template <int quad>
    static inline Simd::Bytes codes(const uint8_t* block, int at) { return nibbles_of<quad>(block + kCodes, at); }
};

struct FourBitHalves {  // each half of a group has its own scale
    static constexpr int kOffset = 8, kScales = 2;
    static constexpr bool kMinimum = false, kSigned = false;
    static constexpr int kHighest = 15;
    static constexpr int kCodes = 2 * kScaleBytes;
    static constexpr int kBytes = kCodes + kNibbleBytes;
    template <int quad>
    static inline Simd::Bytes codes(const uint8_t* block, int at) { return nibbles_of<quad>(block + kCodes, at); }
};

struct NonLinearFourBits {
    static constexpr int kOffset = 0, kScales = 1;
    static constexpr bool kMinimum = false, kSigned = true;
    static constexpr int kHighest = 127;
    static constexpr int kBytes = kScaleBytes + kNibbleBytes;
    template <int quad>
    static inline Simd::Bytes codes(const uint8_t* block, int at) { return Simd::look_up(kNonLinear, nibbles_of<quad>(block + kScaleBytes, at)); }
};

template <int offset, bool minimum>
struct FiveBits {  // one plane: bit q of a byte is the highest bit of quad q
    static constexpr int kOffset = offset, kScales = 1;
    static constexpr bool kMinimum = minimum, kSigned = false;
    static constexpr int kHighest = 31;
    static constexpr int kCodes = kScaleBytes * (minimum ? 2 : 1);
    static constexpr int kBytes = kCodes + kNibbleBytes + kQuadBytes;
    template <int quad>
    static inline Simd::Bytes codes(const uint8_t* block, int at) {
        const Simd::Bytes plane = Simd::load_bytes(block + kCodes + kNibbleBytes + at);
        return Simd::either(nibbles_of<quad>(block + kCodes, at), Simd::bits<quad, 4>(plane, 1));
    }
};

struct SixBits {  // two planes, for the quads of each half: bits 2 * (q % 4) and the next are the highest of quad q
    static constexpr int kOffset = 32, kScales = 2;
    static constexpr bool kMinimum = false, kSigned = false;
    static constexpr int kHighest = 63;
    static constexpr int kCodes = 2 * kScaleBytes;
    static constexpr int kBytes = kCodes + kNibbleBytes + 2 * kQuadBytes;
    template <int quad>
    static inline Simd::Bytes codes(const uint8_t* block, int at) {
        const Simd::Bytes plane = Simd::load_bytes(block + kCodes + kNibbleBytes + quad / 4 * kQuadBytes + at);
        return Simd::either(nibbles_of<quad>(block + kCodes, at), Simd::bits<2 * (quad % 4), 4>(plane, 3));
    }
};

struct EightBits {
    static constexpr int kOffset = 0, kScales = 1;
    static constexpr bool kMinimum = false, kSigned = true;
    static constexpr int kHighest = 127;
    static constexpr int kBytes = kScaleBytes + 2 * kNibbleBytes;
    template <int quad>
    static inline Simd::Bytes codes(const uint8_t* block, int at) { return Simd::load_bytes(block + kScaleBytes + quad * kQuadBytes + at); }
};

// Numbers that the Python side knows (`PackedFormat`).
enum Format : int32_t {
    kFloat32, kFloat16, kBfloat16, kInt8, kInt4, kInt4Minimum, kInt4NonLinear, kInt5, kInt5Minimum, kInt6, kInt4Halves,
};

}  // namespace quire
