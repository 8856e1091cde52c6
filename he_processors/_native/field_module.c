/* Python's view of the field modulo 2^61 - 1: the buffer protocol. Every function checks the sizes of its buffers,
 * releases the interpreter lock and keeps no state. he_processors/field61.py is the only caller. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "field.h"
#include "interface.h"

#include <string.h>

INSTRUCTION_SETS(vf_kernel)

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

static int holds_words(const Py_buffer *b)
{
    return b->len % 8 == 0 && (uintptr_t)b->buf % 8 == 0;
}

/* totals[k] += sum_b scales[k][b] * (block b of values . powers[k]), both in one pass over the values. */
static void add_blocks(const struct vf_kernel *kernel, const Py_buffer *values, const uint64_t *powers, Py_ssize_t m,
                       const uint64_t *scales, Py_ssize_t blocks, uint64_t totals[2], uint64_t *too_large)
{
    const uint64_t *both[2] = {powers, powers + m};
    Py_ssize_t n = values->len / 8;
    for (Py_ssize_t b = 0, at = 0; at < n; b++, at += m) {
        uint64_t inner[2];
        kernel->dots((const int64_t *)values->buf + at, both, (size_t)(n - at > m ? m : n - at), inner, too_large);
        for (int k = 0; k < 2; k++)
            totals[k] = vf_reduce((vf_u128)inner[k] * vf_fold(scales[k * blocks + b]) + totals[k]);
    }
}

/* combine(name, values int64[n], more int64[k], powers uint64[2][m], scales uint64[2][blocks], out uint64[2]) -> whether
 * no value exceeds VF_LARGEST in magnitude */
static PyObject *py_combine(PyObject *self, PyObject *args)
{
    const char *name;
    Py_buffer values, more, powers, scales, out;
    if (!PyArg_ParseTuple(args, "sy*y*y*y*w*", &name, &values, &more, &powers, &scales, &out))
        return NULL;
    const struct vf_kernel *kernel = find(name);
    int fits = kernel && holds_words(&values) && holds_words(&more) && holds_words(&powers) && holds_words(&scales) &&
               holds_words(&out) && powers.len >= 16 && powers.len % 16 == 0 && out.len == 16;
    Py_ssize_t m = powers.len / 16, n = values.len / 8, k = more.len / 8;
    Py_ssize_t of_values = fits ? n / m + (n % m != 0) : 0, blocks = fits ? of_values + k / m + (k % m != 0) : 0;
    uint64_t too_large = 0, ignored = 0;
    fits = fits && scales.len / 16 == blocks && scales.len % 16 == 0;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        memset(out.buf, 0, (size_t)out.len);
        add_blocks(kernel, &values, powers.buf, m, scales.buf, blocks, out.buf, &too_large);
        add_blocks(kernel, &more, powers.buf, m, (const uint64_t *)scales.buf + of_values, blocks, out.buf, &ignored);
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
    return PyBool_FromLong(!(too_large >> 63));
}

#define CHAINS 8 /* of which none waits for another */

static void write_powers(uint64_t base, uint64_t *powers, Py_ssize_t n)
{
    uint64_t step = vf_fold(base);
    for (int doubled = 1; doubled < CHAINS; doubled *= 2)
        step = vf_reduce((vf_u128)step * step);
    for (Py_ssize_t i = 0; i < n && i < CHAINS; i++)
        powers[i] = i == 0 ? 1 : vf_reduce((vf_u128)powers[i - 1] * vf_fold(base));
    for (Py_ssize_t i = CHAINS; i < n; i++)
        powers[i] = vf_reduce((vf_u128)powers[i - CHAINS] * step);
}

/* powers(bases uint64[r], out uint64[r][m]): out[k][i] = bases[k]^i modulo p */
static PyObject *py_powers(PyObject *self, PyObject *args)
{
    Py_buffer bases, out;
    if (!PyArg_ParseTuple(args, "y*w*", &bases, &out))
        return NULL;
    Py_ssize_t rows = bases.len / 8, n = rows ? out.len / 8 / rows : 0;
    int fits = holds_words(&bases) && holds_words(&out) && out.len == 8 * rows * n;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t k = 0; k < rows; k++)
            write_powers(((const uint64_t *)bases.buf)[k], (uint64_t *)out.buf + k * n, n);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&bases);
    PyBuffer_Release(&out);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "powers: a buffer of the wrong size");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"instruction_sets", py_instruction_sets, METH_NOARGS, "names, best first"},
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
