/* Python's view of the kernels: capsules for moduli, the buffer protocol for rows. Every function checks the sizes of
 * its buffers and the range of its indices, releases the interpreter lock, and keeps no state: callers may run it on
 * row blocks from several threads. he_processors/bignum/native.py is the only caller. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bignum.h"
#include "interface.h"

#include <stdlib.h>
#include <string.h>

#define CAPSULE "he_processors._native._bignum.modulus"
#define MAX_LIMBS 1000 /* keeps the column sums of every kernel below 2^64 */
#define MAX_WINDOW 16

static const struct vb_kernels *best_first[4];

static void detect(void)
{
    size_t n = 0;
#if VB_X86
    __builtin_cpu_init(); /* cpu_supports also asks whether the operating system saves the registers */
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512ifma"))
        best_first[n++] = &vb_ifma;
    if (__builtin_cpu_supports("avx2"))
        best_first[n++] = &vb_avx2;
#endif
    best_first[n++] = &vb_portable;
}

static void release_modulus(PyObject *capsule)
{
    struct vb_modulus *m = PyCapsule_GetPointer(capsule, CAPSULE);
    if (m) {
        free(m->divisor);
        free(m->scaled_plus1);
        free(m->one);
        free(m->square);
        free(m);
    }
}

static int as_modulus(PyObject *capsule, void *result)
{
    *(void **)result = PyCapsule_GetPointer(capsule, CAPSULE);
    return *(void **)result != NULL;
}

