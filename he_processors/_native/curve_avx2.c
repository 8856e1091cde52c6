/* AVX2: four points at a time, field elements in ten signed limbs of 26 and 25 bits in turn.
 *
 * Limb k counts 2^ceil(25.5 k), and by the low 32 bits of its lane, signed: the multiplier sees no others.
 *   tight    even limbs at most 2^25 in size, odd ones 2^24 + 2^12. What products give, in whole lanes.
 *   raw      a limb-wise combination of tight elements; it needs no settling.
 *   A factor of a product is a combination of at most three tight elements, and the first one of four.
 *
 * Reference: Bernstein, Duif, Lange, Schwabe, Yang, "High-speed high-security signatures", and its software's bounds.
 */
#include "curve.h"

#if VC_X86

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,tune=skylake"))), apply_to = function)
#else
/* Tuned for what has AVX2 and no more: GCC's general tuning copies elements by string instructions, which are slow. */
#pragma GCC target("avx2,tune=skylake")
#endif

#include <immintrin.h>

#define NAME "avx2"
#define KERNELS vc_avx2
#define LANES 4
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define BITS(k) ((k) % 2 ? 25 : 26)

typedef __m256i vec;
typedef __m256i mask; /* a lane is all ones or 0 */
typedef struct {
    vec v[10];
} fe;

INLINE vec all(int64_t value)
{
    return _mm256_set1_epi64x(value);
}

INLINE vec plus(vec a, vec b)
{
    return _mm256_add_epi64(a, b);
}

INLINE vec less(vec a, vec b)
{
    return _mm256_sub_epi64(a, b);
}

INLINE vec and(vec a, vec b)
{
    return _mm256_and_si256(a, b);
}

INLINE vec or(vec a, vec b)
{
    return _mm256_or_si256(a, b);
}

#define RIGHT(a, n) _mm256_srli_epi64(a, n)
#define LEFT(a, n) _mm256_slli_epi64(a, n)

/* Ten column sums stay in registers: without it, GCC makes all products first and spills them. */
#define KEEP(h)                                                                                                       \
    __asm__("" : "+x"((h)[0]), "+x"((h)[1]), "+x"((h)[2]), "+x"((h)[3]), "+x"((h)[4]), "+x"((h)[5]), "+x"((h)[6]), \
            "+x"((h)[7]), "+x"((h)[8]), "+x"((h)[9]))

INLINE vec nineteen(vec a)
{
    return plus(plus(LEFT(a, 4), LEFT(a, 1)), a);
}

INLINE fe sum(fe a, fe b)
{
    UNROLL for (int k = 0; k < 10; k++)
        a.v[k] = plus(a.v[k], b.v[k]);
    return a;
}

INLINE fe diff(fe a, fe b)
{
    UNROLL for (int k = 0; k < 10; k++)
        a.v[k] = less(a.v[k], b.v[k]);
    return a;
}

#define settle(a) (a)
#define settle_wide(a) (a)

/* floor(a / 2^bits) for |a| <= 2^62: AVX2 has no signed shift of 64 bits. */
INLINE vec signed_right(vec a, int bits)
{
    return less(RIGHT(plus(a, all(1LL << 62)), bits), all(1LL << (62 - bits)));
}

/* The nearest multiple of 2^BITS(k) of limb k, as a number of such; what is left stays in the limb. */
INLINE vec take_carry(vec *h, int k)
{
    const int bits = BITS(k);
    vec t = plus(h[k], all((1LL << 62) + (1LL << (bits - 1))));
    h[k] = less(and(t, all((1LL << bits) - 1)), all(1LL << (bits - 1)));
    return less(RIGHT(t, bits), all(1LL << (62 - bits)));
}

/* Limbs below 2^61 in size, limb 9 below 2^57, whole lanes, to tight. Limbs 0 and 4 are carried twice: what comes back
 * from limb 9, 19 times its carry, and the carry of limb 3 are below 2^37, so that limbs 1 and 5 end with one more,
 * below 2^12. */
INLINE fe carry(vec *h)
{
    static const int order[] = {0, 4, 1, 5, 2, 6, 3, 7, 4, 8};
    fe out;
    UNROLL for (int i = 0; i < 10; i++)
        h[order[i] + 1] = plus(h[order[i] + 1], take_carry(h, order[i]));
    h[0] = plus(h[0], nineteen(take_carry(h, 9)));
    h[1] = plus(h[1], take_carry(h, 0));
    UNROLL for (int k = 0; k < 10; k++)
        out.v[k] = h[k];
    return out;
}

