//! One kernel run.

use std::any::Any;
use std::sync::Arc;

use crate::pipeline::{Binding, Pipeline};

/// One kernel run. Its arguments become the first binding.
pub(crate) struct Dispatch {
    pub(crate) pipeline: Arc<Pipeline>,
    pub(crate) args: Vec<u32>,
    pub(crate) bindings: Vec<Binding>,
    /// Number of workgroups.
    pub(crate) groups: u64,
    /// Kept until the run is submitted: the owner of buffers that must not be overwritten before then, such
    /// as an attention plan.
    pub(crate) keeps: Option<Arc<dyn Any + Send + Sync>>,
}
