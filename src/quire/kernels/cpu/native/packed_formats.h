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

// The values of IQ4_NL's sixteen codes (ggml's format).
alignas(16) static const int8_t kNonLinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// weight = scale * (code - kOffset) + minimum. kScales: 2 where each half of the group has its own scale.
// codes<chunk>: those of quads `chunk` and `chunk + 4`, for kLanes rows from the given byte of each quad on.
struct CodePair { Simd::Bytes low, high; };

template <int offset, bool minimum>
struct FourBits {
    static constexpr int kOffset = offset, kScales = 1;
    static constexpr bool kMinimum = minimum;
    static constexpr int kCodes = kScaleBytes * (minimum ? 2 : 1);
    static constexpr int kBytes = kCodes + kNibbleBytes;
    template <int chunk>
    static inline CodePair codes(const uint8_t* block, int at) {
        const Simd::Bytes both = Simd::load_bytes(block + kCodes + chunk * kQuadBytes + at);
        return {Simd::low_nibbles(both), Simd::high_nibbles(both)};
    }
};

struct NonLinearFourBits {
    static constexpr int kOffset = Simd::kUnsignedCodes ? 128 : 0, kScales = 1;
    static constexpr bool kMinimum = false;
    static constexpr int kBytes = kScaleBytes + kNibbleBytes;
    template <int chunk>
    static inline CodePair codes(const uint8_t* block, int at) {
        const Simd::Bytes both = Simd::load_bytes(block + kScaleBytes + chunk * kQuadBytes + at);
        const Simd::Bytes low = Simd::look_up(kNonLinear, Simd::low_nibbles(both));
        const Simd::Bytes high = Simd::look_up(kNonLinear, Simd::high_nibbles(both));
        return Simd::kUnsignedCodes ? CodePair{Simd::flip_sign(low), Simd::flip_sign(high)} : CodePair{low, high};
    }
};

template <int offset, bool minimum>
struct FiveBits {  // one plane: bit q of a byte is the highest bit of quad q
    static constexpr int kOffset = offset, kScales = 1;
    static constexpr bool kMinimum = minimum;
    static constexpr int kCodes = kScaleBytes * (minimum ? 2 : 1);
    static constexpr int kBytes = kCodes + kNibbleBytes + kQuadBytes;
    template <int chunk>
    static inline CodePair codes(const uint8_t* block, int at) {
        const Simd::Bytes both = Simd::load_bytes(block + kCodes + chunk * kQuadBytes + at);
        const Simd::Bytes plane = Simd::load_bytes(block + kCodes + kNibbleBytes + at);
        return {Simd::either(Simd::low_nibbles(both), Simd::bits<chunk, 4>(plane, 1)),
                Simd::either(Simd::high_nibbles(both), Simd::bits<chunk + 4, 4>(plane, 1))};
    }
};

struct SixBits {  // two planes, for the quads of each half: bits 2 * (q % 4) and the next are the highest of quad q
    static constexpr int kOffset = 32, kScales = 2;
    static constexpr bool kMinimum = false;
    static constexpr int kCodes = 2 * kScaleBytes;
    static constexpr int kBytes = kCodes + kNibbleBytes + 2 * kQuadBytes;
    template <int chunk>
    static inline CodePair codes(const uint8_t* block, int at) {
        const Simd::Bytes both = Simd::load_bytes(block + kCodes + chunk * kQuadBytes + at);
        const uint8_t* planes = block + kCodes + kNibbleBytes + at;
        return {Simd::either(Simd::low_nibbles(both), Simd::bits<2 * chunk, 4>(Simd::load_bytes(planes), 3)),
                Simd::either(Simd::high_nibbles(both), Simd::bits<2 * chunk, 4>(Simd::load_bytes(planes + kQuadBytes), 3))};
    }
};

struct EightBits {
    static constexpr int kOffset = Simd::kUnsignedCodes ? 128 : 0, kScales = 1;
    static constexpr bool kMinimum = false;
    static constexpr int kBytes = kScaleBytes + 2 * kNibbleBytes;
    template <int chunk>
    static inline CodePair codes(const uint8_t* block, int at) {
        const Simd::Bytes low = Simd::load_bytes(block + kScaleBytes + chunk * kQuadBytes + at);
        const Simd::Bytes high = Simd::load_bytes(block + kScaleBytes + (chunk + 4) * kQuadBytes + at);
        return Simd::kUnsignedCodes ? CodePair{Simd::flip_sign(low), Simd::flip_sign(high)} : CodePair{low, high};
    }
};

// Numbers that the Python side knows (`PackedFormat`).
enum Format : int32_t {
    kFloat32, kFloat16, kBfloat16, kInt8, kInt4, kInt4Minimum, kInt4NonLinear, kInt5, kInt5Minimum, kInt6,
};

}  // namespace quire
