/* The best split by a threshold, written once for all instruction sets; the including file defines SCAN, the table's
 * name, and INSTRUCTIONS. Candidates are laid out as arrays, so that the compiler takes as many at a time as fit. A bin
 * that adds nothing repeats the candidate before it, which is never strictly better: it is left out. */
#include <math.h>

#define ALWAYS static inline __attribute__((always_inline))

struct candidates {
    double *left_g, *left_h, *right_g, *right_h;
    float *changes;
    int32_t *bins;
    size_t n;
};

ALWAYS float weight_of(const struct vg_formula *m, int kind, int is_constrained, double g, double h, float lower,
                       float upper)
{
    double cut = g > m->alpha ? g - m->alpha : g < -m->alpha ? g + m->alpha : 0.0;
    double weight = -cut / (h + m->lambda);
    weight = fabs(weight) > m->most_weight ? copysign(m->most_weight, weight) : weight;
    int has_none = kind == VG_WIDE_WEIGHT ? h <= 0 : (h < m->least_hessian) | (h <= 0);
    float rounded = has_none ? 0.0f : (float)weight;
    if (is_constrained)
        rounded = rounded < lower ? lower : rounded > upper ? upper : rounded;
    return rounded;
}

ALWAYS float gain_of(const struct vg_formula *m, int kind, double g, double h, float weight)
{
    float gain;
    if (kind == VG_RATIO) {
        double cut = g > m->alpha ? g - m->alpha : g < -m->alpha ? g + m->alpha : 0.0;
        gain = (float)(cut * cut) / (float)(h + m->lambda);
    } else if (kind == VG_WEIGHT) {
        gain = -(2.0f * (float)g * weight + ((float)h + (float)m->lambda) * (weight * weight));
    } else {
        double wide = weight, square = weight * weight;
        gain = (float)-(2.0 * g * wide + (h + m->lambda) * square + 2.0 * m->alpha * fabs(wide));
    }
    return h <= 0 ? 0.0f : gain;
}

ALWAYS void changes_of(const struct vg_formula *m, int kind, int is_constrained, int direction,
                       const struct vg_question *q, struct candidates *c)
{
    const double *restrict l_g = c->left_g, *restrict l_h = c->left_h;
    const double *restrict r_g = c->right_g, *restrict r_h = c->right_h;
    float *restrict changes = c->changes;
    const float root_gain = q->root_gain, lower = q->lower, upper = q->upper;
    const struct vg_formula formula = *m;
    for (size_t i = 0, n = c->n; i < n; i++) {
        double left_g = l_g[i], left_h = l_h[i], right_g = r_g[i], right_h = r_h[i];
        float left_weight = 0.0f, right_weight = 0.0f;
        if (kind != VG_RATIO) {
            left_weight = weight_of(&formula, kind, is_constrained, left_g, left_h, lower, upper);
            right_weight = weight_of(&formula, kind, is_constrained, right_g, right_h, lower, upper);
        }
        float gain = gain_of(&formula, kind, left_g, left_h, left_weight) + gain_of(&formula, kind, right_g, right_h, right_weight);
        float change = gain - root_gain;
        int is_valid = (left_h >= formula.least_hessian) & (right_h >= formula.least_hessian);
        if (kind == VG_WIDE_WEIGHT)
            is_valid &= (left_h > 0) & (right_h > 0);
        if (is_constrained)
            is_valid &= (direction == 0) | ((direction > 0) & (left_weight <= right_weight)) |
                        ((direction < 0) & (left_weight >= right_weight));
        is_valid &= fabsf(change) < INFINITY; /* no NaN either */
        changes[i] = is_valid ? change : -INFINITY;
    }
}

static void changes_by_kind(const struct vg_formula *m, int direction, const struct vg_question *q,
                            struct candidates *c)
{
    if (m->kind == VG_RATIO)
        changes_of(m, VG_RATIO, 0, 0, q, c);
    else if (m->kind == VG_WEIGHT && !m->is_constrained)
        changes_of(m, VG_WEIGHT, 0, 0, q, c);
    else if (m->kind == VG_WEIGHT)
        changes_of(m, VG_WEIGHT, 1, direction, q, c);
    else if (!m->is_constrained)
        changes_of(m, VG_WIDE_WEIGHT, 0, 0, q, c);
    else
        changes_of(m, VG_WIDE_WEIGHT, 1, direction, q, c);
}

