//! Hot paths of the layer, each made ready so that one call of `run` is what is counted.
//!
//! Counts are to be the same from run to run and from machine to machine: kernels are those for AVX2 on one
//! thread (valgrind knows no AVX-512 and hides it from whoever asks the processor), inputs are fixed, and each
//! path has run once before it is counted, so that nothing is resolved, started or first touched inside.

mod blocks;
mod chunk;
mod kernels;

pub use blocks::{Keys, PoolPath};
pub use chunk::ChunkReuse;
pub use kernels::Kernel;
