//! The Python module `kvcache._native`, which the package `kvcache` gives its public names.
//!
//! ```text
//!   kvcache            names for users        python/kvcache/
//!   kvcache.vllm       connector for vLLM     python/kvcache/vllm/
//!        │
//!   kvcache._native    this crate: conversions only
//!        │
//!   kvcore, kvbackend-cpu, kvchunk, kvmodel
//! ```
//!
//! Work runs without Python's lock. Tensors of other libraries are used where they lie, through `DLPack`.

#![allow(clippy::needless_pass_by_value, reason = "arguments from Python are converted to values")]

mod arena;
mod chunks;
mod error;
mod keys;
mod rope;
mod tensor;

use pyo3::prelude::*;

/// Memory, keys and chunks of KV caches.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("KvCacheError", module.py().get_type::<error::KvCacheError>())?;
    module.add_class::<arena::Arena>()?;
    module.add_class::<arena::ForeignCache>()?;
    module.add_class::<rope::Ropes>()?;
    module.add_class::<chunks::ChunkCacheConfig>()?;
    module.add_class::<chunks::ChunkCacheManager>()?;
    module.add_class::<chunks::PieceHold>()?;
    module.add_class::<chunks::ChunkReservation>()?;
    module.add_class::<chunks::ChunkWaiter>()?;
    module.add_function(wrap_pyfunction!(keys::key_root, module)?)?;
    Ok(())
}
