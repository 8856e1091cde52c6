/* Python's view of the curve kernels: the buffer protocol for rows. Every function checks the sizes of its buffers and
 * the range of its indices, releases the interpreter lock, and keeps no state: callers may run it on row blocks from
 * several threads. he_processors/curve/native.py is the only caller.
 *
 * Functions take the number of an instruction set first (its place in instruction_sets()). Rows come in extended or
 * affine form; how many bytes a row has says which. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "curve.h"
#include "interface.h"

#include <string.h>

#define UNLOCKED(statement)    \
    do {                       \
        Py_BEGIN_ALLOW_THREADS \
        statement;             \
        Py_END_ALLOW_THREADS   \
    } while (0)

INSTRUCTION_SETS(vc_kernels)

static void detect(void)
{
    size_t n = 0;
#if VC_X86
    __builtin_cpu_init(); /* cpu_supports also asks whether the operating system saves the registers */
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512ifma"))
        best_first[n++] = &vc_ifma;
    if (__builtin_cpu_supports("avx2"))
        best_first[n++] = &vc_avx2;
#endif
    best_first[n++] = &vc_portable;
}

static int as_kernels(PyObject *number, void *result)
{
    long i = PyLong_AsLong(number);
    if (i < 0 || i >= 4 || !best_first[i]) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "no such instruction set");
        return 0;
    }
    *(const struct vc_kernels **)result = best_first[i];
    return 1;
}

static PyObject *wrong(const char *what)
{
    PyErr_Format(PyExc_ValueError, "%s has the wrong size or holds an index out of range", what);
    return NULL;
}

/* None, or for functions that read a peer's bytes whether they took every row. */
static PyObject *finish(int fits, int status, const char *what)
{
    if (!fits)
        return wrong(what);
    if (status < 0)
        return PyErr_NoMemory();
    return PyBool_FromLong(status == 0);
}

/* How many items a buffer holds; -1 if it is not a whole number of them, or not where such items may lie. */
static Py_ssize_t n_items(const Py_buffer *b, size_t size, size_t alignment)
{
    return b->len % (Py_ssize_t)size || (uintptr_t)b->buf % alignment ? -1 : b->len / (Py_ssize_t)size;
}

/* A batch of rows: a two-dimensional buffer of words, which has to be given back. */
struct points {
    Py_buffer buffer;
    struct vc_rows rows;
    Py_ssize_t n;
};

static int as_points(PyObject *object, void *result)
{
    struct points *p = result;
    if (!object) { /* a later argument was refused */
        PyBuffer_Release(&p->buffer);
        return 0;
    }
    if (PyObject_GetBuffer(object, &p->buffer, PyBUF_ND) < 0)
        return 0;
    const Py_buffer *b = &p->buffer;
    if (b->ndim != 2 || b->itemsize != 8 || (uintptr_t)b->buf % 8 ||
        (b->shape[1] != VC_POINT_WORDS && b->shape[1] != VC_AFFINE_WORDS)) {
        PyBuffer_Release(&p->buffer);
        wrong("a batch");
        return 0;
    }
    p->rows.rows = b->buf;
    p->rows.is_affine = b->shape[1] == VC_AFFINE_WORDS;
    p->n = b->shape[0];
    return Py_CLEANUP_SUPPORTED;
}

static Py_ssize_t n_points(const Py_buffer *b)
{
    return n_items(b, VC_POINT_WORDS * 8, 8);
}

static Py_ssize_t n_affine(const Py_buffer *b)
{
    return n_items(b, VC_AFFINE_WORDS * 8, 8);
}

typedef int reader(const uint8_t *bytes, size_t n, uint64_t *out);

/* Bytes to rows: `size` bytes and `words` words of a row for each point. */
static PyObject *read_bytes(PyObject *args, size_t offset, size_t size, size_t words, const char *what)
{
    const struct vc_kernels *k;
    Py_buffer bytes, out;
    int status = 0;
    if (!PyArg_ParseTuple(args, "O&y*w*", as_kernels, &k, &bytes, &out))
        return NULL;
    Py_ssize_t n = n_items(&bytes, size, 1);
    int fits = n >= 0 && n_items(&out, 8 * words, 8) == n;
    if (fits) {
        reader *read = *(reader *const *)((const char *)k + offset);
        UNLOCKED(status = read(bytes.buf, (size_t)n, out.buf));
    }
    PyBuffer_Release(&bytes);
    PyBuffer_Release(&out);
    return finish(fits, status, what);
}

