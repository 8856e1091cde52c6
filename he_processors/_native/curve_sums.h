/* Sums and multiples of points, LANES at a time; and the table of operations. See curve_points.h. */
#define AHEAD 4 /* rows of a segment that are on their way from memory */

INLINE void prefetch_affine(const uint64_t *row)
{
    __builtin_prefetch(row);
    __builtin_prefetch(row + 8);
}

INLINE void prefetch_point(const uint64_t *row)
{
    prefetch_affine(row);
    __builtin_prefetch(row + VC_POINT_WORDS - 1);
}

static int widen_all(struct vc_rows p, size_t n, uint64_t *out)
{
    for (size_t i = 0; i < n; i += LANES) {
        struct point q = load_any(p, i, n);
        store_point(&q, out, i, n);
    }
    return 0;
}

static int add_all(struct vc_rows a, struct vc_rows b, size_t n, uint64_t *out)
{
    const struct vc_rows c = b.is_affine ? a : b, affine = b.is_affine ? b : a;
    for (size_t i = 0; i < n; i += LANES) {
        struct point p = load_any(c, i, n);
        if (affine.is_affine) {
            const uint64_t *row[LANES];
            lane_rows(row, affine.rows, VC_AFFINE_WORDS, i, n, NEUTRAL_AFFINE);
            struct affine q = load_affine(row);
            p = add_affine(&p, &q);
        } else {
            struct point other = load_any(affine, i, n);
            struct cached q = cache(&other);
            p = add_cached(&p, &q);
        }
        store_point(&p, out, i, n);
    }
    return 0;
}

static int negate(struct vc_rows p, size_t n, uint64_t *out)
{
    for (size_t i = 0; i < n; i += LANES) {
        const uint64_t *row[LANES];
        if (p.is_affine) {
            lane_rows(row, p.rows, VC_AFFINE_WORDS, i, n, NEUTRAL_AFFINE);
            struct affine q = load_affine(row), r = {q.diff, q.sum, negative(q.t2d)};
            store_affine(&r, out, i, n);
        } else {
            struct point q = load_any(p, i, n), r = {negative(q.x), q.y, q.z, negative(q.t)};
            store_point(&r, out, i, n);
        }
    }
    return 0;
}

static int twice_all(struct vc_rows p, size_t times, size_t n, uint64_t *out)
{
    for (size_t i = 0; i < n; i += LANES) {
        struct point q = load_any(p, i, n);
        for (size_t k = 0; k < times; k++)
            q = twice(&q, k + 1 == times);
        store_point(&q, out, i, n);
    }
    return 0;
}

static int equal(struct vc_rows a, struct vc_rows b, size_t n, uint8_t *out)
{
    for (size_t i = 0; i < n; i += LANES) {
        struct point p = load_any(a, i, n), q = load_any(b, i, n);
        mask x = is_zero(minus(mul(p.x, q.z), mul(q.x, p.z))), y = is_zero(minus(mul(p.y, q.z), mul(q.y, p.z)));
        unsigned bits = lanes_of(both(x, y));
        for (size_t l = 0; l < LANES && i + l < n; l++)
            out[i + l] = bits >> l & 1;
    }
    return 0;
}

/* The tasks of segment sums and which lane works on which. An idle lane keeps adding the neutral point. */
struct queue {
    const uint64_t *rows;
    size_t words;
    const int32_t *order;
    const struct vc_task *tasks;
    size_t n_tasks, next;
    uint64_t *out, *result[LANES];
    const int32_t *at[LANES], *end[LANES]; /* the next row to add; both NULL: idle */
    unsigned busy;
};

INLINE const uint64_t *row_at(const struct queue *q, const int32_t *at)
{
    return q->rows + (size_t)*at * q->words;
}

/* Give a lane its next task that has rows; the others are answered on the spot. */
static void refill(struct queue *q, unsigned lane)
{
    q->at[lane] = q->end[lane] = NULL;
    while (q->next < q->n_tasks) {
        const struct vc_task *task = &q->tasks[q->next++];
        uint64_t *result = q->out + (size_t)task->result * VC_POINT_WORDS;
        if (!task->length) {
            memcpy(result, NEUTRAL_POINT, sizeof NEUTRAL_POINT);
            continue;
        }
        q->result[lane] = result;
        q->at[lane] = q->order + task->start;
        q->end[lane] = q->at[lane] + task->length;
        q->busy++;
        for (int k = 0; k < AHEAD && k < task->length; k++)
            prefetch_point(row_at(q, q->at[lane] + k));
        return;
    }
}

/* The lanes whose tasks are done: their sums go out, they start anew at the neutral point. */
static void next_tasks(struct queue *q, struct point *total, unsigned done)
{
    vec w[24];
    uint64_t words[VC_POINT_WORDS][LANES];
    const struct point none = neutral();
    point_words(total, w);
    memcpy(words, w, sizeof words);
    for (unsigned l = 0; l < LANES; l++)
        if (done >> l & 1) {
            for (size_t k = 0; k < VC_POINT_WORDS; k++)
                q->result[l][k] = words[k][l];
            q->busy--;
            refill(q, l);
        }
    *total = choose_point(of_lanes(done), none, total);
}

