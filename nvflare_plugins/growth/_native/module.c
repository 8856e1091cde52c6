/* Python's view of the kernels: the buffer protocol. Every function checks the sizes of its buffers and what indexes
 * them, but for codes and rows, which come from here; it releases the interpreter lock and keeps no state. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "growth.h"

#include <stdlib.h>
#include <string.h>

#define GROUP_SLOTS 8192 /* sums of some features that stay in the cache while a span's rows are added */

static const struct vg_scan *best_first[4];

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

static PyObject *py_instruction_sets(PyObject *self, PyObject *unused)
{
    PyObject *names = PyList_New(0);
    for (size_t i = 0; names && i < 4 && best_first[i]; i++) {
        PyObject *item = PyUnicode_FromString(best_first[i]->name);
        if (!item || PyList_Append(names, item) < 0)
            Py_CLEAR(names);
        Py_XDECREF(item);
    }
    return names;
}

static const struct vg_scan *find(const char *name)
{
    for (size_t i = 0; i < 4 && best_first[i]; i++)
        if (!strcmp(best_first[i]->name, name))
            return best_first[i];
    return NULL;
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
    if (row <= 0 || codes->len % row || !holds(missing, n_features, 4) || !holds(codes, codes->len / (Py_ssize_t)kernels->width, (Py_ssize_t)kernels->width))
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

/* The sums of one span, without those of missing values; slots has one more than the bins of each feature. */
static void sums_of_span(const struct vg_codes *kernels, const struct vg_table *table, const vg_pair *pairs,
                         const int32_t *order, const struct vg_span *span, const int64_t *starts,
                         const int64_t *offsets, vg_pair *slots, vg_pair *out)
{
    size_t n_features = table->n_features;
    memset(slots, 0, (size_t)(offsets[n_features]) * sizeof(vg_pair));
    for (size_t first = 0, last; first < n_features; first = last) {
        for (last = first + 1; last < n_features && offsets[last + 1] - offsets[first] <= GROUP_SLOTS;)
            last++;
        kernels->add(table, pairs, order, span, offsets, first, last, slots);
    }
    for (size_t f = 0; f < n_features && slots != out; f++) {
        size_t n_bins = (size_t)(starts[f + 1] - starts[f]);
        memcpy(out + starts[f], slots + offsets[f], n_bins * sizeof(vg_pair));
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
        Py_BEGIN_ALLOW_THREADS
        int64_t *offsets = malloc((size_t)(n_features + 1) * sizeof(int64_t));
        vg_pair *slots = is_dense ? NULL : malloc((size_t)(n_bins + n_features) * sizeof(vg_pair));
        has_memory = offsets && (slots || is_dense);
        for (Py_ssize_t f = 0; has_memory && f <= n_features; f++)
            offsets[f] = ((int64_t *)starts.buf)[f] + (is_dense ? 0 : f);
        for (Py_ssize_t i = 0; has_memory && i < n_spans; i++) {
            vg_pair *sums = (vg_pair *)out.buf + i * n_bins;
            sums_of_span(kernels, &table, pairs.buf, order.len ? order.buf : NULL, (struct vg_span *)spans.buf + i,
                         starts.buf, offsets, is_dense ? sums : slots, sums);
        }
        free(offsets);
        free(slots);
        Py_END_ALLOW_THREADS
    }
    return finish((Py_buffer *[]){&codes, &missing, &pairs, &order, &spans, &starts, &out}, 7, "add", fits, has_memory);
}

/* divide(width, codes uint[n, f], missing uint32[f], masks uint8[m], divisions int64[k, 6], order int32[n] inout,
 *        scratch int32[n] out, n_left int64[k] out) */
static PyObject *py_divide(PyObject *self, PyObject *args)
{
    Py_ssize_t width;
    Py_buffer codes, missing, masks, divisions, order, scratch, n_left;
    if (!PyArg_ParseTuple(args, "ny*y*y*y*w*w*w*", &width, &codes, &missing, &masks, &divisions, &order, &scratch,
                          &n_left))
        return NULL;
    const struct vg_codes *kernels = kernels_of(width);
    Py_ssize_t n = divisions.len / (Py_ssize_t)sizeof(struct vg_division);
    const struct vg_division *division = divisions.buf;
    struct vg_table table;
    int fits = is_table(kernels, &codes, &missing, &table) && holds(&divisions, 6 * n, 8) &&
               are_spans(divisions.buf, n, sizeof(*division), (Py_ssize_t)table.n_rows) &&
               holds(&order, (Py_ssize_t)table.n_rows, 4) && holds(&scratch, (Py_ssize_t)table.n_rows, 4) &&
               holds(&n_left, n, 8);
    for (Py_ssize_t i = 0; fits && i < n; i++)
        fits = division[i].feature >= 0 && division[i].feature < (int64_t)table.n_features &&
               division[i].mask < masks.len;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < n; i++)
            ((int64_t *)n_left.buf)[i] = kernels->divide(&table, masks.buf, division + i, order.buf, scratch.buf);
        Py_END_ALLOW_THREADS
    }
    return finish((Py_buffer *[]){&codes, &missing, &masks, &divisions, &order, &scratch, &n_left}, 7, "divide", fits,
                  1);
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

