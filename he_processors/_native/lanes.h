/* The batch operations, written once for all instruction sets: LANES numbers travel together, interleaved limb by
 * limb (group[k * LANES + l] is limb k of lane l). The including file defines
 *
 *   LANES, LIMB_BITS, limb_t (element of a row), word_t (element of a group), KERNELS (name of the table), NAME
 *   static void multiply(const struct vb_modulus *m, word_t *a, const word_t *b, word_t *scratch)   a = a * b / R
 *   static void square(const struct vb_modulus *m, word_t *a, word_t *scratch)                      a = a * a / R
 *   static void load(const struct vb_modulus *m, word_t *group, const limb_t *const rows[LANES])
 *
 * `multiply` may be given b == a. It wants a < 4 * S (partial sums are up to a + S); b may be any number below R. Rows
 * are always read completely before a row that may alias them is written: no pointer is declared restrict.
 */
#include <stdlib.h>
#include <string.h>

#define GROUP(m) ((m)->limbs * LANES)
#define SCRATCH_WORDS(m) (GROUP(m) + 8 * LANES)
#define ROW(rows, index) ((rows) + (size_t)(index) * m->limbs)

/* Cleared memory for `words` lane words, on a cache line. */
static word_t *allocate(size_t words)
{
    size_t bytes = (words * sizeof(word_t) + 63) / 64 * 64;
    word_t *memory = aligned_alloc(64, bytes);
    if (memory)
        memset(memory, 0, bytes);
    return memory;
}

static inline void set_lane(const struct vb_modulus *m, word_t *group, unsigned lane, const limb_t *row)
{
    for (size_t k = 0; k < m->limbs; k++)
        group[k * LANES + lane] = row[k];
}

static inline void get_lane(const struct vb_modulus *m, const word_t *group, unsigned lane, limb_t *row)
{
    for (size_t k = 0; k < m->limbs; k++)
        row[k] = (limb_t)group[k * LANES + lane];
}

/* Up to LANES consecutive rows; lanes beyond `count` get the residue 1. */
static inline void load_rows(const struct vb_modulus *m, word_t *group, const limb_t *rows, size_t step, size_t count)
{
    const limb_t *row[LANES];
    for (unsigned l = 0; l < LANES; l++)
        row[l] = l < count ? ROW(rows, l * step) : (const limb_t *)m->one;
    load(m, group, row);
}

static inline void store_rows(const struct vb_modulus *m, const word_t *group, limb_t *rows, size_t count)
{
    for (unsigned l = 0; l < LANES && l < count; l++)
        get_lane(m, group, l, ROW(rows, l));
}

static inline void prefetch_row(const struct vb_modulus *m, const limb_t *row)
{
    for (size_t byte = 0; byte < m->limbs * sizeof(limb_t); byte += 64)
        __builtin_prefetch((const char *)row + byte);
}

static int lanes_mul(const struct vb_modulus *m, const void *a_rows, const void *b_rows, size_t b_step, size_t n,
                     void *out_rows)
{
    const limb_t *a = a_rows, *b = b_rows;
    limb_t *out = out_rows;
    word_t *acc = allocate(2 * GROUP(m) + SCRATCH_WORDS(m));
    if (!acc)
        return -1;
    word_t *factor = acc + GROUP(m), *scratch = factor + GROUP(m);
    for (size_t i = 0; i < n; i += LANES) {
        load_rows(m, acc, ROW(a, i), 1, n - i);
        load_rows(m, factor, ROW(b, i * b_step), b_step, n - i);
        multiply(m, acc, factor, scratch);
        store_rows(m, acc, ROW(out, i), n - i);
    }
    free(acc);
    return 0;
}

/* a += b, limbs carried over again. */
static void add_group(const struct vb_modulus *m, word_t *a, const word_t *b)
{
    for (unsigned l = 0; l < LANES; l++) {
        unsigned __int128 t = 0;
        for (size_t k = 0; k < m->limbs; k++) {
            t += (unsigned __int128)a[k * LANES + l] + b[k * LANES + l];
            a[k * LANES + l] = (word_t)(t & (UINT64_MAX >> (64 - LIMB_BITS)));
            t >>= LIMB_BITS;
        }
    }
}

/* The sum is below 4 * S; the product by 1 brings it below 2 * S again. */
static int lanes_add(const struct vb_modulus *m, const void *a_rows, const void *b_rows, size_t b_step, size_t n,
                     void *out_rows)
{
    const limb_t *a = a_rows, *b = b_rows;
    limb_t *out = out_rows;
    word_t *acc = allocate(3 * GROUP(m) + SCRATCH_WORDS(m));
    if (!acc)
        return -1;
    word_t *other = acc + GROUP(m), *one = other + GROUP(m), *scratch = one + GROUP(m);
    load_rows(m, one, m->one, 0, LANES);
    for (size_t i = 0; i < n; i += LANES) {
        load_rows(m, acc, ROW(a, i), 1, n - i);
        load_rows(m, other, ROW(b, i * b_step), b_step, n - i);
        add_group(m, acc, other);
        multiply(m, acc, one, scratch);
        store_rows(m, acc, ROW(out, i), n - i);
    }
    free(acc);
    return 0;
}

