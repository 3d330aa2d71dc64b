#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "primitives.h"

dim3 threadIdx;
dim3 blockIdx;

namespace ddtree::emulator {

int32_t multiprocessors = 132;

namespace {

constexpr int kWarp = 32;
constexpr size_t kStackBytes = 128 * 1024;
constexpr size_t kSlotBytes = 64;

struct Copy {
    void* to;
    const void* from;
    bool valid;
    int group;
};

struct Fiber {
    std::unique_ptr<unsigned char[]> stack{new unsigned char[kStackBytes]};
    ucontext_t start;
    jmp_buf at;
    bool started = false;
    std::vector<Copy> copies;
    int groups = 0;  // committed so far
};

struct Warp {
    int alive = 0;
    std::vector<int> waiting;
    int parity = 0;  // two exchange areas in turn: a lane may be one exchange ahead of the slowest reader
    alignas(64) unsigned char area[2][kWarp * kSlotBytes];
};

struct Machine {
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<int> runnable;
    std::vector<int> at_block_barrier;
    std::vector<unsigned char> shared;
    jmp_buf scheduler;
    int current = 0;
    int alive = 0;
    void (*body)(const void*) = nullptr;
    const void* args = nullptr;
    uint64_t random = 0x9e3779b97f4a7c15ull;
};

Machine machine;

uint64_t next_random() {
    machine.random ^= machine.random << 13;
    machine.random ^= machine.random >> 7;
    machine.random ^= machine.random << 17;
    return machine.random;
}

void yield() {
    if (_setjmp(machine.fibers[machine.current].at) == 0) {
        _longjmp(machine.scheduler, 1);
    }
}

void release(std::vector<int>& waiting) {
    machine.runnable.insert(machine.runnable.end(), waiting.begin(), waiting.end());
    waiting.clear();
}

void release_full_warp(Warp& warp) {
    if (!warp.waiting.empty() && static_cast<int>(warp.waiting.size()) == warp.alive) {
        warp.parity ^= 1;
        release(warp.waiting);
    }
}

void release_full_block() {
    if (!machine.at_block_barrier.empty() && static_cast<int>(machine.at_block_barrier.size()) == machine.alive) {
        release(machine.at_block_barrier);
    }
}

void land(const Copy& copy) {
    if (copy.valid) {
        std::memcpy(copy.to, copy.from, 16);
    } else {
        std::memset(copy.to, 0, 16);
    }
}

void fiber_main() {
    machine.body(machine.args);
    Warp& warp = machine.warps[machine.current / kWarp];
    --warp.alive;
    --machine.alive;
    // Threads that have left are not waited for.
    release_full_warp(warp);
    release_full_block();
    _longjmp(machine.scheduler, 1);
}

bool run_block(int threads) {
    machine.runnable.clear();
    machine.at_block_barrier.clear();
    machine.alive = threads;
    for (int i = 0; i < threads; ++i) {
        Fiber& fiber = machine.fibers[i];
        fiber.started = false;
        fiber.copies.clear();
        fiber.groups = 0;
        machine.runnable.push_back(i);
    }
    for (int w = 0; w < threads / kWarp; ++w) {
        machine.warps[w].alive = kWarp;
        machine.warps[w].waiting.clear();
        machine.warps[w].parity = 0;
    }
    while (!machine.runnable.empty()) {
        const size_t pick = next_random() % machine.runnable.size();
        machine.current = machine.runnable[pick];
        machine.runnable[pick] = machine.runnable.back();
        machine.runnable.pop_back();
        threadIdx.x = static_cast<unsigned>(machine.current);
        Fiber& fiber = machine.fibers[machine.current];
        if (_setjmp(machine.scheduler) == 0) {
            if (fiber.started) {
                _longjmp(fiber.at, 1);
            }
            fiber.started = true;
            getcontext(&fiber.start);
            fiber.start.uc_stack.ss_sp = fiber.stack.get();
            fiber.start.uc_stack.ss_size = kStackBytes;
            fiber.start.uc_link = nullptr;
            makecontext(&fiber.start, fiber_main, 0);
            setcontext(&fiber.start);
        }
    }
    return machine.alive == 0;
}

}  // namespace

unsigned char* dynamic_shared() {
    return reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(machine.shared.data()) + 127) / 128 * 128);
}

