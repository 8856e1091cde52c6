/* The scan with the vectors of AVX512. */
#include "growth.h"

#if VG_X86

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512vl,avx512bw"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512dq,avx512vl,avx512bw")
#endif

#define SCAN vg_scan_avx512
#define INSTRUCTIONS "avx512"
#include "scan.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
