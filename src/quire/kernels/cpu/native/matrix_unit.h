// The registers of AMX, the matrix unit of newer x86 CPUs: tiles of bfloat16 numbers, and of sums in float32.
#pragma once
#include <algorithm>

#include "simd.h"

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace quire {

constexpr int kTileTokens = 16, kTileColumns = 16, kTileDepth = 32;  // of a product of two tiles
constexpr int kTileNumbers = kTileTokens * kTileDepth;               // bfloat16 numbers of a tile: 1 KiB
constexpr int kMatrixTokens = 2 * kTileTokens;                       // whose sums are in tiles at once

#if defined(QUIRE_MATRIX_UNIT)

constexpr bool kMatrixProducts = true;

#if defined(__AMX_BF16__)
// The kernel lets a process use the tiles when it has asked for them.
static inline bool request_matrix_unit() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return granted;
}
#endif

// Tiles 0 to 3 are sums: two tiles of tokens times two of columns. 4 and 5: the left factor, 16 tokens, 32 inputs. 6 and 7: the
// right one, 16 pairs of inputs, 16 columns. All have 16 rows of 64 bytes.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

class TileScope {  // the tiles belong to this thread while it lives
public:
    TileScope() {
        const TileShapes shapes;
        _tile_loadconfig(&shapes);
    }
    ~TileScope() { _tile_release(); }
    TileScope(const TileScope&) = delete;
};

// Numbers rounded to bfloat16, in the high half of each lane.
static inline __m512i rounded(__m512 x) { return _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000)); }

// Two inputs of sixteen columns, as a row of a tile of the right factor.
static inline void store_pair(__m512 even, __m512 odd, uint16_t* out) {
    const __m512i high = _mm512_and_si512(rounded(odd), _mm512_set1_epi32((int)0xFFFF0000u));
    _mm512_store_si512(out, _mm512_or_si512(_mm512_srli_epi32(rounded(even), 16), high));
}

// Adds the products of `count` groups to the sums of kTiles tiles of tokens. weights: [count, kVectors] tiles; x: [count] tiles of
// activations, those of the next tokens `strip` numbers behind; totals: [16 * kTiles, stride], of which
// 16 * kVectors columns are written. first: whether they begin with zeros.
template <int kVectors, int kTiles>
static inline void tile_products(const uint16_t* weights, const uint16_t* x, int64_t strip, int count, bool first, float* totals, int64_t stride) {
    const int64_t bytes = stride * (int64_t)sizeof(float);
    float* next = totals + kTileTokens * stride;
    if (first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, totals, bytes);
        if constexpr (kVectors == 2) _tile_loadd(1, totals + kTileColumns, bytes);
        if constexpr (kTiles == 2) _tile_loadd(2, next, bytes);
        if constexpr (kTiles == 2 && kVectors == 2) _tile_loadd(3, next + kTileColumns, bytes);
    }
    for (int g = 0; g < count; g++, weights += kVectors * kTileNumbers, x += kTileNumbers) {
        _tile_loadd(6, weights, 64);
        _tile_loadd(4, x, 64);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (kVectors == 2) {
            _tile_loadd(7, weights + kTileNumbers, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (kTiles == 2) {
            _tile_loadd(5, x + strip, 64);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (kVectors == 2) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, totals, bytes);
    if constexpr (kVectors == 2) _tile_stored(1, totals + kTileColumns, bytes);
    if constexpr (kTiles == 2) _tile_stored(2, next, bytes);
    if constexpr (kTiles == 2 && kVectors == 2) _tile_stored(3, next + kTileColumns, bytes);
}

// The left factor of up to sixteen tokens: [width / 32, 16, 32]. x: [tokens, stride], of which `width` numbers are taken; tokens that are not there are zeros.
static inline void tile_tokens(const float* x, int tokens, int width, int64_t stride, uint16_t* out) {
    for (int g = 0; g < width / kTileDepth; g++, x += kTileDepth, out += kTileNumbers) {
        for (int t = 0; t < tokens; t++)
            for (int i = 0; i < kTileDepth; i += Simd::kLanes) {
                const __m512i numbers = _mm512_srli_epi32(rounded(_mm512_loadu_ps(x + t * stride + i)), 16);
                _mm256_store_si256((__m256i*)(out + t * kTileDepth + i), _mm512_cvtepi32_epi16(numbers));
            }
        std::fill(out + tokens * kTileDepth, out + kTileNumbers, 0);
    }
}

#else

constexpr bool kMatrixProducts = false;  // of the above, nothing is used
static inline bool request_matrix_unit() { return false; }
static inline void tile_tokens(const float*, int, int, int64_t, uint16_t*) {}

#endif

}  // namespace quire
