/* Batches of big numbers modulo one odd number: what the instruction-set files share.
 *
 * Representation. A residue x modulo N is a row of `limbs` limbs of `limb_bits` bits, least significant first. It holds
 * x * R modulo S, where S = c * N is the *scaled modulus*, c = -1/N modulo 2^limb_bits, and R = 2^(limb_bits * limbs)
 * is at least 16 * S. Because S = -1 modulo 2^limb_bits, the Montgomery quotient digit of a column is the column
 * itself: no multiplication by -1/N stands between two columns. Rows are "almost reduced": below 2 * S, not below N;
 * a product of two numbers below 4 * S is below 2 * S again. Only leaving for the wire reduces modulo N.
 *
 * Nothing here runs in constant time, and tables are indexed by secret digits: the timing side channel on the machine
 * of the key owner is outside the threat model (SECURITY.md).
 */
#ifndef VEILBOOST_BIGNUM_H
#define VEILBOOST_BIGNUM_H

#include <stddef.h>
#include <stdint.h>

#if !defined(__SIZEOF_INT128__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the native backend needs a little-endian 64-bit target with __int128; the Python backends take over"
#endif

#if defined(__x86_64__) && !defined(VEILBOOST_PORTABLE) // which tests define, to be without x86 anywhere
#define VB_X86 1
#else
#define VB_X86 0
#endif

struct vb_kernels;

struct vb_modulus {
    const struct vb_kernels *kernels;
    size_t limbs;           /* limbs of a row */
    size_t width;           /* bytes of a residue on the wire */
    size_t words;           /* 64-bit words of N */
    unsigned shift;         /* leading zero bits of N's top word */
    uint64_t *divisor;      /* N << shift */
    uint64_t *scaled_plus1; /* limbs of S + 1; the lowest is 0 */
    void *one;              /* row: R mod N, the residue 1 */
    void *square;           /* row: R^2 mod N, carries a plain number into residue form */
};

/* One step of a sliding-window power: square `squarings` times, then multiply by the table's `entry` (none if < 0). */
struct vb_pow_step {
    int32_t squarings;
    int32_t entry;
};

/* A run of rows to multiply, rows order[start .. start + length), and the row of the output that takes the product. */
struct vb_task {
    int64_t start;
    int64_t length;
    int64_t result;
};

/* The operations of one instruction set. All return 0, or -1 when memory is short. Outputs may be the inputs. */
struct vb_kernels {
    const char *name;
    unsigned limb_bits;
    unsigned limb_bytes;
    unsigned lanes;
    /* out[i] = a[i] * b[i * b_step], b_step 0 or 1 */
    int (*mul)(const struct vb_modulus *m, const void *a, const void *b, size_t b_step, size_t n, void *out);
    /* out[i] = a[i] + b[i * b_step] */
    int (*add)(const struct vb_modulus *m, const void *a, const void *b, size_t b_step, size_t n, void *out);
    /* out[result] = product of the rows of a task; tasks are served in the given order, longest first is best */
    int (*products)(const struct vb_modulus *m, const void *rows, const int32_t *order, const struct vb_task *tasks,
                    size_t n_tasks, void *out);
    /* out[i] = base^(2^(window * i)) */
    int (*ladder)(const struct vb_modulus *m, const void *base, unsigned window, size_t n, void *out);
    /* out[i << window | d] = bases[i]^d */
    int (*table)(const struct vb_modulus *m, const void *bases, unsigned window, size_t n, void *out);
    /* out[i] = product over windows j of table[j << window | digit j of exponent i] */
    int (*powers)(const struct vb_modulus *m, const void *table, unsigned window, size_t n_windows,
                  const uint8_t *exponents, size_t exponent_width, size_t n, void *out);
    /* out[i] = rows[i]^e, e given as a program over the odd powers 1, 3, ..., 2 * n_odd - 1 */
    int (*pow_const)(const struct vb_modulus *m, const void *rows, const struct vb_pow_step *steps, size_t n_steps,
                     size_t n_odd, size_t n, void *out);
    /* out[g] = prod_j rows[g * group + j]^(2^(shift_bits * j)) */
    int (*horner)(const struct vb_modulus *m, const void *rows, size_t n, size_t group, size_t shift_bits, void *out);
    /* out[i] = residue of the little-endian number bytes[i * width .. + width), of any size */
    int (*enter)(const struct vb_modulus *m, const uint8_t *bytes, size_t width, size_t n, void *out);
    /* bytes[i] = rows[i] as canonical little-endian numbers of m->width bytes */
    int (*leave)(const struct vb_modulus *m, const void *rows, size_t n, uint8_t *bytes);
};

extern const struct vb_kernels vb_portable;
#if VB_X86
extern const struct vb_kernels vb_avx2, vb_ifma;
#endif

/* Plain integers in 64-bit words (words.c). */
uint64_t vb_bits(const uint8_t *bytes, size_t size, size_t offset, unsigned count);
void vb_split(const uint8_t *bytes, size_t size, unsigned limb_bits, unsigned limb_bytes, size_t limbs, void *out);
void vb_to_words(const uint8_t *bytes, size_t size, size_t words, uint64_t *out);
unsigned vb_normalise(uint64_t *divisor, size_t words);
void vb_remainder(uint64_t *number, size_t n, const uint64_t *divisor, size_t words, unsigned shift);

#endif
