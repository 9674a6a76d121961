// Attention on tensor cores over latents of f16, and over values of 257 to 512 columns. Entries have the most queries
// of a block in their names.
#include "attend_mma.cuh"

KV_KERNEL(attend_f16_latent_q16, AttendArgs, THREADS) { attend_mma<F16, false, true, 1, 1, 8>(args); }
KV_KERNEL(attend_f16_latent_q32, AttendArgs, THREADS) { attend_mma<F16, false, true, 2, 1, 8>(args); }
