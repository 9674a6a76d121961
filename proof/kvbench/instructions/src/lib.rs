//! Hot paths of the library, each prepared for counting one call of `run`.
//!
//! Counts must be equal in every run and on every machine. Kernels use AVX2 on one thread, because valgrind
//! does not support AVX-512 and hides it from programs that query the processor. Inputs are fixed. Each path
//! runs once before it is counted, so the count does not include symbol resolution, thread start-up or
//! the first access to memory.

mod blocks;
mod chunk;
mod kernels;

pub use blocks::{Keys, PoolPath};
pub use chunk::ChunkReuse;
pub use kernels::HotKernel;
