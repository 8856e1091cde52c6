/* What the Python side asks of the extensions (nvflare_plugins/growth/_native/__init__.py): raise both with every change
 * of the C sources, so that an extension which was built from earlier ones is refused by name. */
#ifndef VEILBOOST_GROWTH_INTERFACE_H
#define VEILBOOST_GROWTH_INTERFACE_H

#define INTERFACE 1

static PyObject *with_interface(PyObject *module)
{
    if (module != NULL && PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) < 0)
        Py_CLEAR(module);
    return module;
}

#endif
