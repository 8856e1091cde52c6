/* Any 64-bit machine: one point at a time, field elements in five limbs of 51 bits, products in unsigned __int128.
 *
 * Three kinds of element:
 *   tight    limbs below 2^51 + 2^13: the value is below 2^255 + 2^218. What products give.
 *   raw      a limb-wise combination of tight elements, modulo 2^64.
 *   settled  limbs below 2^54. A factor of a product is settled or tight.
 */
#include "curve.h"

#define NAME "portable"
#define KERNELS vc_portable
#define LANES 1
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
#define LOW51 0x7FFFFFFFFFFFFULL

typedef uint64_t vec;
typedef uint64_t mask; /* all ones or 0 */
typedef unsigned __int128 u128;
typedef struct {
    vec v[5];
} fe;

INLINE vec all(int64_t value)
{
    return (vec)value;
}

INLINE fe sum(fe a, fe b)
{
    UNROLL for (int k = 0; k < 5; k++)
        a.v[k] += b.v[k];
    return a;
}

INLINE fe diff(fe a, fe b)
{
    UNROLL for (int k = 0; k < 5; k++)
        a.v[k] -= b.v[k];
    return a;
}

/* Raw to settled. Limbs of 4p, 2^53 - 76 and 2^53 - 4, are more than three tight limbs, which is the most that was
 * subtracted; with three added (four make 2^53 + 2^53 + 2^15, and only one subtracted), they stay below 2^54 + 2^15. */
INLINE fe settle(fe a)
{
    a.v[0] += 0x1FFFFFFFFFFFB4ULL;
    UNROLL for (int k = 1; k < 5; k++)
        a.v[k] += 0x1FFFFFFFFFFFFCULL;
    return a;
}

#define settle_wide settle

/* Columns below 2^115, the last below 2^111: to tight. Carries are below 2^64, the last one below 2^60, so that limb 0
 * takes 19 times it, and carries less than 2^13 into limb 1. */
INLINE fe carry(u128 *z)
{
    fe out;
    UNROLL for (int k = 0; k < 4; k++)
        z[k + 1] += (uint64_t)(z[k] >> 51);
    UNROLL for (int k = 0; k < 5; k++)
        out.v[k] = (uint64_t)z[k] & LOW51;
    out.v[0] += 19 * (uint64_t)(z[4] >> 51);
    out.v[1] += out.v[0] >> 51;
    out.v[0] &= LOW51;
    return out;
}

/* A column is at most one product of settled limbs and four times 19 of them: 77 * 2^108.1 < 2^115; the last has none
 * that count 19 times. */
INLINE fe mul(fe a, fe b)
{
    u128 z[5] = {0};
    UNROLL for (int i = 0; i < 5; i++)
        UNROLL for (int j = 0; j < 5; j++)
            z[(i + j) % 5] += (u128)a.v[i] * (i + j < 5 ? b.v[j] : 19 * b.v[j]);
    return carry(z);
}

INLINE fe square(fe a)
{
    u128 z[5] = {0};
    UNROLL for (int i = 0; i < 5; i++)
        UNROLL for (int j = i; j < 5; j++)
            z[(i + j) % 5] += (u128)(i == j ? a.v[i] : 2 * a.v[i]) * (i + j < 5 ? a.v[j] : 19 * a.v[j]);
    return carry(z);
}

/* Settled to tight. */
INLINE fe tight(fe a)
{
    u128 z[5] = {a.v[0], a.v[1], a.v[2], a.v[3], a.v[4]};
    return carry(z);
}

/* Four words below 2^255 (bit 255 is dropped) to tight. */
INLINE fe from_words(const vec *w)
{
    return (fe){{w[0] & LOW51, (w[0] >> 51 | w[1] << 13) & LOW51, (w[1] >> 38 | w[2] << 26) & LOW51,
                 (w[2] >> 25 | w[3] << 39) & LOW51, w[3] >> 12 & LOW51}};
}

/* Tight to the one representative below p, in four words. A tight value v is below 2p, and at least p exactly if
 * v + 19 reaches 2^255. */
INLINE void to_words(fe a, vec *w)
{
    uint64_t over = (a.v[0] + 19) >> 51;
    UNROLL for (int k = 1; k < 5; k++)
        over = (a.v[k] + over) >> 51;
    a.v[0] += 19 * over;
    UNROLL for (int k = 0; k < 4; k++) {
        a.v[k + 1] += a.v[k] >> 51;
        a.v[k] &= LOW51;
    }
    a.v[4] &= LOW51;
    w[0] = a.v[0] | a.v[1] << 51;
    w[1] = a.v[1] >> 13 | a.v[2] << 38;
    w[2] = a.v[2] >> 26 | a.v[3] << 25;
    w[3] = a.v[3] >> 39 | a.v[4] << 12;
}

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
    return a == b ? ~(mask)0 : 0;
}

INLINE mask both(mask a, mask b)
{
    return a & b;
}

INLINE mask not(mask a)
{
    return ~a;
}

INLINE unsigned lanes_of(mask a)
{
    return (unsigned)(a & 1);
}

INLINE mask of_lanes(unsigned bits)
{
    return -(mask)(bits & 1);
}

INLINE fe choose(mask m, fe a, fe b)
{
    UNROLL for (int k = 0; k < 5; k++)
        a.v[k] = (a.v[k] & m) | (b.v[k] & ~m);
    return a;
}

INLINE void load_words(vec *w, const uint64_t *const *rows, int count)
{
    for (int k = 0; k < count; k++)
        w[k] = rows[0][k];
}

INLINE void store_words(const vec *w, uint64_t *const *rows, int count)
{
    for (int k = 0; k < count; k++)
        rows[0][k] = w[k];
}

#include "curve_points.h"
#include "curve_forms.h"
#include "curve_sums.h"
