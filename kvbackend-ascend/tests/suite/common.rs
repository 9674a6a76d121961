//! Backends and tensors that tests share.

use std::sync::Arc;

use kvbackend_ascend::{AscendBackend, AscendOptions};
use kvconform::raw;
pub(crate) use kvconform::raw::noise;
use kvcore::{Backend, DType, KvArena, KvShape, Stream, TensorView};

/// Opens a device, or prints why it cannot.
pub(crate) fn opened(device: usize) -> Option<Arc<AscendBackend>> {
    AscendBackend::with_options(&AscendOptions { device, plain: false })
        .inspect_err(|reason| kvconform::skip(reason))
        .ok()
}

pub(crate) fn upload(backend: &dyn Backend, dtype: DType, shape: &[usize], bytes: &[u8]) -> TensorView {
    raw::upload(backend, dtype, shape, bytes).unwrap()
}

pub(crate) fn download(stream: &dyn Stream, view: &TensorView) -> Vec<u8> {
    raw::download(stream, view).unwrap()
}

pub(crate) fn arena(backend: &dyn Backend, shape: KvShape) -> KvArena {
    raw::arena(backend, shape).unwrap()
}
