//! One run of a kernel.

use std::any::Any;
use std::sync::Arc;

use crate::pipeline::{Binding, Pipeline};

/// One run of a kernel. The arguments become its first binding.
pub(crate) struct Dispatch {
    pub(crate) pipeline: Arc<Pipeline>,
    pub(crate) args: Vec<u32>,
    pub(crate) bindings: Vec<Binding>,
    /// Number of workgroups.
    pub(crate) groups: u64,
    /// Kept until the run is submitted: the owner of buffers that may not be written again before, such as a
    /// plan of attention.
    pub(crate) keeps: Option<Arc<dyn Any + Send + Sync>>,
}
