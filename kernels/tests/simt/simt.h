// An emulator of CUDA thread blocks: runs the .cu sources of this crate on the CPU, for tests.
//
// Blocks run one after the other; inside a block every CUDA thread is a fiber. A fiber runs until it has to wait for its
// warp (shuffles, __syncwarp) or its block (__syncthreads). A wait that can never end aborts with a message, so a barrier
// in divergent code fails the test. It shows that the arithmetic and the barriers are right, not that there are no races.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__ __restrict
// One block runs at a time, so one copy is enough; like the real thing it keeps what the last block left in it.
#define __shared__ static

struct uint3 { unsigned x, y, z; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace simt {

constexpr unsigned WARP = 32;
constexpr size_t STACK_BYTES = 64 * 1024;

enum class State { Ready, InWarp, InBlock, Done };

struct Fiber {
    void* stack_pointer = nullptr;
    State state = State::Ready;
    uint3 thread{};
    unsigned lane = 0, warp = 0;
    unsigned round = 0;  // parity of the exchanges it took part in
};

struct Warp {
    uint64_t values[2][WARP];  // two, so that a fast fiber cannot overwrite what a slow one still reads
    unsigned alive = 0, arrived = 0, mask = 0;
};

struct Block {
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::unique_ptr<char[]> stacks;
    size_t stack_count = 0;
    unsigned alive = 0, waiting = 0;
    uint3 index{}, threads{}, grid{};
    const std::function<void()>* kernel = nullptr;
    Fiber* current = nullptr;
    void* scheduler = nullptr;  // stack pointer of the scheduler while a fiber runs
};

inline Block& block() {
    static Block one;
    return one;
}

[[noreturn]] inline void fail(const char* what) {
    const Block& b = block();
    fprintf(stderr, "simt: %s in block (%u, %u, %u)\n", what, b.index.x, b.index.y, b.index.z);
    abort();
}

#if !defined(__x86_64__)
#error "the emulator switches stacks with x86-64 instructions"
#endif
// Saves the callee-saved registers and the stack pointer in *from, and continues at `to`.
extern "C" void simt_switch(void** from, void* to);
asm(R"(
.text
.weak simt_switch
.type simt_switch, @function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size simt_switch, .-simt_switch
)");

inline void leave() { simt_switch(&block().current->stack_pointer, block().scheduler); }

inline void release_block() {
    Block& b = block();
    b.waiting = 0;
    for (Fiber& fiber : b.fibers) {
        if (fiber.state == State::InBlock) fiber.state = State::Ready;
    }
}

inline void release_warp(unsigned number) {
    Block& b = block();
    b.warps[number].arrived = b.warps[number].mask = 0;
    for (unsigned i = number * WARP; i < std::min<size_t>(b.fibers.size(), (number + 1) * WARP); ++i) {
        if (b.fibers[i].state == State::InWarp) b.fibers[i].state = State::Ready;
    }
}

inline void wait_for_block() {
    Block& b = block();
    if (++b.waiting == b.alive) return release_block();
    b.current->state = State::InBlock;
    leave();
}

inline void wait_for_warp(unsigned mask) {
    Block& b = block();
    Warp& warp = b.warps[b.current->warp];
    if (!(mask >> b.current->lane & 1)) fail("a lane outside its own mask");
    if (warp.arrived && warp.mask != mask) fail("different masks in one warp");
    warp.mask = mask;
    warp.arrived |= 1u << b.current->lane;
    if ((warp.arrived & warp.alive) == (mask & warp.alive)) return release_warp(b.current->warp);
    b.current->state = State::InWarp;
    leave();
}

// Gives `value` to the warp and returns what `source` gave.
template <class T>
T exchange(unsigned mask, T value, unsigned source) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "");
    Block& b = block();
    Fiber& me = *b.current;
    auto& values = b.warps[me.warp].values[me.round++ & 1];
    memcpy(&values[me.lane], &value, sizeof value);
    wait_for_warp(mask);
    if (!(mask >> source & 1)) fail("a shuffle from a lane outside its mask");
    memcpy(&value, &values[source], sizeof value);
    return value;
}

inline void fiber_main() {
    (*block().kernel)();
    Block& b = block();
    Fiber& me = *b.current;
    me.state = State::Done;
    Warp& warp = b.warps[me.warp];
    warp.alive &= ~(1u << me.lane);
    if (--b.alive && b.waiting == b.alive) release_block();
    if (warp.arrived && (warp.arrived & warp.alive) == (warp.mask & warp.alive)) release_warp(me.warp);
    leave();
    fail("a finished thread was resumed");
}

