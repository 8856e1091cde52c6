/* Plain big integers in 64-bit words, least significant first: splitting and remainder. */
#include "bignum.h"

#include <string.h>

typedef unsigned __int128 u128;

/* `count` <= 64 bits of a little-endian number from bit `offset` on; bits beyond its end are 0. */
uint64_t vb_bits(const uint8_t *bytes, size_t size, size_t offset, unsigned count)
{
    uint64_t low = 0;
    uint8_t high = 0;
    size_t first = offset / 8;
    unsigned shift = offset % 8;
    if (first + 8 <= size)
        memcpy(&low, bytes + first, 8);
    else if (first < size)
        memcpy(&low, bytes + first, size - first);
    if (first + 8 < size)
        high = bytes[first + 8];
    if (shift)
        low = low >> shift | (uint64_t)high << (64 - shift);
    return count == 64 ? low : low & (((uint64_t)1 << count) - 1);
}

void vb_split(const uint8_t *bytes, size_t size, unsigned limb_bits, unsigned limb_bytes, size_t limbs, void *out)
{
    for (size_t k = 0; k < limbs; k++) {
        uint64_t limb = vb_bits(bytes, size, k * limb_bits, limb_bits);
        memcpy((uint8_t *)out + k * limb_bytes, &limb, limb_bytes);
    }
}

void vb_to_words(const uint8_t *bytes, size_t size, size_t words, uint64_t *out)
{
    memset(out, 0, words * 8);
    memcpy(out, bytes, size < words * 8 ? size : words * 8);
}

/* Shift a divisor left until its top bit is set; the distance. Its top word must not be 0. */
unsigned vb_normalise(uint64_t *divisor, size_t words)
{
    unsigned shift = (unsigned)__builtin_clzll(divisor[words - 1]);
    if (shift)
        for (size_t k = words; k-- > 0;)
            divisor[k] = divisor[k] << shift | (k ? divisor[k - 1] >> (64 - shift) : 0);
    return shift;
}

/* Quotient digit of (top, next, third) by the normalised (d1, d0), at most one too large (Knuth 4.3.1, algorithm D). */
static uint64_t quotient_digit(uint64_t top, uint64_t next, uint64_t third, uint64_t d1, uint64_t d0)
{
    if (top >= d1)
        return UINT64_MAX; /* too large by at most two; the add-back below repeats */
    u128 head = (u128)top << 64 | next;
    u128 digit = head / d1, rest = head % d1;
    while ((uint64_t)(rest >> 64) == 0 && digit * d0 > (rest << 64 | third)) {
        digit--;
        rest += d1;
    }
    return (uint64_t)digit;
}

/* window[0 .. words] -= digit * divisor, digit lowered until the result is not negative. */
static void subtract_multiple(uint64_t *window, const uint64_t *divisor, size_t words, uint64_t digit)
{
    u128 carry = 0;
    uint64_t borrow = 0;
    for (size_t k = 0; k < words; k++) {
        carry += (u128)divisor[k] * digit;
        u128 difference = (u128)window[k] - (uint64_t)carry - borrow;
        window[k] = (uint64_t)difference;
        borrow = (uint64_t)(difference >> 64) & 1;
        carry >>= 64;
    }
    u128 difference = (u128)window[words] - (uint64_t)carry - borrow;
    window[words] = (uint64_t)difference;
    while (window[words]) { /* only a negative result leaves anything here */
        u128 sum = 0;
        for (size_t k = 0; k < words; k++) {
            sum += (u128)window[k] + divisor[k];
            window[k] = (uint64_t)sum;
            sum >>= 64;
        }
        window[words] += (uint64_t)sum;
    }
}

/* number[0 .. n) modulo divisor >> shift, in place; number[n - 1] must be 0 and n > words. The divisor's top bit is
 * set. The remainder is left in number[0 .. words), the rest is 0. */
void vb_remainder(uint64_t *number, size_t n, const uint64_t *divisor, size_t words, unsigned shift)
{
    if (shift)
        for (size_t k = n; k-- > 0;)
            number[k] = number[k] << shift | (k ? number[k - 1] >> (64 - shift) : 0);
    uint64_t d1 = divisor[words - 1], d0 = words > 1 ? divisor[words - 2] : 0;
    for (size_t j = n - words; j-- > 0;) {
        uint64_t third = words > 1 ? number[j + words - 2] : 0;
        uint64_t digit = quotient_digit(number[j + words], number[j + words - 1], third, d1, d0);
        subtract_multiple(number + j, divisor, words, digit);
    }
    if (shift)
        for (size_t k = 0; k < words; k++)
            number[k] = number[k] >> shift | number[k + 1] << (64 - shift);
}
