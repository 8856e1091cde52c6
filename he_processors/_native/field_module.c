/* Python's view of the field modulo 2^61 - 1: the buffer protocol. Every function checks the sizes of its buffers,
 * releases the interpreter lock and keeps no state. he_processors/field61.py is the only caller. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "field.h"
#include "interface.h"

#include <string.h>

static const struct vf_kernel *best_first[4];

static void detect(void)
{
    size_t n = 0;
#if VF_X86
    __builtin_cpu_init(); /* cpu_supports also asks whether the operating system saves the registers */
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512ifma"))
        best_first[n++] = &vf_ifma;
    if (__builtin_cpu_supports("avx2"))
        best_first[n++] = &vf_avx2;
#endif
    best_first[n++] = &vf_portable;
}

static const struct vf_kernel *find(const char *name)
{
    for (size_t i = 0; i < 4 && best_first[i]; i++)
        if (!strcmp(best_first[i]->name, name))
            return best_first[i];
    return NULL;
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

static int holds_words(const Py_buffer *b)
{
    return b->len % 8 == 0 && (uintptr_t)b->buf % 8 == 0;
}

/* block_dots(name, values int64[n], coefficients uint64[m], out uint64[ceil(n / m)]) */
static PyObject *py_block_dots(PyObject *self, PyObject *args)
{
    const char *name;
    Py_buffer values, coefficients, out;
    if (!PyArg_ParseTuple(args, "sy*y*w*", &name, &values, &coefficients, &out))
        return NULL;
    const struct vf_kernel *kernel = find(name);
    Py_ssize_t n = values.len / 8, m = coefficients.len / 8;
    int fits = kernel && holds_words(&values) && holds_words(&coefficients) && holds_words(&out) && m > 0 &&
               out.len / 8 == n / m + (n % m != 0);
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < n; i += m)
            ((uint64_t *)out.buf)[i / m] =
                kernel->dot((const int64_t *)values.buf + i, coefficients.buf, (size_t)(n - i > m ? m : n - i));
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&values);
    PyBuffer_Release(&coefficients);
    PyBuffer_Release(&out);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "block_dots: an unknown instruction set, or a buffer of the wrong size");
        return NULL;
    }
    Py_RETURN_NONE;
}

/* For each of t tags: totals[i] += sum_b scales[i][b] * (block b of values . powers[i]), a block for all tags at a time
 * while it is in the cache. */
static void add_blocks(const struct vf_kernel *kernel, const Py_buffer *values, const uint64_t *powers, Py_ssize_t m,
                       const uint64_t *scales, Py_ssize_t blocks, uint64_t *totals, Py_ssize_t t)
{
    Py_ssize_t n = values->len / 8;
    for (Py_ssize_t b = 0, at = 0; at < n; b++, at += m)
        for (Py_ssize_t i = 0; i < t; i++) {
            size_t length = (size_t)(n - at > m ? m : n - at);
            uint64_t inner = kernel->dot((const int64_t *)values->buf + at, powers + i * m, length);
            totals[i] = vf_reduce((vf_u128)inner * vf_fold(scales[i * blocks + b]) + totals[i]);
        }
}

/* combine(name, values int64[n], more int64[k], powers uint64[t][m], scales uint64[t][blocks], m, out uint64[t]) */
static PyObject *py_combine(PyObject *self, PyObject *args)
{
    const char *name;
    Py_buffer values, more, powers, scales, out;
    Py_ssize_t m;
    if (!PyArg_ParseTuple(args, "sy*y*y*y*nw*", &name, &values, &more, &powers, &scales, &m, &out))
        return NULL;
    const struct vf_kernel *kernel = find(name);
    int fits = kernel && holds_words(&values) && holds_words(&more) && holds_words(&powers) && holds_words(&scales) &&
               holds_words(&out) && m > 0;
    Py_ssize_t n = values.len / 8, k = more.len / 8, t = out.len / 8;
    Py_ssize_t blocks = fits ? n / m + (n % m != 0) + k / m + (k % m != 0) : 0;
    fits = fits && powers.len % m == 0 && powers.len / m == 8 * t &&
           (blocks ? scales.len % blocks == 0 && scales.len / blocks == 8 * t : scales.len == 0);
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        memset(out.buf, 0, (size_t)out.len);
        add_blocks(kernel, &values, powers.buf, m, scales.buf, blocks, out.buf, t);
        add_blocks(kernel, &more, powers.buf, m, (const uint64_t *)scales.buf + n / m + (n % m != 0), blocks, out.buf, t);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&values);
    PyBuffer_Release(&more);
    PyBuffer_Release(&powers);
    PyBuffer_Release(&scales);
    PyBuffer_Release(&out);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "combine: an unknown instruction set, or a buffer of the wrong size");
        return NULL;
    }
    Py_RETURN_NONE;
}

/* powers(base, out uint64[m]): out[i] = base^i modulo p */
static PyObject *py_powers(PyObject *self, PyObject *args)
{
    unsigned long long base;
    Py_buffer out;
    if (!PyArg_ParseTuple(args, "Kw*", &base, &out))
        return NULL;
    int fits = holds_words(&out);
    if (fits) {
        Py_ssize_t n = out.len / 8;
        uint64_t *powers = out.buf, base1 = vf_fold(base), base2 = vf_reduce((vf_u128)base1 * base1);
        uint64_t base4 = vf_reduce((vf_u128)base2 * base2);
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < n; i++) /* four chains, of which none waits for another */
            powers[i] = i == 0 ? 1 : vf_reduce(i < 4 ? (vf_u128)powers[i - 1] * base1 : (vf_u128)powers[i - 4] * base4);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&out);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "powers: a buffer of the wrong size");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"instruction_sets", py_instruction_sets, METH_NOARGS, "names, best first"},
    {"block_dots", py_block_dots, METH_VARARGS, NULL},
    {"combine", py_combine, METH_VARARGS, NULL},
    {"powers", py_powers, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_field", "Inner products modulo 2^61 - 1; see he_processors/field61.py.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__field(void)
{
    detect();
    return with_interface(PyModule_Create(&definition));
}
