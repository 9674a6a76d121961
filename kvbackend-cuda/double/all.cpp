// A test double of the CUDA driver library: kernels run as fibres on the host, streams as worker threads.
//
// This file is all sources as one unit, which compiles several times faster than one by one: compile it and the
// kernels, or all other sources and the kernels. The command is in selftest/main.cpp. The sources of kernels are
// compiled with KV_DOUBLE and with checks of alignment and bounds, which make faults of what a device would trap on.
//
// Device 0 runs work at once. Device 1 runs nothing before the host waits, and then only what the wait needs; after a
// thousand queries of something that is not ready, each further one runs one operation. Device 2 is like device 0 with
// 64 MiB, and device 3 is like device 0. KV_DOUBLE_DEVICES sets their number, KV_DOUBLE_DRIVER the version of the driver
// (13000), and KV_DOUBLE_NCCL that of NCCL (22800).
//
// Not modelled:
// - The legacy stream's implicit waits: it is a plain stream, and so is every stream without the non-blocking flag.
//   The per-thread stream, cooperative launches, clusters, managed memory, arrays and textures do not exist.
// - A kernel that reads pageable memory of the host or memory of another device without peer access, and host code
//   that reads memory of the device, are not found.
// - Threads of a block run one after the other from barrier to barrier, and blocks of a launch one after the other:
//   a thread that spins until another one writes never ends. Blocks of different streams run at the same time.
// - Stream-ordered allocation, and launches of graphs, inside a capture: they are refused.
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
