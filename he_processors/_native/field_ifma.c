/* AVX512-IFMA: eight products at a time, in limbs of 52 and 12 bits, whose halves are summed without carrying. */
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

/* Sums of one inner product with weights 2^0, 2^52 and 2^104, apart so that no product waits for another. */
struct sums {
    vec first, middle[3], last[3];
};

static inline vec low(vec sum, vec a, vec b)
{
    return _mm512_madd52lo_epu64(sum, a, b); /* the instruction takes the low 52 bits of a and b itself */
}

static inline vec high(vec sum, vec a, vec b)
{
    return _mm512_madd52hi_epu64(sum, a, b);
}

static inline void add_products(struct sums *sums, vec x, vec x1, const uint64_t *coefficients)
{
    vec c = _mm512_loadu_si512(coefficients), c1 = _mm512_srli_epi64(c, LIMB);
    sums->first = low(sums->first, x, c);
    sums->middle[0] = high(sums->middle[0], x, c);
    sums->middle[1] = low(sums->middle[1], x, c1);
    sums->middle[2] = low(sums->middle[2], x1, c);
    sums->last[0] = high(sums->last[0], x, c1);
    sums->last[1] = high(sums->last[1], x1, c);
    sums->last[2] = low(sums->last[2], x1, c1);
}

static inline vec added(const vec of[3])
{
    return _mm512_add_epi64(_mm512_add_epi64(of[0], of[1]), of[2]);
}

static vf_u128 over_lanes(vec of)
{
    uint64_t lanes[LANES];
    vf_u128 total = 0;
    _mm512_storeu_si512(lanes, of);
    for (int k = 0; k < LANES; k++)
        total += lanes[k];
    return total;
}

static uint64_t total(const struct sums *sums)
{
    vf_u128 last = over_lanes(added(sums->last)) << 43; /* 2^104 = 2^43 */
    return vf_reduce(over_lanes(sums->first) + (over_lanes(added(sums->middle)) << LIMB) + last);
}

static void dots_part(const int64_t *values, const uint64_t *const coefficients[2], size_t n, uint64_t out[2],
                      uint64_t *too_large)
{
    const vec zero = _mm512_setzero_si512(), shift = _mm512_set1_epi64(VF_SHIFT);
    const vec largest = _mm512_set1_epi64(VF_LARGEST);
    struct sums sums[2] = {{zero, {zero, zero, zero}, {zero, zero, zero}}, {zero, {zero, zero, zero}, {zero, zero, zero}}};
    vec signs = zero;
    for (size_t i = 0; i < n; i += LANES) {
        vec x = _mm512_loadu_si512(values + i);
        signs = _mm512_or_si512(signs, _mm512_or_si512(_mm512_add_epi64(largest, x), _mm512_sub_epi64(largest, x)));
        x = _mm512_mask_add_epi64(x, _mm512_movepi64_mask(x), x, shift);
        vec x1 = _mm512_srli_epi64(x, LIMB);
        add_products(&sums[0], x, x1, coefficients[0] + i);
        add_products(&sums[1], x, x1, coefficients[1] + i);
    }
    out[0] = total(&sums[0]);
    out[1] = total(&sums[1]);
    *too_large |= (uint64_t)(_mm512_movepi64_mask(signs) != 0) << 63;
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

const struct vf_kernel vf_ifma = {"ifma", dots};

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
