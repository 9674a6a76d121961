//! Runs of cached tokens as requests use them, and the work of an attention step.

use std::sync::Arc;

use kvcore::{AttendRows, BlockId, QueryRow};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// A run of cached tokens as one request uses it: its blocks, its place in the prompt, and the distance from
/// the positions where its keys are stored to the positions where they are used.
#[pyclass(frozen, name = "Segment", module = "kvcache")]
#[derive(Clone)]
pub(crate) struct PySegment(pub(crate) kvcore::Segment);

#[pymethods]
impl PySegment {
    /// Creates a run of `length` tokens in `block_ids`. The first token has the logical index
    /// `logical_start`. This token's key was rotated to position `stored_start`, and is used `offset`
    /// positions later.
    #[new]
    #[pyo3(signature = (block_ids, length, *, logical_start = 0, stored_start = 0, offset = 0))]
    fn new(block_ids: Vec<u32>, length: usize, logical_start: usize, stored_start: i64, offset: i64) -> Self {
        let blocks: Vec<BlockId> = block_ids.into_iter().map(BlockId).collect();
        let segment = kvcore::Segment::new(blocks.into(), length, logical_start, stored_start);
        Self(segment.at_offset(offset))
    }

    /// The number of tokens.
    #[getter]
    fn length(&self) -> usize {
        self.0.len
    }

    /// The logical index of the first token.
    #[getter]
    fn logical_start(&self) -> usize {
        self.0.logical_start
    }

    /// The position at which the first token is used.
    #[getter]
    fn position(&self) -> i64 {
        self.0.position(0)
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}

/// A step's queries and the segments that they attend to, prepared once for all layers.
#[pyclass(frozen, name = "AttendWork", module = "kvcache")]
pub(crate) struct PyAttendWork(pub(crate) Arc<kvcore::AttendWork>);

#[pymethods]
impl PyAttendWork {
    /// Creates the work for a batch. Each entry consists of a request's number of query rows and the segments
    /// that the rows attend to. The rows are the last tokens of the last segment. A row sees all tokens whose
    /// logical index is at most its own.
    #[new]
    fn new(batch: Vec<(usize, Vec<PyRef<'_, PySegment>>)>) -> PyResult<Self> {
        let (mut rows, mut entries) = (Vec::new(), Vec::new());
        for (count, segments) in batch {
            let segments: Vec<kvcore::Segment> = segments.iter().map(|segment| segment.0.clone()).collect();
            let Some(last) = segments.last().filter(|last| count <= last.len) else {
                let text = format!("{count} rows are not the last tokens of the last segment");
                return Err(PyValueError::new_err(text));
            };
            let start = rows.len();
            rows.extend((last.len - count..last.len).map(|token| QueryRow {
                logical: last.logical_start.saturating_add(token),
                position: last.position(token as i64),
            }));
            entries.push(AttendRows::new(start..rows.len(), segments));
        }
        Ok(Self(Arc::new(kvcore::AttendWork::new(rows, entries))))
    }

    /// The number of query rows.
    #[getter]
    fn num_rows(&self) -> usize {
        self.0.rows().len()
    }
}
