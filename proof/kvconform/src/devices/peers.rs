//! Cases for copies between devices.

use kvcore::{Backend, CopyTensor, DType, Error, MemoryKind, TensorView, allocate_tensor};

use super::{DeviceRig, DriverDouble, DriverFault, EAGER, LAZY, bytes_on, fails, same, same_bytes};
use crate::bench::Outcome;
use crate::raw::{download, noise, upload};

pub(super) fn tensors_go_from_device_to_device_in_the_order_of_events<R: DeviceRig>(
    rig: &R,
    double: &dyn DriverDouble,
) -> Outcome {
    for (here, there) in [(EAGER, LAZY), (LAZY, EAGER)] {
        let live = || [here, there].map(|device| double.live(device));
        let before = live();
        let (from, into) = (rig.open(here)?, rig.open(there)?);
        let (sender, receiver) = (from.stream()?, into.stream()?);
        let (first, second) = (noise(1, 5000), noise(2, 5000));
        let source = upload(from.as_ref(), DType::U8, &[5, 1000], &first)?;
        let target = allocate_tensor(into.as_ref(), MemoryKind::Device, DType::U8, &[5, 1000])?;
        double.queued(there);
        for (contents, rows) in [(&first, 0..5), (&second, 2..4)] {
            let other = upload(from.as_ref(), DType::U8, &[5, 1000], contents)?;
            sender.copy_tensor(&CopyTensor { src: other, dst: source.clone() })?;
            receiver.wait_for(&sender.record()?)?;
            let part = |view: &TensorView| view.slice(0, rows.start, rows.end);
            receiver.copy_tensor(&CopyTensor { src: part(&source)?, dst: part(&target)? })?;
            // The sender's next write waits for the copy.
            sender.wait_for(&receiver.record()?)?;
        }
        same("copies from device to device", double.queued(there).peer_copies, 2)?;
        drop((source, sender));
        let expected = [&first[..2000], &second[2000..4000], &first[4000..]].concat();
        let what = format!("from device {here} to {there}");
        same_bytes(&what, &download(receiver.as_ref(), &target)?, &expected)?;
        drop((target, receiver, from, into));
        same("left behind", live(), before)?;
    }
    Ok(())
}

pub(super) fn a_lost_device_that_gives_does_not_take_the_receiver_with_it<R: DeviceRig>(
    rig: &R,
    double: &dyn DriverDouble,
) -> Outcome {
    let (from, into) = (rig.open(LAZY)?, rig.open(EAGER)?);
    let (sender, receiver) = (from.stream()?, into.stream()?);
    let src = upload(from.as_ref(), DType::U8, &[64], &noise(1, 64))?;
    let dst = bytes_on(into.as_ref(), 64)?;
    let (function, code) = double.fault(DriverFault::LostInWait);
    double.fail(function, 1, code);
    let lost = |error: &Error| matches!(error, Error::DeviceLost { .. });
    fails("a wait", sender.synchronize(), lost)?;
    fails("a copy", receiver.copy_tensor(&CopyTensor { src, dst: dst.clone() }), lost)?;
    receiver.write(&dst, &[7; 64])?;
    same_bytes("the receiver goes on", &download(receiver.as_ref(), &dst)?, &[7; 64])
}

pub(super) fn only_whole_tensors_of_devices_cross<R: DeviceRig>(rig: &R, _: &dyn DriverDouble) -> Outcome {
    let (from, into) = (rig.open(EAGER)?, rig.open(LAZY)?);
    let stream = into.stream()?;
    let tensor = |backend: &dyn Backend, kind| allocate_tensor(backend, kind, DType::U8, &[4, 4]);
    let there = tensor(from.as_ref(), MemoryKind::Device)?;
    let here = tensor(into.as_ref(), MemoryKind::Device)?;
    let copy = |src: &TensorView, dst: &TensorView| {
        stream.copy_tensor(&CopyTensor { src: src.clone(), dst: dst.clone() })
    };
    let columns = copy(&there.slice(1, 0, 2)?, &here.slice(1, 0, 2)?);
    fails("columns", columns, |error| matches!(error, Error::Unsupported { .. }))?;
    let foreign = |error: &Error| matches!(error, Error::ForeignHandle { .. });
    fails("a copy to another device", copy(&here, &there), foreign)?;
    fails("its pinned memory", copy(&tensor(from.as_ref(), MemoryKind::Pinned)?, &here), foreign)?;
    copy(&there, &here)?;
    Ok(stream.synchronize()?)
}
