//! Backends and tensors that tests share.

use std::sync::Arc;

use kvbackend_cuda::{CudaBackend, CudaOptions};
use kvconform::raw;
pub(crate) use kvconform::raw::noise;
use kvcore::{Backend, DType, KvArena, KvShape, Stream, TensorView};

/// Opens a device, or prints why it cannot.
pub(crate) fn opened(device: usize) -> Option<Arc<CudaBackend>> {
    CudaBackend::with_options(&CudaOptions { device, ..CudaOptions::default() })
        .inspect_err(|reason| kvconform::skip(reason))
        .ok()
}

/// Writes host bytes to new device memory.
pub(crate) fn upload(backend: &dyn Backend, dtype: DType, shape: &[usize], bytes: &[u8]) -> TensorView {
    raw::upload(backend, dtype, shape, bytes).unwrap()
}

/// Returns the bytes of a dense view.
pub(crate) fn download(stream: &dyn Stream, view: &TensorView) -> Vec<u8> {
    raw::download(stream, view).unwrap()
}

pub(crate) fn arena(backend: &dyn Backend, shape: KvShape) -> KvArena {
    raw::arena(backend, shape).unwrap()
}
