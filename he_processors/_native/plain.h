/* The functions on plain integers that module.c offers to Python. */
#ifndef VEILBOOST_PLAIN_H
#define VEILBOOST_PLAIN_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* linear(terms, constant, modulus, out): out[i] = (constant + sum_t rows_t[i] * coefficient_t) mod modulus, where terms
 * is a tuple of (rows, width, coefficient); all numbers little-endian and not negative. */
PyObject *vb_py_linear(PyObject *self, PyObject *args);

#endif
