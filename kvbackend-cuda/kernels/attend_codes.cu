// Attention on tensor cores over pools of int8, int4 and fp8 codes. Entries have the most queries of a block, and the
// most columns of values, in their names.
#include "attend_mma.cuh"

KV_KERNEL(attend_codes_q16_v256, AttendArgs, THREADS) { attend_mma<BF16, true, false, 1, 2, 4>(args); }
KV_KERNEL(attend_codes_q64_v128, AttendArgs, THREADS) { attend_mma<BF16, true, false, 4, 2, 2>(args); }
