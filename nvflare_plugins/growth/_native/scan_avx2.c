/* The scan with the vectors of AVX2. */
#include "growth.h"

#if VG_X86

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC target("avx2")
#endif

#define SCAN vg_scan_avx2
#define INSTRUCTIONS "avx2"
#include "scan.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