INLINE void run_queue(struct queue *q, int is_affine)
{
    struct point total = neutral();
    for (unsigned l = 0; l < LANES; l++)
        refill(q, l);
    while (q->busy) {
        const uint64_t *row[LANES];
        unsigned done = 0;
        for (unsigned l = 0; l < LANES; l++) {
            if (!q->at[l]) {
                row[l] = is_affine ? NEUTRAL_AFFINE : NEUTRAL_POINT;
                continue;
            }
            row[l] = row_at(q, q->at[l]);
            if (q->end[l] - q->at[l] > AHEAD) {
                if (is_affine)
                    prefetch_affine(row_at(q, q->at[l] + AHEAD));
                else
                    prefetch_point(row_at(q, q->at[l] + AHEAD));
            }
            done |= (unsigned)(++q->at[l] == q->end[l]) << l;
        }
        if (is_affine) {
            struct affine p = load_affine(row);
            total = add_affine(&total, &p);
        } else {
            struct point p = load_point(row);
            struct cached c = cache(&p);
            total = add_cached(&total, &c);
        }
        if (done)
            next_tasks(q, &total, done);
    }
}

static int sums(struct vc_rows p, const int32_t *order, const struct vc_task *tasks, size_t n_tasks, uint64_t *out)
{
    struct queue q = {.rows = p.rows, .words = p.is_affine ? VC_AFFINE_WORDS : VC_POINT_WORDS, .order = order,
                      .tasks = tasks, .n_tasks = n_tasks, .out = out};
    if (p.is_affine)
        run_queue(&q, 1);
    else
        run_queue(&q, 0);
    return 0;
}

static int ladder(struct vc_rows base, unsigned window, size_t n, uint64_t *out)
{
    struct point p = load_any(base, 0, 1);
    for (size_t i = 0; i < n; i++) {
        store_point(&p, out, i, i + 1);
        for (unsigned k = 0; k < window; k++)
            p = twice(&p, k + 1 == window);
    }
    return 0;
}

static int table(struct vc_rows bases, unsigned window, size_t n, uint64_t *out)
{
    const size_t entries = ((size_t)1 << (window - 1)) + 1;
    for (size_t i = 0; i < n; i += LANES) {
        struct point p = load_any(bases, i, n), total = neutral();
        const struct cached q = cache(&p);
        for (size_t d = 0; d < entries; d++) {
            uint64_t spare[VC_POINT_WORDS], *row[LANES];
            vec w[24];
            for (size_t l = 0; l < LANES; l++)
                row[l] = i + l < n ? out + ((i + l) * entries + d) * VC_POINT_WORDS : spare;
            point_words(&total, w);
            store_words(w, row, VC_POINT_WORDS);
            total = add_cached(&total, &q);
        }
    }
    return 0;
}

/* Table entries of the lanes in one window, and which lanes subtract. */
struct lookups {
    const uint64_t *row[LANES];
    unsigned minus;
};

INLINE struct lookups look_up(const uint64_t *window, const int16_t *digits, size_t step)
{
    struct lookups found = {.minus = 0};
    for (unsigned l = 0; l < LANES; l++) {
        int digit = digits[l * step];
        found.row[l] = window + (size_t)(digit < 0 ? -digit : digit) * VC_AFFINE_WORDS;
        found.minus |= (unsigned)(digit < 0) << l;
        prefetch_affine(found.row[l]);
    }
    return found;
}

/* The digits of a group are known before its first addition: entries are asked for one addition ahead. */
static int fixed_mul(const uint64_t *table, unsigned window, size_t n_windows, const uint8_t *scalars, size_t width,
                     size_t n, uint64_t *out)
{
    const size_t words = (((size_t)1 << (window - 1)) + 1) * VC_AFFINE_WORDS;
    int16_t *digits = allocate(LANES * n_windows * sizeof *digits);
    if (!digits)
        return -1;
    for (size_t i = 0; i < n; i += LANES) {
        struct point total = neutral();
        for (size_t l = 0; l < LANES; l++)
            vc_signed_digits(scalars + (i + l < n ? i + l : i) * width, width, window, n_windows,
                             digits + l * n_windows);
        struct lookups next = look_up(table, digits, n_windows);
        for (size_t j = 0; j < n_windows; j++) {
            struct lookups now = next;
            if (j + 1 < n_windows)
                next = look_up(table + (j + 1) * words, digits + j + 1, n_windows);
            struct affine q = load_affine(now.row);
            total = add_signed(&total, &q, of_lanes(now.minus));
        }
        store_point(&total, out, i, n);
    }
    free(digits);
    return 0;
}

#define DIGIT 4 /* bits of a window of `mul`; its table holds the multiples 1 to 8 */

