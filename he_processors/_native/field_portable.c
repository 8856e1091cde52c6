/* Any 64-bit machine: one product at a time in unsigned __int128. */
#include "field.h"

#define STEP 32 /* products, each below 2^123, until the sum is folded: with what is carried over below 2^128 */

static uint64_t dot(const int64_t *values, const uint64_t *coefficients, size_t n)
{
    uint64_t total = 0;
    for (size_t i = 0; i < n;) {
        size_t end = n - i > STEP ? i + STEP : n;
        vf_u128 sum = total;
        for (; i < end; i++)
            sum += (vf_u128)vf_fold_signed(values[i]) * vf_fold(coefficients[i]);
        total = vf_reduce(sum);
    }
    return total;
}

const struct vf_kernel vf_portable = {"portable", dot};