/* from_affine(set, bytes, out_affine) and the like -> whether every row was taken */
static PyObject *py_from_affine(PyObject *self, PyObject *args)
{
    return read_bytes(args, offsetof(struct vc_kernels, from_affine), 64, VC_AFFINE_WORDS, "from_affine");
}

static PyObject *py_from_compressed(PyObject *self, PyObject *args)
{
    return read_bytes(args, offsetof(struct vc_kernels, from_compressed), 32, VC_AFFINE_WORDS, "from_compressed");
}

static PyObject *py_from_ristretto(PyObject *self, PyObject *args)
{
    return read_bytes(args, offsetof(struct vc_kernels, from_ristretto), 32, VC_AFFINE_WORDS, "from_ristretto");
}

static PyObject *py_from_uniform(PyObject *self, PyObject *args)
{
    return read_bytes(args, offsetof(struct vc_kernels, from_uniform), 64, VC_POINT_WORDS, "from_uniform");
}

static int run_normalise(const struct vc_kernels *k, struct vc_rows p, size_t n, void *out, enum vc_form form)
{
    return k->normalise(p, n, form, out, NULL);
}

static int run_ristretto(const struct vc_kernels *k, struct vc_rows p, size_t n, void *out, enum vc_form form)
{
    return k->to_ristretto(p, n, out);
}

static int run_widen(const struct vc_kernels *k, struct vc_rows p, size_t n, void *out, enum vc_form form)
{
    return k->widen(p, n, out);
}

static int run_negate(const struct vc_kernels *k, struct vc_rows p, size_t n, void *out, enum vc_form form)
{
    return k->negate(p, n, out);
}

/* Rows to something of `size` bytes each; 0: as many as the rows have. */
static PyObject *convert(PyObject *args, size_t size, size_t alignment, enum vc_form form, const char *what,
                         int (*run)(const struct vc_kernels *, struct vc_rows, size_t, void *, enum vc_form))
{
    const struct vc_kernels *k;
    Py_buffer out;
    struct points p;
    int status = 0;
    if (!PyArg_ParseTuple(args, "O&O&w*", as_kernels, &k, as_points, &p, &out))
        return NULL;
    Py_ssize_t n = p.n;
    if (!size)
        size = 8 * (p.rows.is_affine ? VC_AFFINE_WORDS : VC_POINT_WORDS);
    int fits = n_items(&out, size, alignment) == n;
    if (fits)
        UNLOCKED(status = run(k, p.rows, (size_t)n, out.buf, form));
    PyBuffer_Release(&p.buffer);
    PyBuffer_Release(&out);
    return finish(fits, status, what);
}

/* to_affine(set, rows, bytes) */
static PyObject *py_to_affine(PyObject *self, PyObject *args)
{
    return convert(args, 64, 1, VC_TO_BYTES, "to_affine", run_normalise);
}

/* narrow(set, rows, out_affine) */
static PyObject *py_narrow(PyObject *self, PyObject *args)
{
    return convert(args, 8 * VC_AFFINE_WORDS, 8, VC_TO_AFFINE, "narrow", run_normalise);
}

/* to_ristretto(set, rows, bytes) */
static PyObject *py_to_ristretto(PyObject *self, PyObject *args)
{
    return convert(args, 32, 1, VC_TO_BYTES, "to_ristretto", run_ristretto);
}

/* widen(set, rows, out_points) */
static PyObject *py_widen(PyObject *self, PyObject *args)
{
    return convert(args, 8 * VC_POINT_WORDS, 8, VC_TO_AFFINE, "widen", run_widen);
}

/* negate(set, rows, out_rows of the same form) */
static PyObject *py_negate(PyObject *self, PyObject *args)
{
    return convert(args, 0, 8, VC_TO_AFFINE, "negate", run_negate);
}

