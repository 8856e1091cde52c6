/* exp and log of float32, and the gradients that are made of them, in one pass: nvflare_plugins/growth/float32.py and
 * objectives.py are the only callers and have a twin of each function in numpy, whose results these have to the bit.
 * Compiled without contraction: every operation rounds by itself. The method and its constants are those of the GNU C
 * library since 2.27 (S. Nagy, ARM optimized routines): a table, a short polynomial, doubles throughout.
 * Sizes of buffers are checked, the interpreter lock is released, no state is kept. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../../../he_processors/_native/extension.h"
#include "growth.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline double double_of(uint64_t bits)
{
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

#define EXP_PARTS 32
/* Bits of 2^(i/32), less i in the place of the exponent's last bits: adding k there gives 2^(k/32). */
static const uint64_t exp_table[EXP_PARTS] = {
    0x3ff0000000000000, 0x3fefd9b0d3158574, 0x3fefb5586cf9890f, 0x3fef9301d0125b51, 0x3fef72b83c7d517b,
    0x3fef54873168b9aa, 0x3fef387a6e756238, 0x3fef1e9df51fdee1, 0x3fef06fe0a31b715, 0x3feef1a7373aa9cb,
    0x3feedea64c123422, 0x3feece086061892d, 0x3feebfdad5362a27, 0x3feeb42b569d4f82, 0x3feeab07dd485429,
    0x3feea47eb03a5585, 0x3feea09e667f3bcd, 0x3fee9f75e8ec5f74, 0x3feea11473eb0187, 0x3feea589994cce13,
    0x3feeace5422aa0db, 0x3feeb737b0cdc5e5, 0x3feec49182a3f090, 0x3feed503b23e255d, 0x3feee89f995ad3ad,
    0x3feeff76f2fb5e47, 0x3fef199bdd85529c, 0x3fef3720dcef9069, 0x3fef5818dcfba487, 0x3fef7c97337b9b5f,
    0x3fefa4afa2a490da, 0x3fefd0765b6e4540,
};
#define EXP_SHIFT 0x1.8p52
#define EXP_SCALE (0x1.71547652b82fep+0 * EXP_PARTS)
#define EXP_C0 (0x1.c6af84b912394p-5 / EXP_PARTS / EXP_PARTS / EXP_PARTS)
#define EXP_C1 (0x1.ebfce50fac4f3p-3 / EXP_PARTS / EXP_PARTS)
#define EXP_C2 (0x1.62e42ff0c52d6p-1 / EXP_PARTS)

static inline float exp_of(float x)
{
    if (!(fabsf(x) < 88.0f)) {
        if (x != x)
            return x;
        if (x > 0x1.62e42ep6f)
            return HUGE_VALF;
        if (x < -0x1.9fe368p6f)
            return 0.0f;
    }
    /* The library's form for processors with fused operations rounds these two, of all, the other way. */
    if (x == 0x1.04845ep+5f)
        return 0x1.f93e38p+46f;
    if (x == -0x1.f8cbb2p+5f)
        return 0x1.f45326p-92f;
    double z = EXP_SCALE * (double)x;
    double shifted = z + EXP_SHIFT;
    uint64_t k;
    memcpy(&k, &shifted, sizeof k);
    double r = z - (shifted - EXP_SHIFT);
    double s = double_of(exp_table[k % EXP_PARTS] + (k << 47));
    double high = EXP_C0 * r + EXP_C1, low = EXP_C2 * r + 1.0;
    return (float)((high * (r * r) + low) * s);
}

