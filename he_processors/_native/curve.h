/* Batches of points of edwards25519: what the instruction-set files share.
 *
 * Points. The curve is -x^2 + y^2 = 1 + d x^2 y^2 modulo p = 2^255 - 19. A point is one row of 64-bit words, in one of
 * two forms, five words a field element, in the radix of the instruction set:
 *   extended  X, Y, Z, T   with x = X/Z, y = Y/Z, T = XY/Z                  VC_POINT_WORDS
 *   affine    y + x, y - x, 2dxy, and a word that keeps rows on cache lines  VC_AFFINE_WORDS
 * The neutral point is the same words in every radix. Formulas are complete (d is no square, -1 is one): nothing below
 * asks whether points are equal, opposite, neutral or of small order.
 *
 * Reference: Hisil, Wong, Carter, Dawson, "Twisted Edwards curves revisited", sections 3.1 and 3.3.
 *
 * Nothing here runs in constant time: the timing side channel on one's own machine is outside the threat model
 * (SECURITY.md).
 */
#ifndef VEILBOOST_CURVE_H
#define VEILBOOST_CURVE_H

#include <stddef.h>
#include <stdint.h>

#if !defined(__SIZEOF_INT128__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the native backend needs a little-endian 64-bit target with __int128; the Python backend takes over"
#endif

#if defined(__x86_64__) && !defined(VEILBOOST_PORTABLE) // which tests define, to be without x86 anywhere
#define VC_X86 1
#else
#define VC_X86 0
#endif

#define VC_POINT_WORDS 20
#define VC_AFFINE_WORDS 16
#define VC_SCALAR_BYTES 32
#define VC_MAX_WINDOW 15
#define VC_MAX_WINDOWS 257 /* of a scalar: one bit each */
#define VC_MAX_BUCKETS 16

/* Rows to add, points[order[start .. start + length)], and the row of the output that takes the sum. */
struct vc_task {
    int64_t start;
    int64_t length;
    int64_t result;
};

/* A batch of rows in one of the two forms. */
struct vc_rows {
    const uint64_t *rows;
    int is_affine;
};

enum vc_form { VC_TO_BYTES, VC_TO_KEYS, VC_TO_AFFINE };

/* The operations of one instruction set. They return 0, or -1 when memory is short; those that read a peer's bytes
 * return 1 if a row is refused. Outputs are extended rows unless said otherwise, and never lie over the inputs. */
struct vc_kernels {
    const char *name;
    /* bytes[i * 64 ..] are x and y; out: affine rows. Refused: not canonical, not on the curve. */
    int (*from_affine)(const uint8_t *bytes, size_t n, uint64_t *out);
    /* bytes[i * 32 ..] are y and, in the top bit, the lowest bit of x; out: affine rows. Refused: not canonical, no point
     * of the curve has this y, or x is zero and the bit set. */
    int (*from_compressed)(const uint8_t *bytes, size_t n, uint64_t *out);
    /* bytes[i * 32 ..]; out: affine rows. Refused: not the canonical encoding of an element. */
    int (*from_ristretto)(const uint8_t *bytes, size_t n, uint64_t *out);
    int (*from_uniform)(const uint8_t *bytes, size_t n, uint64_t *out);
    int (*to_ristretto)(struct vc_rows points, size_t n, uint8_t *bytes);
    /* VC_TO_BYTES: uint8[n][64], x and y; VC_TO_KEYS: uint64[n], the low word of y, and odd[i], the lowest bit of x;
     * VC_TO_AFFINE: affine rows. */
    int (*normalise)(struct vc_rows points, size_t n, enum vc_form form, void *out, uint8_t *odd);
    int (*widen)(struct vc_rows points, size_t n, uint64_t *out);
    int (*add)(struct vc_rows a, struct vc_rows b, size_t n, uint64_t *out);
    /* out has the form of the points */
    int (*negate)(struct vc_rows points, size_t n, uint64_t *out);
    int (*twice)(struct vc_rows points, size_t times, size_t n, uint64_t *out);
    int (*equal)(struct vc_rows a, struct vc_rows b, size_t n, uint8_t *out);
    /* out[result] = sum of a task's points; tasks are served in the given order, longest first is best */
    int (*sums)(struct vc_rows points, const int32_t *order, const struct vc_task *tasks, size_t n_tasks,
                uint64_t *out);
    /* out[i] = 2^(window * i) base */
    int (*ladder)(struct vc_rows base, unsigned window, size_t n, uint64_t *out);
    /* out[i * (2^(window - 1) + 1) + d] = d bases[i] */
    int (*table)(struct vc_rows bases, unsigned window, size_t n, uint64_t *out);
    /* out[i] = scalar i times the base of an affine table; bits that need more than n_windows are ignored */
    int (*fixed_mul)(const uint64_t *table, unsigned window, size_t n_windows, const uint8_t *scalars, size_t width,
                     size_t n, uint64_t *out);
    /* out[i] = scalar i times point i */
    int (*mul)(struct vc_rows points, const uint8_t *scalars, size_t n, uint64_t *out);
    /* out[k * n + i] = scalar k times point i; digits[k * n_digits ..] is scalar k: even digits are zero, odd ones at
     * most 2 * n_buckets - 1 */
    int (*mul_each)(struct vc_rows points, const int8_t *digits, size_t n_digits, size_t n_scalars, size_t n_buckets,
                    size_t n, uint64_t *out);
};

extern const struct vc_kernels vc_portable;
#if VC_X86
extern const struct vc_kernels vc_avx2, vc_ifma;
#endif

/* Scalars (curve_scalars.c): little-endian numbers of `width` bytes, and a bound of 32. */
int vc_all_below(const uint8_t *numbers, size_t width, size_t n, const uint8_t *bound);
void vc_signed_digits(const uint8_t *scalar, size_t width, unsigned window, size_t n_windows, int16_t *digits);
/* factor * scalar + shift modulo the group order, for scalars of 32 bytes; the factor comes times 2^256. */
void vc_scale(const uint8_t *scalars, size_t n, const uint8_t *factor, const uint8_t *shift, uint8_t *out);

#endif
