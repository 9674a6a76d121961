//! The Python module `kvcache._native`, whose classes the package `kvcache` exports.
//!
//! ```text
//!   kvcache            names for users        python/kvcache/
//!   kvcache.vllm       connector for vLLM     python/kvcache/vllm/
//!        │
//!   kvcache._native    this crate: conversions only
//!        │
//!   kvcore, kvbackend-{ascend,cpu,cuda}, kvchunk, kvmanager, kvtier, kvmodel, kvengine, kvlab
//! ```
//!
//! Work runs without Python's lock. Tensors from other libraries are used in place, through `DLPack`. The
//! struct `PyX` is the Python class `X`.
//!
//! | module | contents |
//! |---|---|
//! | `arena` | `Arena`: keys and values in blocks, and the operations on them |
//! | `pool`, `table` | `BlockPool`, `MutableBlocks`, `SharedBlocks`; `BlockTable`, `WriteSlots`, `TailCopy` |
//! | `segment` | `Segment`, `AttendWork` |
//! | `chunks`, `metrics`, `prompt` | the chunk cache and its metrics; prompts in parts, and the parts' places |
//! | `keys`, `rope` | keys of blocks; the rotary embeddings of a model |
//! | `foreign`, `npu`, `runs` | caches of other engines on the host, a GPU or an NPU; rows as Python names them |
//! | `managers` | the managers of `kvmanager`: blocks, sequences and requests by ID, and ranks' caches |
//! | `llm`, `sampling` | `LLM`, `RequestOutput`, `SamplingParams` |
//! | `slab`, `slab_blocks` | `Slab`, private: rows of other engines' memory, or blocks of arenas, as records on a disk |
//! | `slab_times` | the times of a slab's loads and writes |
//! | `lab` | questions to check a model that runs inside vLLM |
//! | `device`, `names` | devices and element types by their names |
//! | `tensor`, `export` | other libraries' tensors used here; this module's tensors used elsewhere |
//! | `error` | `KvCacheError`, from the errors of the crates below |

#![allow(clippy::needless_pass_by_value, reason = "arguments from Python are converted to values")]

mod arena;
mod chat;
mod chunks;
mod device;
mod error;
mod export;
mod foreign;
mod keys;
mod lab;
mod llm;
mod managers;
mod metrics;
mod names;
mod npu;
mod pool;
mod prompt;
mod provide;
mod rope;
mod runs;
mod sampling;
mod segment;
mod slab;
mod slab_blocks;
mod slab_load;
mod slab_rows;
mod slab_times;
mod table;
mod tensor;

use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// Memory, keys and chunks for KV caches, and an engine that uses them.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("BUILT_IN_DECOYS", PyTuple::new(module.py(), kvengine::BUILT_IN_DECOYS)?)?;
    module.add("KvCacheError", module.py().get_type::<error::KvCacheError>())?;
    module.add_class::<arena::Arena>()?;
    module.add_class::<foreign::PyForeignCache>()?;
    module.add_class::<pool::PyBlockPool>()?;
    module.add_class::<pool::PyMutableBlocks>()?;
    module.add_class::<pool::PySharedBlocks>()?;
    module.add_class::<table::PyBlockTable>()?;
    module.add_class::<table::PyWriteSlots>()?;
    module.add_class::<table::PyTailCopy>()?;
    module.add_class::<segment::PySegment>()?;
    module.add_class::<segment::PyAttendWork>()?;
    module.add_class::<rope::PyRopes>()?;
    module.add_class::<chunks::PyChunkCacheConfig>()?;
    module.add_class::<chunks::PyChunkCacheManager>()?;
    module.add_class::<chunks::PyPieceHold>()?;
    module.add_class::<chunks::PyChunkReservation>()?;
    module.add_class::<chunks::PyChunkWaiter>()?;
    module.add_class::<metrics::PyChunkCacheMetrics>()?;
    module.add_class::<prompt::PyChunkHash>()?;
    module.add_class::<prompt::PyChunkedPrompt>()?;
    module.add_class::<prompt::PyPositionPlan>()?;
    module.add_class::<prompt::PyChunkPlace>()?;
    module.add_class::<sampling::SamplingParams>()?;
    module.add_class::<slab::PySlab>()?;
    module.add_class::<slab_blocks::SlabBlocks>()?;
    module.add_class::<slab_blocks::BlockLoad>()?;
    module.add_class::<slab_load::SlabLoad>()?;
    module.add_class::<slab_rows::RowLoad>()?;
    module.add_class::<lab::NoteQuestion>()?;
    module.add_class::<lab::PyPaired>()?;
    module.add_class::<llm::Llm>()?;
    module.add_class::<llm::RequestOutput>()?;
    module.add_class::<export::PyTensor>()?;
    module.add_class::<managers::PyBlockManager>()?;
    module.add_class::<managers::PyPagedKvCache>()?;
    module.add_class::<managers::PyPagedKvCacheWrapper>()?;
    module.add_class::<managers::PyKvCache>()?;
    module.add_class::<managers::PyReceivedMatrix>()?;
    module.add_class::<managers::PyKvStorageManager>()?;
    module.add_class::<managers::PyStorageMetrics>()?;
    module.add_class::<managers::PyStorageTierConfig>()?;
    module.add_function(wrap_pyfunction!(keys::key_root, module)?)?;
    module.add_function(wrap_pyfunction!(lab::note_decoys, module)?)?;
    module.add_function(wrap_pyfunction!(lab::note_questions, module)?)?;
    module.add_function(wrap_pyfunction!(keys::prefix_keys, module)?)?;
    module.add_function(wrap_pyfunction!(keys::vllm_keys, module)?)?;
    Ok(())
}