inline void prepare(unsigned number) {
    Block& b = block();
    Fiber& fiber = b.fibers[number];
    fiber = Fiber();
    fiber.thread = {number % b.threads.x, number / b.threads.x % b.threads.y, number / (b.threads.x * b.threads.y)};
    fiber.lane = number % WARP;
    fiber.warp = number / WARP;
    b.warps[fiber.warp].alive |= 1u << fiber.lane;
    auto top = reinterpret_cast<uintptr_t>(b.stacks.get() + STACK_BYTES * (number + 1)) & ~uintptr_t(15);
    auto* slot = reinterpret_cast<void**>(top);
    *--slot = nullptr;  // where a return address would be, which also aligns the stack
    *--slot = reinterpret_cast<void*>(fiber_main);
    for (int saved = 0; saved < 6; ++saved) *--slot = nullptr;
    fiber.stack_pointer = slot;
}

// Runs each lane of a warp to its next wait; whether any could run.
inline bool run_warp(unsigned number, bool upwards) {
    Block& b = block();
    const unsigned first = number * WARP, last = std::min<unsigned>(b.fibers.size(), first + WARP);
    bool progress = false;
    for (unsigned i = first; i < last; ++i) {
        Fiber& fiber = b.fibers[upwards ? i : last - 1 - (i - first)];
        if (fiber.state != State::Ready) continue;
        progress = true;
        b.current = &fiber;
        simt_switch(&b.scheduler, fiber.stack_pointer);
    }
    return progress;
}

inline void run_block() {
    Block& b = block();
    const unsigned count = b.threads.x * b.threads.y * b.threads.z;
    if (b.stack_count < count) {
        b.stacks.reset(new char[STACK_BYTES * count]);
        b.stack_count = count;
    }
    b.fibers.assign(count, Fiber());
    b.warps.assign((count + WARP - 1) / WARP, Warp());
    b.alive = count;
    b.waiting = 0;
    for (unsigned i = 0; i < count; ++i) prepare(i);
    static unsigned order = 1;
    while (b.alive) {
        bool progress = false;
        // A warp runs as far as it can before the next one starts, upwards or downwards by chance: code that needs warps to
        // keep pace, or one of the orders, lacks a barrier.
        order = order * 1664525u + 1013904223u;
        const bool upwards = order >> 31;
        for (unsigned w = 0; w < b.warps.size(); ++w) {
            while (run_warp(upwards ? w : b.warps.size() - 1 - w, upwards)) progress = true;
        }
        if (b.alive && !progress) fail("a barrier that not all threads reach");
    }
}

template <class... A, size_t... I>
void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_reference_t<A>*>(args[I])...);
}

// Arguments as the CUDA driver takes them: one pointer to each.
template <class... A>
void launch(void (*kernel)(A...), const unsigned* grid, const unsigned* threads, void** args) {
    Block& b = block();
    const std::function<void()> body = [=] { call(kernel, args, std::index_sequence_for<A...>{}); };
    b.kernel = &body;
    b.grid = {grid[0], grid[1], grid[2]};
    b.threads = {threads[0], threads[1], threads[2]};
    for (unsigned z = 0; z < b.grid.z; ++z)
        for (unsigned y = 0; y < b.grid.y; ++y)
            for (unsigned x = 0; x < b.grid.x; ++x) {
                b.index = {x, y, z};
                run_block();
            }
}

template <class T>
constexpr char letter() {
    return std::is_pointer_v<T> ? 'p' : std::is_same_v<T, float> ? 'f' : std::is_same_v<T, int> ? 'i' : '?';
}

// Whether the kernel takes these arguments: p for a pointer, i for an int, f for a float.
template <class... A>
bool takes(void (*)(A...), const char* arguments) {
    const char letters[] = {letter<A>()..., 0};
    return strcmp(letters, arguments) == 0;
}

inline unsigned lane_of(unsigned lane, unsigned source, int width) { return (lane & ~(width - 1)) | (source & (width - 1)); }

}  // namespace simt

#define threadIdx (simt::block().current->thread)
#define blockIdx (simt::block().index)
#define blockDim (simt::block().threads)
#define gridDim (simt::block().grid)

inline void __syncthreads() { simt::wait_for_block(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { simt::wait_for_warp(mask); }
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    return simt::exchange(mask, value, simt::lane_of(simt::block().current->lane, source, width));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int other) {
    return simt::exchange(mask, value, simt::block().current->lane ^ other);
}
inline unsigned __ballot_sync(unsigned mask, int vote) {
    unsigned result = 0;
    for (unsigned lane = 0; lane < simt::WARP; ++lane) {
        if (mask >> lane & 1) result |= (simt::exchange(mask, vote != 0, lane) ? 1u : 0u) << lane;
    }
    return result;
}
template <class T>
T atomicAdd(T* at, T value) {
    T before = *at;
    *at = before + value;
    return before;
}
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __expf(float x) { return std::exp(x); }
using std::max;
using std::min;
