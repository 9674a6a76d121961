//! A dispatch: one run of a kernel.

use std::any::Any;
use std::sync::Arc;

use crate::pipeline::{Binding, Pipeline};

/// One run of a kernel. Its arguments become the first binding.
pub(crate) struct Dispatch {
    pub(crate) pipeline: Arc<Pipeline>,
    pub(crate) args: Vec<u32>,
    pub(crate) bindings: Vec<Binding>,
    /// The number of workgroups.
    pub(crate) groups: u64,
    /// The owner of buffers that must not be overwritten before the dispatch is submitted, such as an
    /// attention plan.
    pub(crate) keeps: Option<Arc<dyn Any + Send + Sync>>,
}
