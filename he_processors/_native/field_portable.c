/* Any 64-bit machine: one product at a time in unsigned __int128. */
#include "field.h"

#define STEP 32 /* products, each below 2^123, until the sum is folded: with what is carried over below 2^128 */

static void dots(const int64_t *values, const uint64_t *const coefficients[2], size_t n, uint64_t out[2],
                 uint64_t *too_large)
{
    out[0] = out[1] = 0;
    for (size_t i = 0; i < n;) {
        size_t end = n - i > STEP ? i + STEP : n;
        vf_u128 first = out[0], second = out[1];
        for (; i < end; i++) {
            uint64_t x = vf_fold_signed(values[i]);
            *too_large |= vf_too_large(values[i]);
            first += (vf_u128)x * vf_fold(coefficients[0][i]);
            second += (vf_u128)x * vf_fold(coefficients[1][i]);
        }
        out[0] = vf_reduce(first);
        out[1] = vf_reduce(second);
    }
}

const struct vf_kernel vf_portable = {"portable", dots};
