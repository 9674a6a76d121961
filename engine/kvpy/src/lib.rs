//! The Python module `kvcache._native`, which the package `kvcache` gives its public names.
//!
//! ```text
//!   kvcache            names for users        python/kvcache/
//!   kvcache.vllm       connector for vLLM     python/kvcache/vllm/
//!        │
//!   kvcache._native    this crate: conversions only
//!        │
//!   kvcore, kvbackend-{ascend,cpu,cuda}, kvchunk, kvmodel, kvengine, kvlab
//! ```
//!
//! Work runs without Python's lock. Tensors of other libraries are used where they lie, through `DLPack`.

#![allow(clippy::needless_pass_by_value, reason = "arguments from Python are converted to values")]

mod arena;
mod chunks;
mod device;
mod error;
mod foreign;
mod keys;
mod lab;
mod llm;
mod metrics;
mod names;
mod npu;
mod pool;
mod prompt;
mod rope;
mod sampling;
mod segment;
mod table;
mod tensor;

use pyo3::prelude::*;

/// Memory, keys and chunks of KV caches, and an engine over them.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("KvCacheError", module.py().get_type::<error::KvCacheError>())?;
    module.add_class::<arena::Arena>()?;
    module.add_class::<foreign::ForeignCache>()?;
    module.add_class::<pool::BlockPool>()?;
    module.add_class::<pool::MutableBlocks>()?;
    module.add_class::<pool::SharedBlocks>()?;
    module.add_class::<table::BlockTable>()?;
    module.add_class::<table::WriteSlots>()?;
    module.add_class::<table::TailCopy>()?;
    module.add_class::<segment::Segment>()?;
    module.add_class::<segment::AttendWork>()?;
    module.add_class::<rope::Ropes>()?;
    module.add_class::<chunks::ChunkCacheConfig>()?;
    module.add_class::<chunks::ChunkCacheManager>()?;
    module.add_class::<chunks::PieceHold>()?;
    module.add_class::<chunks::ChunkReservation>()?;
    module.add_class::<chunks::ChunkWaiter>()?;
    module.add_class::<metrics::ChunkCacheMetrics>()?;
    module.add_class::<prompt::ChunkHash>()?;
    module.add_class::<prompt::ChunkedPrompt>()?;
    module.add_class::<prompt::PositionPlan>()?;
    module.add_class::<prompt::ChunkPlace>()?;
    module.add_class::<sampling::SamplingParams>()?;
    module.add_class::<lab::NoteQuestion>()?;
    module.add_class::<lab::Paired>()?;
    module.add_class::<llm::Llm>()?;
    module.add_class::<llm::RequestOutput>()?;
    module.add_function(wrap_pyfunction!(keys::key_root, module)?)?;
    module.add_function(wrap_pyfunction!(lab::note_questions, module)?)?;
    module.add_function(wrap_pyfunction!(keys::prefix_keys, module)?)?;
    module.add_function(wrap_pyfunction!(keys::vllm_keys, module)?)?;
    Ok(())
}
