/* Growing trees: rows in bins, sums of pairs in bins, division of nodes, best splits. The numpy twins of all of it are
 * in nvflare_plugins/growth; results are equal to the bit. Compiled without contraction, so that every operation rounds
 * as numpy's does. Codes come from `bin` alone and are not checked again. */
#ifndef VEILBOOST_GROWTH_H
#define VEILBOOST_GROWTH_H

#include <stddef.h>
#include <stdint.h>

/* What the Python side asks for (__init__.py): raise both with every change of the C sources. */
#define INTERFACE 3

#if defined(__x86_64__) && defined(__GNUC__)
#define VG_X86 1
#else
#define VG_X86 0
#endif

typedef int64_t vg_pair __attribute__((vector_size(16), aligned(8))); /* (g, h), or a sum of such */

/* Rows in bins: codes[n_rows][n_features] of 1, 2 or 4 bytes; missing[n_features]. */
struct vg_table {
    const void *codes;
    size_t n_rows, n_features;
    const uint32_t *missing;
};

/* Bins of all features, one feature after the other. */
struct vg_layout {
    const float *upper;
    const int64_t *starts;
    const uint8_t *is_categorical;
    size_t n_features;
};

/* The rows order[begin] to order[end - 1] of a node, or these rows themselves where there is no order. */
struct vg_span {
    int64_t begin, end;
};

/* How a span's rows are divided; masks[mask + bin] tells which categories go right, unless mask is negative. */
struct vg_division {
    int64_t begin, end, feature, bin, default_left, mask;
};

/* A tree's nodes, for rows that go down it; left < 0 for a leaf. */
struct vg_node {
    int64_t left, right, feature, bin, default_left, mask;
};

/* The kernels of one type of codes; columns[n_features][n_rows] are the codes feature by feature. */
struct vg_codes {
    size_t width;
    void (*bin)(const struct vg_layout *layout, const float *values, size_t n_rows, const uint32_t *missing,
                void *codes, uint8_t *lacks, uint8_t *fills);
    void (*add)(const struct vg_table *table, const vg_pair *pairs, const int32_t *order, const struct vg_span *span,
                const int64_t *offsets, size_t stride, size_t first, size_t last, vg_pair *slots);
    int64_t (*divide)(const void *columns, size_t n_rows, uint32_t missing, const uint8_t *masks,
                      const struct vg_division *division, int32_t *order, int32_t *scratch);
    void (*descend)(const struct vg_table *table, const uint8_t *masks, const struct vg_node *nodes, int32_t *leaves);
};

extern const struct vg_codes vg_codes_1, vg_codes_2, vg_codes_4;

enum vg_kind { VG_RATIO, VG_WEIGHT, VG_WIDE_WEIGHT }; /* gains up to 3.3 without and with limited weights; from 3.4 */

struct vg_formula {
    double lambda, alpha, most_weight, least_hessian, g_step, h_step; /* most_weight: infinity for no limit */
    int64_t kind, is_constrained;
};

struct vg_facts {
    const int64_t *starts;
    const int8_t *monotone;
    size_t n_features, most_bins;
};

/* What is asked of a node, and what is found; change is 0 where there is no split. */
struct vg_question {
    const vg_pair *sums;
    const uint8_t *allowed;
    int64_t g, h;
    float root_gain, lower, upper;
};

struct vg_split {
    int64_t feature, bin, default_left, g, h;
};

/* The best split of a node's columns of numbers; scratch is for 8 * most_bins doubles. */
struct vg_scan {
    const char *name;
    float (*best)(const struct vg_formula *formula, const struct vg_facts *facts, const struct vg_question *question,
                  double *scratch, struct vg_split *split);
};

extern const struct vg_scan vg_scan_avx512, vg_scan_avx2, vg_scan_portable;

#endif