/* 2^255 = 19, and two odd limbs have half a bit each too many: a_i b_j counts twice if both are odd, and 19 times from
 * limb 10 on. With four and three tight elements, an even limb of a is below 2^27.02, of b below 2^26.6, odd ones half
 * of that; 19 b < 2^31, and column 0 is the largest: 2^53.62 (1 + 4 * 19 + 5 * 19 / 2) < 2^61. Column 9 is below 2^57.
 *
 * A function of its own: written out seven times, an addition of points would not fit the instruction cache. */
static __attribute__((noinline)) void multiply(fe *out, const fe *pa, const fe *pb)
{
    const vec *a = pa->v, *b = pb->v;
    vec h[10], b19[10];
    UNROLL for (int j = 1; j < 10; j++)
        b19[j] = _mm256_mul_epi32(b[j], all(19));
    UNROLL for (int k = 0; k < 10; k++)
        h[k] = _mm256_mul_epi32(a[0], b[k]);
    KEEP(h);
    UNROLL for (int i = 1; i < 10; i++) {
        vec once = a[i], often = i % 2 ? plus(once, once) : once;
        UNROLL for (int j = 0; j < 10; j++)
            h[(i + j) % 10] = plus(h[(i + j) % 10],
                                   _mm256_mul_epi32(j % 2 ? often : once, i + j < 10 ? b[j] : b19[j]));
        KEEP(h);
    }
    *out = carry(h);
}

static __attribute__((noinline)) void multiply_self(fe *out, const fe *pa)
{
    const vec *a = pa->v;
    vec h[10], a2[10], a19[10];
    UNROLL for (int j = 0; j < 10; j++)
        a2[j] = plus(a[j], a[j]);
    UNROLL for (int j = 5; j < 10; j++)
        a19[j] = _mm256_mul_epi32(a[j], all(19));
    UNROLL for (int k = 0; k < 10; k++) {
        vec once = all(0), twofold = all(0);
        UNROLL for (int i = 0; i < 10; i++) {
            int j = (10 + k - i) % 10;
            if (i < j)
                twofold = plus(twofold, _mm256_mul_epi32(i % 2 && j % 2 ? a2[i] : a[i], i + j < 10 ? a[j] : a19[j]));
            if (i == j)
                once = plus(once, _mm256_mul_epi32(i % 2 ? a2[i] : a[i], i + j < 10 ? a[j] : a19[j]));
        }
        h[k] = plus(once, plus(twofold, twofold));
    }
    *out = carry(h);
}

INLINE fe mul(fe a, fe b)
{
    fe out, x, y;
    UNROLL for (int k = 0; k < 10; k++) {
        x.v[k] = a.v[k];
        y.v[k] = b.v[k];
    }
    multiply(&out, &x, &y);
    return out;
}

INLINE fe square(fe a)
{
    fe out, x;
    UNROLL for (int k = 0; k < 10; k++)
        x.v[k] = a.v[k];
    multiply_self(&out, &x);
    return out;
}

/* The low 32 bits of each lane, signed, as the whole lane. */
INLINE vec widened(vec a)
{
    vec sign = _mm256_srai_epi32(_mm256_shuffle_epi32(a, 0xA0), 31);
    return _mm256_blend_epi32(a, sign, 0xAA);
}

/* Any factor of a product to tight. */
INLINE fe tight(fe a)
{
    UNROLL for (int k = 0; k < 10; k++)
        a.v[k] = widened(a.v[k]);
    return carry(a.v);
}

/* Four words below 2^255 (bit 255 is dropped) to tight. */
INLINE fe from_words(const vec *w)
{
    const vec even = all((1 << 26) - 1), odd = all((1 << 25) - 1);
    vec h[10] = {and(w[0], even), and(RIGHT(w[0], 26), odd), and(or(RIGHT(w[0], 51), LEFT(w[1], 13)), even),
                 and(RIGHT(w[1], 13), odd), RIGHT(w[1], 38), and(w[2], odd), and(RIGHT(w[2], 25), even),
                 and(or(RIGHT(w[2], 51), LEFT(w[3], 13)), odd), and(RIGHT(w[3], 12), even),
                 and(RIGHT(w[3], 38), odd)};
    return carry(h);
}

