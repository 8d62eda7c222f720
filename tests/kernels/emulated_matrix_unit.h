// The tiles of AMX in plain C++, for CPUs without them.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define QUIRE_MATRIX_UNIT

namespace quire {
static inline bool request_matrix_unit() { return true; }
}

struct EmulatedTile {
    uint8_t rows[16][64];
};
static thread_local EmulatedTile emulated_tiles[8];
static thread_local bool emulated_tiles_configured = false;

static inline float emulated_bfloat(const uint8_t* p) {
    uint32_t bits = (uint32_t)p[0] << 16 | (uint32_t)p[1] << 24;
    if ((bits & 0x7F800000u) == 0) bits &= 0x80000000u;  // the unit takes denormal numbers as zeros
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
static inline void emulated_loadconfig(const void*) { emulated_tiles_configured = true; }
static inline void emulated_release() { emulated_tiles_configured = false; }
static inline void emulated_zero(int tile) { std::memset(&emulated_tiles[tile], 0, sizeof(EmulatedTile)); }
static inline void emulated_loadd(int tile, const void* from, int64_t stride) {
    if (!emulated_tiles_configured) __builtin_trap();
    for (int row = 0; row < 16; row++) std::memcpy(emulated_tiles[tile].rows[row], (const uint8_t*)from + row * stride, 64);
}
static inline void emulated_stored(int tile, void* to, int64_t stride) {
    for (int row = 0; row < 16; row++) std::memcpy((uint8_t*)to + row * stride, emulated_tiles[tile].rows[row], 64);
}
static inline void emulated_dpbf16ps(int sums, int left, int right) {
    for (int m = 0; m < 16; m++) {
        float total[16];
        std::memcpy(total, emulated_tiles[sums].rows[m], 64);
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < 16; n++) {
                const uint8_t *a = emulated_tiles[left].rows[m] + 4 * k, *b = emulated_tiles[right].rows[k] + 4 * n;
                total[n] += emulated_bfloat(a) * emulated_bfloat(b);
                total[n] += emulated_bfloat(a + 2) * emulated_bfloat(b + 2);
            }
        std::memcpy(emulated_tiles[sums].rows[m], total, 64);
    }
}

#undef _tile_loadconfig
#define _tile_loadconfig emulated_loadconfig
#undef _tile_release
#define _tile_release emulated_release
#undef _tile_zero
#define _tile_zero emulated_zero
#undef _tile_loadd
#define _tile_loadd emulated_loadd
#undef _tile_stored
#define _tile_stored emulated_stored
#undef _tile_dpbf16ps
#define _tile_dpbf16ps emulated_dpbf16ps
