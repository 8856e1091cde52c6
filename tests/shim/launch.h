// Runs a kernel over all warps of a launch; follows the kernels in the same translation unit. ALL_KERNELS, from
// shim_device.py, holds a LAUNCHABLE for each of them.
#pragma once

namespace shim {

static void (*body)(void**);
static void** arguments;
static u64 n_warps;

static void lane_main() {
    u32 lane = current;
    for (u64 warp = 0; warp < n_warps; ++warp) {
        if (lane == 0) first_thread = warp * WARP;
        body(arguments);
        meet(0, END);
    }
    if (lane + 1 < WARP) switch_to(lane + 1);
    _longjmp(launcher, 1);   // the last lane
}

static void run(void (*kernel_body)(void**), u64 groups, void** kernel_arguments) {
    body = kernel_body;
    arguments = kernel_arguments;
    n_warps = (groups * TPI + WARP - 1) / WARP;
    carry = NO_CHAIN;
    for (Fiber& fiber : fibers) {
        fiber.started = false;
        if (!fiber.stack) fiber.stack = (char*)malloc(STACK_BYTES);
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = fiber.stack;
        fiber.start.uc_stack.ss_size = STACK_BYTES;
        makecontext(&fiber.start, lane_main, 0);
    }
    if (_setjmp(launcher)) return;
    current = 0;
    fibers[0].started = true;
    setcontext(&fibers[0].start);
}

template <class... A, size_t... I>
static void call(void (*kernel)(A...), void** values, std::index_sequence<I...>) {
    kernel(*(A*)values[I]...);
}

template <auto kernel>
struct Body;
template <class... A, void (*kernel)(A...)>
struct Body<kernel> {
    static void run(void** values) { call(kernel, values, std::index_sequence_for<A...>{}); }
    static constexpr int count = sizeof...(A);
};

}  // namespace shim

#define LAUNCHABLE(kernel)                                                   \
    if (!strcmp(name, #kernel) && n_values == shim::Body<kernel>::count) {   \
        shim::run(shim::Body<kernel>::run, groups, values);                  \
        return 0;                                                            \
    }

// values: the address of each argument. Returns 0, or 1 for an unknown kernel or a wrong number of arguments.
extern "C" int shim_launch(const char* name, u64 groups, void** values, int n_values) {
    ALL_KERNELS
    return 1;
}
