//! Backends and tensors that tests share.

use std::sync::{Arc, OnceLock};

use kvbackend_wgpu::{WgpuBackend, WgpuOptions};
use kvcore::{
    Backend, DType, KvArena, KvLayout, KvShape, MemoryKind, Result, Stream, TensorView, allocate_tensor,
};

/// Returns the device that most tests share, or prints a line that says why there is none.
pub(crate) fn shared() -> Option<Arc<WgpuBackend>> {
    static BACKEND: OnceLock<Result<Arc<WgpuBackend>>> = OnceLock::new();
    known(BACKEND.get_or_init(WgpuBackend::new).clone())
}

/// Opens a device for one test.
pub(crate) fn opened(options: &WgpuOptions) -> Option<Arc<WgpuBackend>> {
    known(WgpuBackend::with_options(options))
}

/// Returns the opened backend, or prints a line that says why there is none.
pub(crate) fn known(opened: Result<Arc<WgpuBackend>>) -> Option<Arc<WgpuBackend>> {
    opened.inspect_err(|reason| kvconform::skip(reason)).ok()
}

/// Writes bytes of the host to new memory of the device.
pub(crate) fn upload(backend: &dyn Backend, dtype: DType, shape: &[usize], bytes: &[u8]) -> TensorView {
    let view = allocate_tensor(backend, MemoryKind::Device, dtype, shape).unwrap();
    backend.stream().unwrap().write(&view, bytes).unwrap();
    view
}

/// Returns the bytes of a dense view.
pub(crate) fn download(stream: &dyn Stream, view: &TensorView) -> Vec<u8> {
    let mut bytes = vec![0; view.dtype().bytes_for(view.len()).unwrap()];
    stream.read(view, &mut bytes).unwrap();
    bytes
}

pub(crate) fn arena(backend: &dyn Backend, shape: KvShape) -> KvArena {
    let layout = Arc::new(KvLayout::new(shape).unwrap());
    KvArena::allocate(backend, MemoryKind::Device, layout).unwrap()
}

/// Returns all bytes of K and V.
pub(crate) fn contents(stream: &dyn Stream, arena: &KvArena) -> [Vec<u8>; 2] {
    [(arena.k(), arena.layout().k_bytes()), (arena.v(), arena.layout().v_bytes())].map(|(storage, bytes)| {
        download(stream, &TensorView::new(Arc::clone(storage), DType::U8, &[bytes]).unwrap())
    })
}

/// Returns bytes that depend only on the seed.
pub(crate) fn noise(seed: u64, n: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as u8
    };
    std::iter::repeat_with(next).take(n).collect()
}
