/* AVX512-IFMA: eight products at a time, in limbs of 52 and 10 bits, whose halves are summed without carrying. */
#include "field.h"

#if VF_X86

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512vl,avx512ifma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512dq,avx512vl,avx512ifma")
#endif

#include <immintrin.h>

#define LANES 8
#define LIMB 52
#define MOST (1024 * LANES) /* products: a lane of the middle sum takes three halves below 2^52 from each */

typedef __m512i vec;

static inline vec low(vec sum, vec a, vec b)
{
    return _mm512_madd52lo_epu64(sum, a, b);
}

static inline vec high(vec sum, vec a, vec b)
{
    return _mm512_madd52hi_epu64(sum, a, b);
}

static uint64_t dot_part(const int64_t *values, const uint64_t *coefficients, size_t n)
{
    const vec p = _mm512_set1_epi64(VF_P), zero = _mm512_setzero_si512();
    vec sum0 = zero, sum1[3] = {zero, zero, zero}, sum2[3] = {zero, zero, zero}; /* no product waits for another */
    for (size_t i = 0; i < n; i += LANES) {
        vec x = _mm512_loadu_si512(values + i), c = _mm512_loadu_si512(coefficients + i);
        x = _mm512_add_epi64(_mm512_and_si512(x, p), _mm512_srai_epi64(x, VF_BITS));
        x = _mm512_add_epi64(x, _mm512_and_si512(p, _mm512_srai_epi64(x, 63)));
        c = _mm512_add_epi64(_mm512_and_si512(c, p), _mm512_srli_epi64(c, VF_BITS));
        vec x1 = _mm512_srli_epi64(x, LIMB), c1 = _mm512_srli_epi64(c, LIMB); /* the instruction takes 52 bits itself */
        sum0 = low(sum0, x, c);
        sum1[0] = high(sum1[0], x, c);
        sum1[1] = low(sum1[1], x, c1);
        sum1[2] = low(sum1[2], x1, c);
        sum2[0] = high(sum2[0], x, c1);
        sum2[1] = high(sum2[1], x1, c);
        sum2[2] = low(sum2[2], x1, c1);
    }
    uint64_t sums[3][LANES], total = 0;
    _mm512_storeu_si512(sums[0], sum0);
    _mm512_storeu_si512(sums[1], _mm512_add_epi64(_mm512_add_epi64(sum1[0], sum1[1]), sum1[2]));
    _mm512_storeu_si512(sums[2], _mm512_add_epi64(_mm512_add_epi64(sum2[0], sum2[1]), sum2[2]));
    for (int k = 0; k < LANES; k++) /* 2^104 = 2^43 */
        total = vf_reduce((vf_u128)total + sums[0][k] + ((vf_u128)sums[1][k] << LIMB) + ((vf_u128)sums[2][k] << 43));
    return total;
}

static uint64_t dot(const int64_t *values, const uint64_t *coefficients, size_t n)
{
    uint64_t total = 0;
    size_t whole = n - n % LANES;
    for (size_t i = 0; i < whole; i += MOST)
        total = vf_reduce((vf_u128)total + dot_part(values + i, coefficients + i, whole - i > MOST ? MOST : whole - i));
    return vf_reduce((vf_u128)total + vf_portable.dot(values + whole, coefficients + whole, n - whole));
}

const struct vf_kernel vf_ifma = {"ifma", dot};

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