static PyObject *finish(int status)
{
    if (status < 0)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *wrong(const char *what)
{
    PyErr_Format(PyExc_ValueError, "%s has the wrong size or holds an index out of range", what);
    return NULL;
}

/* How many items a buffer holds; -1 if it is not a whole number of them, or not where such items may lie. */
static Py_ssize_t n_items(const Py_buffer *b, size_t size, size_t alignment)
{
    return b->len % (Py_ssize_t)size || (uintptr_t)b->buf % alignment ? -1 : b->len / (Py_ssize_t)size;
}

static Py_ssize_t n_rows(const struct vb_modulus *m, const Py_buffer *b)
{
    return n_items(b, m->limbs * m->kernels->limb_bytes, m->kernels->limb_bytes);
}

/* Whether a buffer holds one number of `width` bytes for each of `count` rows, for any width and count. */
static int holds_numbers(const Py_buffer *b, Py_ssize_t width, Py_ssize_t count)
{
    return width > 0 && b->len % width == 0 && b->len / width == count;
}

static PyObject *py_instruction_sets(PyObject *self, PyObject *unused)
{
    PyObject *names = PyList_New(0);
    for (size_t i = 0; names && i < 4 && best_first[i]; i++) {
        const struct vb_kernels *k = best_first[i];
        PyObject *item = Py_BuildValue("(sII)", k->name, k->limb_bits, k->limb_bytes);
        if (!item || PyList_Append(names, item) < 0)
            Py_CLEAR(names);
        Py_XDECREF(item);
    }
    return names;
}

static void fill_modulus(struct vb_modulus *m, const Py_buffer *n, const Py_buffer *scaled, const Py_buffer *one,
                         const Py_buffer *square)
{
    const struct vb_kernels *k = m->kernels;
    vb_split(scaled->buf, scaled->len, k->limb_bits, 8, m->limbs, m->scaled_plus1);
    vb_split(one->buf, one->len, k->limb_bits, k->limb_bytes, m->limbs, m->one);
    vb_split(square->buf, square->len, k->limb_bits, k->limb_bytes, m->limbs, m->square);
    vb_to_words(n->buf, n->len, m->words, m->divisor);
    m->shift = vb_normalise(m->divisor, m->words);
}

/* modulus(name, limbs, n, scaled_plus1, r_mod_n, r_squared_mod_n) -> capsule */
static PyObject *py_modulus(PyObject *self, PyObject *args)
{
    const char *name;
    Py_ssize_t limbs;
    Py_buffer n, scaled, one, square;
    if (!PyArg_ParseTuple(args, "sny*y*y*y*", &name, &limbs, &n, &scaled, &one, &square))
        return NULL;
    PyObject *capsule = NULL;
    const struct vb_kernels *kernels = NULL;
    for (size_t i = 0; i < 4 && best_first[i]; i++)
        if (!strcmp(best_first[i]->name, name))
            kernels = best_first[i];
    struct vb_modulus *m = calloc(1, sizeof *m);
    if (!m) {
        PyErr_NoMemory();
    } else if (!kernels || limbs < 8 || limbs > MAX_LIMBS || n.len < 1 || !((const uint8_t *)n.buf)[n.len - 1] ||
               n.len > limbs * (Py_ssize_t)kernels->limb_bits / 8) { /* R has to be longer than the modulus */
        wrong("modulus");
        free(m);
    } else {
        m->kernels = kernels;
        m->limbs = (size_t)limbs;
        m->width = (size_t)n.len;
        m->words = (m->width + 7) / 8;
        m->divisor = calloc(m->words, 8);
        m->scaled_plus1 = calloc(m->limbs, 8);
        m->one = calloc(m->limbs, kernels->limb_bytes);
        m->square = calloc(m->limbs, kernels->limb_bytes);
        capsule = PyCapsule_New(m, CAPSULE, release_modulus);
        if (!m->divisor || !m->scaled_plus1 || !m->one || !m->square) {
            Py_CLEAR(capsule);
            PyErr_NoMemory();
        } else {
            fill_modulus(m, &n, &scaled, &one, &square);
        }
    }
    PyBuffer_Release(&n);
    PyBuffer_Release(&scaled);
    PyBuffer_Release(&one);
    PyBuffer_Release(&square);
    return capsule;
}

/* first_not_below(numbers, width, bound) -> index of the first number >= bound, or -1 */
static PyObject *py_first_not_below(PyObject *self, PyObject *args)
{
    Py_buffer bytes, bound;
    Py_ssize_t width, found = -1;
    if (!PyArg_ParseTuple(args, "y*ny*", &bytes, &width, &bound))
        return NULL;
    int fits = width > 0 && bound.len == width && bytes.len % width == 0;
    if (fits) {
        const uint8_t *limit = bound.buf;
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; found < 0 && i < bytes.len / width; i++) {
            const uint8_t *number = (const uint8_t *)bytes.buf + i * width;
            Py_ssize_t k = width - 1;
            while (k > 0 && number[k] == limit[k])
                k--;
            if (number[k] >= limit[k])
                found = i;
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&bytes);
    PyBuffer_Release(&bound);
    return fits ? PyLong_FromSsize_t(found) : wrong("numbers");
}

/* enter(modulus, numbers, width, out_rows): numbers of any size into residue form */
static PyObject *py_enter(PyObject *self, PyObject *args)
{
    const struct vb_modulus *m;
    Py_buffer bytes, out;
    Py_ssize_t width;
    int status = 0;
    if (!PyArg_ParseTuple(args, "O&y*nw*", as_modulus, &m, &bytes, &width, &out))
        return NULL;
    int fits = holds_numbers(&bytes, width, n_rows(m, &out));
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        status = m->kernels->enter(m, bytes.buf, (size_t)width, (size_t)(bytes.len / width), out.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&bytes);
    PyBuffer_Release(&out);
    return fits ? finish(status) : wrong("enter");
}

/* leave(modulus, rows, out_numbers): residue form into canonical numbers */
static PyObject *py_leave(PyObject *self, PyObject *args)
{
    const struct vb_modulus *m;
    Py_buffer rows, bytes;
    int status = 0;
    if (!PyArg_ParseTuple(args, "O&y*w*", as_modulus, &m, &rows, &bytes))
        return NULL;
    int fits = holds_numbers(&bytes, (Py_ssize_t)m->width, n_rows(m, &rows));
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        status = m->kernels->leave(m, rows.buf, (size_t)n_rows(m, &rows), bytes.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&rows);
    PyBuffer_Release(&bytes);
    return fits ? finish(status) : wrong("leave");
}

/* (modulus, a_rows, b_rows, out_rows): b_rows may be a single row */
static PyObject *binary(PyObject *args, int is_mul)
{
    const struct vb_modulus *m;
    Py_buffer a, b, out;
    int status = 0;
    if (!PyArg_ParseTuple(args, "O&y*y*w*", as_modulus, &m, &a, &b, &out))
        return NULL;
    int fits = n_rows(m, &a) >= 0 && (n_rows(m, &b) == n_rows(m, &a) || n_rows(m, &b) == 1) &&
               n_rows(m, &out) == n_rows(m, &a);
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        status = (is_mul ? m->kernels->mul : m->kernels->add)(m, a.buf, b.buf, b.len == a.len,
                                                              (size_t)n_rows(m, &a), out.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&a);
    PyBuffer_Release(&b);
    PyBuffer_Release(&out);
    return fits ? finish(status) : wrong("a batch");
}

static PyObject *py_mul(PyObject *self, PyObject *args)
{
    return binary(args, 1);
}

static PyObject *py_add(PyObject *self, PyObject *args)
{
    return binary(args, 0);
}

/* Every task inside the order, its result inside the output, and every row index that it uses inside the rows. */
static int tasks_fit(const int32_t *order, int64_t n_order, const struct vb_task *tasks, size_t n_tasks, int64_t rows,
                     int64_t results)
{
    for (size_t t = 0; t < n_tasks; t++) {
        int64_t start = tasks[t].start, length = tasks[t].length, result = tasks[t].result;
        if (start < 0 || start > n_order || length < 0 || length > n_order - start || result < 0 || result >= results)
            return 0;
        for (int64_t i = start; i < start + length; i++)
            if (order[i] < 0 || order[i] >= rows)
                return 0;
    }
    return 1;
}

/* products(modulus, rows, order int32[], tasks int64[][3] (start, length, result), out_rows) */
static PyObject *py_products(PyObject *self, PyObject *args)
{
    const struct vb_modulus *m;
    Py_buffer rows, order, tasks, out;
    int status = 0;
    if (!PyArg_ParseTuple(args, "O&y*y*y*w*", as_modulus, &m, &rows, &order, &tasks, &out))
        return NULL;
    Py_ssize_t n_order = n_items(&order, 4, 4), n_tasks = n_items(&tasks, sizeof(struct vb_task), 8);
    int fits = n_rows(m, &rows) >= 0 && n_rows(m, &out) >= 0 && n_order >= 0 && n_tasks >= 0;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        fits = tasks_fit(order.buf, n_order, tasks.buf, (size_t)n_tasks, n_rows(m, &rows), n_rows(m, &out));
        if (fits)
            status = m->kernels->products(m, rows.buf, order.buf, tasks.buf, (size_t)n_tasks, out.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&rows);
    PyBuffer_Release(&order);
    PyBuffer_Release(&tasks);
    PyBuffer_Release(&out);
    return fits ? finish(status) : wrong("products");
}

/* ladder(modulus, base_row, window, out_rows): out[i] = base^(2^(window * i)) */
static PyObject *py_ladder(PyObject *self, PyObject *args)
{
    const struct vb_modulus *m;
    Py_buffer base, out;
    unsigned window;
    int status = 0;
    if (!PyArg_ParseTuple(args, "O&y*Iw*", as_modulus, &m, &base, &window, &out))
        return NULL;
    int fits = n_rows(m, &base) == 1 && n_rows(m, &out) >= 0 && window <= MAX_WINDOW;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        status = m->kernels->ladder(m, base.buf, window, (size_t)n_rows(m, &out), out.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&base);
    PyBuffer_Release(&out);
    return fits ? finish(status) : wrong("ladder");
}

/* table(modulus, base_rows, window, out_rows): out[i << window | d] = bases[i]^d */
static PyObject *py_table(PyObject *self, PyObject *args)
{
    const struct vb_modulus *m;
    Py_buffer bases, out;
    unsigned window;
    int status = 0;
    if (!PyArg_ParseTuple(args, "O&y*Iw*", as_modulus, &m, &bases, &window, &out))
        return NULL;
    int fits = window <= MAX_WINDOW && n_rows(m, &bases) >= 0 && n_rows(m, &out) >= 0 &&
               out.len >> window == bases.len && out.len % ((Py_ssize_t)1 << window) == 0;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        status = m->kernels->table(m, bases.buf, window, (size_t)n_rows(m, &bases), out.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&bases);
    PyBuffer_Release(&out);
    return fits ? finish(status) : wrong("table");
}

/* powers(modulus, table_rows, window, exponents, exponent_width, out_rows) */
static PyObject *py_powers(PyObject *self, PyObject *args)
{
    const struct vb_modulus *m;
    Py_buffer table, exponents, out;
    unsigned window;
    Py_ssize_t width;
    int status = 0;
    if (!PyArg_ParseTuple(args, "O&y*Iy*nw*", as_modulus, &m, &table, &window, &exponents, &width, &out))
        return NULL;
    int fits = window > 0 && window <= MAX_WINDOW && n_rows(m, &table) > 0 &&
               n_rows(m, &table) % ((Py_ssize_t)1 << window) == 0 &&
               holds_numbers(&exponents, width, n_rows(m, &out));
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        status = m->kernels->powers(m, table.buf, window, (size_t)n_rows(m, &table) >> window, exponents.buf,
                                    (size_t)width, (size_t)n_rows(m, &out), out.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&table);
    PyBuffer_Release(&exponents);
    PyBuffer_Release(&out);
    return fits ? finish(status) : wrong("powers");
}

/* pow_const(modulus, rows, steps int32[][2] (squarings, entry), n_odd, out_rows) */
static PyObject *py_pow_const(PyObject *self, PyObject *args)
{
    const struct vb_modulus *m;
    Py_buffer rows, steps, out;
    Py_ssize_t n_odd;
    int status = 0;
    if (!PyArg_ParseTuple(args, "O&y*y*nw*", as_modulus, &m, &rows, &steps, &n_odd, &out))
        return NULL;
    const struct vb_pow_step *step = steps.buf;
    Py_ssize_t n_steps = n_items(&steps, sizeof *step, 4);
    int fits = n_rows(m, &rows) >= 0 && n_rows(m, &out) == n_rows(m, &rows) && n_steps >= 0 && n_odd > 0 &&
               n_odd <= 1 << MAX_WINDOW;
    for (Py_ssize_t s = 0; fits && s < n_steps; s++)
        fits = step[s].entry < n_odd;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        status = m->kernels->pow_const(m, rows.buf, step, (size_t)n_steps, (size_t)n_odd, (size_t)n_rows(m, &rows), out.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&rows);
    PyBuffer_Release(&steps);
    PyBuffer_Release(&out);
    return fits ? finish(status) : wrong("pow_const");
}

/* horner(modulus, rows, group, shift_bits, out_rows) */
static PyObject *py_horner(PyObject *self, PyObject *args)
{
    const struct vb_modulus *m;
    Py_buffer rows, out;
    Py_ssize_t group, shift_bits;
    int status = 0;
    if (!PyArg_ParseTuple(args, "O&y*nnw*", as_modulus, &m, &rows, &group, &shift_bits, &out))
        return NULL;
    Py_ssize_t n = n_rows(m, &rows);
    int fits = n >= 0 && group > 0 && shift_bits >= 0 && n_rows(m, &out) == n / group + (n % group != 0);
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        status = m->kernels->horner(m, rows.buf, (size_t)n, (size_t)group, (size_t)shift_bits, out.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&rows);
    PyBuffer_Release(&out);
    return fits ? finish(status) : wrong("horner");
}

static PyMethodDef methods[] = {
    {"instruction_sets", py_instruction_sets, METH_NOARGS, "(name, limb_bits, limb_bytes), best first"},
    {"modulus", py_modulus, METH_VARARGS, NULL},
    {"first_not_below", py_first_not_below, METH_VARARGS, NULL},
    {"enter", py_enter, METH_VARARGS, NULL},
    {"leave", py_leave, METH_VARARGS, NULL},
    {"mul", py_mul, METH_VARARGS, NULL},
    {"add", py_add, METH_VARARGS, NULL},
    {"products", py_products, METH_VARARGS, NULL},
    {"ladder", py_ladder, METH_VARARGS, NULL},
    {"table", py_table, METH_VARARGS, NULL},
    {"powers", py_powers, METH_VARARGS, NULL},
    {"pow_const", py_pow_const, METH_VARARGS, NULL},
    {"horner", py_horner, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_bignum", "Batches of big numbers; see he_processors/bignum/native.py.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__bignum(void)
{
    detect();
    return with_interface(PyModule_Create(&definition));
}
