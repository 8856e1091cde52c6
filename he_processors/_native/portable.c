/* Any 64-bit machine: one number at a time, 64-bit limbs, products in unsigned __int128. */
#include "bignum.h"

#include <string.h>

#define NAME "portable"
#define KERNELS vb_portable
#define LANES 1
#define LIMB_BITS 64
typedef uint64_t limb_t;
typedef uint64_t word_t;
typedef unsigned __int128 u128;

/* a = a * b / R modulo S: operand scanning, the quotient digit is the lowest limb itself because S = -1 mod 2^64. */
static void multiply(const struct vb_modulus *m, word_t *a, const word_t *b, word_t *sum)
{
    const uint64_t *s = m->scaled_plus1;
    size_t limbs = m->limbs;
    memset(sum, 0, limbs * sizeof(word_t));
    for (size_t i = 0; i < limbs; i++) {
        u128 product = (u128)a[0] * b[i] + sum[0], carry = 0;
        uint64_t digit = (uint64_t)product;
        product >>= 64;
        for (size_t k = 1; k < limbs; k++) {
            product += (u128)a[k] * b[i] + sum[k];
            carry += (u128)s[k] * digit + (uint64_t)product;
            sum[k - 1] = (uint64_t)carry;
            product >>= 64;
            carry >>= 64;
        }
        sum[limbs - 1] = (uint64_t)(product + carry);
    }
    memcpy(a, sum, limbs * sizeof(word_t));
}

static void square(const struct vb_modulus *m, word_t *a, word_t *sum)
{
    multiply(m, a, a, sum);
}

static void load(const struct vb_modulus *m, word_t *group, const limb_t *const rows[LANES])
{
    memcpy(group, rows[0], m->limbs * sizeof(limb_t));
}

#include "lanes.h"