INLINE struct cached pick(const struct cached *multiples, const int16_t *digits, size_t step, unsigned *minus)
{
    const struct point zero = neutral();
    struct cached found = {zero.y, zero.y, settle(sum(zero.y, zero.y)), zero.x};
    *minus = 0;
    for (int d = 1; d <= 1 << (DIGIT - 1); d++) {
        const struct cached *q = &multiples[d - 1];
        unsigned here = 0;
        for (unsigned l = 0; l < LANES; l++)
            here |= (unsigned)(abs(digits[l * step]) == d) << l;
        mask m = of_lanes(here);
        found = (struct cached){choose(m, q->sum, found.sum), choose(m, q->diff, found.diff),
                                choose(m, q->z2, found.z2), choose(m, q->t2d, found.t2d)};
    }
    for (unsigned l = 0; l < LANES; l++)
        *minus |= (unsigned)(digits[l * step] < 0) << l;
    return found;
}

static int mul_all(struct vc_rows points, const uint8_t *scalars, size_t n, uint64_t *out)
{
    const size_t n_windows = 8 * VC_SCALAR_BYTES / DIGIT + 1;
    struct cached *multiples = allocate(sizeof *multiples << (DIGIT - 1));
    int16_t digits[LANES * (8 * VC_SCALAR_BYTES / DIGIT + 1)];
    if (!multiples)
        return -1;
    for (size_t i = 0; i < n; i += LANES) {
        struct point p = load_any(points, i, n), total = neutral();
        multiples[0] = cache(&p);
        for (int d = 1; d < 1 << (DIGIT - 1); d++) {
            p = add_cached(&p, &multiples[0]);
            multiples[d] = cache(&p);
        }
        for (size_t l = 0; l < LANES; l++)
            vc_signed_digits(scalars + (i + l < n ? i + l : i) * VC_SCALAR_BYTES, VC_SCALAR_BYTES, DIGIT, n_windows,
                             digits + l * n_windows);
        for (size_t j = n_windows; j-- > 0;) {
            unsigned minus_lanes;
            for (int k = 0; k < DIGIT; k++)
                total = twice(&total, k + 1 == DIGIT);
            struct cached q = pick(multiples, digits + j, n_windows, &minus_lanes);
            mask m = of_lanes(minus_lanes);
            struct cached r = {choose(m, q.diff, q.sum), choose(m, q.sum, q.diff), q.z2,
                               choose(m, negative(q.t2d), q.t2d)};
            total = add_cached(&total, &r);
        }
        store_point(&total, out, i, n);
    }
    free(multiples);
    return 0;
}

/* sum_j (2j + 1) bucket[j] = 2 sum_j j bucket[j] + sum_j bucket[j]. */
static struct point sum_of_buckets(const struct point *bucket, size_t n_buckets)
{
    struct point total = bucket[n_buckets - 1], weighted = neutral();
    for (size_t j = n_buckets - 1; j-- > 0;) {
        struct cached q = cache(&total);
        weighted = add_cached(&weighted, &q);
        q = cache(&bucket[j]);
        total = add_cached(&total, &q);
    }
    weighted = twice(&weighted, 1);
    struct cached q = cache(&weighted);
    return add_cached(&total, &q);
}

/* From the lowest digit up: the point is doubled once a digit, and falls into one bucket of each scalar whose digit
 * there is not 0. The scalars are the same in all lanes, so that branches are, too. */
static int mul_each(struct vc_rows points, const int8_t *digits, size_t n_digits, size_t n_scalars, size_t n_buckets,
                    size_t n, uint64_t *out)
{
    struct point *bucket = allocate(n_scalars * n_buckets * sizeof *bucket);
    if (!bucket)
        return -1;
    for (size_t i = 0; i < n; i += LANES) {
        struct point p = load_any(points, i, n);
        for (size_t b = 0; b < n_scalars * n_buckets; b++)
            bucket[b] = neutral();
        for (size_t j = 0; j < n_digits; j++) {
            struct cached q;
            int is_cached = 0, is_next = 0;
            for (size_t k = 0; k < n_scalars; k++) {
                int digit = digits[k * n_digits + j];
                is_next |= j + 1 < n_digits && digits[k * n_digits + j + 1];
                if (!digit)
                    continue;
                if (!is_cached)
                    q = cache(&p);
                is_cached = 1;
                struct point *b = &bucket[k * n_buckets + (size_t)(abs(digit) - 1) / 2];
                *b = digit > 0 ? add_cached(b, &q) : subtract_cached(b, &q);
            }
            if (j + 1 < n_digits)
                p = twice(&p, is_next);
        }
        for (size_t k = 0; k < n_scalars; k++) {
            struct point total = sum_of_buckets(bucket + k * n_buckets, n_buckets);
            store_point(&total, out + k * n * VC_POINT_WORDS, i, n);
        }
    }
    free(bucket);
    return 0;
}

const struct vc_kernels KERNELS = {
    .name = NAME,
    .from_affine = from_affine,
    .from_compressed = from_compressed,
    .from_ristretto = from_ristretto,
    .from_uniform = from_uniform,
    .to_ristretto = to_ristretto,
    .normalise = normalise,
    .widen = widen_all,
    .add = add_all,
    .negate = negate,
    .twice = twice_all,
    .equal = equal,
    .sums = sums,
    .ladder = ladder,
    .table = table,
    .fixed_mul = fixed_mul,
    .mul = mul_all,
    .mul_each = mul_each,
};
