//! Memory: writes from pinned memory, and memory and streams that an engine lends.

use std::sync::Arc;

use kvbackend_cuda::{CudaBackend, CudaOptions};
use kvcore::{Backend, CopyTensor, DType, Error, MemoryKind, Storage, TensorView, allocate_tensor};

use crate::common::{download, noise, opened, upload};
use crate::double::{EAGER, LAZY, among_others};

#[test]
fn a_write_may_come_from_pinned_memory() {
    let _shared = among_others();
    for (device, n) in [(EAGER, 4096), (LAZY, 4096), (EAGER, 3 << 20), (LAZY, 3 << 20)] {
        let Some(backend) = opened(device) else { return };
        let stream = backend.stream().unwrap();
        let pinned = backend.allocate(MemoryKind::Pinned, n).unwrap();
        // SAFETY: the memory has `n` bytes, which only this slice uses while the storage lives. On these
        // devices, the host sees it at the same address.
        let source = unsafe { std::slice::from_raw_parts_mut(pinned.address() as *mut u8, n) };
        source.copy_from_slice(&noise(12, n));
        let view = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::U8, &[n]).unwrap();
        stream.write(&view, source).unwrap();
        source.fill(0);
        assert!(download(stream.as_ref(), &view) == noise(12, n), "{n} bytes on device {device}");
    }
}

#[test]
fn lent_memory_is_used_where_it_is_and_outlives_no_owner() {
    let _shared = among_others();
    let Some(backend) = opened(EAGER) else { return };
    // A second backend on the same device acts as the engine that owns the memory.
    let engine = opened(EAGER).unwrap();
    let tensor = upload(engine.as_ref(), DType::U8, &[4096], &noise(5, 4096));
    let owner = Arc::clone(tensor.storage());
    let address = owner.address();
    // SAFETY: the owner keeps the memory alive, and nothing else uses it.
    let lent = unsafe { backend.lent(address, 4096, Arc::new(Arc::clone(&owner))) }.unwrap();
    assert_eq!((lent.address(), lent.len(), lent.kind()), (address, 4096, MemoryKind::Device));
    let view = TensorView::new(Arc::new(lent), DType::U8, &[4096]).unwrap();
    let stream = backend.stream().unwrap();
    let copy = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::U8, &[4096]).unwrap();
    stream.copy_tensor(&CopyTensor { src: view.clone(), dst: copy.clone() }).unwrap();
    assert_eq!(download(stream.as_ref(), &copy), noise(5, 4096));
    assert!(Arc::strong_count(&owner) > 2);
    drop((view, stream, copy));
    assert_eq!(Arc::strong_count(&owner), 2, "the view and this handle");
}

#[test]
fn lent_memory_that_the_driver_describes_otherwise_is_refused() {
    let _shared = among_others();
    let Some(backend) = opened(EAGER) else { return };
    let lend = |address, bytes| {
        let owner = Arc::new(());
        // SAFETY: memory that does not have this size on this device is refused and never used.
        let lent = unsafe { backend.lent(address, bytes, owner.clone()) };
        (lent.map(drop), Arc::strong_count(&owner))
    };
    let own = backend.allocate(MemoryKind::Device, 4096).unwrap();
    assert!(matches!(lend(own.address(), 0), (Err(Error::Zero { .. }), 1)));
    assert!(matches!(lend(own.address(), 1 << 30), (Err(Error::TooLarge { .. }), 1)));
    let nowhere = lend(64, 4096);
    assert!(
        matches!(&nowhere, (Err(Error::Device { reason, .. }), 1) if reason.contains("does not know the lent memory")),
        "{nowhere:?}"
    );
    let Ok(other) = CudaBackend::with_options(&CudaOptions { device: LAZY, ..CudaOptions::default() }) else {
        return;
    };
    let there = other.allocate(MemoryKind::Device, 4096).unwrap();
    let foreign = lend(there.address(), 4096);
    assert!(
        matches!(&foreign, (Err(Error::Device { reason, .. }), 1) if reason.contains("is on device 1")),
        "{foreign:?}"
    );
}

/// A stream that an engine creates and destroys through the driver's own functions.
struct EngineStream(kvbackend_cuda::cudarc::driver::sys::CUstream, i32);

impl EngineStream {
    fn new(device: usize) -> Self {
        use kvbackend_cuda::cudarc::driver::sys;
        let (mut context, mut handle, mut raw) = (std::ptr::null_mut(), 0, std::ptr::null_mut());
        // SAFETY: all pointers are valid for writes; `Drop` releases the context.
        unsafe {
            sys::cuDeviceGet(&raw mut handle, device as i32).result().unwrap();
            sys::cuDevicePrimaryCtxRetain(&raw mut context, handle).result().unwrap();
            sys::cuCtxSetCurrent(context).result().unwrap();
            sys::cuStreamCreate(&raw mut raw, 1).result().unwrap();
        }
        Self(raw, handle)
    }
}

impl Drop for EngineStream {
    fn drop(&mut self) {
        use kvbackend_cuda::cudarc::driver::sys;
        // SAFETY: the stream is alive, and the engine no longer uses the context.
        unsafe {
            sys::cuStreamDestroy_v2(self.0).result().unwrap();
            sys::cuCtxSetCurrent(std::ptr::null_mut()).result().unwrap();
            sys::cuDevicePrimaryCtxRelease_v2(self.1).result().unwrap();
        }
    }
}

#[test]
fn a_lent_stream_keeps_its_order_and_its_owner() {
    let _shared = among_others();
    let Some(backend) = opened(LAZY) else { return };
    let engine = EngineStream::new(LAZY);
    let owner = Arc::new(());
    // SAFETY: the stream lives until the end of the test.
    let stream = unsafe { backend.lent_stream(engine.0, owner.clone()) }.unwrap();
    let stream: &dyn kvcore::Stream = &stream;
    let view = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::U8, &[64]).unwrap();
    stream.write(&view, &noise(6, 64)).unwrap();
    assert_eq!(download(stream, &view), noise(6, 64));
    assert_eq!(Arc::strong_count(&owner), 2);
    if let Some(other) = opened(EAGER) {
        // SAFETY: the stream lives until the end of the test, and the call is refused.
        let refused = unsafe { other.lent_stream(engine.0, owner.clone()) };
        assert!(matches!(refused, Err(Error::ForeignHandle { .. })), "{refused:?}");
    }
}

#[test]
fn kinds_of_memory_that_kernels_cannot_reach_are_refused_by_name() {
    let _shared = among_others();
    let Some(backend) = opened(EAGER) else { return };
    let refused = backend.allocate(MemoryKind::System, 64);
    assert!(
        matches!(&refused, Err(Error::Unsupported { what, .. }) if what.contains("pinned")),
        "{refused:?}"
    );
    assert!(matches!(backend.reserve(MemoryKind::Pinned, 64), Err(Error::Unsupported { .. })));
    assert!(matches!(backend.reserve(MemoryKind::Device, 0), Err(Error::Zero { .. })));
    assert!(matches!(backend.reserve(MemoryKind::Device, usize::MAX), Err(Error::Overflow { .. })));
}
