/* AVX512-IFMA: eight points at a time, field elements in five limbs of 52 bits.
 *
 * Three kinds of element:
 *   tight    limbs 0 to 3 below 2^52, limb 4 below 2^47 + 2^6: the value is below 2^255 + 2^214. What products give.
 *   raw      a limb-wise combination of at most three tight elements added and three subtracted: limbs are signed.
 *   settled  limbs 0 to 3 count by their low 52 bits, as the multiplier reads them; limb 4 is below 2^52; the value is
 *            below 2^258. A factor of a product is settled or tight; every tight element is settled.
 */
#include "curve.h"

#if VC_X86

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512vl,avx512ifma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512dq,avx512vl,avx512ifma")
#endif

#include <immintrin.h>

#define NAME "ifma"
#define KERNELS vc_ifma
#define LANES 8
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define LOW52 0xFFFFFFFFFFFFFLL
#define LOW47 0x7FFFFFFFFFFFLL

typedef __m512i vec;
typedef __mmask8 mask;
typedef struct {
    vec v[5];
} fe;

INLINE vec all(int64_t value)
{
    return _mm512_set1_epi64(value);
}

INLINE vec low(vec sum, vec a, vec b)
{
    return _mm512_madd52lo_epu64(sum, a, b);
}

INLINE vec high(vec sum, vec a, vec b)
{
    return _mm512_madd52hi_epu64(sum, a, b);
}

INLINE vec plus(vec a, vec b)
{
    return _mm512_add_epi64(a, b);
}

INLINE vec and(vec a, vec b)
{
    return _mm512_and_si512(a, b);
}

#define RIGHT(a, n) _mm512_srli_epi64(a, n)
#define LEFT(a, n) _mm512_slli_epi64(a, n)

INLINE fe sum(fe a, fe b)
{
    UNROLL for (int k = 0; k < 5; k++)
        a.v[k] = plus(a.v[k], b.v[k]);
    return a;
}

INLINE fe diff(fe a, fe b)
{
    UNROLL for (int k = 0; k < 5; k++)
        a.v[k] = _mm512_sub_epi64(a.v[k], b.v[k]);
    return a;
}

/* Raw to settled. 4p = 2^257 - 76 makes up for what was subtracted, less than 3 * (2^255 + 2^214); with three added,
 * the value stays below 7 * 2^255 + 2^216. Carries are signed; the bits that were carried stay where they are, for the
 * multiplier does not see them. */
INLINE fe settle(fe a)
{
    a.v[0] = plus(a.v[0], all(-76));
    a.v[4] = plus(a.v[4], all(1LL << 49));
    UNROLL for (int k = 0; k < 4; k++)
        a.v[k + 1] = plus(a.v[k + 1], _mm512_srai_epi64(a.v[k], 52));
    return a;
}

/* Also for combinations of four: here the same. */
#define settle_wide settle

/* Limbs 0 to 3 below 2^57, limb 4 below 2^56 and `top` < 2^11 more in units of 2^260: to tight. Bits from 2^255 on come
 * back as multiples of 19 before the one chain of carries, so that no carry is left at its end: limb 4 ends as 47 bits
 * and the carry of limb 3, below 2^6. */
INLINE fe carry(vec *z, vec top)
{
    fe out;
    top = plus(LEFT(top, 5), RIGHT(z[4], 47));
    z[4] = and(z[4], all(LOW47));
    z[0] = low(z[0], top, all(19));
    UNROLL for (int k = 0; k < 4; k++) {
        z[k + 1] = plus(z[k + 1], RIGHT(z[k], 52));
        out.v[k] = and(z[k], all(LOW52));
    }
    out.v[4] = z[4];
    return out;
}

/* Columns 0 to 9 of a product below 2^516, each a sum of at most nine numbers below 2^52: to tight. What lies above
 * 2^260 is below 2^256, so that z[9] ends below 2^48, and 608 z[9] below 2^58. */
INLINE fe fold(vec *z)
{
    const vec by = all(608); /* 2^260 = 32 * 2^255 = 608 */
    UNROLL for (int k = 5; k < 9; k++)
        z[k + 1] = plus(z[k + 1], RIGHT(z[k], 52));
    UNROLL for (int k = 0; k < 5; k++)
        z[k] = low(z[k], z[k + 5], by);
    UNROLL for (int k = 0; k < 4; k++)
        z[k + 1] = high(z[k + 1], z[k + 5], by);
    return carry(z, high(_mm512_setzero_si512(), z[9], by));
}

INLINE fe mul(fe a, fe b)
{
    vec z[10];
    UNROLL for (int k = 0; k < 10; k++)
        z[k] = _mm512_setzero_si512();
    UNROLL for (int i = 0; i < 5; i++)
        UNROLL for (int j = 0; j < 5; j++) {
            z[i + j] = low(z[i + j], a.v[i], b.v[j]);
            z[i + j + 1] = high(z[i + j + 1], a.v[i], b.v[j]);
        }
    return fold(z);
}

INLINE fe square(fe a)
{
    vec z[10];
    UNROLL for (int k = 0; k < 10; k++)
        z[k] = _mm512_setzero_si512();
    UNROLL for (int i = 0; i < 5; i++)
        UNROLL for (int j = i + 1; j < 5; j++) {
            z[i + j] = low(z[i + j], a.v[i], a.v[j]);
            z[i + j + 1] = high(z[i + j + 1], a.v[i], a.v[j]);
        }
    UNROLL for (int k = 1; k < 9; k++)
        z[k] = plus(z[k], z[k]);
    UNROLL for (int i = 0; i < 5; i++) {
        z[2 * i] = low(z[2 * i], a.v[i], a.v[i]);
        z[2 * i + 1] = high(z[2 * i + 1], a.v[i], a.v[i]);
    }
    return fold(z);
}

