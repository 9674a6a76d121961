//! Bytes on devices: tensors, pools and noise for tests that compare bytes instead of values.

use std::sync::Arc;

use kvcore::{
    Backend, DType, KvArena, KvLayout, KvShape, MemoryKind, Result, Stream, TensorView, allocate_tensor,
};

/// Allocates a tensor on the device and writes host bytes to it. Waits until the write is done.
///
/// # Errors
/// Returns the errors of the allocation and of the write.
pub fn upload(backend: &dyn Backend, dtype: DType, shape: &[usize], bytes: &[u8]) -> Result<TensorView> {
    let view = allocate_tensor(backend, MemoryKind::Device, dtype, shape)?;
    let stream = backend.stream()?;
    stream.write(&view, bytes)?;
    stream.synchronize()?;
    Ok(view)
}

/// Waits for the stream's work so far, and returns the bytes of a dense view.
///
/// # Errors
/// Returns the errors of the read.
pub fn download(stream: &dyn Stream, view: &TensorView) -> Result<Vec<u8>> {
    let mut bytes = vec![0; view.dtype().bytes_for(view.len())?];
    stream.read(view, &mut bytes)?;
    Ok(bytes)
}

/// Allocates a zeroed pool with the given shape on the device.
///
/// # Errors
/// Returns the errors of the layout and of the allocation.
pub fn arena(backend: &dyn Backend, shape: KvShape) -> Result<KvArena> {
    KvArena::allocate(backend, MemoryKind::Device, Arc::new(KvLayout::new(shape)?))
}

/// Returns `n` bytes that depend only on the seed.
pub fn noise(seed: u64, n: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    std::iter::repeat_with(next).flatten().take(n).collect()
}
