// Products of many tokens with a panel of quantized weights on AMX, the matrix unit of newer x86 CPUs.
//
// The integers are those of the vector kernels, and so are the operations on floats: results are the same to the bit.
#pragma once
#include <vector>

#include "gemm_tiles.h"

#if defined(__AMX_INT8__)
#include <sys/syscall.h>
#include <unistd.h>

namespace quire {

constexpr int kAmxTokens = 16;

// The kernel lets a process use the tiles when it has asked for them.
static inline bool request_amx() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return granted;
}

// Tiles 0 to 3: sums, 16 x 16 int32; 4 and 5: high and low bytes of activations, 16 tokens x 32 bytes; 6: weights, 8 quads x
// 16 rows x 4 bytes.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 32, 32, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 8};
};

class AmxTiles {  // the tiles belong to this thread while it lives
public:
    AmxTiles() {
        const TileShapes shapes;
        _tile_loadconfig(&shapes);
    }
    ~AmxTiles() { _tile_release(); }
    AmxTiles(const AmxTiles&) = delete;
};

// A panel's codes as signed bytes, [groups, 8 quads, 16 rows, 4].
template <class F>
static inline void unpack_panel(const uint8_t* panel, int groups, int8_t* out) {
    const __m512i offset = _mm512_set1_epi8((char)F::kOffset);
    for (int g = 0; g < groups; g++, panel += F::kBytes, out += 8 * kQuadBytes) {
        const __m512i codes[8] = {F::template codes<0>(panel, 0), F::template codes<1>(panel, 0), F::template codes<2>(panel, 0),
                                  F::template codes<3>(panel, 0), F::template codes<4>(panel, 0), F::template codes<5>(panel, 0),
                                  F::template codes<6>(panel, 0), F::template codes<7>(panel, 0)};
        for (int q = 0; q < 8; q++) _mm512_storeu_si512(out + q * kQuadBytes, _mm512_sub_epi8(codes[q], offset));
    }
}

// Groups whose sums are in memory before the vector units add the first: what a tile stored cannot be loaded at once.
constexpr int kAmxAhead = 3;

// Sixteen tokens with a panel. codes: as unpacked; out: [tokens, stride].
template <class F>
static inline void amx_tile(const uint8_t* panel, const int8_t* codes, const Quantized& x, int width, float* out, int64_t stride) {
    const int groups = width / kGroup;
    alignas(64) int32_t sums[kAmxAhead + 1][2][kAmxTokens][16];  // of high and of low bytes
    Simd::Float total[kAmxTokens];
#pragma GCC unroll 16
    for (int t = 0; t < kAmxTokens; t++) total[t] = Simd::zero();
    auto multiply = [&](int g) __attribute__((always_inline)) {
        const int8_t* planes = x.codes + g * kGroupBytes + kGroupBytes / 2;  // behind the words
        auto& target = sums[g % (kAmxAhead + 1)];
        _tile_loadd(4, planes, groups * kGroupBytes);
        _tile_loadd(5, planes + kGroup, groups * kGroupBytes);
        _tile_loadd(6, codes + g * 8 * kQuadBytes, kQuadBytes);
        if (g % 2) {
            _tile_zero(2);
            _tile_zero(3);
            _tile_dpbssd(2, 4, 6);
            _tile_dpbssd(3, 5, 6);
            _tile_stored(2, target[0], 64);
            _tile_stored(3, target[1], 64);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 5, 6);
            _tile_stored(0, target[0], 64);
            _tile_stored(1, target[1], 64);
        }
    };
    for (int g = 0; g < std::min(kAmxAhead, groups); g++) multiply(g);
    for (int g = 0; g < groups; g++, panel += F::kBytes) {
        if (g + kAmxAhead < groups) multiply(g + kAmxAhead);
        const auto* scales = reinterpret_cast<const uint16_t*>(panel);
        const auto& dots = sums[g % (kAmxAhead + 1)];
        const Simd::Float scale = Simd::load_float16(scales);
        Simd::Float minimum;
        if constexpr (F::kMinimum) minimum = Simd::load_float16(scales + kPanelRows);
#pragma GCC unroll 16
        for (int t = 0; t < kAmxTokens; t++) {
            const __m512i high = _mm512_slli_epi32(_mm512_load_si512(dots[0][t]), 8);
            const Simd::Float product = Simd::multiply(Simd::to_float(_mm512_add_epi32(high, _mm512_load_si512(dots[1][t]))), scale);
            total[t] = Simd::multiply_add(product, x.scales[t * groups + g], total[t]);
            if constexpr (F::kMinimum) total[t] = Simd::multiply_add(minimum, x.sums[t * groups + g], total[t]);
        }
    }
#pragma GCC unroll 16
    for (int t = 0; t < kAmxTokens; t++) Simd::store(out + t * stride, total[t]);
}

// As many tokens as fill whole tiles; returns the first that is left.
template <class F>
static inline int64_t amx_panel(const uint8_t* panel, const Rows& x, int64_t token, int64_t end, float* out, int64_t stride) {
    if constexpr (F::kScales == 1) {
        if (end - token < kAmxTokens || !request_amx()) return token;
        thread_local std::vector<int8_t> codes;
        codes.resize((size_t)x.width * kPanelRows);
        unpack_panel<F>(panel, x.width / kGroup, codes.data());
        const AmxTiles tiles;
        for (; token + kAmxTokens <= end; token += kAmxTokens, out += kAmxTokens * stride)
            amx_tile<F>(panel, codes.data(), x.quantized.from(token, x.width), x.width, out, stride);
    }
    return token;
}

}  // namespace quire

#endif
