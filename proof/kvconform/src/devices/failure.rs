//! Errors that explain what to do, and devices that still work after another one is lost.

use kvcore::{Backend, CopyTensor, DType, Error, MemoryKind};

use super::{DeviceRig, DriverDouble, DriverFault, EAGER, LAZY, SMALL, bytes_on, fails, same, same_bytes};
use crate::bench::{Failure, Outcome, ensure};
use crate::raw::{download, noise, upload};

pub(super) fn a_device_that_is_not_there_is_named_with_the_ones_that_are<R: DeviceRig>(rig: &R) -> Outcome {
    rig.open(EAGER)?;
    let Err(Error::NoDevice { reason, .. }) = rig.open(99) else {
        return Err(Failure::new("device 99 was opened"));
    };
    ensure(reason.contains("no device 99") && reason.contains("0 to "), || reason)
}

pub(super) fn memory_that_is_full_is_an_error_with_the_free_bytes_and_nothing_is_held<R: DeviceRig>(
    rig: &R,
    double: &dyn DriverDouble,
) -> Outcome {
    let backend = rig.open(SMALL)?;
    let before = double.live(SMALL);
    fails(
        "1 GiB",
        backend.allocate(MemoryKind::Device, 1 << 30),
        |error| matches!(error, Error::Allocation { bytes: 0x4000_0000, reason, .. } if reason.contains("bytes are free")),
    )?;
    fails("1 GiB reserved", backend.reserve(MemoryKind::Device, 1 << 30), is_allocation)?;
    same("after refusals", double.live(SMALL), before)?;
    // The device still works.
    backend.allocate(MemoryKind::Device, 1 << 20)?;
    Ok(())
}

pub(super) fn another_program_that_fills_the_device_is_an_allocation_error<R: DeviceRig>(
    rig: &R,
    double: &dyn DriverDouble,
) -> Outcome {
    let backend = rig.open(SMALL)?;
    double.limit(SMALL, Some(double.live(SMALL).bytes));
    fails("a full device", backend.allocate(MemoryKind::Device, 1 << 20), is_allocation)?;
    double.limit(SMALL, None);
    backend.allocate(MemoryKind::Device, 1 << 20)?;
    Ok(())
}

pub(super) fn pinned_memory_that_the_system_refuses_is_an_allocation_error<R: DeviceRig>(
    rig: &R,
    double: &dyn DriverDouble,
) -> Outcome {
    let backend = rig.open(EAGER)?;
    let (function, code) = double.fault(DriverFault::PinnedMemory);
    double.fail(function, 1, code);
    fails("pinned memory", backend.allocate(MemoryKind::Pinned, 4096), |error| {
        matches!(error, Error::Allocation { kind: MemoryKind::Pinned, .. })
    })
}

pub(super) fn a_fault_loses_the_device_and_no_other<R: DeviceRig>(rig: &R, _: &dyn DriverDouble) -> Outcome {
    for (device, other) in [(EAGER, LAZY), (LAZY, EAGER)] {
        let (backend, neighbour) = (rig.open(device)?, rig.open(other)?);
        let stream = backend.stream()?;
        let copy = rig.copy_of_freed_memory(&backend)?;
        let event = stream.copy_tensor(&copy).and_then(|()| stream.record());
        fails("a wait", stream.synchronize(), is_lost)?;
        if let Ok(event) = event {
            fails("a wait for an event", event.wait(), is_lost)?;
            ensure(event.is_done(), || "an event that never comes is waited for".to_owned())?;
        }
        fails("a read", stream.read(&copy.dst, &mut [0; 4096]), is_lost)?;
        fails("a write", stream.write(&copy.dst, &[0; 4096]), is_lost)?;
        fails("an operation", stream.copy_tensor(&copy), is_lost)?;
        fails("an allocation", backend.allocate(MemoryKind::Device, 64), is_lost)?;
        fails("a stream", backend.stream(), is_lost)?;
        works("the other device", neighbour.as_ref())?;
        drop((stream, copy, backend));
        works("the lost device, opened again", rig.open(device)?.as_ref())?;
    }
    Ok(())
}

pub(super) fn memory_of_another_device_is_foreign<R: DeviceRig>(rig: &R) -> Outcome {
    let (one, other) = (rig.open(EAGER)?, rig.open(LAZY)?);
    let (here, there) = (bytes_on(one.as_ref(), 64)?, bytes_on(other.as_ref(), 64)?);
    let (stream, name) = (one.stream()?, one.name());
    let foreign = |what: &str, result: kvcore::Result<()>| match result {
        Err(Error::ForeignHandle { backend, .. }) if backend == name => Ok(()),
        other => Err(Failure::new(format!("{what}: {other:?}"))),
    };
    // A stream may read another device's tensors, but not write to them.
    foreign("a copy to it", stream.copy_tensor(&CopyTensor { src: here, dst: there.clone() }))?;
    foreign("a read", stream.read(&there, &mut [0; 64]))?;
    foreign("a write", stream.write(&there, &[0; 64]))
}

/// Checks that a device stores and returns bytes.
fn works(what: &str, backend: &dyn Backend) -> Outcome {
    let bytes = noise(2, 64);
    let view = upload(backend, DType::U8, &[64], &bytes)?;
    same_bytes(what, &download(backend.stream()?.as_ref(), &view)?, &bytes)
}

fn is_lost(error: &Error) -> bool {
    matches!(error, Error::DeviceLost { .. })
}

fn is_allocation(error: &Error) -> bool {
    matches!(error, Error::Allocation { .. })
}
