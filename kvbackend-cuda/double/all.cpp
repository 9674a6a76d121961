// A test double of the CUDA driver library: kernels run as fibres on the host, and streams run as worker
// threads.
//
// This file includes all sources as one unit, which compiles several times faster than the separate sources.
// Compile either this file and the kernels, or all other sources and the kernels. The command is in
// selftest/main.cpp. Kernel sources are compiled with KV_DOUBLE and with alignment and bounds checks, which
// turn accesses that a device would trap on into faults.
//
// Device 0 runs work at once. Device 1 runs nothing before the host waits, and then only what the wait needs;
// the hundredth query of a stream or event that is not ready, and each later query, runs one operation.
// Device 2 is like device 0, but has only 64 MiB, and device 3 is like device 0. KV_DOUBLE_DEVICES sets the
// number of devices, KV_DOUBLE_DRIVER the driver's version (default 13000), and KV_DOUBLE_NCCL the version of
// NCCL (default 22800).
//
// Not modelled:
// - The legacy stream's implicit waits: it is a plain stream, and so is every stream without the non-blocking
//   flag. The per-thread stream, cooperative launches, clusters, managed memory, arrays and textures do not
//   exist.
// - Wrong accesses that are not detected: a kernel that reads pageable host memory, or memory of another
//   device without peer access, and host code that reads device memory.
// - Concurrency inside a launch: threads of a block run one after another from barrier to barrier, and so do
//   a launch's blocks. A thread that spins until another thread writes never ends. Blocks of different
//   streams run at the same time.
// - Stream-ordered allocations and graph launches during a capture: they are refused.
#include "fault.cpp"  // First, since it sets what the headers of the system see.

#include "allocation.cpp"
#include "block.cpp"
#include "collective.cpp"
#include "context.cpp"
#include "control.cpp"
#include "copy.cpp"
#include "cublas.cpp"
#include "device.cpp"
#include "errors.cpp"
#include "event.cpp"
#include "fibre.cpp"
#include "graph.cpp"
#include "launch.cpp"
#include "memory.cpp"
#include "module.cpp"
#include "nccl.cpp"
#include "pool.cpp"
#include "queue.cpp"
#include "stream.cpp"
#include "vmm.cpp"
