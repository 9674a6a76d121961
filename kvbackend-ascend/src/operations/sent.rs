//! Tensors on the device whose contents the host has sent.

use std::sync::Arc;

use kvcore::Result;

use crate::bindings::types as sys;
use crate::operators::Tensor;
use crate::queue::{ListMemory, Work};

/// A tensor on the device whose contents were sent from a list on the host.
#[derive(Debug, Clone)]
pub(super) struct SentTensor {
    pub(super) tensor: Tensor,
    list: Arc<ListMemory>,
}

impl SentTensor {
    /// Sends a list of values to the device as a dense tensor.
    pub(super) fn send<T: bytemuck::NoUninit>(
        work: &mut Work<'_>,
        numbers: &[T],
        dtype: sys::aclDataType,
        dims: &[usize],
    ) -> Result<Self> {
        let list = work.send(bytemuck::cast_slice(numbers))?;
        Ok(Self { tensor: Tensor::dense(list.address(), dtype, dims), list })
    }

    /// Sends a list of row indices to the device.
    pub(super) fn index(work: &mut Work<'_>, numbers: &[i32]) -> Result<Self> {
        Self::send(work, numbers, sys::ACL_INT32, &[numbers.len()])
    }

    /// Holds the tensor's memory until the work is done.
    pub(super) fn hold(&self, work: &mut Work<'_>) {
        work.hold_list(&self.list);
    }
}
