/* Python's view of the kernels: the buffer protocol. Every function checks the sizes of its buffers and what indexes
 * them, but for codes and rows, which come from here; it releases the interpreter lock and keeps no state. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../../../he_processors/_native/extension.h"
#include "growth.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define GROUP_SLOTS 8192 /* sums of some features that stay in the cache while a span's rows are added */

INSTRUCTION_SETS(vg_scan)

static void detect(void)
{
    size_t n = 0;
#if VG_X86
    __builtin_cpu_init(); /* cpu_supports also asks whether the operating system saves the registers */
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw"))
        best_first[n++] = &vg_scan_avx512;
    if (__builtin_cpu_supports("avx2"))
        best_first[n++] = &vg_scan_avx2;
#endif
    best_first[n++] = &vg_scan_portable;
}

static const struct vg_codes *kernels_of(Py_ssize_t width)
{
    return width == 1 ? &vg_codes_1 : width == 2 ? &vg_codes_2 : width == 4 ? &vg_codes_4 : NULL;
}

/* Whether a buffer holds n items of a size, aligned. */
static int holds(const Py_buffer *buffer, Py_ssize_t n, Py_ssize_t size)
{
    return n >= 0 && buffer->len % size == 0 && buffer->len / size == n &&
           (uintptr_t)buffer->buf % (size_t)(size < 8 ? size : 8) == 0;
}

static int is_table(const struct vg_codes *kernels, const Py_buffer *codes, const Py_buffer *missing,
                    struct vg_table *table)
{
    Py_ssize_t n_features = missing->len / 4, row = kernels ? n_features * (Py_ssize_t)kernels->width : 0;
    if (row <= 0 || codes->len % row || !holds(missing, n_features, 4) ||
        (uintptr_t)codes->buf % (uintptr_t)kernels->width)
        return 0;
    *table = (struct vg_table){codes->buf, (size_t)(codes->len / row), (size_t)n_features, missing->buf};
    return 1;
}

/* Whether bins of features follow each other. */
static int are_starts(const Py_buffer *starts, Py_ssize_t n_features)
{
    const int64_t *start = starts->buf;
    if (!holds(starts, n_features + 1, 8) || start[0] != 0)
        return 0;
    for (Py_ssize_t f = 0; f < n_features; f++)
        if (start[f + 1] < start[f] || start[f + 1] > PY_SSIZE_T_MAX / 32)
            return 0;
    return 1;
}

static int are_spans(const struct vg_span *spans, Py_ssize_t n, size_t step, Py_ssize_t n_rows)
{
    for (Py_ssize_t i = 0; i < n; i++) {
        const struct vg_span *span = (const void *)((const char *)spans + (size_t)i * step);
        if (span->begin < 0 || span->end < span->begin || span->end > n_rows)
            return 0;
    }
    return 1;
}