/* Settled to tight. */
INLINE fe tight(fe a)
{
    UNROLL for (int k = 0; k < 4; k++)
        a.v[k] = and(a.v[k], all(LOW52));
    return carry(a.v, _mm512_setzero_si512());
}

/* Four words below 2^255 (bit 255 is dropped) to tight. */
INLINE fe from_words(const vec *w)
{
    const vec cut = all(LOW52);
    return (fe){{and(w[0], cut), and(_mm512_or_si512(RIGHT(w[0], 52), LEFT(w[1], 12)), cut),
                 and(_mm512_or_si512(RIGHT(w[1], 40), LEFT(w[2], 24)), cut),
                 and(_mm512_or_si512(RIGHT(w[2], 28), LEFT(w[3], 36)), cut), and(RIGHT(w[3], 16), all(LOW47))}};
}

/* Tight to the one representative below p, in four words. A tight value v is below 2p, and at least p exactly if
 * v + 19 reaches 2^255. */
INLINE void to_words(fe a, vec *w)
{
    vec over = RIGHT(plus(a.v[0], all(19)), 52);
    UNROLL for (int k = 1; k < 4; k++)
        over = RIGHT(plus(a.v[k], over), 52);
    over = RIGHT(plus(a.v[4], over), 47);
    a.v[0] = low(a.v[0], over, all(19));
    UNROLL for (int k = 0; k < 4; k++) {
        a.v[k + 1] = plus(a.v[k + 1], RIGHT(a.v[k], 52));
        a.v[k] = and(a.v[k], all(LOW52));
    }
    a.v[4] = and(a.v[4], all(LOW47));
    w[0] = _mm512_or_si512(a.v[0], LEFT(a.v[1], 52));
    w[1] = _mm512_or_si512(RIGHT(a.v[1], 12), LEFT(a.v[2], 40));
    w[2] = _mm512_or_si512(RIGHT(a.v[2], 24), LEFT(a.v[3], 28));
    w[3] = _mm512_or_si512(RIGHT(a.v[3], 36), LEFT(a.v[4], 16));
}

/* Tight elements as five words of a row. */
INLINE fe from_row(const vec *w)
{
    return (fe){{w[0], w[1], w[2], w[3], w[4]}};
}

INLINE void to_row(fe a, vec *w)
{
    UNROLL for (int k = 0; k < 5; k++)
        w[k] = a.v[k];
}

INLINE mask same(vec a, vec b)
{
    return _mm512_cmpeq_epi64_mask(a, b);
}

INLINE mask both(mask a, mask b)
{
    return (mask)(a & b);
}

INLINE mask not(mask a)
{
    return (mask)~a;
}

/* Which lanes, as bits of a number; and back. */
INLINE unsigned lanes_of(mask a)
{
    return a;
}

INLINE mask of_lanes(unsigned bits)
{
    return (mask)bits;
}

/* a where the mask is set, b elsewhere. */
INLINE fe choose(mask m, fe a, fe b)
{
    UNROLL for (int k = 0; k < 5; k++)
        a.v[k] = _mm512_mask_blend_epi64(m, b.v[k], a.v[k]);
    return a;
}

INLINE void transpose(vec *r)
{
    vec s[8], t[8];
    UNROLL for (int i = 0; i < 8; i += 2) {
        s[i] = _mm512_unpacklo_epi64(r[i], r[i + 1]);
        s[i + 1] = _mm512_unpackhi_epi64(r[i], r[i + 1]);
    }
    UNROLL for (int h = 0; h < 8; h += 4)
        UNROLL for (int i = 0; i < 2; i++) {
            t[h + i] = _mm512_shuffle_i64x2(s[h + i], s[h + i + 2], 0x88);
            t[h + i + 2] = _mm512_shuffle_i64x2(s[h + i], s[h + i + 2], 0xDD);
        }
    UNROLL for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i64x2(t[i], t[i + 4], 0x88);
        r[i + 4] = _mm512_shuffle_i64x2(t[i], t[i + 4], 0xDD);
    }
}

/* Words of one row for each lane, a multiple of four of them; the last block may be short. */
INLINE void load_words(vec *w, const uint64_t *const *rows, int count)
{
    UNROLL for (int k = 0; k < count; k += 8) {
        vec r[8];
        __mmask8 use = (__mmask8)(count - k < 8 ? (1 << (count - k)) - 1 : 0xFF);
        UNROLL for (int i = 0; i < 8; i++)
            r[i] = _mm512_maskz_loadu_epi64(use, rows[i] + k);
        transpose(r);
        UNROLL for (int i = 0; i < 8; i++)
            if (k + i < count)
                w[k + i] = r[i];
    }
}

INLINE void store_words(const vec *w, uint64_t *const *rows, int count)
{
    UNROLL for (int k = 0; k < count; k += 8) {
        vec r[8];
        __mmask8 use = (__mmask8)(count - k < 8 ? (1 << (count - k)) - 1 : 0xFF);
        UNROLL for (int i = 0; i < 8; i++)
            r[i] = k + i < count ? w[k + i] : _mm512_setzero_si512();
        transpose(r);
        UNROLL for (int i = 0; i < 8; i++)
            _mm512_mask_storeu_epi64(rows[i] + k, use, r[i]);
    }
}

#include "curve_points.h"
#include "curve_forms.h"
#include "curve_sums.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