/* y_words(set, rows, out uint64[n], odd uint8[n]) */
static PyObject *py_y_words(PyObject *self, PyObject *args)
{
    const struct vc_kernels *k;
    Py_buffer words, odd;
    struct points p;
    int status = 0;
    if (!PyArg_ParseTuple(args, "O&O&w*w*", as_kernels, &k, as_points, &p, &words, &odd))
        return NULL;
    Py_ssize_t n = p.n;
    int fits = n_items(&words, 8, 8) == n && odd.len == n;
    if (fits)
        UNLOCKED(status = k->normalise(p.rows, (size_t)n, VC_TO_KEYS, words.buf, odd.buf));
    PyBuffer_Release(&p.buffer);
    PyBuffer_Release(&words);
    PyBuffer_Release(&odd);
    return finish(fits, status, "y_words");
}

/* (set, a_rows, b_rows, out): out_points, or uint8[n] */
static PyObject *binary(PyObject *args, int is_add)
{
    const struct vc_kernels *k;
    Py_buffer out;
    struct points p, q;
    int status = 0;
    if (!PyArg_ParseTuple(args, "O&O&O&w*", as_kernels, &k, as_points, &p, as_points, &q, &out))
        return NULL;
    Py_ssize_t n = p.n;
    int fits = q.n == n && (is_add ? n_points(&out) : out.len) == n;
    if (fits)
        UNLOCKED(status = is_add ? k->add(p.rows, q.rows, (size_t)n, out.buf)
                                 : k->equal(p.rows, q.rows, (size_t)n, out.buf));
    PyBuffer_Release(&p.buffer);
    PyBuffer_Release(&q.buffer);
    PyBuffer_Release(&out);
    return finish(fits, status, "a batch");
}

static PyObject *py_add(PyObject *self, PyObject *args)
{
    return binary(args, 1);
}

static PyObject *py_equal(PyObject *self, PyObject *args)
{
    return binary(args, 0);
}

/* twice(set, rows, times, out_points) */
static PyObject *py_twice(PyObject *self, PyObject *args)
{
    const struct vc_kernels *k;
    Py_buffer out;
    Py_ssize_t times;
    struct points p;
    int status = 0;
    if (!PyArg_ParseTuple(args, "O&O&nw*", as_kernels, &k, as_points, &p, &times, &out))
        return NULL;
    Py_ssize_t n = p.n;
    int fits = n_points(&out) == n && times >= 0;
    if (fits)
        UNLOCKED(status = k->twice(p.rows, (size_t)times, (size_t)n, out.buf));
    PyBuffer_Release(&p.buffer);
    PyBuffer_Release(&out);
    return finish(fits, status, "twice");
}

/* Every task inside the order, its result inside the output, and every row index that it uses inside the rows. */
static int tasks_fit(const int32_t *order, int64_t n_order, const struct vc_task *tasks, size_t n_tasks, int64_t rows,
                     int64_t results)
{
    for (size_t t = 0; t < n_tasks; t++) {
        int64_t start = tasks[t].start, length = tasks[t].length, result = tasks[t].result;
        if (start < 0 || start > n_order || length < 0 || length > n_order - start || result < 0 || result >= results)
            return 0;
        int64_t highest = -1;
        uint32_t all = 0; /* a negative index sets the top bit */
        for (int64_t i = start; i < start + length; i++) {
            all |= (uint32_t)order[i];
            highest = order[i] > highest ? order[i] : highest;
        }
        if (all >> 31 || highest >= rows)
            return 0;
    }
    return 1;
}

/* sums(set, rows, order int32[], tasks int64[][3] (start, length, result), out_points) */
static PyObject *py_sums(PyObject *self, PyObject *args)
{
    const struct vc_kernels *k;
    Py_buffer order, tasks, out;
    struct points p;
    int status = 0;
    if (!PyArg_ParseTuple(args, "O&O&y*y*w*", as_kernels, &k, as_points, &p, &order, &tasks, &out))
        return NULL;
    Py_ssize_t n = p.n, n_order = n_items(&order, 4, 4);
    Py_ssize_t n_tasks = n_items(&tasks, sizeof(struct vc_task), 8);
    int fits = n_points(&out) >= 0 && n_order >= 0 && n_tasks >= 0;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        fits = tasks_fit(order.buf, n_order, tasks.buf, (size_t)n_tasks, n, n_points(&out));
        if (fits)
            status = k->sums(p.rows, order.buf, tasks.buf, (size_t)n_tasks, out.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&p.buffer);
    PyBuffer_Release(&order);
    PyBuffer_Release(&tasks);
    PyBuffer_Release(&out);
    return finish(fits, status, "sums");
}

