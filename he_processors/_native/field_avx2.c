/* AVX2: four products at a time, in halves of 31 bits, whose products are summed as low and high words. */
#include "field.h"

#if VF_X86

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC target("avx2")
#endif

#include <immintrin.h>

#define LANES 4
#define HALF 31
#define MOST ((size_t)1 << 32) /* products: the words of their sums stay below 2^64 */

typedef __m256i vec;

static inline vec fold_signed(vec value, vec p)
{
    vec negative = _mm256_cmpgt_epi64(_mm256_setzero_si256(), value);
    vec high = _mm256_sub_epi64(_mm256_srli_epi64(value, VF_BITS), _mm256_and_si256(negative, _mm256_set1_epi64x(8)));
    vec sum = _mm256_add_epi64(_mm256_and_si256(value, p), high);
    vec below = _mm256_cmpgt_epi64(_mm256_setzero_si256(), sum);
    return _mm256_add_epi64(sum, _mm256_and_si256(below, p));
}

static inline vec fold(vec value, vec p)
{
    return _mm256_add_epi64(_mm256_and_si256(value, p), _mm256_srli_epi64(value, VF_BITS));
}

/* Add the low word of each product to sums[0], the high word to sums[1]. */
static inline void add_words(vec sums[2], vec product)
{
    vec low = _mm256_and_si256(product, _mm256_set1_epi64x(UINT32_MAX));
    sums[0] = _mm256_add_epi64(sums[0], low);
    sums[1] = _mm256_add_epi64(sums[1], _mm256_srli_epi64(product, 32));
}

/* The sum of four lanes times 2^shift modulo p. */
static uint64_t gather(vec lanes, unsigned shift)
{
    uint64_t sums[LANES], total = 0;
    _mm256_storeu_si256((vec *)sums, lanes);
    for (int k = 0; k < LANES; k++)
        total = vf_reduce((vf_u128)total + ((vf_u128)vf_fold(sums[k]) << shift));
    return total;
}

static uint64_t dot_part(const int64_t *values, const uint64_t *coefficients, size_t n)
{
    const vec p = _mm256_set1_epi64x(VF_P), half = _mm256_set1_epi64x((1u << HALF) - 1), zero = _mm256_setzero_si256();
    vec both_low[2] = {zero, zero}, mixed[2] = {zero, zero}, both_high[2] = {zero, zero};
    for (size_t i = 0; i < n; i += LANES) {
        vec x = fold_signed(_mm256_loadu_si256((const vec *)(values + i)), p);
        vec c = fold(_mm256_loadu_si256((const vec *)(coefficients + i)), p);
        vec x0 = _mm256_and_si256(x, half), x1 = _mm256_srli_epi64(x, HALF);
        vec c0 = _mm256_and_si256(c, half), c1 = _mm256_srli_epi64(c, HALF);
        add_words(both_low, _mm256_mul_epu32(x0, c0));
        add_words(mixed, _mm256_add_epi64(_mm256_mul_epu32(x0, c1), _mm256_mul_epu32(x1, c0)));
        add_words(both_high, _mm256_mul_epu32(x1, c1));
    }
    /* Weights of the six sums: 2^0, 2^32, 2^31, 2^63 = 2^2, 2^62 = 2^1, 2^94 = 2^33. */
    vf_u128 total = gather(both_low[0], 0);
    total += gather(both_low[1], 32);
    total += gather(mixed[0], HALF);
    total += gather(mixed[1], 2);
    total += gather(both_high[0], 1);
    total += gather(both_high[1], 33);
    return vf_reduce(total);
}

static uint64_t dot(const int64_t *values, const uint64_t *coefficients, size_t n)
{
    uint64_t total = 0;
    size_t whole = n - n % LANES;
    for (size_t i = 0; i < whole; i += MOST)
        total = vf_reduce((vf_u128)total + dot_part(values + i, coefficients + i, whole - i > MOST ? MOST : whole - i));
    return vf_reduce((vf_u128)total + vf_portable.dot(values + whole, coefficients + whole, n - whole));
}

const struct vf_kernel vf_avx2 = {"avx2", dot};

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
