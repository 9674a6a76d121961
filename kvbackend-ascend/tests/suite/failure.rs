//! NPU failures: memory that runs out during an operation, waits that fail, and devices that cannot be
//! opened.

use std::sync::Arc;

use kvcore::{
    ApplyRope, Backend, CopyTensor, DType, Error, MemoryKind, Rope, RopeConfig, Stream, allocate_tensor,
};

use crate::common::{download, noise, opened, upload};
use crate::simulator::{EAGER, LAZY, SMALL, alone, with_others};

/// ACL's code for an invalid argument.
const INVALID_VALUE: i32 = 107_000;

#[test]
fn the_devices_and_the_operators_are_listed() {
    let _others = with_others();
    let Some(_) = opened(EAGER) else { return };
    let devices = kvbackend_ascend::devices().unwrap();
    assert!(!devices.is_empty() && devices[0].total_memory > 0);
    assert!(kvbackend_ascend::operators().unwrap().iter().all(|operator| operator.present));
}

#[test]
fn memory_that_runs_out_within_an_operation_is_an_error_and_the_stream_goes_on() {
    let Some((simulator, _alone)) = alone() else { return };
    let backend = opened(SMALL).unwrap();
    let stream = backend.stream().unwrap();
    let rows = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[4, 2, 8]).unwrap();
    let rope = Arc::new(Rope::new(RopeConfig::new(8, 100.0), 16).unwrap());
    let rotate = ApplyRope { rows, positions: [1, 2, 3, 4].into(), rope };
    simulator.limit(SMALL, simulator.live(SMALL)[0]);
    let refused = stream.rope(&rotate);
    assert!(matches!(refused, Err(Error::Allocation { .. })), "{refused:?}");
    simulator.limit(SMALL, 64 << 20);
    stream.rope(&rotate).unwrap();
    stream.synchronize().unwrap();
}

#[test]
fn an_operator_whose_workspace_finds_no_memory_leaves_nothing() {
    let Some((simulator, _alone)) = alone() else { return };
    let backend = opened(SMALL).unwrap();
    let stream = backend.stream().unwrap();
    let tensor = || allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[5, 8]).unwrap();
    // The strides differ, so an operator makes the copy; its workspace is the only memory that the operator
    // allocates.
    let copy = CopyTensor { src: tensor().slice(1, 0, 4).unwrap(), dst: tensor().slice(1, 4, 8).unwrap() };
    let before = simulator.live(SMALL);
    simulator.limit(SMALL, before[0]);
    let refused = stream.copy_tensor(&copy);
    assert!(matches!(refused, Err(Error::Allocation { .. })), "{refused:?}");
    assert_eq!(simulator.live(SMALL), before, "no executor stays");
    simulator.limit(SMALL, 64 << 20);
    stream.copy_tensor(&copy).unwrap();
    stream.synchronize().unwrap();
}

#[test]
fn work_keeps_its_memory_if_the_wait_for_it_is_refused() {
    let Some((simulator, _alone)) = alone() else { return };
    let backend = opened(LAZY).unwrap();
    let stream = backend.stream().unwrap();
    let rows = upload(backend.as_ref(), DType::F32, &[4, 2, 8], &noise(1, 256));
    let rope = Arc::new(Rope::new(RopeConfig::new(8, 100.0), 16).unwrap());
    stream.rope(&ApplyRope { rows, positions: [1, 2, 3, 4].into(), rope }).unwrap();
    simulator.fail("aclrtSynchronizeStream", 1, INVALID_VALUE);
    let refused = stream.synchronize();
    assert!(matches!(refused, Err(Error::Device { .. })), "{refused:?}");
    // The work runs now. If its memory had been freed, the device would be lost.
    stream.synchronize().unwrap();
}

/// Environment variable for the child process in which a lent stream's memory is leaked.
const CHILD: &str = "KV_ASCEND_TEST_LENT_STREAM";

/// Runs in its own process, because work that nothing can wait for never frees its memory and keeps the
/// device open.
#[test]
fn work_on_a_lent_stream_keeps_its_memory_if_its_wait_is_refused() {
    let Some((simulator, _alone)) = alone() else { return };
    if std::env::var_os(CHILD).is_none() {
        let name = "failure::work_on_a_lent_stream_keeps_its_memory_if_its_wait_is_refused";
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let output = child.args([name, "--exact"]).env(CHILD, "1").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let backend = opened(LAZY).unwrap();
    let raw = simulator.stream(LAZY);
    // SAFETY: the stream lives until it is destroyed below.
    let stream: Arc<dyn Stream> = Arc::new(unsafe { backend.lent_stream(raw, Arc::new(())) });
    let rows = upload(backend.as_ref(), DType::F32, &[4, 2, 8], &noise(1, 256));
    let rope = Arc::new(Rope::new(RopeConfig::new(8, 100.0), 16).unwrap());
    stream.rope(&ApplyRope { rows, positions: [1, 2, 3, 4].into(), rope }).unwrap();
    simulator.fail("aclrtSynchronizeStream", 1, INVALID_VALUE);
    drop(stream);
    let wait =
        simulator.entry::<unsafe extern "C" fn(*mut std::ffi::c_void) -> i32>("aclrtSynchronizeStream");
    // SAFETY: the entry has this type, and the stream is alive.
    assert_eq!(unsafe { wait(raw) }, 0, "its owner waits for the work, which finds its memory");
    simulator.end(LAZY, raw);
}

#[test]
fn a_device_that_cannot_be_opened_hides_no_other() {
    let Some((simulator, _alone)) = alone() else { return };
    simulator.fail("aclrtSetDevice", 1, 107_001);
    let devices = kvbackend_ascend::devices().unwrap();
    assert!(devices[0].unfit.as_ref().is_some_and(|reason| reason.contains("device 0")), "{devices:?}");
    assert!(devices[1..].iter().all(|device| device.unfit.is_none() && device.total_memory > 0));
    assert!(devices.len() > 1);
}

#[test]
fn a_device_that_cannot_access_another_does_not_reach_it() {
    let Some((simulator, _alone)) = alone() else { return };
    let (from, into) = (opened(EAGER).unwrap(), opened(LAZY).unwrap());
    let src = upload(from.as_ref(), DType::U8, &[64], &noise(1, 64));
    let dst = allocate_tensor(into.as_ref(), MemoryKind::Device, DType::U8, &[64]).unwrap();
    let stream = into.stream().unwrap();
    simulator.fail("aclrtDeviceCanAccessPeer", 1, INVALID_VALUE);
    let copied = stream.copy_tensor(&CopyTensor { src: src.clone(), dst: dst.clone() });
    assert!(matches!(copied, Err(Error::ForeignHandle { .. })), "{copied:?}");
    stream.copy_tensor(&CopyTensor { src, dst: dst.clone() }).unwrap();
    assert_eq!(download(stream.as_ref(), &dst), noise(1, 64));
}
