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

/* Sums of one inner product: low and high words of products of two low halves, of mixed ones, of two high halves. */
struct sums {
    vec both_low[2], mixed[2], both_high[2];
};

static inline void add_products(struct sums *sums, vec x0, vec x1, vec c)
{
    vec c0 = _mm256_and_si256(c, _mm256_set1_epi64x((1u << HALF) - 1)), c1 = _mm256_srli_epi64(c, HALF);
    add_words(sums->both_low, _mm256_mul_epu32(x0, c0));
    add_words(sums->mixed, _mm256_add_epi64(_mm256_mul_epu32(x0, c1), _mm256_mul_epu32(x1, c0)));
    add_words(sums->both_high, _mm256_mul_epu32(x1, c1));
}

static uint64_t total(const struct sums *sums)
{
    /* Weights of the six sums: 2^0, 2^32, 2^31, 2^63 = 2^2, 2^62 = 2^1, 2^94 = 2^33. */
    vf_u128 total = gather(sums->both_low[0], 0);
    total += gather(sums->both_low[1], 32);
    total += gather(sums->mixed[0], HALF);
    total += gather(sums->mixed[1], 2);
    total += gather(sums->both_high[0], 1);
    total += gather(sums->both_high[1], 33);
    return vf_reduce(total);
}

static void dots_part(const int64_t *values, const uint64_t *const coefficients[2], size_t n, uint64_t out[2],
                      uint64_t *too_large)
{
    const vec p = _mm256_set1_epi64x(VF_P), half = _mm256_set1_epi64x((1u << HALF) - 1), zero = _mm256_setzero_si256();
    const vec largest = _mm256_set1_epi64x(VF_LARGEST);
    struct sums sums[2] = {{{zero, zero}, {zero, zero}, {zero, zero}}, {{zero, zero}, {zero, zero}, {zero, zero}}};
    vec signs = zero;
    for (size_t i = 0; i < n; i += LANES) {
        vec value = _mm256_loadu_si256((const vec *)(values + i)), x = fold_signed(value, p);
        vec sides = _mm256_or_si256(_mm256_add_epi64(largest, value), _mm256_sub_epi64(largest, value));
        vec x0 = _mm256_and_si256(x, half), x1 = _mm256_srli_epi64(x, HALF);
        signs = _mm256_or_si256(signs, sides);
        add_products(&sums[0], x0, x1, fold(_mm256_loadu_si256((const vec *)(coefficients[0] + i)), p));
        add_products(&sums[1], x0, x1, fold(_mm256_loadu_si256((const vec *)(coefficients[1] + i)), p));
    }
    out[0] = total(&sums[0]);
    out[1] = total(&sums[1]);
    *too_large |= (uint64_t)(_mm256_movemask_pd(_mm256_castsi256_pd(signs)) != 0) << 63;
}

static void dots(const int64_t *values, const uint64_t *const coefficients[2], size_t n, uint64_t out[2],
                 uint64_t *too_large)
{
    size_t whole = n - n % LANES;
    const uint64_t *rest[2] = {coefficients[0] + whole, coefficients[1] + whole};
    vf_portable.dots(values + whole, rest, n - whole, out, too_large);
    for (size_t i = 0; i < whole; i += MOST) {
        const uint64_t *of_part[2] = {coefficients[0] + i, coefficients[1] + i};
        uint64_t part[2];
        dots_part(values + i, of_part, whole - i > MOST ? MOST : whole - i, part, too_large);
        for (int k = 0; k < 2; k++)
            out[k] = vf_reduce((vf_u128)out[k] + part[k]);
    }
}

const struct vf_kernel vf_avx2 = {"avx2", dots};

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
