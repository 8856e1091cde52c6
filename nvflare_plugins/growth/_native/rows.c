/* Rows: their bins, sums and nodes, for codes of each width. */
#include "growth.h"

#include <string.h>

/* A number's bin: how many upper bounds are not above it. A category's: the first that is not below it. */
static inline size_t bin_of(const float *upper, size_t n_bins, float value, int is_categorical)
{
    size_t low = 0, n = n_bins;
    if (is_categorical)
        value = (float)(value < 0 ? 0 : value > 0x1p30f ? 0x1p30f : (float)(int64_t)value);
    while (n > 0) {
        size_t half = n / 2;
        int is_above = is_categorical ? upper[low + half] < value : upper[low + half] <= value;
        low += is_above ? half + 1 : 0;
        n = is_above ? n - half - 1 : half;
    }
    return low < n_bins ? low : n_bins ? n_bins - 1 : 0;
}

#define CODE uint8_t
#define NAME vg_codes_1
#define CODES(name) name##_1
#include "codes.h"

#define CODE uint16_t
#define NAME vg_codes_2
#define CODES(name) name##_2
#include "codes.h"

#define CODE uint32_t
#define NAME vg_codes_4
#define CODES(name) name##_4
#include "codes.h"