static PyObject *finish(Py_buffer **buffers, int n, const char *name, int fits, int has_memory)
{
    for (int i = 0; i < n; i++)
        PyBuffer_Release(buffers[i]);
    if (!fits)
        return PyErr_Format(PyExc_ValueError, "%s: a buffer of the wrong size, or an index beyond one", name);
    if (!has_memory)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* bin(width, values float32[n, f], upper float32[bins], starts int64[f + 1], is_categorical uint8[f],
 *     missing uint32[f], codes uint[n, f] out, lacks uint8[f] out, fills uint8[f] out) */
static PyObject *py_bin(PyObject *self, PyObject *args)
{
    Py_ssize_t width;
    Py_buffer values, upper, starts, kinds, missing, codes, lacks, fills;
    if (!PyArg_ParseTuple(args, "ny*y*y*y*y*w*w*w*", &width, &values, &upper, &starts, &kinds, &missing, &codes, &lacks,
                          &fills))
        return NULL;
    const struct vg_codes *kernels = kernels_of(width);
    Py_ssize_t n_features = kinds.len;
    struct vg_table table;
    int fits = is_table(kernels, &codes, &missing, &table) && holds(&missing, n_features, 4) &&
               are_starts(&starts, n_features) && holds(&upper, ((int64_t *)starts.buf)[n_features], 4) &&
               holds(&values, (Py_ssize_t)table.n_rows * n_features, 4) && lacks.len == n_features &&
               fills.len == n_features;
    if (fits) {
        struct vg_layout layout = {upper.buf, starts.buf, kinds.buf, (size_t)n_features};
        Py_BEGIN_ALLOW_THREADS
        kernels->bin(&layout, values.buf, table.n_rows, missing.buf, codes.buf, lacks.buf, fills.buf);
        Py_END_ALLOW_THREADS
    }
    return finish((Py_buffer *[]){&values, &upper, &starts, &kinds, &missing, &codes, &lacks, &fills}, 8, "bin", fits,
                  1);
}

/* Where the sums of each feature's codes are: as in a node's histogram where no value is missing, else with a slot more
 * for each feature. `stride` is the distance between features if it is always the same, else 0. */
struct slots {
    int64_t *offsets;
    size_t stride;
    vg_pair *sums; /* NULL: in the histogram itself */
};

static int lay_out(const int64_t *starts, size_t n_features, int is_dense, struct slots *slots)
{
    int64_t most = 0, least = INT64_MAX, more = is_dense ? 0 : 1;
    for (size_t f = 0; f < n_features; f++) {
        int64_t n_bins = starts[f + 1] - starts[f];
        most = n_bins > most ? n_bins : most;
        least = n_bins < least ? n_bins : least;
    }
    int64_t evenly = (most + more) * (int64_t)n_features;
    int is_even = is_dense ? most == least : evenly <= 2 * (starts[n_features] + (int64_t)n_features);
    slots->stride = is_even ? (size_t)(most + more) : 0;
    slots->offsets = malloc((n_features + 1) * sizeof(int64_t));
    for (size_t f = 0; slots->offsets && f <= n_features; f++)
        slots->offsets[f] = is_even ? (most + more) * (int64_t)f : starts[f] + more * (int64_t)f;
    slots->sums = NULL;
    if (slots->offsets && !is_dense)
        slots->sums = malloc((size_t)slots->offsets[n_features] * sizeof(vg_pair));
    return slots->offsets && (is_dense || slots->sums);
}

/* The sums of one span, without those of missing values. */
static void sums_of_span(const struct vg_codes *kernels, const struct vg_table *table, const vg_pair *pairs,
                         const int32_t *order, const struct vg_span *span, const int64_t *starts,
                         const struct slots *slots, vg_pair *out)
{
    size_t n_features = table->n_features;
    const int64_t *offsets = slots->offsets;
    vg_pair *sums = slots->sums ? slots->sums : out;
    memset(sums, 0, (size_t)offsets[n_features] * sizeof(vg_pair));
    for (size_t first = 0, last; first < n_features; first = last) {
        for (last = first + 1; last < n_features && offsets[last + 1] - offsets[first] <= GROUP_SLOTS;)
            last++;
        kernels->add(table, pairs, order, span, offsets, slots->stride, first, last, sums);
    }
    for (size_t f = 0; f < n_features && sums != out; f++) {
        size_t n_bins = (size_t)(starts[f + 1] - starts[f]);
        memcpy(out + starts[f], sums + offsets[f], n_bins * sizeof(vg_pair));
        if (table->missing[f] < n_bins)
            memset(out + starts[f] + table->missing[f], 0, sizeof(vg_pair));
    }
}

/* add(width, codes uint[n, f], missing uint32[f], is_dense, pairs int64[n, 2], order int32[n] or empty,
 *     spans int64[k, 2], starts int64[f + 1], out int64[k, bins, 2] out) */
static PyObject *py_add(PyObject *self, PyObject *args)
{
    Py_ssize_t width;
    int is_dense, has_memory = 1;
    Py_buffer codes, missing, pairs, order, spans, starts, out;
    if (!PyArg_ParseTuple(args, "ny*y*py*y*y*y*w*", &width, &codes, &missing, &is_dense, &pairs, &order, &spans,
                          &starts, &out))
        return NULL;
    const struct vg_codes *kernels = kernels_of(width);
    Py_ssize_t n_features = missing.len / 4, n_spans = spans.len / 16;
    struct vg_table table;
    int fits = is_table(kernels, &codes, &missing, &table) && are_starts(&starts, n_features) &&
               holds(&pairs, 2 * (Py_ssize_t)table.n_rows, 8) &&
               (order.len == 0 || holds(&order, (Py_ssize_t)table.n_rows, 4)) && holds(&spans, 2 * n_spans, 8) &&
               are_spans(spans.buf, n_spans, sizeof(struct vg_span), (Py_ssize_t)table.n_rows);
    int64_t n_bins = fits ? ((int64_t *)starts.buf)[n_features] : 0;
    fits = fits && holds(&out, n_spans * n_bins * 2, 8);
    if (fits) {
        struct slots slots;
        Py_BEGIN_ALLOW_THREADS
        has_memory = lay_out(starts.buf, (size_t)n_features, is_dense, &slots);
        for (Py_ssize_t i = 0; has_memory && i < n_spans; i++)
            sums_of_span(kernels, &table, pairs.buf, order.len ? order.buf : NULL, (struct vg_span *)spans.buf + i,
                         starts.buf, &slots, (vg_pair *)out.buf + i * n_bins);
        free(slots.offsets);
        free(slots.sums);
        Py_END_ALLOW_THREADS
    }
    return finish((Py_buffer *[]){&codes, &missing, &pairs, &order, &spans, &starts, &out}, 7, "add", fits, has_memory);
}

/* total(pairs int64[n, 2], out int64[2] out) */
static PyObject *py_total(PyObject *self, PyObject *args)
{
    Py_buffer pairs, out;
    if (!PyArg_ParseTuple(args, "y*w*", &pairs, &out))
        return NULL;
    Py_ssize_t n = pairs.len / 16;
    int fits = holds(&pairs, 2 * n, 8) && holds(&out, 2, 8);
    if (fits) {
        vg_pair sum = {0, 0};
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < n; i++)
            sum += ((const vg_pair *)pairs.buf)[i];
        Py_END_ALLOW_THREADS
        *(vg_pair *)out.buf = sum;
    }
    return finish((Py_buffer *[]){&pairs, &out}, 2, "total", fits, 1);
}

