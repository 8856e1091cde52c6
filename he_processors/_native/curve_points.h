/* Points, LANES at a time, written once for all instruction sets. The including file defines
 *
 *   LANES, INLINE, UNROLL, NAME, KERNELS; vec (LANES words of 64 bits), fe (LANES elements), mask (LANES truths)
 *   sum, diff              raw results of tight elements; settle, settle_wide: raw to a factor of products
 *   mul, square, tight     tight results of settled (or tight) elements
 *   from_words, to_words   four words of a number below 2^255, and the canonical ones; from_row, to_row: five words
 *   all, same, both, not, lanes_of, of_lanes, choose, load_words, store_words
 *
 * The three kinds of element are described in each of these files. settle takes combinations of at most three tight
 * elements; settle_wide of four, whose result may only be the first factor of a product.
 */
#include <stdlib.h>
#include <string.h>

static const uint64_t ONE[4] = {1, 0, 0, 0};
static const uint64_t D[4] = {0x75EB4DCA135978A3, 0x00700A4D4141D8AB, 0x8CC740797779E898, 0x52036CEE2B6FFE73};
static const uint64_t TWO_D[4] = {0xEBD69B9426B2F159, 0x00E0149A8283B156, 0x198E80F2EEF3D130, 0x2406D9DC56DFFCE7};
static const uint64_t INVERSE_D[4] = {0x25E0F276CDC9F843, 0x0B5DD6984279542E, 0x2B162114CDB9CF66, 0x40907ED214D5CE43};

static const uint64_t NEUTRAL_POINT[VC_POINT_WORDS] = {[5] = 1, [10] = 1};
static const uint64_t NEUTRAL_AFFINE[VC_AFFINE_WORDS] = {[0] = 1, [5] = 1};

/* Extended coordinates; all four tight. */
struct point {
    fe x, y, z, t;
};

/* y + x, y - x, 2dxy of an affine point; all three settled. */
struct affine {
    fe sum, diff, t2d;
};

/* Y + X, Y - X, 2Z, 2dT: a point that is to be added; all four settled. */
struct cached {
    fe sum, diff, z2, t2d;
};

INLINE fe constant(const uint64_t *words)
{
    const vec w[4] = {all((int64_t)words[0]), all((int64_t)words[1]), all((int64_t)words[2]), all((int64_t)words[3])};
    return from_words(w);
}

INLINE fe negative(fe a)
{
    const vec zero[4] = {all(0), all(0), all(0), all(0)};
    return tight(settle(diff(from_words(zero), a)));
}

INLINE mask same_words(const vec *a, const vec *b)
{
    return both(both(same(a[0], b[0]), same(a[1], b[1])), both(same(a[2], b[2]), same(a[3], b[3])));
}

INLINE mask is_zero(fe a)
{
    const vec zero[4] = {all(0), all(0), all(0), all(0)};
    vec w[4];
    to_words(a, w);
    return same_words(w, zero);
}

/* a^(2^250 - 1) and a^11: what both powers below begin with. */
static void power_of_ones(const fe *a, fe *ones, fe *eleven)
{
    static const struct {
        int squarings, with; /* after so many squarings, multiply by an earlier step */
    } step[] = {{5, 0}, {10, 1}, {20, 2}, {10, 1}, {50, 4}, {100, 5}, {50, 4}};
    fe made[8], two = square(*a), nine = mul(square(square(two)), *a);
    *eleven = mul(nine, two);
    made[0] = mul(square(*eleven), nine); /* 2^5 - 1 */
    for (int s = 0; s < 7; s++) {
        fe x = made[s];
        for (int k = 0; k < step[s].squarings; k++)
            x = square(x);
        made[s + 1] = mul(x, made[step[s].with]);
    }
    *ones = made[7];
}

/* a^(p - 2): the inverse, or 0. */
static fe inverse(fe a)
{
    fe ones, eleven;
    power_of_ones(&a, &ones, &eleven);
    for (int k = 0; k < 5; k++)
        ones = square(ones);
    return mul(ones, eleven);
}

/* a^((p - 5) / 8). */
static fe root_power(fe a)
{
    fe ones, eleven;
    power_of_ones(&a, &ones, &eleven);
    return mul(square(square(ones)), a);
}

/* The last step of every addition and doubling: (E F : G H : F G : E H). F may be a combination of four. */
INLINE struct point finish(fe e, fe f, fe g, fe h)
{
    return (struct point){mul(f, e), mul(g, h), mul(f, g), mul(e, h)};
}

INLINE struct point add_affine(const struct point *p, const struct affine *q)
{
    fe a = mul(settle(diff(p->y, p->x)), q->diff), b = mul(settle(sum(p->y, p->x)), q->sum);
    fe c = mul(p->t, q->t2d), d = sum(p->z, p->z);
    return finish(settle(diff(b, a)), settle(diff(d, c)), settle(sum(d, c)), settle(sum(b, a)));
}

/* p + q, or p - q in the lanes of the mask: minus q has the first two changed over, and the opposite product c. */
INLINE struct point add_signed(const struct point *p, const struct affine *q, mask minus)
{
    fe a = mul(settle(diff(p->y, p->x)), choose(minus, q->sum, q->diff));
    fe b = mul(settle(sum(p->y, p->x)), choose(minus, q->diff, q->sum));
    fe c = mul(p->t, q->t2d), d = sum(p->z, p->z), f = settle(diff(d, c)), g = settle(sum(d, c));
    return finish(settle(diff(b, a)), choose(minus, g, f), choose(minus, f, g), settle(sum(b, a)));
}

