/* Scalars: compared with a bound, as signed digits, and times a secret factor modulo the group order. */
#include "curve.h"

#include <string.h>

typedef unsigned __int128 u128;

static const uint64_t order[4] = {0x5812631a5cf5d3ed, 0x14def9dea2f79cd6, 0, 0x1000000000000000};
static const uint64_t minus_inverse = 0xd2b51da312547e1b; /* -1 / order modulo 2^64 */

/* `count` <= 32 bits of a little-endian number from bit `offset` on; bits beyond its end are 0. */
static uint32_t bits_at(const uint8_t *number, size_t width, size_t offset, unsigned count)
{
    uint64_t found = 0;
    size_t first = offset / 8;
    if (first < width)
        memcpy(&found, number + first, width - first < 8 ? width - first : 8);
    return (uint32_t)(found >> offset % 8 & (((uint64_t)1 << count) - 1));
}

/* number = sum_j digits[j] 2^(window j), digits in (-2^(window - 1), 2^(window - 1)]; a carry out of the last window is
 * dropped. */
void vc_signed_digits(const uint8_t *scalar, size_t width, unsigned window, size_t n_windows, int16_t *digits)
{
    int carry = 0, half = 1 << (window - 1);
    for (size_t j = 0; j < n_windows; j++) {
        int digit = (int)bits_at(scalar, width, j * window, window) + carry;
        carry = digit > half;
        digits[j] = (int16_t)(carry ? digit - 2 * half : digit);
    }
}

int vc_all_below(const uint8_t *numbers, size_t width, size_t n, const uint8_t *bound)
{
    for (size_t i = 0; i < n; i++) {
        size_t k = VC_SCALAR_BYTES;
        int digit = 0;
        while (k-- > 0) {
            digit = k < width ? numbers[i * width + k] : 0;
            if (digit != bound[k])
                break;
        }
        if (k == (size_t)-1 || digit > bound[k])
            return 0;
    }
    return 1;
}

/* x - order where that is not negative, else x; without a branch. */
static void subtract_order(uint64_t *x)
{
    uint64_t less[4], borrow = 0;
    for (size_t i = 0; i < 4; i++) {
        u128 d = (u128)x[i] - order[i] - borrow;
        less[i] = (uint64_t)d;
        borrow = (uint64_t)(d >> 64) & 1;
    }
    for (size_t i = 0; i < 4; i++)
        x[i] = borrow ? x[i] : less[i];
}

/* The factor comes times 2^256: Montgomery's reduction takes that off (Math. Comp. 44, 1985). Below the order are
 * scalars, factor and shift; the reduced product is below twice the order, the sum below three times. */
void vc_scale(const uint8_t *scalars, size_t n, const uint8_t *factor, const uint8_t *shift, uint8_t *out)
{
    uint64_t f[4], s[4];
    memcpy(f, factor, 32);
    memcpy(s, shift, 32);
    for (size_t row = 0; row < n; row++) {
        uint64_t a[4], t[5] = {0};
        memcpy(a, scalars + row * VC_SCALAR_BYTES, 32);
        for (size_t i = 0; i < 4; i++) {
            u128 c = 0;
            for (size_t j = 0; j < 4; j++, c >>= 64) {
                c += (u128)a[i] * f[j] + t[j];
                t[j] = (uint64_t)c;
            }
            t[4] += (uint64_t)c;
            uint64_t q = t[0] * minus_inverse;
            c = ((u128)q * order[0] + t[0]) >> 64;
            for (size_t j = 1; j < 4; j++, c >>= 64) {
                c += (u128)q * order[j] + t[j];
                t[j - 1] = (uint64_t)c;
            }
            c += t[4];
            t[3] = (uint64_t)c;
            t[4] = (uint64_t)(c >> 64);
        }
        u128 c = 0;
        for (size_t j = 0; j < 4; j++, c >>= 64) {
            c += (u128)t[j] + s[j];
            t[j] = (uint64_t)c;
        }
        subtract_order(t);
        subtract_order(t);
        memcpy(out + row * VC_SCALAR_BYTES, t, 32);
    }
}
