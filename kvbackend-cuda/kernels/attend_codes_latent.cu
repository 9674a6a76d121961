// Attention on tensor cores over latents of int8, int4 and fp8 codes, and over values of 257 to 512 columns.
// The entries' names contain the maximum number of queries per block.
#include "attend_mma.cuh"

KV_KERNEL(attend_codes_latent_q16, AttendArgs, THREADS) { attend_mma<BF16, true, true, 1, 1, 8>(args); }