INLINE struct point add_cached(const struct point *p, const struct cached *q)
{
    fe a = mul(settle(diff(p->y, p->x)), q->diff), b = mul(settle(sum(p->y, p->x)), q->sum);
    fe c = mul(p->t, q->t2d), d = mul(p->z, q->z2);
    return finish(settle(diff(b, a)), settle(diff(d, c)), settle(sum(d, c)), settle(sum(b, a)));
}

INLINE struct point subtract_cached(const struct point *p, const struct cached *q)
{
    fe a = mul(settle(diff(p->y, p->x)), q->sum), b = mul(settle(sum(p->y, p->x)), q->diff);
    fe c = mul(p->t, q->t2d), d = mul(p->z, q->z2);
    return finish(settle(diff(b, a)), settle(sum(d, c)), settle(diff(d, c)), settle(sum(b, a)));
}

/* All four of E, F, G, H with the opposite sign of the paper's where that saves a bias: the same point. T is only made
 * if the point is to be added to something. */
INLINE struct point twice(const struct point *p, int with_t)
{
    fe a = square(p->x), b = square(p->y), c = square(p->z), s = square(settle(sum(p->x, p->y)));
    fe e = settle(diff(diff(s, a), b)), f = settle_wide(diff(sum(sum(c, c), a), b));
    fe g = settle(diff(b, a)), h = settle(sum(a, b));
    return (struct point){mul(f, e), mul(g, h), mul(f, g), with_t ? mul(e, h) : p->t};
}

INLINE struct cached cache(const struct point *p)
{
    return (struct cached){settle(sum(p->y, p->x)), settle(diff(p->y, p->x)), settle(sum(p->z, p->z)),
                           mul(p->t, constant(TWO_D))};
}

INLINE struct point neutral(void)
{
    const vec zero[4] = {all(0), all(0), all(0), all(0)};
    fe none = from_words(zero), one = constant(ONE);
    return (struct point){none, one, one, none};
}

/* An affine point as (2x : 2y : 2 : 2xy). */
INLINE struct point widen(const struct affine *q)
{
    fe one = constant(ONE);
    return (struct point){tight(settle(diff(q->sum, q->diff))), tight(settle(sum(q->sum, q->diff))),
                          tight(settle(sum(one, one))), mul(q->t2d, constant(INVERSE_D))};
}

/* x and y, tight, to the affine form. */
INLINE struct affine affine_of(fe x, fe y)
{
    return (struct affine){tight(settle(sum(y, x))), tight(settle(diff(y, x))), mul(mul(x, y), constant(TWO_D))};
}

INLINE struct point choose_point(mask m, struct point a, const struct point *b)
{
    return (struct point){choose(m, a.x, b->x), choose(m, a.y, b->y), choose(m, a.z, b->z), choose(m, a.t, b->t)};
}

INLINE void point_words(const struct point *p, vec *w)
{
    to_row(p->x, w);
    to_row(p->y, w + 5);
    to_row(p->z, w + 10);
    to_row(p->t, w + 15);
}

INLINE struct affine load_affine(const uint64_t *const *rows)
{
    vec w[16];
    load_words(w, rows, VC_AFFINE_WORDS);
    return (struct affine){from_row(w), from_row(w + 5), from_row(w + 10)};
}

INLINE struct point load_point(const uint64_t *const *rows)
{
    vec w[24];
    load_words(w, rows, VC_POINT_WORDS);
    return (struct point){from_row(w), from_row(w + 5), from_row(w + 10), from_row(w + 15)};
}

/* Rows i, i + 1, ... for the lanes; lanes from `count` on get the row `spare`. */
INLINE void lane_rows(const uint64_t **row, const uint64_t *rows, size_t words, size_t i, size_t count,
                      const uint64_t *spare)
{
    for (size_t l = 0; l < LANES; l++)
        row[l] = i + l < count ? rows + (i + l) * words : spare;
}

/* Up to LANES points from row i on, in extended coordinates whatever their form. */
static struct point load_any(struct vc_rows p, size_t i, size_t n)
{
    const uint64_t *row[LANES];
    if (!p.is_affine) {
        lane_rows(row, p.rows, VC_POINT_WORDS, i, n, NEUTRAL_POINT);
        return load_point(row);
    }
    lane_rows(row, p.rows, VC_AFFINE_WORDS, i, n, NEUTRAL_AFFINE);
    struct affine q = load_affine(row);
    return widen(&q);
}

INLINE void store_rows(const vec *w, uint64_t *rows, int words, size_t stride, size_t i, size_t n)
{
    uint64_t spare[VC_POINT_WORDS], *row[LANES];
    for (size_t l = 0; l < LANES; l++)
        row[l] = i + l < n ? rows + (i + l) * stride : spare;
    store_words(w, row, words);
}

static void store_point(const struct point *p, uint64_t *rows, size_t i, size_t n)
{
    vec w[24];
    point_words(p, w);
    store_rows(w, rows, VC_POINT_WORDS, VC_POINT_WORDS, i, n);
}

/* The three parts have to be tight. */
static void store_affine(const struct affine *q, uint64_t *rows, size_t i, size_t n)
{
    vec w[16];
    to_row(q->sum, w);
    to_row(q->diff, w + 5);
    to_row(q->t2d, w + 10);
    w[15] = all(0);
    store_rows(w, rows, VC_AFFINE_WORDS, VC_AFFINE_WORDS, i, n);
}

/* Memory on a cache line for `size` bytes; NULL if there is none. */
static void *allocate(size_t size)
{
    return aligned_alloc(64, (size + 63) / 64 * 64 + 64);
}