/* The tasks of a segmented product and who works on which. An idle lane keeps multiplying by 1. */
struct queue {
    const limb_t *rows;
    const int32_t *order;
    const struct vb_task *tasks;
    size_t n_tasks, next;
    limb_t *out;
    limb_t *result[LANES];
    const int32_t *at[LANES], *end[LANES]; /* the next row to multiply in; at == end: idle */
    unsigned busy;
};

/* Give a lane its next task. Tasks of no row or one row need no product and are answered on the spot. */
static void refill(const struct vb_modulus *m, struct queue *q, word_t *acc, unsigned lane)
{
    while (q->next < q->n_tasks) {
        const struct vb_task *task = &q->tasks[q->next++];
        const int32_t *first = q->order + task->start;
        int64_t length = task->length;
        const limb_t *row = length ? ROW(q->rows, *first) : (const limb_t *)m->one;
        if (length > 1) {
            set_lane(m, acc, lane, row);
            q->result[lane] = ROW(q->out, task->result);
            q->at[lane] = first + 1;
            q->end[lane] = first + length;
            q->busy++;
            return;
        }
        memcpy(ROW(q->out, task->result), row, m->limbs * sizeof(limb_t));
    }
    q->at[lane] = q->end[lane] = NULL;
}

static int lanes_products(const struct vb_modulus *m, const void *rows, const int32_t *order,
                          const struct vb_task *tasks, size_t n_tasks, void *out)
{
    word_t *acc = allocate(2 * GROUP(m) + SCRATCH_WORDS(m));
    if (!acc)
        return -1;
    word_t *factor = acc + GROUP(m), *scratch = factor + GROUP(m);
    struct queue q = {.rows = rows, .order = order, .tasks = tasks, .n_tasks = n_tasks, .out = out};
    for (unsigned l = 0; l < LANES; l++)
        refill(m, &q, acc, l);
    while (q.busy) {
        const limb_t *row[LANES];
        for (unsigned l = 0; l < LANES; l++)
            row[l] = q.at[l] != q.end[l] ? ROW(q.rows, *q.at[l]) : (const limb_t *)m->one;
        load(m, factor, row);
        for (unsigned l = 0; l < LANES; l++)
            if (q.at[l] != q.end[l] && ++q.at[l] != q.end[l])
                prefetch_row(m, ROW(q.rows, *q.at[l]));
            else if (q.at[l])
                q.busy--; /* its last factor is in this step */
        multiply(m, acc, factor, scratch);
        for (unsigned l = 0; l < LANES; l++)
            if (q.at[l] && q.at[l] == q.end[l]) {
                get_lane(m, acc, l, q.result[l]);
                refill(m, &q, acc, l);
            }
    }
    free(acc);
    return 0;
}

static int lanes_ladder(const struct vb_modulus *m, const void *base, unsigned window, size_t n, void *out_rows)
{
    limb_t *out = out_rows;
    word_t *acc = allocate(GROUP(m) + SCRATCH_WORDS(m));
    if (!acc)
        return -1;
    load_rows(m, acc, base, 0, 1);
    for (size_t i = 0; i < n; i++) {
        store_rows(m, acc, ROW(out, i), 1);
        for (unsigned s = 0; s < window && i + 1 < n; s++)
            square(m, acc, acc + GROUP(m));
    }
    free(acc);
    return 0;
}

static int lanes_table(const struct vb_modulus *m, const void *base_rows, unsigned window, size_t n, void *out_rows)
{
    const limb_t *bases = base_rows;
    limb_t *out = out_rows;
    word_t *acc = allocate(2 * GROUP(m) + SCRATCH_WORDS(m));
    if (!acc)
        return -1;
    word_t *factor = acc + GROUP(m), *scratch = factor + GROUP(m);
    for (size_t i = 0; i < n; i += LANES) {
        load_rows(m, acc, m->one, 0, LANES);
        load_rows(m, factor, ROW(bases, i), 1, n - i);
        for (size_t d = 0; d < (size_t)1 << window; d++) {
            for (unsigned l = 0; l < LANES && i + l < n; l++)
                get_lane(m, acc, l, ROW(out, (i + l) << window | d));
            multiply(m, acc, factor, scratch);
        }
    }
    free(acc);
    return 0;
}

struct exponents {
    const uint8_t *bytes;
    size_t width;
    const limb_t *table;
    unsigned window;
};

