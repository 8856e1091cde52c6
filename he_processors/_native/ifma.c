/* AVX512-IFMA: eight numbers at a time, 52-bit limbs.
 *
 * A pass takes JB (mostly four) limbs of b. It walks once over the columns: at step k, limb k of a and limb k of S + 1
 * meet all limbs of b and all quotient digits of the pass, whose products fall into the JB + 1 columns held in
 * registers (low halves in column k + i, high halves in column k + i + 1). Column k is then complete, is written JB
 * places further down, and the next one comes in. Columns are sums of at most 4 * limbs products below 2^52: they fit
 * 64 bits without carrying, and only the last pass carries.
 */
#include "bignum.h"

#if VB_X86

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512vl,avx512ifma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512dq,avx512vl,avx512ifma")
#endif

#include <immintrin.h>
#include <string.h>

#define NAME "ifma"
#define KERNELS vb_ifma
#define LANES 8
#define LIMB_BITS 52
typedef uint64_t limb_t;
typedef uint64_t word_t;
typedef __m512i vec;

#define JB 4
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

INLINE vec low(vec sum, vec a, vec b)
{
    return _mm512_madd52lo_epu64(sum, a, b);
}

INLINE vec high(vec sum, vec a, vec b)
{
    return _mm512_madd52hi_epu64(sum, a, b);
}

INLINE vec get(const word_t *group, size_t k)
{
    return _mm512_load_si512(group + k * LANES);
}

INLINE void put(word_t *group, size_t k, vec value)
{
    _mm512_store_si512(group + k * LANES, value);
}

/* Products of one limb of `x` with all limbs of `y`, into the columns sum[0 .. JB]. */
INLINE void products(vec *sum, vec x, const vec *y, int jb)
{
    UNROLL for (int i = 0; i < jb; i++) {
        sum[i] = low(sum[i], x, y[i]);
        sum[i + 1] = high(sum[i + 1], x, y[i]);
    }
}

/* The first jb columns: their low limbs are the quotient digits of the pass. In: column[0 .. 2 jb), the first half with
 * all products of a and b. Out: the digits, and column[jb .. 2 jb) with what the columns below carry into them. */
INLINE void quotients(const uint64_t *s, vec *column, vec *quotient, int jb)
{
    const vec mask = _mm512_set1_epi64((1LL << LIMB_BITS) - 1);
    UNROLL for (int k = 0; k < jb; k++) {
        quotient[k] = _mm512_and_si512(column[k], mask);
        column[k + 1] = _mm512_add_epi64(column[k + 1], _mm512_srli_epi64(column[k], LIMB_BITS));
        UNROLL for (int j = 1; j < jb; j++) {
            vec limb = _mm512_set1_epi64((long long)s[j]);
            column[k + j] = low(column[k + j], limb, quotient[k]);
            column[k + j + 1] = high(column[k + j + 1], limb, quotient[k]);
        }
    }
}

/* Move every column one place down. Written out: as a loop, Clang makes it a memmove, and the columns leave the
 * registers. */
INLINE void shift_down(vec *column, int jb)
{
    column[0] = column[1];
    if (jb > 1)
        column[1] = column[2];
    if (jb > 2)
        column[2] = column[3];
    if (jb > 3)
        column[3] = column[4];
    column[jb] = _mm512_setzero_si512();
}

/* Write a complete column: as it is, or carried over if this is the last pass. */
INLINE void finish_column(word_t *out, size_t k, vec total, vec *carry, int last)
{
    if (last) {
        total = _mm512_add_epi64(total, *carry);
        *carry = _mm512_srli_epi64(total, LIMB_BITS);
        total = _mm512_and_si512(total, _mm512_set1_epi64((1LL << LIMB_BITS) - 1));
    }
    put(out, k, total);
}

/* One pass of a product: out = (sum + a * b[0 .. jb) + quotients * S) / 2^(52 * jb). The last pass carries; its `out`
 * may be a, which is read ahead of where it is written. sum[limbs .. limbs + jb) is 0. */