void block_barrier() {
    machine.at_block_barrier.push_back(machine.current);
    if (static_cast<int>(machine.at_block_barrier.size()) == machine.alive) {
        release_full_block();
    }
    yield();
}

const unsigned char* exchange(const void* value, size_t bytes) {
    Warp& warp = machine.warps[machine.current / kWarp];
    unsigned char* area = warp.area[warp.parity];
    if (bytes > 0) {
        std::memcpy(area + machine.current % kWarp * kSlotBytes, value, bytes);
    }
    warp.waiting.push_back(machine.current);
    release_full_warp(warp);
    yield();
    return area;
}

void copy_start(void* to, const void* from, bool valid) {
    const Copy copy{to, from, valid, machine.fibers[machine.current].groups};
    if (next_random() % 2 == 0) {
        land(copy);
    } else {
        machine.fibers[machine.current].copies.push_back(copy);
    }
}

void copy_commit() { ++machine.fibers[machine.current].groups; }

void copy_wait(int pending) {
    Fiber& fiber = machine.fibers[machine.current];
    std::vector<Copy> later;
    for (const Copy& copy : fiber.copies) {
        if (copy.group < fiber.groups - pending) {
            land(copy);
        } else {
            later.push_back(copy);
        }
    }
    fiber.copies.swap(later);
}

float from_fp16(uint16_t bits) {
    static const std::vector<float> table = [] {
        std::vector<float> values(1 << 16);
        for (uint32_t i = 0; i < values.size(); ++i) {
            const int exponent = static_cast<int>(i >> 10 & 31);
            const float mantissa = static_cast<float>(i & 1023);
            const float size = exponent == 31  ? (mantissa == 0 ? INFINITY : NAN)
                               : exponent == 0 ? std::ldexp(mantissa, -24)
                                               : std::ldexp(1024 + mantissa, exponent - 25);
            values[i] = i >> 15 ? -size : size;
        }
        return values;
    }();
    return table[bits];
}

uint16_t to_fp16(float value) {
    const auto sign = static_cast<uint16_t>(std::signbit(value) ? 0x8000 : 0);
    const float size = std::fabs(value);
    if (std::isnan(value)) {
        return 0x7fff;
    }
    if (size >= 65520.0f) {
        return sign | 0x7c00;
    }
    if (size == 0.0f) {
        return sign;
    }
    int exponent = 0;
    std::frexp(size, &exponent);
    // Steps of 2^-24 below the normal range, of 11 significant bits above; nearbyint rounds ties to even.
    const int step = exponent - 11 < -24 ? -24 : exponent - 11;
    const auto steps = static_cast<uint32_t>(std::nearbyint(std::ldexp(size, -step)));
    return static_cast<uint16_t>(sign | (steps + (static_cast<uint32_t>(step + 24) << 10)));
}

bool run(void (*body)(const void*), const void* args, dim3 grid, dim3 block, size_t shared_bytes) {
    const auto threads = static_cast<int>(block.x);
    if (threads % kWarp != 0 || block.y != 1 || block.z != 1 || grid.x == 0 || grid.y == 0 || grid.z == 0) {
        return false;  // CUDA would refuse the grid; part warps are not modelled
    }
    if (machine.fibers.size() < static_cast<size_t>(threads)) {
        machine.fibers.resize(threads);
        machine.warps.resize(threads / kWarp);
    }
    machine.body = body;
    machine.args = args;
    for (unsigned z = 0; z < grid.z; ++z) {
        for (unsigned y = 0; y < grid.y; ++y) {
            for (unsigned x = 0; x < grid.x; ++x) {
                blockIdx = dim3(x, y, z);
                machine.shared.assign(shared_bytes + 128, 0xff);
                if (!run_block(threads)) {
                    return false;
                }
            }
        }
    }
    return true;
}

}  // namespace ddtree::emulator
