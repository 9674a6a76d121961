//! Attention plans on the device: the offsets of their records. `kernels::attend` builds the plans.

use std::sync::Arc;

use kvcore::device::queue::Recent;

use super::upload::CudaUpload;

/// The number of plans that a stream keeps. A few are enough, because a model's layers differ at most in
/// their window.
const KEPT: usize = 4;

/// Identifies a plan by everything that it depends on. Layers with equal keys share a plan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct AttendPlanKey {
    /// The ID of the work, [`AttendWork::id`](kvcore::AttendWork::id).
    pub(crate) work: u64,
    pub(crate) window: Option<usize>,
    /// In this order: the numbers of query heads per block, blocks for all heads, rows per block, tokens per
    /// tile, and blocks that run at the same time.
    pub(crate) tiling: [usize; 5],
    pub(crate) block_size: usize,
    pub(crate) part_bytes: usize,
    /// True if the output overlaps the queries. If so, nothing may be written before all queries are read.
    pub(crate) over_queries: bool,
}

/// The offsets of the records that all chunks share, in bytes from the start of the plan.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SharedPlaces {
    pub(crate) rows: u64,
    pub(crate) segments: u64,
    pub(crate) tables: u64,
    pub(crate) groups: u64,
}

/// A chunk of tiles whose parts fit in scratch memory, with the offsets of its records in bytes from the
/// start of the plan.
#[derive(Debug)]
pub(crate) struct PlanChunk {
    pub(crate) shared: SharedPlaces,
    pub(crate) runs: u64,
    pub(crate) tasks: u64,
    pub(crate) task_count: usize,
    pub(crate) merged: u64,
    pub(crate) merged_rows: usize,
    pub(crate) ranges: u64,
    pub(crate) lists: u64,
    /// The number of parts. A part is a task's result for one row and all heads.
    pub(crate) parts: usize,
}

/// The division of a call into chunks, with its records on the device.
#[derive(Debug)]
pub(crate) struct AttendPlan {
    pub(crate) chunks: Vec<PlanChunk>,
    /// The device address of the records.
    pub(crate) address: u64,
    /// The records' memory, unless a graph owns it.
    pub(crate) upload: Option<Arc<CudaUpload>>,
}

/// The plans of a stream's most recent calls.
pub(crate) type AttendPlans = Recent<AttendPlanKey, Arc<AttendPlan>, KEPT>;
