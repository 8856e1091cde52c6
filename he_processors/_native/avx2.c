/* AVX2: four numbers at a time, 28-bit limbs in 64-bit lanes.
 *
 * The walk is that of ifma.c, but a product of two limbs has 56 bits and falls into one column as a whole. A pass adds
 * less than 2^60 to a column, so columns are carried over after every CARRY_PASSES passes.
 */
#include "bignum.h"

#if VB_X86

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC target("avx2")
#endif

#include <immintrin.h>
#include <string.h>

#define NAME "avx2"
#define KERNELS vb_avx2
#define LANES 4
#define LIMB_BITS 28
typedef uint32_t limb_t;
typedef uint64_t word_t;
typedef __m256i vec;

#define JB 4
#define CARRY_PASSES 8
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

INLINE vec get(const word_t *group, size_t k)
{
    return _mm256_load_si256((const vec *)(group + k * LANES));
}

INLINE void put(word_t *group, size_t k, vec value)
{
    _mm256_store_si256((vec *)(group + k * LANES), value);
}

INLINE vec mul_add(vec sum, vec a, vec b)
{
    return _mm256_add_epi64(sum, _mm256_mul_epu32(a, b));
}

/* Products of one limb with all limbs of `y`, into the columns sum[0 .. jb). */
INLINE void products(vec *sum, vec x, const vec *y, int jb)
{
    UNROLL for (int i = 0; i < jb; i++)
        sum[i] = mul_add(sum[i], x, y[i]);
}

/* As in ifma.c: quotient digits from column[0 .. jb), what they add to column[jb .. 2 jb). */
INLINE void quotients(const uint64_t *s, vec *column, vec *quotient, int jb)
{
    UNROLL for (int k = 0; k < jb; k++) {
        quotient[k] = _mm256_and_si256(column[k], _mm256_set1_epi64x((1LL << LIMB_BITS) - 1));
        column[k + 1] = _mm256_add_epi64(column[k + 1], _mm256_srli_epi64(column[k], LIMB_BITS));
        UNROLL for (int j = 1; j < jb; j++)
            column[k + j] = mul_add(column[k + j], _mm256_set1_epi64x((long long)s[j]), quotient[k]);
    }
}

/* Write column k, carried over if this pass does so; move the columns down and bring in the next one. */
INLINE void finish_column(const word_t *sum, word_t *out, size_t k, vec *column, vec *carry, int jb, int carries)
{
    vec total = column[0];
    if (carries) {
        total = _mm256_add_epi64(total, *carry);
        *carry = _mm256_srli_epi64(total, LIMB_BITS);
        total = _mm256_and_si256(total, _mm256_set1_epi64x((1LL << LIMB_BITS) - 1));
    }
    put(out, k - jb, total);
    if (jb > 1) /* written out: Clang would make a loop a memmove, and the columns would leave the registers */
        column[0] = column[1];
    if (jb > 2)
        column[1] = column[2];
    if (jb > 3)
        column[2] = column[3];
    column[jb - 1] = get(sum, k + jb);
}

/* One pass: out = (sum + a * b[0 .. jb) + quotients * S) / 2^(28 * jb). With `squares`, b = a + start, and the products
 * of the limbs from start on count: those of the block itself once, those of higher limbs twice. `out` may be a.
 * sum[limbs .. limbs + 2 * jb) is 0. */
