/* Batches of plain integers for Python: a linear combination modulo anything. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bignum.h"
#include "plain.h"

#include <stdlib.h>
#include <string.h>

#define MAX_TERMS 8

struct term {
    Py_buffer rows, coefficient;
    size_t width;         /* bytes of a number */
    size_t words, factor_words;
    uint64_t *factor;     /* the coefficient */
};

struct combination {
    struct term terms[MAX_TERMS];
    size_t n_terms;
    Py_buffer constant, modulus, out;
    size_t words;         /* of the modulus */
    size_t sum_words, number_words;
    unsigned shift;
    uint64_t *memory, *divisor, *sum, *number;
};

/* Lay out one block of memory: divisor, sum, one number, then the coefficients. */
static int prepare(struct combination *c)
{
    size_t total = 0;
    c->words = ((size_t)c->modulus.len + 7) / 8;
    c->sum_words = c->words > ((size_t)c->constant.len + 7) / 8 ? c->words : ((size_t)c->constant.len + 7) / 8;
    for (size_t t = 0; t < c->n_terms; t++) {
        struct term *term = &c->terms[t];
        term->words = (term->width + 7) / 8;
        term->factor_words = ((size_t)term->coefficient.len + 7) / 8;
        total += term->factor_words;
        if (term->words > c->number_words)
            c->number_words = term->words;
        if (term->words + term->factor_words > c->sum_words)
            c->sum_words = term->words + term->factor_words;
    }
    c->sum_words += 2; /* one for the carry of the sum, one for the shift of the division */
    c->memory = calloc(c->words + c->sum_words + c->number_words + total + 1, 8);
    if (!c->memory)
        return -1;
    c->divisor = c->memory;
    c->sum = c->divisor + c->words;
    c->number = c->sum + c->sum_words;
    uint64_t *next = c->number + c->number_words;
    for (size_t t = 0; t < c->n_terms; t++) {
        struct term *term = &c->terms[t];
        term->factor = next;
        vb_to_words(term->coefficient.buf, term->coefficient.len, term->factor_words, term->factor);
        next += term->factor_words;
    }
    vb_to_words(c->modulus.buf, c->modulus.len, c->words, c->divisor);
    c->shift = vb_normalise(c->divisor, c->words);
    return 0;
}

static void combine(struct combination *c)
{
    size_t width = (size_t)c->modulus.len, n = (size_t)c->out.len / width;
    for (size_t i = 0; i < n; i++) {
        vb_to_words(c->constant.buf, c->constant.len, c->sum_words, c->sum);
        for (size_t t = 0; t < c->n_terms; t++) {
            const struct term *term = &c->terms[t];
            vb_to_words((const uint8_t *)term->rows.buf + i * term->width, term->width, term->words, c->number);
            vb_mul_add(c->sum, c->sum_words, c->number, term->words, term->factor, term->factor_words);
        }
        vb_remainder(c->sum, c->sum_words, c->divisor, c->words, c->shift);
        memcpy((uint8_t *)c->out.buf + i * width, c->sum, width);
    }
}

static int parse_terms(struct combination *c, PyObject *terms)
{
    Py_ssize_t n = PyTuple_Size(terms);
    if (n < 0)
        return -1;
    if (n > MAX_TERMS) {
        PyErr_SetString(PyExc_ValueError, "too many terms");
        return -1;
    }
    for (Py_ssize_t t = 0; t < n; t++) {
        struct term *term = &c->terms[t];
        Py_ssize_t width;
        PyObject *item = PyTuple_GetItem(terms, t);
        if (!item || !PyArg_ParseTuple(item, "y*ny*", &term->rows, &width, &term->coefficient))
            return -1;
        c->n_terms++;
        term->width = (size_t)width;
        if (width < 1 || c->out.len / c->modulus.len * width != term->rows.len) {
            PyErr_SetString(PyExc_ValueError, "a term has the wrong number of rows");
            return -1;
        }
    }
    return 0;
}

PyObject *vb_py_linear(PyObject *self, PyObject *args)
{
    PyObject *terms;
    struct combination c = {0};
    int status = -1;
    if (!PyArg_ParseTuple(args, "O!y*y*w*", &PyTuple_Type, &terms, &c.constant, &c.modulus, &c.out))
        return NULL;
    if (c.modulus.len < 1 || c.out.len % c.modulus.len || !((const uint8_t *)c.modulus.buf)[c.modulus.len - 1]) {
        PyErr_SetString(PyExc_ValueError, "the modulus has leading zeros, or does not fit the result");
    } else if (parse_terms(&c, terms) == 0) {
        Py_BEGIN_ALLOW_THREADS
        status = prepare(&c);
        if (status == 0)
            combine(&c);
        Py_END_ALLOW_THREADS
        if (status < 0)
            PyErr_NoMemory();
    }
    free(c.memory);
    for (size_t t = 0; t < c.n_terms; t++) {
        PyBuffer_Release(&c.terms[t].rows);
        PyBuffer_Release(&c.terms[t].coefficient);
    }
    PyBuffer_Release(&c.constant);
    PyBuffer_Release(&c.modulus);
    PyBuffer_Release(&c.out);
    if (status < 0)
        return NULL;
    Py_RETURN_NONE;
}
