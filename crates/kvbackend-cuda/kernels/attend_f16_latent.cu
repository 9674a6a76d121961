// Attention to latents on tensor cores for pools of f16, and to values of 257 to 512 columns: entries by the most queries of a
// block.
#include "attend_mma.cuh"

KV_KERNEL(attend_f16_latent_q16, AttendArgs, THREADS) { attend_mma<F16, false, true, 1, 1, 8>(args); }
KV_KERNEL(attend_f16_latent_q32, AttendArgs, THREADS) { attend_mma<F16, false, true, 2, 1, 8>(args); }