/* The table entries of up to LANES exponents in one window; lanes beyond the last exponent repeat it. */
static void find_entries(const struct vb_modulus *m, const struct exponents *e, size_t window, size_t first,
                         size_t stop, const limb_t *row[LANES])
{
    for (unsigned l = 0; l < LANES; l++) {
        const uint8_t *exponent = e->bytes + (first + l < stop ? first + l : stop - 1) * e->width;
        row[l] = ROW(e->table, window << e->window | vb_bits(exponent, e->width, window * e->window, e->window));
    }
}

/* Each group of a block takes a factor from one window of the table before the next window is looked at: the window
 * stays in cache. The entries of the group after the present one are on their way meanwhile. */
#define POWERS_BLOCK 512 /* groups; with 2048-bit moduli, 1.3 MB */

static int lanes_powers(const struct vb_modulus *m, const void *table, unsigned window, size_t n_windows,
                        const uint8_t *bytes, size_t width, size_t n, void *out_rows)
{
    const struct exponents e = {.bytes = bytes, .width = width, .table = table, .window = window};
    limb_t *out = out_rows;
    size_t n_groups = (n + LANES - 1) / LANES;
    n_groups = n_groups < POWERS_BLOCK ? n_groups : POWERS_BLOCK;
    word_t *block = allocate((n_groups + 1) * GROUP(m) + SCRATCH_WORDS(m));
    if (!block)
        return -1;
    word_t *factor = block + n_groups * GROUP(m), *scratch = factor + GROUP(m);
    for (size_t start = 0; start < n; start += POWERS_BLOCK * LANES) {
        size_t stop = n - start < POWERS_BLOCK * LANES ? n : start + POWERS_BLOCK * LANES;
        for (size_t j = 0; j < n_windows; j++)
            for (size_t i = start; i < stop; i += LANES) {
                word_t *acc = block + (i - start) / LANES * GROUP(m);
                const limb_t *row[LANES];
                find_entries(m, &e, j, i, stop, row);
                load(m, j ? factor : acc, row);
                find_entries(m, &e, j, i + LANES < stop ? i + LANES : start, stop, row);
                for (unsigned l = 0; l < LANES; l++)
                    prefetch_row(m, row[l]);
                if (j)
                    multiply(m, acc, factor, scratch);
            }
        for (size_t i = start; i < stop; i += LANES)
            store_rows(m, block + (i - start) / LANES * GROUP(m), ROW(out, i), stop - i);
    }
    free(block);
    return 0;
}

static int lanes_pow_const(const struct vb_modulus *m, const void *in_rows, const struct vb_pow_step *steps,
                           size_t n_steps, size_t n_odd, size_t n, void *out_rows)
{
    const limb_t *rows = in_rows;
    limb_t *out = out_rows;
    word_t *acc = allocate((n_odd + 1) * GROUP(m) + SCRATCH_WORDS(m));
    if (!acc)
        return -1;
    word_t *odd = acc + GROUP(m), *scratch = odd + n_odd * GROUP(m);
    for (size_t i = 0; i < n; i += LANES) {
        load_rows(m, odd, ROW(rows, i), 1, n - i);
        memcpy(acc, odd, GROUP(m) * sizeof(word_t));
        square(m, acc, scratch);
        for (size_t t = 1; t < n_odd; t++) {
            memcpy(odd + t * GROUP(m), odd + (t - 1) * GROUP(m), GROUP(m) * sizeof(word_t));
            multiply(m, odd + t * GROUP(m), acc, scratch);
        }
        load_rows(m, acc, m->one, 0, LANES);
        for (size_t s = 0; s < n_steps; s++) {
            for (int32_t k = 0; k < steps[s].squarings; k++)
                square(m, acc, scratch);
            if (steps[s].entry >= 0)
                multiply(m, acc, odd + (size_t)steps[s].entry * GROUP(m), scratch);
        }
        store_rows(m, acc, ROW(out, i), n - i);
    }
    free(acc);
    return 0;
}

static int lanes_horner(const struct vb_modulus *m, const void *in_rows, size_t n, size_t group, size_t shift_bits,
                        void *out_rows)
{
    const limb_t *rows = in_rows;
    limb_t *out = out_rows;
    size_t n_out = (n + group - 1) / group;
    word_t *acc = allocate(2 * GROUP(m) + SCRATCH_WORDS(m));
    if (!acc)
        return -1;
    word_t *factor = acc + GROUP(m), *scratch = factor + GROUP(m);
    for (size_t i = 0; i < n_out; i += LANES) {
        for (size_t j = group; j-- > 0;) {
            const limb_t *row[LANES];
            for (unsigned l = 0; l < LANES; l++) {
                size_t index = (i + l) * group + j; /* missing rows at the end count as 1 */
                row[l] = index < n ? ROW(rows, index) : (const limb_t *)m->one;
            }
            load(m, j == group - 1 ? acc : factor, row);
            if (j == group - 1)
                continue;
            for (size_t s = 0; s < shift_bits; s++)
                square(m, acc, scratch);
            multiply(m, acc, factor, scratch);
        }
        store_rows(m, acc, ROW(out, i), n_out - i);
    }
    free(acc);
    return 0;
}