/* ladder(set, base_row, window, out_points) and table(set, base_rows, window, out_points) */
static PyObject *prepare(PyObject *args, int is_table)
{
    const struct vc_kernels *k;
    Py_buffer out;
    unsigned window;
    struct points p;
    int status = 0;
    if (!PyArg_ParseTuple(args, "O&O&Iw*", as_kernels, &k, as_points, &p, &window, &out))
        return NULL;
    Py_ssize_t n = p.n, n_out = n_points(&out);
    int fits = n_out >= 0 && window > 0 && window <= VC_MAX_WINDOW;
    if (fits && is_table) {
        Py_ssize_t entries = ((Py_ssize_t)1 << (window - 1)) + 1;
        fits = n_out % entries == 0 && n_out / entries == n;
    } else if (fits) {
        fits = n == 1;
    }
    if (fits)
        UNLOCKED(status = is_table ? k->table(p.rows, window, (size_t)n, out.buf)
                                   : k->ladder(p.rows, window, (size_t)n_out, out.buf));
    PyBuffer_Release(&p.buffer);
    PyBuffer_Release(&out);
    return finish(fits, status, "table");
}

static PyObject *py_ladder(PyObject *self, PyObject *args)
{
    return prepare(args, 0);
}

static PyObject *py_table(PyObject *self, PyObject *args)
{
    return prepare(args, 1);
}

/* fixed_mul(set, table_affine, window, n_windows, scalars, width, out_points): the first n_windows of the table */
static PyObject *py_fixed_mul(PyObject *self, PyObject *args)
{
    const struct vc_kernels *k;
    Py_buffer table, scalars, out;
    unsigned window;
    Py_ssize_t width, n_windows;
    int status = 0;
    if (!PyArg_ParseTuple(args, "O&y*Iny*nw*", as_kernels, &k, &table, &window, &n_windows, &scalars, &width, &out))
        return NULL;
    Py_ssize_t n = n_points(&out);
    int fits = n >= 0 && window > 0 && window <= VC_MAX_WINDOW && width > 0 && width <= VC_SCALAR_BYTES &&
               scalars.len % width == 0 && scalars.len / width == n && n_windows > 0 && n_windows <= VC_MAX_WINDOWS &&
               n_affine(&table) >= n_windows * (((Py_ssize_t)1 << (window - 1)) + 1);
    if (fits)
        UNLOCKED(status = k->fixed_mul(table.buf, window, (size_t)n_windows, scalars.buf, (size_t)width, (size_t)n,
                                       out.buf));
    PyBuffer_Release(&table);
    PyBuffer_Release(&scalars);
    PyBuffer_Release(&out);
    return finish(fits, status, "fixed_mul");
}

/* mul(set, rows, scalars, out_points) */
static PyObject *py_mul(PyObject *self, PyObject *args)
{
    const struct vc_kernels *k;
    Py_buffer scalars, out;
    struct points p;
    int status = 0;
    if (!PyArg_ParseTuple(args, "O&O&y*w*", as_kernels, &k, as_points, &p, &scalars, &out))
        return NULL;
    Py_ssize_t n = p.n;
    int fits = n_points(&out) == n && n_items(&scalars, VC_SCALAR_BYTES, 1) == n;
    if (fits)
        UNLOCKED(status = k->mul(p.rows, scalars.buf, (size_t)n, out.buf));
    PyBuffer_Release(&p.buffer);
    PyBuffer_Release(&scalars);
    PyBuffer_Release(&out);
    return finish(fits, status, "mul");
}

/* mul_each(set, rows, digits, n_scalars, n_buckets, out_points): out holds n rows for each scalar */
static PyObject *py_mul_each(PyObject *self, PyObject *args)
{
    const struct vc_kernels *k;
    Py_buffer digits, out;
    Py_ssize_t n_scalars, n_buckets;
    struct points p;
    int status = 0;
    if (!PyArg_ParseTuple(args, "O&O&y*nnw*", as_kernels, &k, as_points, &p, &digits, &n_scalars, &n_buckets, &out))
        return NULL;
    Py_ssize_t n = p.n, n_out = n_points(&out);
    int fits = n_scalars > 0 && n_scalars <= 1024 && n_buckets > 0 && n_buckets <= VC_MAX_BUCKETS &&
               digits.len % n_scalars == 0 && n_out % n_scalars == 0 && n_out / n_scalars == n;
    const int8_t *digit = digits.buf;
    for (Py_ssize_t i = 0; fits && i < digits.len; i++)
        fits = !digit[i] || (digit[i] % 2 && digit[i] < 2 * n_buckets && digit[i] > -2 * n_buckets);
    if (fits)
        UNLOCKED(status = k->mul_each(p.rows, digit, (size_t)(digits.len / n_scalars), (size_t)n_scalars,
                                      (size_t)n_buckets, (size_t)n, out.buf));
    PyBuffer_Release(&p.buffer);
    PyBuffer_Release(&digits);
    PyBuffer_Release(&out);
    return finish(fits, status, "mul_each");
}

