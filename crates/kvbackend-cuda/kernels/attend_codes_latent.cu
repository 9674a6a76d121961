// Attention to latents on tensor cores for pools of int8, int4 and fp8 codes, and to values of 257 to 512 columns: entries by the most queries of a
// block.
#include "attend_mma.cuh"

KV_KERNEL(attend_codes_latent_q16, AttendArgs, THREADS) { attend_mma<BF16, true, true, 1, 1, 8>(args); }