INLINE void product_pass(const struct vb_modulus *m, const word_t *a, const word_t *b, const word_t *sum, word_t *out,
                         int jb, int last)
{
    const uint64_t *s = m->scaled_plus1;
    const size_t limbs = m->limbs;
    const vec zero = _mm512_setzero_si512();
    vec digit[JB], quotient[JB], head[2 * JB + 1], *column = head + jb, fold[JB + 1] = {zero, zero, zero, zero, zero};
    vec carry = zero;
    UNROLL for (int i = 0; i < jb; i++)
        digit[i] = get(b, i);
    UNROLL for (int i = 0; i < 2 * jb; i++)
        head[i] = get(sum, i);
    UNROLL for (int k = 0; k < jb; k++)
        products(head + k, get(a, k), digit, jb);
    quotients(s, head, quotient, jb);
    for (size_t k = jb; k < limbs; k++) {
        column[jb] = get(sum, k + jb);
        products(column, get(a, k), digit, jb);
        products(fold, _mm512_set1_epi64((long long)s[k]), quotient, jb);
        finish_column(out, k - jb, _mm512_add_epi64(column[0], fold[0]), &carry, last);
        shift_down(column, jb);
        shift_down(fold, jb);
    }
    UNROLL for (int i = 0; i < jb; i++)
        finish_column(out, limbs - jb + i, _mm512_add_epi64(column[i], fold[i]), &carry, last);
}

/* Column k of a square pass: `cross` holds products that count twice. */
INLINE void square_column(const word_t *sum, word_t *out, size_t k, vec *cross, vec *fold, vec *carry, int jb,
                          int last)
{
    vec once = _mm512_add_epi64(get(sum, k), fold[0]), twice = _mm512_add_epi64(cross[0], cross[0]);
    finish_column(out, k - jb, _mm512_add_epi64(once, twice), carry, last);
    shift_down(cross, jb);
    shift_down(fold, jb);
}

/* Products of limb i of a block with the limbs of the same block that are not above it. */
INLINE void diagonal(vec *cross, vec *fold, vec x, const vec *digit, int i)
{
    products(cross, x, digit, i);
    fold[i] = low(fold[i], x, digit[i]);
    fold[i + 1] = high(fold[i + 1], x, digit[i]);
}

/* One pass of a square: as product_pass with b = a + start, but a pair of limbs is multiplied only once, by the block
 * of the lower limb. Products of block `start` begin at column `start` of the pass, so the columns that give the
 * quotient digits are complete before any later block. */
INLINE void square_pass(const struct vb_modulus *m, const word_t *a, size_t start, const word_t *sum, word_t *out,
                        int jb, int last)
{
    const uint64_t *s = m->scaled_plus1;
    const size_t limbs = m->limbs;
    const vec zero = _mm512_setzero_si512();
    vec digit[JB], quotient[JB], head[2 * JB + 1] = {zero, zero, zero, zero, zero, zero, zero, zero, zero};
    vec *fold = head + jb, cross[2 * JB + 1] = {zero, zero, zero, zero, zero, zero, zero, zero, zero}, carry = zero;
    UNROLL for (int i = 0; i < jb; i++) {
        digit[i] = get(a, start + i);
        head[i] = get(sum, i);
    }
    if (start == 0) {
        UNROLL for (int i = 0; i < jb; i++)
            diagonal(cross + i, head + i, digit[i], digit, i);
        UNROLL for (int i = 0; i < 2 * jb; i++)
            head[i] = _mm512_add_epi64(head[i], _mm512_add_epi64(cross[i], cross[i]));
    }
    quotients(s, head, quotient, jb);
    cross[0] = cross[1] = cross[2] = cross[3] = cross[4] = zero;
    size_t k = jb;
    for (; k < start; k++) {
        products(fold, _mm512_set1_epi64((long long)s[k]), quotient, jb);
        square_column(sum, out, k, cross, fold, &carry, jb, last);
    }
    if (start)
        UNROLL for (int i = 0; i < jb; i++, k++) {
            products(fold, _mm512_set1_epi64((long long)s[k]), quotient, jb);
            diagonal(cross, fold, digit[i], digit, i);
            square_column(sum, out, k, cross, fold, &carry, jb, last);
        }
    for (; k < limbs; k++) {
        products(fold, _mm512_set1_epi64((long long)s[k]), quotient, jb);
        products(cross, get(a, k), digit, jb);
        square_column(sum, out, k, cross, fold, &carry, jb, last);
    }
    UNROLL for (int i = 0; i < jb; i++)
        square_column(sum, out, k + i, cross, fold, &carry, jb, last);
}

