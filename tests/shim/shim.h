// The machine layer of the CUDA kernels (he_processors/cuda/warp.cuh) on a CPU: 32 fibers are the lanes of a warp.
//
// A fiber runs until it exchanges values with the others, so that lanes advance in lockstep from exchange to exchange.
// No chain of carries goes on over an exchange, so that one flag serves them all. What a GPU would answer with a hang or
// silent nonsense stops the program here: lanes that meet at different exchanges, or a carry read where no chain is open.
#pragma once

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <utility>

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(16) uint4 {
    u32 x, y, z, w;
};
static inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return uint4{x, y, z, w}; }

#define DEVICE static inline
#define KERNEL static void

namespace shim {

constexpr u32 WARP = 32;
constexpr size_t STACK_BYTES = 64 << 10;
constexpr u32 NO_CHAIN = 2;

enum Meeting { SHUFFLE, BALLOT, END };

struct Fiber {
    ucontext_t start;
    jmp_buf resume;
    bool started;
    char* stack;
};

struct Posted {
    u32 value;
    Meeting meeting;
};

static Fiber fibers[WARP];
static Posted board[2][WARP];   // two, since a lane may post again before the last one has read
static u32 current, parity[WARP];
static u32 carry = NO_CHAIN;    // of the current lane: each ends its chain before another goes on
static u64 first_thread;
static jmp_buf launcher;

static void die(const char* why) {
    fprintf(stderr, "shim: %s\n", why);
    abort();
}

static void switch_to(u32 lane) {
    if (_setjmp(fibers[current].resume)) return;
    current = lane;
    if (fibers[lane].started) _longjmp(fibers[lane].resume, 1);
    fibers[lane].started = true;
    setcontext(&fibers[lane].start);
}

// Post a value, let all other lanes post theirs, and return what was posted. The first lane, which goes on first, looks
// for all whether they have met.
static const Posted* meet(u32 value, Meeting meeting) {
    u32 lane = current;
    Posted* posts = board[parity[lane] ^= 1];
    carry = NO_CHAIN;
    posts[lane] = Posted{value, meeting};
    switch_to((lane + 1) % WARP);
    for (u32 other = 1; lane == 0 && other < WARP; ++other) {
        if (posts[other].meeting != meeting) die("lanes of a warp meet at different exchanges");
    }
    return posts;
}

static u32 take_carry() {
    if (carry == NO_CHAIN) die("a carry is read outside a chain");
    return carry;
}

static u32 give_carry(u64 sum) {
    carry = (u32)(sum >> 32);
    return (u32)sum;
}

}  // namespace shim

DEVICE u32 add_cc(u32 a, u32 b) { return shim::give_carry((u64)a + b); }
DEVICE u32 addc_cc(u32 a, u32 b) { return shim::give_carry((u64)a + b + shim::take_carry()); }
DEVICE u32 addc(u32 a, u32 b) {
    u32 sum = a + b + shim::take_carry();
    shim::carry = shim::NO_CHAIN;
    return sum;
}
DEVICE u32 mad_lo_cc(u32 a, u32 b, u32 c) { return shim::give_carry((u64)(u32)((u64)a * b) + c); }
DEVICE u32 madc_lo_cc(u32 a, u32 b, u32 c) { return shim::give_carry((u64)(u32)((u64)a * b) + c + shim::take_carry()); }
DEVICE u32 madc_hi_cc(u32 a, u32 b, u32 c) { return shim::give_carry(((u64)a * b >> 32) + c + shim::take_carry()); }

DEVICE u32 shuffle(u32 value, u32 lane_of_group) {
    u32 base = shim::current / TPI * TPI;   // kept: the lane runs on after the others have
    return shim::meet(value, shim::SHUFFLE)[base + lane_of_group % TPI].value;
}
DEVICE u32 votes(bool value) {
    const shim::Posted* posts = shim::meet(value, shim::BALLOT);
    u32 bits = 0;
    for (u32 lane = 0; lane < shim::WARP; ++lane) bits |= posts[lane].value << lane;
    return bits;
}
DEVICE void prefetch_sector(const u32*) {}
DEVICE u64 thread_index() { return shim::first_thread + shim::current; }