/* on_grid(pairs float32[n, 2], g_scale, h_scale, out int64[n, 2] out): times the scale, rounded half to even */
static PyObject *py_on_grid(PyObject *self, PyObject *args)
{
    Py_buffer pairs, out;
    double g_scale, h_scale;
    if (!PyArg_ParseTuple(args, "y*ddw*", &pairs, &g_scale, &h_scale, &out))
        return NULL;
    Py_ssize_t n = pairs.len / 8;
    int fits = holds(&pairs, 2 * n, 4) && holds(&out, 2 * n, 8);
    if (fits) {
        const float *pair = pairs.buf;
        int64_t *found = out.buf;
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < 2 * n; i += 2) {
            found[i] = llrint((double)pair[i] * g_scale);
            found[i + 1] = llrint((double)pair[i + 1] * h_scale);
        }
        Py_END_ALLOW_THREADS
    }
    return finish((Py_buffer *[]){&pairs, &out}, 2, "on_grid", fits, 1);
}

/* place(order int32[n], spans int64[k, 2], nodes int64[k], out int32[n] out): out of each row is its span's node */
static PyObject *py_place(PyObject *self, PyObject *args)
{
    Py_buffer order, spans, nodes, out;
    if (!PyArg_ParseTuple(args, "y*y*y*w*", &order, &spans, &nodes, &out))
        return NULL;
    Py_ssize_t n_rows = order.len / 4, n = nodes.len / 8;
    const struct vg_span *span = spans.buf;
    int fits = holds(&order, n_rows, 4) && holds(&out, n_rows, 4) && holds(&nodes, n, 8) && holds(&spans, 2 * n, 8) &&
               are_spans(span, n, sizeof(*span), n_rows);
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < n; i++)
            for (int64_t k = span[i].begin; k < span[i].end; k++)
                ((int32_t *)out.buf)[((const int32_t *)order.buf)[k]] = (int32_t)((const int64_t *)nodes.buf)[i];
        Py_END_ALLOW_THREADS
    }
    return finish((Py_buffer *[]){&order, &spans, &nodes, &out}, 4, "place", fits, 1);
}

