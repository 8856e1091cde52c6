/* Scalars: compared with a bound, and as signed digits. */
#include "curve.h"

#include <string.h>

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
