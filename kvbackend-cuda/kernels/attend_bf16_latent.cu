// Attention on tensor cores over bf16 latents, and over values of 257 to 512 columns. The entries' names
// contain the maximum number of queries per block.
#include "attend_mma.cuh"

KV_KERNEL(attend_bf16_latent_q16, AttendArgs, THREADS) { attend_mma<BF16, false, true, 1, 1, 8>(args); }
KV_KERNEL(attend_bf16_latent_q32, AttendArgs, THREADS) { attend_mma<BF16, false, true, 2, 1, 8>(args); }
