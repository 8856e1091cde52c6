/* What the Python side asks of the extensions (he_processors/_native/__init__.py): raise both with every change of the C
 * sources, so that an extension which was built from earlier ones is refused by name. */
#ifndef VEILBOOST_INTERFACE_H
#define VEILBOOST_INTERFACE_H

#include "extension.h"

#define INTERFACE 6

static PyObject *with_interface(PyObject *module)
{
    return with_number(module, INTERFACE);
}

#endif
