// Attention on tensor cores over bf16 pools. The entries' names contain the maximum numbers of queries per
// block and of value columns.
#include "attend_mma.cuh"

KV_KERNEL(attend_bf16_q16_v256, AttendArgs, THREADS) { attend_mma<BF16, false, false, 1, 2, 4>(args); }
KV_KERNEL(attend_bf16_q32_v256, AttendArgs, THREADS) { attend_mma<BF16, false, false, 2, 2, 4>(args); }
KV_KERNEL(attend_bf16_q64_v128, AttendArgs, THREADS) { attend_mma<BF16, false, false, 4, 2, 2>(args); }