INLINE void pass(const struct vb_modulus *m, const word_t *a, const word_t *b, size_t start, const word_t *sum,
                 word_t *out, int jb, int carries, int squares)
{
    const uint64_t *s = m->scaled_plus1;
    const size_t limbs = m->limbs;
    vec digit[JB], quotient[JB], head[2 * JB], *column = head + jb, carry = _mm256_setzero_si256();
    UNROLL for (int i = 0; i < jb; i++)
        digit[i] = get(b, i);
    UNROLL for (int i = 0; i < 2 * jb; i++)
        head[i] = get(sum, i);
    if (start == 0)
        UNROLL for (int k = 0; k < jb; k++)
            products(head + k, get(a, k), digit, jb);
    quotients(s, head, quotient, jb);
    size_t k = jb;
    for (; k < start; k++) {
        products(column, _mm256_set1_epi64x((long long)s[k]), quotient, jb);
        finish_column(sum, out, k, column, &carry, jb, carries);
    }
    for (size_t end = start + jb; start && k < end; k++) {
        products(column, get(a, k), digit, jb);
        products(column, _mm256_set1_epi64x((long long)s[k]), quotient, jb);
        finish_column(sum, out, k, column, &carry, jb, carries);
    }
    if (squares)
        UNROLL for (int i = 0; i < jb; i++)
            digit[i] = _mm256_add_epi64(digit[i], digit[i]);
    for (; k < limbs; k++) {
        products(column, get(a, k), digit, jb);
        products(column, _mm256_set1_epi64x((long long)s[k]), quotient, jb);
        finish_column(sum, out, k, column, &carry, jb, carries);
    }
    UNROLL for (int i = 0; i < jb; i++)
        finish_column(sum, out, limbs + i, column, &carry, jb, carries);
}

INLINE void passes(const struct vb_modulus *m, word_t *a, const word_t *b, word_t *sum, int squares)
{
    size_t limbs = m->limbs, rest = (limbs - 1) % JB + 1, i = 0;
    memset(sum, 0, (limbs + 2 * JB) * LANES * sizeof(word_t));
    for (; i + rest < limbs; i += JB)
        if (i / JB % CARRY_PASSES == CARRY_PASSES - 1)
            pass(m, a, b + i * LANES, squares ? i : 0, sum, sum, JB, 1, squares);
        else
            pass(m, a, b + i * LANES, squares ? i : 0, sum, sum, JB, 0, squares);
    b += i * LANES;
    size_t start = squares ? i : 0;
    switch (rest) {
    case 1: pass(m, a, b, start, sum, a, 1, 1, squares); break;
    case 2: pass(m, a, b, start, sum, a, 2, 1, squares); break;
    case 3: pass(m, a, b, start, sum, a, 3, 1, squares); break;
    default: pass(m, a, b, start, sum, a, 4, 1, squares); break;
    }
}

static void multiply(const struct vb_modulus *m, word_t *a, const word_t *b, word_t *sum)
{
    passes(m, a, b, sum, 0);
}

static void square(const struct vb_modulus *m, word_t *a, word_t *sum)
{
    passes(m, a, a, sum, 1);
}

/* Transpose four rows, four limbs at a time. */
static void load(const struct vb_modulus *m, word_t *group, const limb_t *const rows[LANES])
{
    size_t k = 0;
    for (; k + 4 <= m->limbs; k += 4) {
        vec r[4];
        UNROLL for (int i = 0; i < 4; i++)
            r[i] = _mm256_cvtepu32_epi64(_mm_loadu_si128((const __m128i *)(rows[i] + k)));
        vec even01 = _mm256_unpacklo_epi64(r[0], r[1]), odd01 = _mm256_unpackhi_epi64(r[0], r[1]);
        vec even23 = _mm256_unpacklo_epi64(r[2], r[3]), odd23 = _mm256_unpackhi_epi64(r[2], r[3]);
        put(group, k, _mm256_permute2x128_si256(even01, even23, 0x20));
        put(group, k + 1, _mm256_permute2x128_si256(odd01, odd23, 0x20));
        put(group, k + 2, _mm256_permute2x128_si256(even01, even23, 0x31));
        put(group, k + 3, _mm256_permute2x128_si256(odd01, odd23, 0x31));
    }
    for (; k < m->limbs; k++)
        for (int l = 0; l < LANES; l++)
            group[k * LANES + l] = rows[l][k];
}

#include "lanes.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