/* Tight to the one representative below p, in four words. The value h is below 2^255 in size: 19 h / 2^255, rounded,
 * carries q = floor(h / p) through all limbs (fe_tobytes of the reference's software proves it). */
INLINE void to_words(fe a, vec *w)
{
    vec *h = a.v, q;
    UNROLL for (int k = 0; k < 10; k++)
        h[k] = widened(h[k]);
    q = signed_right(plus(nineteen(h[9]), all(1 << 24)), 25);
    UNROLL for (int k = 0; k < 10; k++)
        q = signed_right(plus(h[k], q), BITS(k));
    h[0] = plus(h[0], nineteen(q));
    UNROLL for (int k = 0; k < 10; k++) {
        vec over = signed_right(h[k], BITS(k));
        h[k] = less(h[k], LEFT(over, BITS(k)));
        if (k < 9)
            h[k + 1] = plus(h[k + 1], over);
    }
    w[0] = or(or(h[0], LEFT(h[1], 26)), LEFT(h[2], 51));
    w[1] = or(or(RIGHT(h[2], 13), LEFT(h[3], 13)), LEFT(h[4], 38));
    w[2] = or(or(h[5], LEFT(h[6], 25)), LEFT(h[7], 51));
    w[3] = or(or(RIGHT(h[7], 13), LEFT(h[8], 12)), LEFT(h[9], 38));
}

/* Two limbs a word. */
INLINE fe from_row(const vec *w)
{
    fe a;
    UNROLL for (int k = 0; k < 5; k++) {
        a.v[2 * k] = w[k];
        a.v[2 * k + 1] = RIGHT(w[k], 32);
    }
    return a;
}

INLINE void to_row(fe a, vec *w)
{
    UNROLL for (int k = 0; k < 5; k++)
        w[k] = _mm256_blend_epi32(a.v[2 * k], LEFT(a.v[2 * k + 1], 32), 0xAA);
}

INLINE mask same(vec a, vec b)
{
    return _mm256_cmpeq_epi64(a, b);
}

INLINE mask both(mask a, mask b)
{
    return and(a, b);
}

INLINE mask not(mask a)
{
    return _mm256_xor_si256(a, all(-1));
}

/* Which lanes, as bits of a number; and back. */
INLINE unsigned lanes_of(mask a)
{
    return (unsigned)_mm256_movemask_pd(_mm256_castsi256_pd(a));
}

INLINE mask of_lanes(unsigned bits)
{
    const vec lane = _mm256_set_epi64x(8, 4, 2, 1);
    return same(and(all(bits), lane), lane);
}

/* a where the mask is set, b elsewhere. */
INLINE fe choose(mask m, fe a, fe b)
{
    UNROLL for (int k = 0; k < 10; k++)
        a.v[k] = _mm256_blendv_epi8(b.v[k], a.v[k], m);
    return a;
}

INLINE void transpose(vec *r)
{
    vec s0 = _mm256_unpacklo_epi64(r[0], r[1]), s1 = _mm256_unpackhi_epi64(r[0], r[1]);
    vec s2 = _mm256_unpacklo_epi64(r[2], r[3]), s3 = _mm256_unpackhi_epi64(r[2], r[3]);
    r[0] = _mm256_permute2x128_si256(s0, s2, 0x20);
    r[1] = _mm256_permute2x128_si256(s1, s3, 0x20);
    r[2] = _mm256_permute2x128_si256(s0, s2, 0x31);
    r[3] = _mm256_permute2x128_si256(s1, s3, 0x31);
}

/* Words of one row for each lane, a multiple of four of them. */
INLINE void load_words(vec *w, const uint64_t *const *rows, int count)
{
    UNROLL for (int k = 0; k < count; k += 4) {
        UNROLL for (int i = 0; i < 4; i++)
            w[k + i] = _mm256_loadu_si256((const __m256i *)(rows[i] + k));
        transpose(w + k);
    }
}

INLINE void store_words(const vec *w, uint64_t *const *rows, int count)
{
    UNROLL for (int k = 0; k < count; k += 4) {
        vec r[4] = {w[k], w[k + 1], w[k + 2], w[k + 3]};
        transpose(r);
        UNROLL for (int i = 0; i < 4; i++)
            _mm256_storeu_si256((__m256i *)(rows[i] + k), r[i]);
    }
}

#include "curve_points.h"
#include "curve_forms.h"
#include "curve_sums.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
