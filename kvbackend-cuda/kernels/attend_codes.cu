// Attention on tensor cores over pools of int8, int4 and fp8 codes. The entries' names contain the maximum
// numbers of queries per block and of value columns.
#include "attend_mma.cuh"

KV_KERNEL(attend_codes_q16_v256, AttendArgs, THREADS) { attend_mma<BF16, true, false, 1, 2, 4>(args); }
KV_KERNEL(attend_codes_q64_v128, AttendArgs, THREADS) { attend_mma<BF16, true, false, 4, 2, 2>(args); }
