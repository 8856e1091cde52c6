/* What every extension says of itself to Python: its instruction sets and the number of its interface. Also included by
 * nvflare_plugins/growth/_native: raise INTERFACE of both packages with every change here. */
#ifndef VEILBOOST_EXTENSION_H
#define VEILBOOST_EXTENSION_H

#include <string.h>

/* Kernels of one kind, best first, and the two ways to them: their names for Python, and one by its name. */
#define INSTRUCTION_SETS(kernels)                                             \
    static const struct kernels *best_first[4];                               \
                                                                              \
    static PyObject *py_instruction_sets(PyObject *self, PyObject *unused)    \
    {                                                                         \
        PyObject *names = PyList_New(0);                                      \
        for (size_t i = 0; names && i < 4 && best_first[i]; i++) {            \
            PyObject *item = PyUnicode_FromString(best_first[i]->name);       \
            if (!item || PyList_Append(names, item) < 0)                      \
                Py_CLEAR(names);                                              \
            Py_XDECREF(item);                                                 \
        }                                                                     \
        return names;                                                         \
    }                                                                         \
                                                                              \
    static inline const struct kernels *find(const char *name)                \
    {                                                                         \
        for (size_t i = 0; i < 4 && best_first[i]; i++)                       \
            if (!strcmp(best_first[i]->name, name))                           \
                return best_first[i];                                         \
        return NULL;                                                          \
    }

static PyObject *with_number(PyObject *module, long number)
{
    if (module != NULL && PyModule_AddIntConstant(module, "INTERFACE", number) < 0)
        Py_CLEAR(module);
    return module;
}

#endif