#define LOG_PARTS 16
/* 1/c and log(c) for a c near the middle of each part of [0.69, 1.39). */
static const double log_table[LOG_PARTS][2] = {
    {0x1.661ec79f8f3bep+0, -0x1.57bf7808caadep-2}, {0x1.571ed4aaf883dp+0, -0x1.2bef0a7c06ddbp-2},
    {0x1.49539f0f010bp+0, -0x1.01eae7f513a67p-2},  {0x1.3c995b0b80385p+0, -0x1.b31d8a68224e9p-3},
    {0x1.30d190c8864a5p+0, -0x1.6574f0ac07758p-3}, {0x1.25e227b0b8eap+0, -0x1.1aa2bc79c81p-3},
    {0x1.1bb4a4a1a343fp+0, -0x1.a4e76ce8c0e5ep-4}, {0x1.12358f08ae5bap+0, -0x1.1973c5a611cccp-4},
    {0x1.0953f419900a7p+0, -0x1.252f438e10c1ep-5}, {0x1p+0, 0x0p+0},
    {0x1.e608cfd9a47acp-1, 0x1.aa5aa5df25984p-5},  {0x1.ca4b31f026aap-1, 0x1.c5e53aa362eb4p-4},
    {0x1.b2036576afce6p-1, 0x1.526e57720db08p-3},  {0x1.9c2d163a1aa2dp-1, 0x1.bc2860d22477p-3},
    {0x1.886e6037841edp-1, 0x1.1058bc8a07ee1p-2},  {0x1.767dcf5534862p-1, 0x1.4043057b6ee09p-2},
};
#define LN2 0x1.62e42fefa39efp-1
#define LOG_C0 -0x1.00ea348b88334p-2
#define LOG_C1 0x1.5575b0be00b6ap-2
#define LOG_C2 -0x1.ffffef20a4123p-2
#define LOG_LOWEST 0x3f330000u
#define SMALLEST_NORMAL 0x00800000u
#define INFINITE 0x7f800000u

static inline float log_of(float x)
{
    uint32_t bits = bits_of(x);
    if (bits - SMALLEST_NORMAL >= INFINITE - SMALLEST_NORMAL) {
        if (bits << 1 == 0)
            return -HUGE_VALF;
        if (bits == INFINITE || x != x)
            return x;
        if (bits >> 31)
            return NAN;
        bits = bits_of(x * 0x1p23f) - (23u << 23);
    }
    uint32_t above = bits - LOG_LOWEST;
    const double *part = log_table[(above >> 19) % LOG_PARTS];
    double exponent = (double)((int32_t)(above & 0xff800000u) / (1 << 23));
    double r = (double)float_of(bits - (above & 0xff800000u)) * part[0] - 1.0;
    double start = part[1] + exponent * LN2, square = r * r;
    double high = LOG_C0 * square + (LOG_C1 * r + LOG_C2);
    return (float)(high * square + (start + r));
}

/* common::Sigmoid of XGBoost: the limit keeps exp finite; 1e-16 vanishes in a float beside 1. */
static inline float logistic_of(float x)
{
    float negative = -x;
    negative = 88.7f < negative ? 88.7f : negative;
    return 1.0f / (exp_of(negative) + 1.0f + 1e-16f);
}

struct pair {
    float g, h;
};

static void logistic_pairs(const float *margin, const float *label, const float *weight, float of_positive, size_t n,
                           struct pair *out)
{
    for (size_t i = 0; i < n; i++) {
        float p = logistic_of(margin[i]), y = label[i], w = weight ? weight[i] : 1.0f;
        if (y == 1.0f)
            w *= of_positive;
        out[i].g = (p - y) * w;
        out[i].h = fmaxf(p * (1.0f - p), 1e-16f) * w;
    }
}

/* Pairs of a class lie together: out[class][row]. exps has room for n_classes. */
static void softmax_pairs(const float *margin, const float *label, const float *weight, size_t n, size_t n_classes,
                          float *exps, struct pair *out)
{
    for (size_t i = 0; i < n; i++, margin += n_classes) {
        float largest = 1.17549435e-38f, w = weight ? weight[i] : 1.0f;
        for (size_t k = 0; k < n_classes; k++)
            largest = fmaxf(margin[k], largest);
        double sum = 0.0;
        for (size_t k = 0; k < n_classes; k++)
            sum += exps[k] = exp_of(margin[k] - largest);
        for (size_t k = 0; k < n_classes; k++) {
            float p = exps[k] / (float)sum, h = 2.0f * p * (1.0f - p) * w;
            out[k * n + i].g = (label[i] == (float)k ? p - 1.0f : p) * w;
            out[k * n + i].h = fmaxf(h, 1e-16f);
        }
    }
}

static void apply_exp(const float *x, size_t n, float *out)
{
    for (size_t i = 0; i < n; i++)
        out[i] = exp_of(x[i]);
}

static void apply_log(const float *x, size_t n, float *out)
{
    for (size_t i = 0; i < n; i++)
        out[i] = log_of(x[i]);
}

