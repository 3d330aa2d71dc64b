// Types of every launcher. Launchers put work on a stream and return; they allocate nothing, never synchronise, and
// can be captured into a CUDA graph. Arguments known on the host are checked and refused with a status. Values that lie
// in device memory (lengths, slots, masks, kept rows) are clamped by the kernels, so that garbage stays in bounds.
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace ddtree {

using Stream = CUstream_st*;  // cudaStream_t, without its header

enum class Status : int32_t {
    ok = 0,
    null_pointer = 1,         // a pointer that must not be null is
    bad_shape = 2,            // a negative or impossible extent
    unsupported = 3,          // a head size, element type or mode without a kernel
    misaligned = 4,           // an address that is not a multiple of 16 bytes
    workspace_too_small = 5,  // fewer bytes than the workspace function asks for
    launch_failed = 6,        // CUDA refused the launch; cudaGetLastError says why
};

}  // namespace ddtree