/* Bits [piece * R_bits, (piece + 1) * R_bits) of up to LANES numbers, as one group. */
static void load_piece(const struct vb_modulus *m, word_t *group, const uint8_t *bytes, size_t width, size_t count,
                       size_t piece)
{
    for (unsigned l = 0; l < LANES; l++)
        for (size_t k = 0; k < m->limbs; k++)
            group[k * LANES + l] = l < count ? (word_t)vb_bits(bytes + l * width, width,
                                                               (piece * m->limbs + k) * LIMB_BITS, LIMB_BITS) : 0;
}

/* Pieces of R_bits bits from the top: acc = acc * R + piece, each product by R^2 modulo N. acc stays below 4 * S. */
static int lanes_enter(const struct vb_modulus *m, const uint8_t *bytes, size_t width, size_t n, void *out_rows)
{
    limb_t *out = out_rows;
    size_t piece_bits = m->limbs * LIMB_BITS, pieces = (width * 8 + piece_bits - 1) / piece_bits;
    word_t *acc = allocate(5 * GROUP(m) + SCRATCH_WORDS(m));
    if (!acc)
        return -1;
    word_t *term = acc + GROUP(m), *piece = term + GROUP(m), *square_of_r = piece + GROUP(m);
    word_t *one = square_of_r + GROUP(m), *scratch = one + GROUP(m);
    load_rows(m, square_of_r, m->square, 0, LANES);
    load_rows(m, one, m->one, 0, LANES);
    for (size_t i = 0; i < n; i += LANES) {
        memset(acc, 0, GROUP(m) * sizeof(word_t));
        for (size_t p = pieces; p-- > 0;) {
            load_piece(m, piece, bytes + i * width, width, n - i, p);
            memcpy(term, square_of_r, GROUP(m) * sizeof(word_t));
            multiply(m, term, piece, scratch);
            if (p + 1 < pieces)
                multiply(m, acc, square_of_r, scratch);
            add_group(m, acc, term);
        }
        if (pieces > 1)
            multiply(m, acc, one, scratch);
        store_rows(m, acc, ROW(out, i), n - i);
    }
    free(acc);
    return 0;
}

/* One lane, below or equal to S = c * N, as canonical bytes. */
static void canonical(const struct vb_modulus *m, const word_t *group, unsigned lane, uint64_t *words, size_t n_words,
                      uint8_t *bytes)
{
    memset(words, 0, n_words * 8);
    for (size_t k = 0; k < m->limbs; k++) {
        size_t word = k * LIMB_BITS / 64, shift = k * LIMB_BITS % 64;
        uint64_t limb = group[k * LANES + lane];
        words[word] |= limb << shift;
        if (shift + LIMB_BITS > 64)
            words[word + 1] |= limb >> (64 - shift);
    }
    vb_remainder(words, n_words, m->divisor, m->words, m->shift);
    memcpy(bytes, words, m->width);
}

static int lanes_leave(const struct vb_modulus *m, const void *in_rows, size_t n, uint8_t *bytes)
{
    const limb_t *rows = in_rows;
    size_t n_words = m->limbs * LIMB_BITS / 64 + 2;
    word_t *acc = allocate(2 * GROUP(m) + SCRATCH_WORDS(m) + n_words);
    if (!acc)
        return -1;
    word_t *unit = acc + GROUP(m), *scratch = unit + GROUP(m);
    uint64_t *words = (uint64_t *)(scratch + SCRATCH_WORDS(m));
    for (unsigned l = 0; l < LANES; l++)
        unit[l] = 1;
    for (size_t i = 0; i < n; i += LANES) {
        load_rows(m, acc, ROW(rows, i), 1, n - i);
        multiply(m, acc, unit, scratch);
        for (unsigned l = 0; l < LANES && i + l < n; l++)
            canonical(m, acc, l, words, n_words, bytes + (i + l) * m->width);
    }
    free(acc);
    return 0;
}

const struct vb_kernels KERNELS = {
    .name = NAME,
    .limb_bits = LIMB_BITS,
    .limb_bytes = sizeof(limb_t),
    .lanes = LANES,
    .mul = lanes_mul,
    .add = lanes_add,
    .products = lanes_products,
    .ladder = lanes_ladder,
    .table = lanes_table,
    .powers = lanes_powers,
    .pow_const = lanes_pow_const,
    .horner = lanes_horner,
    .enter = lanes_enter,
    .leave = lanes_leave,
};
