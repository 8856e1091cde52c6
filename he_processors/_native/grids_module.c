/* Rounding to grids of powers of two, in one pass: he_processors/fixed_point.py is the only caller and has a twin of
 * each function in numpy, whose results these have to the bit. Sizes of buffers are checked, the interpreter lock is
 * released, no state is kept. Compiled without contraction, so that every operation rounds as numpy's does. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "interface.h"

#include <math.h>
#include <stdint.h>

#define MOST_GRIDS 16
#define BLOCK 2048 /* rows that stay in the cache while each grid has its turn */
#define MOST_STEPS 0x1p62 /* a larger number of steps would not fit an integer with what is carried to it */

struct grid {
    double steps_per_unit, bound;
    double error, carried; /* running sum of rounding errors, and how much of it has been made up for */
};

/* Half to even. Adding 2^52 leaves no room for a fraction; from there on numbers have none. */
static inline double nearest(double x)
{
    double room = copysign(0x1p52, x);
    return fabs(x) < 0x1p52 ? (x + room) - room : x;
}

static int exceeds(const double *values, size_t rows, size_t stride, double bound)
{
    int found = 0;
    for (size_t i = 0; i < rows; i++)
        found |= !(fabs(values[i * stride]) <= bound); /* NaN does */
    return found;
}

static void round_each(const double *values, size_t rows, size_t stride, const struct grid *grid, int64_t *out)
{
    for (size_t i = 0; i < rows; i++)
        out[i * stride] = (int64_t)nearest(values[i * stride] * grid->steps_per_unit);
}

static void round_running(const double *values, size_t rows, size_t stride, struct grid *grid, int64_t *out)
{
    double error = grid->error, carried = grid->carried;
    for (size_t i = 0; i < rows; i++) {
        double scaled = values[i * stride] * grid->steps_per_unit, rounded = nearest(scaled);
        error += scaled - rounded;
        double now = nearest(error);
        out[i * stride] = (int64_t)(rounded + (now - carried));
        carried = now;
    }
    grid->error = error;
    grid->carried = carried;
}

/* Returns the grids, a bit each, on which a value is no number or beyond its bound; out is then not to be used. */
static unsigned round_values(const double *values, size_t n, struct grid *grids, size_t k, int running, int64_t *out)
{
    unsigned found = 0;
    for (size_t start = 0; start < n; start += BLOCK * k) {
        size_t rows = (n - start > BLOCK * k ? BLOCK * k : n - start) / k;
        for (size_t c = 0; c < k; c++)
            found |= (unsigned)exceeds(values + start + c, rows, k, grids[c].bound) << c;
        for (size_t c = 0; c < k && !found; c++) {
            if (running)
                round_running(values + start + c, rows, k, &grids[c], out + start + c);
            else
                round_each(values + start + c, rows, k, &grids[c], out + start + c);
        }
    }
    return found;
}

static int holds(const Py_buffer *buffer, Py_ssize_t words)
{
    return buffer->len == 8 * words && (uintptr_t)buffer->buf % 8 == 0;
}

/* round(values float64[n], steps_per_unit float64[k], bounds float64[k], running, out int64[n]) -> bits of grids */
static PyObject *py_round(PyObject *self, PyObject *args)
{
    Py_buffer values, steps, bounds, out;
    int running;
    unsigned found = 0;
    struct grid grids[MOST_GRIDS];
    if (!PyArg_ParseTuple(args, "y*y*y*pw*", &values, &steps, &bounds, &running, &out))
        return NULL;
    Py_ssize_t n = values.len / 8, k = steps.len / 8;
    int fits = k > 0 && k <= MOST_GRIDS && n % k == 0 && holds(&values, n) && holds(&out, n) && holds(&steps, k) &&
               holds(&bounds, k);
    for (Py_ssize_t c = 0; fits && c < k; c++) {
        grids[c] = (struct grid){((const double *)steps.buf)[c], ((const double *)bounds.buf)[c], 0.0, 0.0};
        fits = grids[c].steps_per_unit * grids[c].bound <= MOST_STEPS;
    }
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        found = round_values(values.buf, (size_t)n, grids, (size_t)k, running, out.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&values);
    PyBuffer_Release(&steps);
    PyBuffer_Release(&bounds);
    PyBuffer_Release(&out);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "round: a buffer of the wrong size, or a grid too fine for its bound");
        return NULL;
    }
    return PyLong_FromUnsignedLong(found);
}

/* scale(integers int64[n], steps float64[k], out float64[n]) */
static PyObject *py_scale(PyObject *self, PyObject *args)
{
    Py_buffer integers, steps, out;
    if (!PyArg_ParseTuple(args, "y*y*w*", &integers, &steps, &out))
        return NULL;
    Py_ssize_t n = integers.len / 8, k = steps.len / 8;
    int fits = k > 0 && n % k == 0 && holds(&integers, n) && holds(&steps, k) && holds(&out, n);
    if (fits) {
        const int64_t *from = integers.buf;
        const double *step = steps.buf;
        double *to = out.buf;
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < n; i += k)
            for (Py_ssize_t c = 0; c < k; c++)
                to[i + c] = (double)from[i + c] * step[c];
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&integers);
    PyBuffer_Release(&steps);
    PyBuffer_Release(&out);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "scale: a buffer of the wrong size");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"round", py_round, METH_VARARGS, NULL},
    {"scale", py_scale, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_grids", "Rounding to grids of powers of two; see he_processors/fixed_point.py.", -1,
    methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__grids(void)
{
    return with_interface(PyModule_Create(&definition));
}