/* divide(width, columns uint[f, n], missing uint32[f], masks uint8[m], divisions int64[k, 6], order int32[n] inout,
 *        scratch int32[n] out, n_left int64[k] out) */
static PyObject *py_divide(PyObject *self, PyObject *args)
{
    Py_ssize_t width;
    Py_buffer columns, missing, masks, divisions, order, scratch, n_left;
    if (!PyArg_ParseTuple(args, "ny*y*y*y*w*w*w*", &width, &columns, &missing, &masks, &divisions, &order, &scratch,
                          &n_left))
        return NULL;
    const struct vg_codes *kernels = kernels_of(width);
    Py_ssize_t n = divisions.len / (Py_ssize_t)sizeof(struct vg_division);
    const struct vg_division *division = divisions.buf;
    struct vg_table table;
    int fits = is_table(kernels, &columns, &missing, &table) && holds(&divisions, 6 * n, 8) &&
               are_spans(divisions.buf, n, sizeof(*division), (Py_ssize_t)table.n_rows) &&
               holds(&order, (Py_ssize_t)table.n_rows, 4) && holds(&scratch, (Py_ssize_t)table.n_rows, 4) &&
               holds(&n_left, n, 8);
    for (Py_ssize_t i = 0; fits && i < n; i++)
        fits = division[i].feature >= 0 && division[i].feature < (int64_t)table.n_features &&
               division[i].mask < masks.len;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < n; i++)
            ((int64_t *)n_left.buf)[i] = kernels->divide(columns.buf, table.n_rows, table.missing[division[i].feature],
                                                         masks.buf, division + i, order.buf, scratch.buf);
        Py_END_ALLOW_THREADS
    }
    return finish((Py_buffer *[]){&columns, &missing, &masks, &divisions, &order, &scratch, &n_left}, 7, "divide",
                  fits, 1);
}

/* descend(width, codes uint[n, f], missing uint32[f], masks uint8[m], nodes int64[k, 6], leaves int32[n] out) */
static PyObject *py_descend(PyObject *self, PyObject *args)
{
    Py_ssize_t width;
    Py_buffer codes, missing, masks, nodes, leaves;
    if (!PyArg_ParseTuple(args, "ny*y*y*y*w*", &width, &codes, &missing, &masks, &nodes, &leaves))
        return NULL;
    const struct vg_codes *kernels = kernels_of(width);
    Py_ssize_t n = nodes.len / (Py_ssize_t)sizeof(struct vg_node);
    const struct vg_node *node = nodes.buf;
    struct vg_table table;
    int fits = is_table(kernels, &codes, &missing, &table) && n > 0 && holds(&nodes, 6 * n, 8) &&
               holds(&leaves, (Py_ssize_t)table.n_rows, 4);
    for (Py_ssize_t i = 0; fits && i < n; i++) /* children come after their parents: every way ends */
        fits = node[i].left < 0 || (node[i].left > i && node[i].left < n && node[i].right > i && node[i].right < n &&
                                    node[i].feature >= 0 && node[i].feature < (int64_t)table.n_features &&
                                    node[i].mask < masks.len);
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        kernels->descend(&table, masks.buf, node, leaves.buf);
        Py_END_ALLOW_THREADS
    }
    return finish((Py_buffer *[]){&codes, &missing, &masks, &nodes, &leaves}, 5, "descend", fits, 1);
}

static void release_all(Py_buffer *buffers, Py_ssize_t n)
{
    for (Py_ssize_t i = 0; i < n; i++)
        PyBuffer_Release(&buffers[i]);
    PyMem_Free(buffers);
}

/* The buffers of a list's items, each of so many words of 64 bits; NULL with an error set. */
static Py_buffer *buffers_of(PyObject *list, Py_ssize_t words)
{
    Py_ssize_t n = PyList_GET_SIZE(list);
    Py_buffer *buffers = PyMem_Calloc((size_t)n + 1, sizeof(Py_buffer));
    if (!buffers)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; buffers && i < n; i++) {
        int is_held = PyObject_GetBuffer(PyList_GET_ITEM(list, i), &buffers[i], PyBUF_SIMPLE) == 0;
        if (is_held && holds(&buffers[i], words, 8))
            continue;
        if (is_held)
            PyErr_SetString(PyExc_ValueError, "best: a histogram of the wrong size");
        release_all(buffers, is_held ? i + 1 : i);
        buffers = NULL;
    }
    return buffers;
}

