//! Memory and streams that engines lend, and pools that sleep in parts.

use std::sync::Arc;

use kvcore::{Backend, CopyTensor, DType, MemoryKind, Storage, Stream, TensorView, allocate_tensor};

use crate::common::{download, noise, opened, upload};
use crate::simulator::{EAGER, LAZY, alone, with_others};

#[test]
fn lent_memory_keeps_its_owner_and_its_address() {
    let _others = with_others();
    let Some(backend) = opened(LAZY) else { return };
    let engine = backend.allocate(MemoryKind::Device, 256).unwrap();
    let owner = Arc::new(());
    // SAFETY: the memory lives until the end of the test.
    let lent = unsafe { backend.lent(engine.address() + 64, 128, owner.clone()) }.unwrap();
    assert_eq!((lent.address(), lent.len(), Arc::strong_count(&owner)), (engine.address() + 64, 128, 2));
    let view = TensorView::new(Arc::new(lent), DType::U8, &[128]).unwrap();
    let stream = backend.stream().unwrap();
    stream.write(&view, &noise(3, 128)).unwrap();
    assert_eq!(download(stream.as_ref(), &view), noise(3, 128));
    let all = TensorView::new(engine, DType::U8, &[256]).unwrap();
    assert_eq!(download(stream.as_ref(), &all)[64..192], noise(3, 128));
    drop((view, stream));
    assert_eq!(Arc::strong_count(&owner), 1);
    // SAFETY: the address is 0, so the call is refused and the memory is never used.
    assert!(unsafe { backend.lent(0, 1, owner) }.is_err());
}

#[test]
fn a_lent_stream_keeps_its_order_and_its_owner() {
    let Some((simulator, _alone)) = alone() else { return };
    for device in [EAGER, LAZY] {
        let backend = opened(device).unwrap();
        let (engine, owner) = (simulator.stream(device), Arc::new(()));
        let before = simulator.live(device);
        // SAFETY: the stream lives until the end of the test.
        let lent = [(); 2].map(|()| unsafe { backend.lent_stream(engine, owner.clone()) });
        let [one, other]: [&dyn Stream; 2] = [&lent[0], &lent[1]];
        let view = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::U8, &[64]).unwrap();
        one.write(&view, &noise(6, 64)).unwrap();
        let copy = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::U8, &[64]).unwrap();
        other.copy_tensor(&CopyTensor { src: view, dst: copy.clone() }).unwrap();
        assert_eq!(download(one, &copy), noise(6, 64), "both are the engine's queue");
        assert_eq!(Arc::strong_count(&owner), 3);
        drop(copy);
        drop(lent);
        assert_eq!(
            (Arc::strong_count(&owner), simulator.live(device)[2]),
            (1, before[2]),
            "the engine's stream stays"
        );
        simulator.end(device, engine);
    }
}

#[test]
fn a_thread_keeps_its_device() {
    let Some((_, _alone)) = alone() else { return };
    let (one, other) = (opened(EAGER).unwrap(), opened(LAZY).unwrap());
    let views = [&one, &other].map(|b| upload(b.as_ref(), DType::U8, &[8], &noise(1, 8)));
    let streams = [&one, &other].map(|b| b.stream().unwrap());
    // Calls on the two devices alternate, first on one thread, then on threads that have no current device
    // yet.
    for _ in 0..3 {
        for (stream, view) in streams.iter().zip(&views) {
            assert_eq!(download(stream.as_ref(), view), noise(1, 8));
        }
    }
    std::thread::scope(|scope| {
        for (stream, view) in streams.iter().zip(&views) {
            scope.spawn(move || assert_eq!(download(stream.as_ref(), view), noise(1, 8)));
        }
    });
}

#[test]
fn calls_restore_the_device_of_the_thread() {
    let Some((simulator, _alone)) = alone() else { return };
    let engine = simulator.stream(EAGER);
    let backend = opened(LAZY).unwrap();
    assert_eq!(simulator.current(), EAGER, "opening a device");
    let view = upload(backend.as_ref(), DType::U8, &[8], &noise(1, 8));
    let stream = backend.stream().unwrap();
    assert_eq!(download(stream.as_ref(), &view), noise(1, 8));
    drop((view, stream, backend));
    assert_eq!(simulator.current(), EAGER, "its calls, and their end");
    simulator.end(EAGER, engine);
}
