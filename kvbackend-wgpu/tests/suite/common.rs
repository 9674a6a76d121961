//! Backends and tensors that tests share.

use std::sync::{Arc, OnceLock};

use kvbackend_wgpu::{WgpuBackend, WgpuOptions};
use kvconform::raw;
use kvcore::{Backend, DType, KvArena, KvShape, Result, Stream, TensorView};

pub(crate) use kvconform::raw::noise;

/// Returns the device that most tests share, or prints why there is none.
pub(crate) fn shared() -> Option<Arc<WgpuBackend>> {
    static BACKEND: OnceLock<Result<Arc<WgpuBackend>>> = OnceLock::new();
    known(BACKEND.get_or_init(WgpuBackend::new).clone())
}

/// Opens a device for a single test.
pub(crate) fn opened(options: &WgpuOptions) -> Option<Arc<WgpuBackend>> {
    known(WgpuBackend::with_options(options))
}

/// Returns the opened backend, or prints why it could not be opened.
pub(crate) fn known(opened: Result<Arc<WgpuBackend>>) -> Option<Arc<WgpuBackend>> {
    opened.inspect_err(|reason| kvconform::skip(reason)).ok()
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

/// Returns all bytes of K and V.
pub(crate) fn contents(stream: &dyn Stream, arena: &KvArena) -> [Vec<u8>; 2] {
    [(arena.k(), arena.layout().k_bytes()), (arena.v(), arena.layout().v_bytes())].map(|(storage, bytes)| {
        download(stream, &TensorView::new(Arc::clone(storage), DType::U8, &[bytes]).unwrap())
    })
}
