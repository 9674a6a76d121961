//! Backends and tensors that tests share.

use std::sync::Arc;

use kvbackend_cuda::{CudaBackend, CudaOptions};
use kvcore::{Backend, DType, KvArena, KvLayout, KvShape, MemoryKind, Stream, TensorView, allocate_tensor};

/// Opens a device, or prints a line that says why there is none.
pub(crate) fn opened(device: usize) -> Option<Arc<CudaBackend>> {
    CudaBackend::with_options(&CudaOptions { device, ..CudaOptions::default() })
        .inspect_err(|reason| kvconform::skip(reason))
        .ok()
}

/// Writes bytes of the host to new memory of the device.
pub(crate) fn upload(backend: &dyn Backend, dtype: DType, shape: &[usize], bytes: &[u8]) -> TensorView {
    let view = allocate_tensor(backend, MemoryKind::Device, dtype, shape).unwrap();
    let stream = backend.stream().unwrap();
    stream.write(&view, bytes).unwrap();
    stream.synchronize().unwrap();
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
