// The vector instructions that this file is compiled for.
#pragma once
#if defined(__aarch64__)
#include "simd_neon.h"
#else
#include "simd_x86.h"
#endif