/* all_below(numbers, width, bound 32 bytes): whether all numbers of `width` bytes are below the bound */
static PyObject *py_all_below(PyObject *self, PyObject *args)
{
    Py_buffer numbers, bound;
    Py_ssize_t width;
    int below = 1;
    if (!PyArg_ParseTuple(args, "y*ny*", &numbers, &width, &bound))
        return NULL;
    int fits = width > 0 && width <= VC_SCALAR_BYTES && bound.len == VC_SCALAR_BYTES && numbers.len % width == 0;
    if (fits)
        UNLOCKED(below = vc_all_below(numbers.buf, (size_t)width, (size_t)(numbers.len / width), bound.buf));
    PyBuffer_Release(&numbers);
    PyBuffer_Release(&bound);
    return fits ? PyBool_FromLong(below) : wrong("all_below");
}

/* scale(scalars, factor times 2^256, shift, out): rows of 32 bytes; scalars, factor and shift below the group order */
static PyObject *py_scale(PyObject *self, PyObject *args)
{
    Py_buffer scalars, factor, shift, out;
    if (!PyArg_ParseTuple(args, "y*y*y*w*", &scalars, &factor, &shift, &out))
        return NULL;
    Py_ssize_t n = n_items(&scalars, VC_SCALAR_BYTES, 1);
    int fits = n >= 0 && n_items(&out, VC_SCALAR_BYTES, 1) == n && factor.len == VC_SCALAR_BYTES &&
               shift.len == VC_SCALAR_BYTES;
    if (fits)
        UNLOCKED(vc_scale(scalars.buf, (size_t)n, factor.buf, shift.buf, out.buf));
    PyBuffer_Release(&scalars);
    PyBuffer_Release(&factor);
    PyBuffer_Release(&shift);
    PyBuffer_Release(&out);
    return finish(fits, 0, "scale");
}

static PyMethodDef methods[] = {
    {"instruction_sets", py_instruction_sets, METH_NOARGS, "names, best first"},
    {"from_affine", py_from_affine, METH_VARARGS, NULL},
    {"from_compressed", py_from_compressed, METH_VARARGS, NULL},
    {"from_ristretto", py_from_ristretto, METH_VARARGS, NULL},
    {"from_uniform", py_from_uniform, METH_VARARGS, NULL},
    {"to_affine", py_to_affine, METH_VARARGS, NULL},
    {"to_ristretto", py_to_ristretto, METH_VARARGS, NULL},
    {"narrow", py_narrow, METH_VARARGS, NULL},
    {"widen", py_widen, METH_VARARGS, NULL},
    {"y_words", py_y_words, METH_VARARGS, NULL},
    {"add", py_add, METH_VARARGS, NULL},
    {"negate", py_negate, METH_VARARGS, NULL},
    {"twice", py_twice, METH_VARARGS, NULL},
    {"equal", py_equal, METH_VARARGS, NULL},
    {"sums", py_sums, METH_VARARGS, NULL},
    {"ladder", py_ladder, METH_VARARGS, NULL},
    {"table", py_table, METH_VARARGS, NULL},
    {"fixed_mul", py_fixed_mul, METH_VARARGS, NULL},
    {"mul", py_mul, METH_VARARGS, NULL},
    {"mul_each", py_mul_each, METH_VARARGS, NULL},
    {"all_below", py_all_below, METH_VARARGS, NULL},
    {"scale", py_scale, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_curve", "Batches of points of edwards25519; see he_processors/curve/native.py.", -1,
    methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__curve(void)
{
    detect();
    return with_interface(PyModule_Create(&definition));
}