static void apply_logistic(const float *x, size_t n, float *out)
{
    for (size_t i = 0; i < n; i++)
        out[i] = logistic_of(x[i]);
}

static int holds(const Py_buffer *buffer, Py_ssize_t n)
{
    return buffer->len == 4 * n && (uintptr_t)buffer->buf % 4 == 0;
}

static PyObject *wrong_size(void)
{
    PyErr_SetString(PyExc_ValueError, "a buffer of the wrong size");
    return NULL;
}

static PyObject *applied(PyObject *args, void (*apply)(const float *, size_t, float *))
{
    Py_buffer x, out;
    if (!PyArg_ParseTuple(args, "y*w*", &x, &out))
        return NULL;
    int fits = x.len % 4 == 0 && holds(&x, x.len / 4) && holds(&out, x.len / 4);
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        apply(x.buf, (size_t)x.len / 4, out.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&x);
    PyBuffer_Release(&out);
    if (!fits)
        return wrong_size();
    Py_RETURN_NONE;
}

/* exp(x float32[n], out float32[n]), and so log and logistic */
static PyObject *py_exp(PyObject *self, PyObject *args)
{
    return applied(args, apply_exp);
}

static PyObject *py_log(PyObject *self, PyObject *args)
{
    return applied(args, apply_log);
}

static PyObject *py_logistic(PyObject *self, PyObject *args)
{
    return applied(args, apply_logistic);
}

/* logistic_pairs(margin float32[n], label float32[n], weight float32[n] or [0], of_positive, out float32[n, 2]) */
static PyObject *py_logistic_pairs(PyObject *self, PyObject *args)
{
    Py_buffer margin, label, weight, out;
    float of_positive;
    if (!PyArg_ParseTuple(args, "y*y*y*fw*", &margin, &label, &weight, &of_positive, &out))
        return NULL;
    Py_ssize_t n = margin.len / 4;
    int fits = holds(&margin, n) && holds(&label, n) && (weight.len == 0 || holds(&weight, n)) && holds(&out, 2 * n);
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        logistic_pairs(margin.buf, label.buf, weight.len ? weight.buf : NULL, of_positive, (size_t)n, out.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&margin);
    PyBuffer_Release(&label);
    PyBuffer_Release(&weight);
    PyBuffer_Release(&out);
    if (!fits)
        return wrong_size();
    Py_RETURN_NONE;
}

/* softmax_pairs(margin float32[n, k], label float32[n], weight float32[n] or [0], out float32[k, n, 2]) */
static PyObject *py_softmax_pairs(PyObject *self, PyObject *args)
{
    Py_buffer margin, label, weight, out;
    float *exps = NULL;
    if (!PyArg_ParseTuple(args, "y*y*y*w*", &margin, &label, &weight, &out))
        return NULL;
    Py_ssize_t n = label.len / 4, k = n ? margin.len / label.len : 0;
    int fits = holds(&label, n) && holds(&margin, n * k) && (weight.len == 0 || holds(&weight, n)) &&
               holds(&out, 2 * n * k);
    if (fits && k > 0)
        exps = PyMem_RawMalloc(sizeof *exps * (size_t)k);
    if (exps != NULL) {
        Py_BEGIN_ALLOW_THREADS
        softmax_pairs(margin.buf, label.buf, weight.len ? weight.buf : NULL, (size_t)n, (size_t)k, exps, out.buf);
        Py_END_ALLOW_THREADS
        PyMem_RawFree(exps);
    }
    PyBuffer_Release(&margin);
    PyBuffer_Release(&label);
    PyBuffer_Release(&weight);
    PyBuffer_Release(&out);
    if (!fits)
        return wrong_size();
    if (exps == NULL && k > 0)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"exp", py_exp, METH_VARARGS, NULL},
    {"log", py_log, METH_VARARGS, NULL},
    {"logistic", py_logistic, METH_VARARGS, NULL},
    {"logistic_pairs", py_logistic_pairs, METH_VARARGS, NULL},
    {"softmax_pairs", py_softmax_pairs, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_float32", "Functions of float32; see nvflare_plugins/growth/float32.py.", -1,
    methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__float32(void)
{
    return with_number(PyModule_Create(&definition), INTERFACE);
}
