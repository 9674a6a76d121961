//! Copies from device to device.

use kvcore::{Backend, CopyTensor, DType, Error, MemoryKind, allocate_tensor};

use crate::common::{download, noise, opened, upload};
use crate::simulator::{EAGER, LAZY, alone};

#[test]
fn tensors_go_from_device_to_device_in_the_order_of_events() {
    let Some((simulator, _alone)) = alone() else { return };
    for (here, there) in [(EAGER, LAZY), (LAZY, EAGER)] {
        let before = [here, there].map(|device| simulator.live(device));
        let (from, into) = (opened(here).unwrap(), opened(there).unwrap());
        let (sender, receiver) = (from.stream().unwrap(), into.stream().unwrap());
        let (first, second) = (noise(1, 5000), noise(2, 5000));
        let source = upload(from.as_ref(), DType::U8, &[5, 1000], &first);
        let target = allocate_tensor(into.as_ref(), MemoryKind::Device, DType::U8, &[5, 1000]).unwrap();
        simulator.trace(there);
        for (contents, rows) in [(&first, 0..5), (&second, 2..4)] {
            let other = upload(from.as_ref(), DType::U8, &[5, 1000], contents);
            sender.copy_tensor(&CopyTensor { src: other, dst: source.clone() }).unwrap();
            receiver.wait_for(&sender.record().unwrap()).unwrap();
            let part = |view: &kvcore::TensorView| view.slice(0, rows.start, rows.end).unwrap();
            receiver.copy_tensor(&CopyTensor { src: part(&source), dst: part(&target) }).unwrap();
            // What the sender writes next waits for the copy.
            sender.wait_for(&receiver.record().unwrap()).unwrap();
        }
        let copies = simulator.trace(there).iter().filter(|line| *line == "memcpy_d2d").count();
        assert_eq!(copies, 2, "one task copies from device to device");
        drop((source, sender));
        let expected = [&first[..2000], &second[2000..4000], &first[4000..]].concat();
        assert_eq!(download(receiver.as_ref(), &target), expected, "from device {here} to {there}");
        drop((target, receiver, from, into));
        assert_eq!([here, there].map(|device| simulator.live(device)), before);
    }
}

#[test]
fn a_lost_device_that_gives_does_not_take_the_receiver_with_it() {
    const LOST: i32 = 507_015;
    let Some((simulator, _alone)) = alone() else { return };
    let (from, into) = (opened(LAZY).unwrap(), opened(EAGER).unwrap());
    let (sender, receiver) = (from.stream().unwrap(), into.stream().unwrap());
    let src = upload(from.as_ref(), DType::U8, &[64], &noise(1, 64));
    let dst = allocate_tensor(into.as_ref(), MemoryKind::Device, DType::U8, &[64]).unwrap();
    simulator.fail("aclrtSynchronizeStream", 1, LOST);
    assert!(matches!(sender.synchronize(), Err(Error::DeviceLost { .. })));
    let copied = receiver.copy_tensor(&CopyTensor { src, dst: dst.clone() });
    assert!(matches!(copied, Err(Error::DeviceLost { .. })), "{copied:?}");
    receiver.write(&dst, &[7; 64]).unwrap();
    assert_eq!(download(receiver.as_ref(), &dst), [7; 64]);
}

#[test]
fn only_whole_tensors_of_devices_cross() {
    let Some((_, _alone)) = alone() else { return };
    let (from, into) = (opened(EAGER).unwrap(), opened(LAZY).unwrap());
    let stream = into.stream().unwrap();
    let tensor = |backend: &dyn Backend, kind| allocate_tensor(backend, kind, DType::U8, &[4, 4]).unwrap();
    let (there, here) =
        (tensor(from.as_ref(), MemoryKind::Device), tensor(into.as_ref(), MemoryKind::Device));
    let copy = |src: &kvcore::TensorView, dst: &kvcore::TensorView| {
        stream.copy_tensor(&CopyTensor { src: src.clone(), dst: dst.clone() })
    };
    let column = |view: &kvcore::TensorView| view.slice(1, 0, 2).unwrap();
    assert!(matches!(copy(&column(&there), &column(&here)), Err(Error::Unsupported { .. })));
    let foreign = |result| matches!(result, Err(Error::ForeignHandle { .. }));
    assert!(foreign(copy(&here, &there)), "a stream writes memory of its own device only");
    assert!(foreign(copy(&tensor(from.as_ref(), MemoryKind::Pinned), &here)));
    copy(&there, &here).unwrap();
    stream.synchronize().unwrap();
}

#[test]
fn a_device_without_a_way_to_another_does_not_reach_it() {
    let Some((simulator, _alone)) = alone() else { return };
    let (from, into) = (opened(EAGER).unwrap(), opened(LAZY).unwrap());
    let src = upload(from.as_ref(), DType::U8, &[64], &noise(1, 64));
    let dst = allocate_tensor(into.as_ref(), MemoryKind::Device, DType::U8, &[64]).unwrap();
    let stream = into.stream().unwrap();
    simulator.fail("aclrtDeviceCanAccessPeer", 1, 107_000);
    let copied = stream.copy_tensor(&CopyTensor { src: src.clone(), dst: dst.clone() });
    assert!(matches!(copied, Err(Error::ForeignHandle { .. })), "{copied:?}");
    stream.copy_tensor(&CopyTensor { src, dst: dst.clone() }).unwrap();
    assert_eq!(download(stream.as_ref(), &dst), noise(1, 64));
}
