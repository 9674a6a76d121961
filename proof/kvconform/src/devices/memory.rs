//! Cases for the memory and handles that a driver holds for a backend, and for their release.

use std::sync::Arc;

use kvcore::{Backend, CopyTensor, DType, Error, MemoryKind, TensorView, allocate_tensor};

use super::{DeviceRig, DriverDouble, EAGER, LAZY, bytes_on, fails, same, same_bytes};
use crate::bench::Outcome;
use crate::raw::{download, noise, upload};

pub(super) fn everything_that_a_backend_took_goes_with_it<R: DeviceRig>(
    rig: &R,
    double: &dyn DriverDouble,
) -> Outcome {
    for device in [EAGER, LAZY] {
        let before = double.live(device);
        let backend = rig.open(device)?;
        let stream = backend.stream()?;
        let src = upload(backend.as_ref(), DType::U8, &[1 << 20], &noise(1, 1 << 20))?;
        let dst = bytes_on(backend.as_ref(), 1 << 20)?;
        let pinned = allocate_tensor(backend.as_ref(), MemoryKind::Pinned, DType::U8, &[4096])?;
        let pool = backend.reserve(MemoryKind::Device, 5 << 20)?;
        pool.unmap(0..pool.granularity())?;
        stream.copy_tensor(&CopyTensor { src, dst })?;
        let event = stream.record()?;
        drop((pinned, pool, backend));
        event.wait()?;
        drop((stream, event));
        same(&format!("left on device {device}"), double.live(device), before)?;
    }
    Ok(())
}

pub(super) fn a_pool_sleeps_granule_by_granule<R: DeviceRig>(rig: &R, double: &dyn DriverDouble) -> Outcome {
    for device in [EAGER, LAZY] {
        let backend = rig.open(device)?;
        let before = double.live(device);
        let held = || double.live(device).bytes - before.bytes;
        let pool = backend.reserve(MemoryKind::Device, 9 << 20)?;
        let (granule, address, len) = (pool.granularity(), pool.address(), pool.len());
        same("a new pool", (held(), pool.mapped_bytes(), pool.resident_bytes()), (len, len, len))?;
        pool.unmap(granule..3 * granule)?;
        let awake = len - 2 * granule;
        same("a pool of which a part sleeps", (held(), pool.mapped_bytes()), (awake, awake))?;
        double.limit(device, Some(double.live(device).bytes + granule));
        fails("one granule of two", pool.map(0..len), |error| matches!(error, Error::Allocation { .. }))?;
        same("nothing is mapped then", (held(), pool.mapped_bytes()), (awake, awake))?;
        double.limit(device, None);
        pool.map(0..len)?;
        same("a pool that is awake", (held(), pool.address()), (len, address))?;
        let view = TensorView::new(Arc::clone(&pool) as _, DType::U8, &[len])?;
        same_bytes("its contents", &download(backend.stream()?.as_ref(), &view)?, &vec![0; len])?;
        drop((pool, view));
        same("after the pool", double.live(device), before)?;
    }
    Ok(())
}