ALWAYS void enter(const struct vg_formula *m, const struct vg_question *q, struct candidates *c, uint64_t left_g,
                  uint64_t left_h, size_t bin)
{
    c->left_g[c->n] = (double)(int64_t)left_g * m->g_step;
    c->left_h[c->n] = (double)(int64_t)left_h * m->h_step;
    c->right_g[c->n] = (double)(int64_t)((uint64_t)q->g - left_g) * m->g_step;
    c->right_h[c->n] = (double)(int64_t)((uint64_t)q->h - left_h) * m->h_step;
    c->bins[c->n++] = (int32_t)bin;
}

/* Returns the index of the first of the largest changes above `best`, or -1. */
static int64_t largest(const struct candidates *c, float *best)
{
    int64_t found = -1;
    for (size_t i = 0; i < c->n; i++)
        if (c->changes[i] > *best) {
            *best = c->changes[i];
            found = (int64_t)i;
        }
    return found;
}

static float best_split(const struct vg_formula *m, const struct vg_facts *facts, const struct vg_question *q,
                        double *scratch, struct vg_split *split)
{
    size_t room = facts->most_bins;
    struct candidates c = {scratch,
                           scratch + room,
                           scratch + 2 * room,
                           scratch + 3 * room,
                           (float *)(scratch + 4 * room),
                           (int32_t *)(scratch + 5 * room),
                           0};
    float best = 0.0f;
    for (size_t f = 0; f < facts->n_features; f++) {
        if (!q->allowed[f])
            continue;
        const vg_pair *sums = q->sums + facts->starts[f];
        size_t n_bins = (size_t)(facts->starts[f + 1] - facts->starts[f]);
        uint64_t g = 0, h = 0;
        int64_t found;
        c.n = 0;
        for (size_t i = 0; i < n_bins; i++) {
            g += (uint64_t)sums[i][0];
            h += (uint64_t)sums[i][1];
            if ((sums[i][0] | sums[i][1]) != 0 || i == 0)
                enter(m, q, &c, g, h, i);
        }
        changes_by_kind(m, facts->monotone[f], q, &c);
        if ((found = largest(&c, &best)) >= 0)
            *split = (struct vg_split){(int64_t)f, c.bins[found], 0, 0, 0};
        uint64_t left_g = (uint64_t)q->g, left_h = (uint64_t)q->h;
        if (g == left_g && h == left_h)
            continue; /* no value is missing */
        c.n = 0;
        for (size_t i = n_bins; i-- > 0;) {
            left_g -= (uint64_t)sums[i][0];
            left_h -= (uint64_t)sums[i][1];
            if ((sums[i][0] | sums[i][1]) != 0 || i + 1 == n_bins)
                enter(m, q, &c, left_g, left_h, i);
        }
        changes_by_kind(m, facts->monotone[f], q, &c);
        if ((found = largest(&c, &best)) >= 0)
            *split = (struct vg_split){(int64_t)f, c.bins[found] - 1, 1, 0, 0};
    }
    if (best > 0.0f) { /* its exact sums */
        const vg_pair *sums = q->sums + facts->starts[split->feature];
        int64_t n_bins = facts->starts[split->feature + 1] - facts->starts[split->feature];
        uint64_t g = 0, h = 0;
        int64_t begin = split->default_left ? split->bin + 1 : 0, end = split->default_left ? n_bins : split->bin + 1;
        for (int64_t i = begin; i < end; i++) {
            g += (uint64_t)sums[i][0];
            h += (uint64_t)sums[i][1];
        }
        split->g = (int64_t)(split->default_left ? (uint64_t)q->g - g : g);
        split->h = (int64_t)(split->default_left ? (uint64_t)q->h - h : h);
    }
    return best;
}

const struct vg_scan SCAN = {INSTRUCTIONS, best_split};
