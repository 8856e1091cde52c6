// What the arithmetic needs from the machine: carry chains and exchange between the lanes of a warp.
//
// Every line of PTX in this package is in this file. tests/shim/shim.h defines the same names for the CPU, so that
// mont.cuh and kernels.cuh compile there unchanged. A carry lives from one call to the next: a chain starts with
// *_cc, continues with *c_cc and ends with addc, with nothing but chain calls between. "volatile" keeps that order.

#define DEVICE __device__ __forceinline__
// Blocks of 128 threads, and enough of them on a multiprocessor to keep its multipliers busy. The second number
// also keeps the assembler from spilling in order to fit one block more.
#define KERNEL extern "C" __global__ void __launch_bounds__(128, LIMBS / TPI <= 16 ? 4 : 2)

typedef unsigned int u32;
typedef unsigned long long u64;

DEVICE u32 add_cc(u32 a, u32 b) {
    u32 r;
    asm volatile("add.cc.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

DEVICE u32 addc_cc(u32 a, u32 b) {
    u32 r;
    asm volatile("addc.cc.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

DEVICE u32 addc(u32 a, u32 b) {
    u32 r;
    asm volatile("addc.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// A low half followed by the high half of the same product is one 32 x 32 -> 64 bit multiply-add for the assembler.
DEVICE u32 mad_lo_cc(u32 a, u32 b, u32 c) {
    u32 r;
    asm volatile("mad.lo.cc.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

DEVICE u32 madc_lo_cc(u32 a, u32 b, u32 c) {
    u32 r;
    asm volatile("madc.lo.cc.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

DEVICE u32 madc_hi_cc(u32 a, u32 b, u32 c) {
    u32 r;
    asm volatile("madc.hi.cc.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

// All 32 lanes must call these together.
DEVICE u32 shuffle(u32 value, u32 lane_of_group) { return __shfl_sync(0xffffffffu, value, lane_of_group, TPI); }
DEVICE u32 votes(bool value) { return __ballot_sync(0xffffffffu, value); }

DEVICE void prefetch_sector(const u32* address) { asm volatile("prefetch.L1 [%0];" : : "l"(address)); }

DEVICE u64 thread_index() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
