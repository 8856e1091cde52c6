#include "bignum.h"