/* best(name, formula float64[8], starts int64[f + 1], monotone int8[f], sums int64[k, bins, 2], totals int64[k, 2],
 *      gains_and_bounds float32[k, 3], allowed uint8[k, f], changes float32[k] out, splits int64[k, 5] out) */
static PyObject *py_best(PyObject *self, PyObject *args)
{
    const char *name;
    int has_memory = 1;
    Py_buffer formula, starts, monotone, sums, totals, bounds, allowed, changes, splits;
    if (!PyArg_ParseTuple(args, "sy*y*y*y*y*y*y*w*w*", &name, &formula, &starts, &monotone, &sums, &totals, &bounds,
                          &allowed, &changes, &splits))
        return NULL;
    const struct vg_scan *scan = find(name);
    Py_ssize_t n_features = monotone.len, k = changes.len / 4;
    int fits = scan && are_starts(&starts, n_features) && holds(&formula, 8, 8) && holds(&changes, k, 4) &&
               holds(&totals, 2 * k, 8) && holds(&bounds, 3 * k, 4) && allowed.len == k * n_features &&
               holds(&splits, 5 * k, 8) && holds(&sums, 2 * k * ((int64_t *)starts.buf)[n_features], 8);
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        const double *m = formula.buf;
        const int64_t *start = starts.buf, *total = totals.buf;
        const float *bound = bounds.buf;
        struct vg_formula rule = {m[0], m[1], m[2], m[3], m[4], m[5], (int64_t)m[6], m[7] != 0};
        struct vg_facts facts = {start, monotone.buf, (size_t)n_features, 0};
        for (Py_ssize_t f = 0; f < n_features; f++)
            if ((size_t)(start[f + 1] - start[f]) > facts.most_bins)
                facts.most_bins = (size_t)(start[f + 1] - start[f]);
        double *scratch = malloc((6 * facts.most_bins + 1) * sizeof(double));
        has_memory = scratch != NULL;
        for (Py_ssize_t i = 0; has_memory && i < k; i++) {
            struct vg_question question = {(const vg_pair *)sums.buf + i * start[n_features],
                                           (const uint8_t *)allowed.buf + i * n_features,
                                           total[2 * i],
                                           total[2 * i + 1],
                                           bound[3 * i],
                                           bound[3 * i + 1],
                                           bound[3 * i + 2]};
            ((float *)changes.buf)[i] =
                scan->best(&rule, &facts, &question, scratch, (struct vg_split *)splits.buf + i);
        }
        free(scratch);
        Py_END_ALLOW_THREADS
    }
    return finish((Py_buffer *[]){&formula, &starts, &monotone, &sums, &totals, &bounds, &allowed, &changes, &splits},
                  9, "best", fits, has_memory);
}

static PyMethodDef methods[] = {
    {"instruction_sets", py_instruction_sets, METH_NOARGS, "names, best first"},
    {"bin", py_bin, METH_VARARGS, NULL},
    {"add", py_add, METH_VARARGS, NULL},
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
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) < 0)
        Py_CLEAR(module);
    return module;
}
