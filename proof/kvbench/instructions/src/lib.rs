//! Hot paths of the library, each prepared for counting one call of `run`.
//!
//! Counts must be equal in every run and on every machine. Kernels are for AVX2 on one thread, since valgrind
//! does not know AVX-512 and hides it from programs that ask the processor. Inputs are fixed. Each path runs
//! once before it is counted, so the count includes no resolving of symbols, no start of threads and no first
//! touch of memory.

mod blocks;
mod chunk;
mod kernels;

pub use blocks::{Keys, PoolPath};
pub use chunk::ChunkReuse;
pub use kernels::HotKernel;