static void multiply(const struct vb_modulus *m, word_t *a, const word_t *b, word_t *sum)
{
    size_t limbs = m->limbs, rest = (limbs - 1) % JB + 1, i = 0;
    memset(sum, 0, (limbs + JB) * LANES * sizeof(word_t));
    for (; i + rest < limbs; i += JB)
        product_pass(m, a, b + i * LANES, sum, sum, JB, 0);
    switch (rest) {
    case 1: product_pass(m, a, b + i * LANES, sum, a, 1, 1); break;
    case 2: product_pass(m, a, b + i * LANES, sum, a, 2, 1); break;
    case 3: product_pass(m, a, b + i * LANES, sum, a, 3, 1); break;
    default: product_pass(m, a, b + i * LANES, sum, a, 4, 1); break;
    }
}

static void square(const struct vb_modulus *m, word_t *a, word_t *sum)
{
    size_t limbs = m->limbs, rest = (limbs - 1) % JB + 1, i = 0;
    memset(sum, 0, (limbs + JB) * LANES * sizeof(word_t));
    for (; i + rest < limbs; i += JB)
        square_pass(m, a, i, sum, sum, JB, 0);
    switch (rest) {
    case 1: square_pass(m, a, i, sum, a, 1, 1); break;
    case 2: square_pass(m, a, i, sum, a, 2, 1); break;
    case 3: square_pass(m, a, i, sum, a, 3, 1); break;
    default: square_pass(m, a, i, sum, a, 4, 1); break;
    }
}

/* Transpose eight rows, eight limbs at a time. */
static void load(const struct vb_modulus *m, word_t *group, const limb_t *const rows[LANES])
{
    for (size_t k = 0; k < m->limbs; k += 8) {
        size_t count = m->limbs - k < 8 ? m->limbs - k : 8;
        __mmask8 use = (__mmask8)(0xFF >> (8 - count));
        vec r[8], s[8], t[8];
        UNROLL for (int i = 0; i < 8; i++)
            r[i] = _mm512_maskz_loadu_epi64(use, rows[i] + k);
        UNROLL for (int i = 0; i < 8; i += 2) {
            s[i] = _mm512_unpacklo_epi64(r[i], r[i + 1]);
            s[i + 1] = _mm512_unpackhi_epi64(r[i], r[i + 1]);
        }
        UNROLL for (int h = 0; h < 8; h += 4)
            UNROLL for (int i = 0; i < 2; i++) {
                t[h + i] = _mm512_shuffle_i64x2(s[h + i], s[h + i + 2], 0x88);
                t[h + i + 2] = _mm512_shuffle_i64x2(s[h + i], s[h + i + 2], 0xDD);
            }
        vec column[8] = {
            _mm512_shuffle_i64x2(t[0], t[4], 0x88), _mm512_shuffle_i64x2(t[1], t[5], 0x88),
            _mm512_shuffle_i64x2(t[2], t[6], 0x88), _mm512_shuffle_i64x2(t[3], t[7], 0x88),
            _mm512_shuffle_i64x2(t[0], t[4], 0xDD), _mm512_shuffle_i64x2(t[1], t[5], 0xDD),
            _mm512_shuffle_i64x2(t[2], t[6], 0xDD), _mm512_shuffle_i64x2(t[3], t[7], 0xDD),
        };
        UNROLL for (int i = 0; i < 8; i++)
            if ((size_t)i < count)
                put(group, k + i, column[i]);
    }
}

#include "lanes.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
