#include "bignum.h"
const struct vb_kernels vb_avx2={.name="avx2"};
