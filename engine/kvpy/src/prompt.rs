//! Prompts in parts, the hashes of their chunks, and the parts' positions.

use kvchunk::{ComputeMode, PositionStrategy, ReuseCell};
use pyo3::prelude::*;

use crate::error::CallError;
use crate::names::named;

/// A prompt's tokens in parts: a system prompt, chunks that do not attend to each other, and a question.
#[pyclass(frozen, name = "ChunkedPrompt", module = "kvcache")]
pub(crate) struct PyChunkedPrompt(pub(crate) kvchunk::ChunkedPrompt);

#[pymethods]
impl PyChunkedPrompt {
    /// Creates a prompt from the token IDs of its parts. No part but the system prompt may be empty. `decoys` are documents that
    /// chunks see while they are computed in the mode `behind:N`. The question never sees them.
    #[new]
    #[pyo3(signature = (sys_prompt, chunks, user_question, *, decoys = None))]
    fn new(
        sys_prompt: Vec<u32>,
        chunks: Vec<Vec<u32>>,
        user_question: Vec<u32>,
        decoys: Option<Vec<Vec<u32>>>,
    ) -> PyResult<Self> {
        let prompt = kvchunk::ChunkedPrompt::new(sys_prompt, chunks, user_question);
        let prompt = prompt.and_then(|prompt| prompt.with_decoys(decoys.unwrap_or_default().into()));
        Ok(Self(prompt.map_err(CallError::from)?))
    }

    /// The tokens of the system prompt.
    #[getter]
    fn sys_prompt(&self) -> Vec<u32> {
        self.0.system().to_vec()
    }

    /// The tokens of each chunk.
    #[getter]
    fn chunks(&self) -> Vec<Vec<u32>> {
        self.0.chunks().to_vec()
    }

    /// The tokens of the question.
    #[getter]
    fn user_question(&self) -> Vec<u32> {
        self.0.question().to_vec()
    }

    /// The tokens of each decoy.
    #[getter]
    fn decoys(&self) -> Vec<Vec<u32>> {
        self.0.decoys().to_vec()
    }

    /// Returns the number of tokens in all parts. Decoys are not part of the prompt.
    fn get_total_tokens(&self) -> usize {
        self.0.total_tokens()
    }

    /// Returns the places of all parts. A chunk's place consists of its logical index, the position at which
    /// its keys are stored, and the position at which they are used.
    #[pyo3(signature = (mode = "with-system", strategy = "overlapped", max_positions = usize::MAX))]
    fn positions(&self, mode: &str, strategy: &str, max_positions: usize) -> PyResult<PyPositionPlan> {
        let mode: ComputeMode = mode.parse().map_err(CallError::from)?;
        let strategy: PositionStrategy = named("strategy", strategy)?;
        let plan = kvchunk::PositionPlan::new(&self.0, ReuseCell { mode, strategy }, max_positions);
        let plan = plan.map_err(CallError::from)?;
        let place = |place: kvchunk::ChunkPlace| PyChunkPlace {
            logical_start: place.logical_start,
            stored_start: place.stored_start,
            used_start: place.used_start,
            num_tokens: place.len,
        };
        Ok(PyPositionPlan {
            chunks: plan.chunks.into_iter().map(place).collect(),
            question_logical: plan.question_logical,
            question_position: plan.question_position,
        })
    }
}

/// The positions and logical indices of a prompt's chunks and question.
#[pyclass(frozen, name = "PositionPlan", get_all, module = "kvcache")]
pub(crate) struct PyPositionPlan {
    chunks: Vec<PyChunkPlace>,
    question_logical: usize,
    question_position: i64,
}

/// A chunk's place: the logical index of its first token in the prompt, the position at which that token is
/// stored, and the position at which it is used.
#[pyclass(frozen, name = "ChunkPlace", get_all, module = "kvcache")]
#[derive(Clone)]
pub(crate) struct PyChunkPlace {
    logical_start: usize,
    stored_start: i64,
    used_start: i64,
    num_tokens: usize,
}

/// The hash of a piece of a chunk. It covers the piece's tokens and everything else that its bytes depend on,
/// but not its position.
#[pyclass(frozen, name = "ChunkHash", eq, hash, get_all, module = "kvcache")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct PyChunkHash {
    hash_bytes: [u8; 32],
    token_count: usize,
    num_blocks: usize,
}

impl From<kvchunk::ChunkHash> for PyChunkHash {
    fn from(hash: kvchunk::ChunkHash) -> Self {
        Self { hash_bytes: *hash.key.as_bytes(), token_count: hash.token_count, num_blocks: hash.num_blocks }
    }
}