static int best_of_nodes(const struct vg_scan *scan, const double *m, const struct vg_facts *facts,
                         const Py_buffer *sums, const int64_t *totals, const float *limits, const uint8_t *allowed,
                         Py_ssize_t n, float *changes, struct vg_split *splits)
{
    struct vg_formula formula = {m[0], m[1], m[2], m[3], m[4], m[5], (int64_t)m[6], m[7] != 0};
    double *scratch = malloc((6 * facts->most_bins + 1) * sizeof(double));
    for (Py_ssize_t i = 0; scratch && i < n; i++, totals += 2, limits += 3, allowed += facts->n_features) {
        struct vg_question question = {sums[i].buf, allowed,   totals[0], totals[1],
                                       limits[0],   limits[1], limits[2]};
        changes[i] = scan->best(&formula, facts, &question, scratch, splits + i);
    }
    free(scratch);
    return scratch != NULL;
}

/* best(name, formula float64[8], starts int64[f + 1], monotone int8[f], sums: list of k int64[bins, 2],
 *      totals int64[k, 2], gains_and_bounds float32[k, 3], allowed uint8[k, f], changes float32[k] out,
 *      splits int64[k, 5] out) */
static PyObject *py_best(PyObject *self, PyObject *args)
{
    const char *name;
    int has_memory = 1;
    PyObject *list;
    Py_buffer formula, starts, monotone, totals, limits, allowed, changes, splits;
    if (!PyArg_ParseTuple(args, "sy*y*y*O!y*y*y*w*w*", &name, &formula, &starts, &monotone, &PyList_Type, &list,
                          &totals, &limits, &allowed, &changes, &splits))
        return NULL;
    const struct vg_scan *scan = find(name);
    Py_ssize_t n_features = monotone.len, k = PyList_GET_SIZE(list);
    int fits = scan && are_starts(&starts, n_features) && holds(&formula, 8, 8) && holds(&changes, k, 4) &&
               holds(&totals, 2 * k, 8) && holds(&limits, 3 * k, 4) && allowed.len == k * n_features &&
               holds(&splits, 5 * k, 8);
    const int64_t *start = starts.buf;
    Py_buffer *sums = fits ? buffers_of(list, 2 * start[n_features]) : NULL;
    if (sums) {
        struct vg_facts facts = {start, monotone.buf, (size_t)n_features, 0};
        for (Py_ssize_t f = 0; f < n_features; f++)
            if ((size_t)(start[f + 1] - start[f]) > facts.most_bins)
                facts.most_bins = (size_t)(start[f + 1] - start[f]);
        Py_BEGIN_ALLOW_THREADS
        has_memory = best_of_nodes(scan, formula.buf, &facts, sums, totals.buf, limits.buf, allowed.buf, k,
                                   changes.buf, splits.buf);
        Py_END_ALLOW_THREADS
        release_all(sums, k);
    }
    PyObject *done = finish((Py_buffer *[]){&formula, &starts, &monotone, &totals, &limits, &allowed, &changes, &splits},
                            8, "best", fits, has_memory);
    if (fits && !sums)
        Py_CLEAR(done); /* with the error of the histograms */
    return done;
}

static PyMethodDef methods[] = {
    {"instruction_sets", py_instruction_sets, METH_NOARGS, "names, best first"},
    {"bin", py_bin, METH_VARARGS, NULL},
    {"add", py_add, METH_VARARGS, NULL},
    {"total", py_total, METH_VARARGS, NULL},
    {"on_grid", py_on_grid, METH_VARARGS, NULL},
    {"place", py_place, METH_VARARGS, NULL},
    {"divide", py_divide, METH_VARARGS, NULL},
    {"descend", py_descend, METH_VARARGS, NULL},
    {"best", py_best, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_growth", "Growing trees; see nvflare_plugins/growth.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__growth(void)
{
    detect();
    return with_number(PyModule_Create(&definition), INTERFACE);
}
