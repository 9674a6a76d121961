//! Classes for engines that work with IDs: the managers of `kvmanager`, under the names from the project's
//! first design documents.

mod blocks;
mod ranks;
mod sequences;
mod storage;

pub(crate) use blocks::PyBlockManager;
pub(crate) use ranks::{PyKvCache, PyReceivedMatrix};
pub(crate) use sequences::{PyPagedKvCache, PyPagedKvCacheWrapper};
pub(crate) use storage::{PyKvStorageManager, PyStorageMetrics, PyStorageTierConfig};

use std::sync::Arc;

use kvcore::{DType, LayerViews, Stream, TensorView};
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::device::{ArenaDevice, finished};
use crate::error::{CallError, Result};
use crate::export::PyTensor;
use crate::names::{dtype, text_of};
use crate::tensor::read;

/// The keys and values of one layer, with axes in the order that Python uses.
type KvPair = (PyTensor, PyTensor);

/// A manager, with the device that holds its memory.
struct OnDevice<M> {
    device: Arc<ArenaDevice>,
    own: Mutex<M>,
}

impl<M: Send> OnDevice<M> {
    fn new(device: Arc<ArenaDevice>, own: M) -> Self {
        Self { device, own: Mutex::new(own) }
    }

    /// Calls `work` with the manager and waits for everything that it enqueues, without holding Python's
    /// lock.
    fn run<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut M, &dyn Stream) -> kvmanager::Result<T> + Send,
    ) -> PyResult<T> {
        let stream = self.device.stream();
        let run = || finished(stream, || work(&mut self.own.lock(), stream).map_err(CallError::from));
        Ok(py.detach(run)?)
    }

    /// Returns views of keys and values `[num_kv_heads, tokens, head_dim]` as rows `[tokens, num_kv_heads,
    /// head_dim]`.
    fn rows(&self, key: &Bound<'_, PyAny>, value: &Bound<'_, PyAny>) -> PyResult<LayerViews> {
        let rows = |tensor| -> PyResult<TensorView> {
            let view = read(tensor, &self.device)?;
            Ok(view.permute(&[1, 0, 2]).map_err(CallError::from)?)
        };
        Ok((rows(key)?, rows(value)?))
    }

    /// Passes rows `[tokens, num_kv_heads, head_dim]` to Python as `[num_kv_heads, tokens, head_dim]`.
    fn pair(&self, (k, v): LayerViews) -> PyResult<KvPair> {
        let heads_first = |view: TensorView| -> Result<PyTensor> {
            Ok(PyTensor::new(view.permute(&[1, 0, 2])?, &self.device))
        };
        Ok((heads_first(k)?, heads_first(v)?))
    }
}

/// Opens the device and parses the element type, from arguments such as `"cuda:0"` and `torch.float16`. The
/// defaults are the CPU and f32.
fn place(
    device: Option<&Bound<'_, PyAny>>,
    dtype_of: Option<&Bound<'_, PyAny>>,
) -> PyResult<(Arc<ArenaDevice>, DType)> {
    let device = device.map_or_else(|| Ok("cpu".to_owned()), text_of)?;
    let element = dtype_of.map_or(Ok(DType::F32), |of| dtype(&text_of(of)?))?;
    Ok((ArenaDevice::open(&device)?, element))
}
