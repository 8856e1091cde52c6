/* Inner products modulo p = 2^61 - 1: what the instruction-set files share.
 *
 * Values are signed 64-bit integers, coefficients unsigned ones, of any size: what does not fit the products is folded
 * by 2^61 = 1 (mod p) when it is read. Results are canonical, below p. Nothing here branches on a value or looks one up
 * in a table.
 */
#ifndef VEILBOOST_FIELD_H
#define VEILBOOST_FIELD_H

#include <stddef.h>
#include <stdint.h>

#if !defined(__SIZEOF_INT128__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the native field needs a little-endian 64-bit target with __int128; numpy takes over"
#endif

#if defined(__x86_64__) && !defined(VEILBOOST_PORTABLE) // which tests define, to be without x86 anywhere
#define VF_X86 1
#else
#define VF_X86 0
#endif

typedef unsigned __int128 vf_u128;

#define VF_BITS 61
#define VF_P ((((uint64_t)1) << VF_BITS) - 1)

#define VF_LARGEST ((int64_t)(VF_P >> 1)) /* half of p: what a checked value may be in magnitude */
#define VF_SHIFT (5 * VF_P) /* a multiple of p that takes a negative value, read as unsigned, to a positive one */

/* The operation of one instruction set: out[k] = sum of values[i] * coefficients[k][i] modulo p, for both k in one pass
 * over values. The top bit of *too_large is set where a value exceeds VF_LARGEST in magnitude. */
struct vf_kernel {
    const char *name;
    void (*dots)(const int64_t *values, const uint64_t *const coefficients[2], size_t n, uint64_t out[2],
                 uint64_t *too_large);
};

extern const struct vf_kernel vf_portable;
#if VF_X86
extern const struct vf_kernel vf_avx2, vf_ifma;
#endif

/* A residue of at most 2^61 + 2. A right shift of a negative number keeps its sign in every compiler that we know. */
static inline uint64_t vf_fold_signed(int64_t value)
{
    int64_t sum = (int64_t)((uint64_t)value & VF_P) + (value >> VF_BITS);
    return (uint64_t)(sum + (int64_t)(VF_P & (uint64_t)(sum >> 63)));
}

/* A number whose top bit is set where a value exceeds VF_LARGEST in magnitude: one of the sums is negative. */
static inline uint64_t vf_too_large(int64_t value)
{
    return ((uint64_t)VF_LARGEST + (uint64_t)value) | ((uint64_t)VF_LARGEST - (uint64_t)value);
}

/* A residue of at most 2^61 + 6. */
static inline uint64_t vf_fold(uint64_t value)
{
    return (value & VF_P) + (value >> VF_BITS);
}

/* The canonical residue of any 128-bit number. */
static inline uint64_t vf_reduce(vf_u128 value)
{
    uint64_t sum = ((uint64_t)value & VF_P) + ((uint64_t)(value >> VF_BITS) & VF_P) + (uint64_t)(value >> 2 * VF_BITS);
    sum = vf_fold(sum);
    return sum >= VF_P ? sum - VF_P : sum;
}

#endif
