//! Prompts in parts, the hashes of their chunks, and the positions of their parts.

use kvchunk::{ComputeMode, PositionStrategy, ReuseCell};
use pyo3::prelude::*;

use crate::error::Failure;
use crate::names::named;

/// The tokens of a prompt in parts: a system prompt, chunks that do not see each other, and a question.
#[pyclass(frozen, module = "kvcache")]
pub(crate) struct ChunkedPrompt(pub(crate) kvchunk::ChunkedPrompt);

#[pymethods]
impl ChunkedPrompt {
    /// Creates a prompt from the token ids of its parts. No part may be empty.
    #[new]
    fn new(sys_prompt: Vec<u32>, chunks: Vec<Vec<u32>>, user_question: Vec<u32>) -> PyResult<Self> {
        let prompt = kvchunk::ChunkedPrompt::new(sys_prompt, chunks, user_question);
        Ok(Self(prompt.map_err(Failure::from)?))
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

    /// The number of tokens of all parts.
    fn get_total_tokens(&self) -> usize {
        self.0.total_tokens()
    }

    /// Returns where the parts stand: each chunk's logical index, and the positions that its keys are stored for and used at.
    #[pyo3(signature = (mode = "with-system", strategy = "overlapped", max_positions = usize::MAX))]
    fn positions(&self, mode: &str, strategy: &str, max_positions: usize) -> PyResult<PositionPlan> {
        let mode: ComputeMode = mode.parse().map_err(Failure::from)?;
        let strategy: PositionStrategy = named("strategy", strategy)?;
        let plan = kvchunk::PositionPlan::new(&self.0, ReuseCell { mode, strategy }, max_positions);
        let plan = plan.map_err(Failure::from)?;
        let place = |place: kvchunk::ChunkPlace| ChunkPlace {
            logical_start: place.logical_start,
            stored_start: place.stored_start,
            used_start: place.used_start,
            num_tokens: place.len,
        };
        Ok(PositionPlan {
            chunks: plan.chunks.into_iter().map(place).collect(),
            question_logical: plan.question_logical,
            question_position: plan.question_position,
        })
    }
}

/// The places of the parts of a prompt.
#[pyclass(frozen, get_all, module = "kvcache")]
pub(crate) struct PositionPlan {
    chunks: Vec<ChunkPlace>,
    question_logical: usize,
    question_position: i64,
}

/// The place of a chunk: its index in the prompt, and the positions of its first key when it is stored and when it is used.
#[pyclass(frozen, get_all, module = "kvcache")]
#[derive(Clone)]
pub(crate) struct ChunkPlace {
    logical_start: usize,
    stored_start: i64,
    used_start: i64,
    num_tokens: usize,
}

/// The hash of a piece of a chunk, wherever it stands: of its tokens, and of all that its bytes depend on.
#[pyclass(frozen, eq, hash, get_all, module = "kvcache")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct ChunkHash {
    hash_bytes: [u8; 32],
    token_count: usize,
    num_blocks: usize,
}

impl From<kvchunk::ChunkHash> for ChunkHash {
    fn from(hash: kvchunk::ChunkHash) -> Self {
        Self { hash_bytes: *hash.key.as_bytes(), token_count: hash.token_count, num_blocks: hash.num_blocks }
    }
}
