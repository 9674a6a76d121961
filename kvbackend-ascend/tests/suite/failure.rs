//! Errors that say what to do, and devices that go on beside one that is lost.

use std::sync::Arc;

use kvbackend_ascend::{AscendBackend, AscendOptions};
use kvcore::{
    ApplyRope, Attend, AttendRows, AttendWork, Backend, BlockOrder, CopyBlocks, CopyTensor, DType, Error,
    Gather, KeyForm, KvShape, MemoryKind, QueryRow, Result, Rope, RopeConfig, Scatter, Segment, Stream,
    TensorView, WritePairs, WriteSlots, allocate_tensor,
};

use crate::common::{arena, download, noise, opened, upload};
use crate::simulator::{EAGER, LAZY, SMALL, alone, beside_others};

/// Codes of ACL.
const OUT_OF_MEMORY: i32 = 207_001;
const LOST: i32 = 507_015;
const INVALID_VALUE: i32 = 107_000;

fn is_lost<T>(result: &Result<T>) -> bool {
    matches!(result, Err(Error::DeviceLost { backend: "ascend", .. }))
}

#[test]
fn a_device_that_is_not_there_is_named_beside_those_that_are() {
    let _beside = beside_others();
    let Some(_) = opened(EAGER) else { return };
    let Err(Error::NoDevice { reason, .. }) =
        AscendBackend::with_options(&AscendOptions { device: 99, plain: false })
    else {
        panic!("device 99 was opened")
    };
    assert!(reason.contains("no device 99") && reason.contains("0 to "), "{reason}");
    let devices = kvbackend_ascend::devices().unwrap();
    assert!(!devices.is_empty() && devices[0].total_memory > 0);
    assert!(kvbackend_ascend::operators().unwrap().iter().all(|operator| operator.there));
}

#[test]
fn memory_that_is_full_is_an_error_with_the_free_bytes_and_nothing_is_held() {
    let Some((simulator, _alone)) = alone() else { return };
    let backend = opened(SMALL).unwrap();
    let before = simulator.live(SMALL);
    let refused = backend.allocate(MemoryKind::Device, 1 << 30);
    let says = |reason: &str| reason.contains("bytes are free");
    assert!(
        matches!(&refused, Err(Error::Allocation { bytes: 0x4000_0000, reason, .. }) if says(reason)),
        "{refused:?}"
    );
    let refused = backend.reserve(MemoryKind::Device, 1 << 30).map(drop);
    assert!(matches!(&refused, Err(Error::Allocation { .. })), "{refused:?}");
    assert_eq!(simulator.live(SMALL), before);
    assert!(backend.allocate(MemoryKind::Device, 1 << 20).is_ok(), "the device goes on");
    simulator.limit(SMALL, simulator.live(SMALL)[0]);
    let refused = backend.allocate(MemoryKind::Device, 1 << 20);
    assert!(matches!(refused, Err(Error::Allocation { .. })), "{refused:?}");
}

#[test]
fn pinned_memory_that_the_system_refuses_is_an_allocation_error() {
    let Some((simulator, _alone)) = alone() else { return };
    let backend = opened(EAGER).unwrap();
    simulator.fail("aclrtMallocHost", 1, OUT_OF_MEMORY);
    let refused = backend.allocate(MemoryKind::Pinned, 4096);
    assert!(matches!(refused, Err(Error::Allocation { kind: MemoryKind::Pinned, .. })), "{refused:?}");
}

#[test]
fn memory_that_runs_out_within_an_operation_is_an_error_and_the_stream_goes_on() {
    let Some((simulator, _alone)) = alone() else { return };
    let backend = opened(SMALL).unwrap();
    let stream = backend.stream().unwrap();
    let rows = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[4, 2, 8]).unwrap();
    let rope = Arc::new(Rope::new(RopeConfig::new(8, 100.0), 16).unwrap());
    let turn = ApplyRope { rows, positions: [1, 2, 3, 4].into(), rope };
    simulator.limit(SMALL, simulator.live(SMALL)[0]);
    let refused = stream.rope(&turn);
    assert!(matches!(refused, Err(Error::Allocation { .. })), "{refused:?}");
    simulator.limit(SMALL, 64 << 20);
    stream.rope(&turn).unwrap();
    stream.synchronize().unwrap();
}

#[test]
fn an_operator_whose_workspace_finds_no_memory_leaves_nothing() {
    let Some((simulator, _alone)) = alone() else { return };
    let backend = opened(SMALL).unwrap();
    let stream = backend.stream().unwrap();
    let tensor = || allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[5, 8]).unwrap();
    // Strides differ, so that an operator copies; a workspace is all the memory that it takes.
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
    // The work runs now. Freed memory would lose the device.
    stream.synchronize().unwrap();
}

/// Set for the process in which the memory of a lent stream stays.
const CHILD: &str = "KV_ASCEND_TEST_LENT_STREAM";

/// In a process of its own: what nobody can wait for is never freed, and keeps the device.
#[test]
fn work_on_a_lent_stream_keeps_its_memory_if_nobody_can_wait_for_it() {
    let Some((simulator, _alone)) = alone() else { return };
    if std::env::var_os(CHILD).is_none() {
        let name = "failure::work_on_a_lent_stream_keeps_its_memory_if_nobody_can_wait_for_it";
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let output = child.args([name, "--exact"]).env(CHILD, "1").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let backend = opened(LAZY).unwrap();
    let raw = simulator.stream(LAZY);
    // SAFETY: the stream lives until it is ended below.
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
fn a_fault_loses_the_device_and_no_other() {
    let Some((_, _alone)) = alone() else { return };
    for (device, other) in [(EAGER, LAZY), (LAZY, EAGER)] {
        let (backend, beside) = (opened(device).unwrap(), opened(other).unwrap());
        let stream = backend.stream().unwrap();
        let owned = backend.allocate(MemoryKind::Device, 4096).unwrap();
        // SAFETY: the memory is freed below, which is what the test is about: the device faults, the process does not.
        let lent = unsafe { backend.lent(owned.address(), 4096, Arc::new(())) }.unwrap();
        drop(owned);
        let src = TensorView::new(Arc::new(lent), DType::U8, &[4096]).unwrap();
        let dst = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::U8, &[4096]).unwrap();
        let copy = CopyTensor { src, dst };
        let event = stream.copy_tensor(&copy).and_then(|()| stream.record());
        assert!(is_lost(&stream.synchronize()), "a wait");
        if let Ok(event) = event {
            assert!(is_lost(&event.wait()) && event.is_done(), "what never comes is not waited for");
        }
        assert!(is_lost(&stream.read(&copy.dst, &mut [0; 4096])), "a read");
        assert!(is_lost(&stream.write(&copy.dst, &[0; 4096])), "a write");
        assert!(is_lost(&stream.copy_tensor(&copy)), "an operation");
        assert!(is_lost(&backend.allocate(MemoryKind::Device, 64)), "an allocation");
        assert!(is_lost(&backend.stream()), "a stream");
        let bytes = noise(2, 64);
        let view = upload(beside.as_ref(), DType::U8, &[64], &bytes);
        assert_eq!(download(beside.stream().unwrap().as_ref(), &view), bytes);
        drop((stream, copy, backend));
        let again = opened(device).unwrap();
        let view = upload(again.as_ref(), DType::U8, &[64], &bytes);
        assert_eq!(download(again.stream().unwrap().as_ref(), &view), bytes, "opened again, it works");
    }
}

#[test]
fn every_call_that_is_refused_is_an_error_and_nothing_is_held() {
    let Some((simulator, _alone)) = alone() else { return };
    let entries = [
        "aclrtSetDevice",
        "aclrtSetCurrentContext",
        "aclrtCreateStreamWithConfig",
        "aclrtMalloc",
        "aclrtMallocHost",
        "aclrtMemsetAsync",
        "aclrtSynchronizeStream",
        "aclrtMemcpyAsync",
        "aclrtMemcpy",
        "aclrtCreateEventExWithFlag",
        "aclrtRecordEvent",
        "aclrtQueryEventStatus",
        "aclrtSynchronizeEvent",
        "aclrtStreamWaitEvent",
        "aclrtMemGetAllocationGranularity",
        "aclrtReserveMemAddress",
        "aclrtMallocPhysical",
        "aclrtMapMem",
        "aclCreateTensor",
        "aclCreateScalar",
        "aclCreateIntArray",
        "aclCreateTensorList",
        "aclnnScatterPaKvCacheGetWorkspaceSize",
        "aclnnScatterPaKvCache",
        "aclnnFusedInferAttentionScoreV2GetWorkspaceSize",
        "aclnnFusedInferAttentionScoreV2",
        "aclnnInplaceIndexCopyGetWorkspaceSize",
        "aclnnInplaceIndexCopy",
        "aclnnIndexSelectGetWorkspaceSize",
        "aclnnCastGetWorkspaceSize",
        "aclnnCast",
        "aclnnBatchMatMulGetWorkspaceSize",
        "aclnnExp",
    ];
    everything(EAGER).unwrap();
    let (before, mut seen) = (simulator.live(EAGER), 0);
    for entry in entries {
        for (after, code) in [(1, INVALID_VALUE), (2, INVALID_VALUE), (5, INVALID_VALUE), (1, LOST)] {
            simulator.fail(entry, after, code);
            let result = everything(EAGER);
            simulator.fail(entry, 0, 0);
            seen += usize::from(result.is_err());
            assert_eq!(
                simulator.live(EAGER),
                before,
                "call {after} of {entry} failed with {code}: {result:?}"
            );
        }
        everything(EAGER).unwrap_or_else(|error| panic!("after {entry} had failed: {error}"));
    }
    assert!(seen > 80, "only {seen} of the failures were seen");
}

/// Opens a device and uses each part of the backend once.
fn everything(device: usize) -> Result<()> {
    let backend = AscendBackend::with_options(&AscendOptions { device, plain: false })?;
    let (stream, second) = (backend.stream()?, backend.stream()?);
    let shape = KvShape {
        num_layers: 2,
        num_blocks: 4,
        block_size: 16,
        k_heads: 2,
        v_heads: 2,
        k_dim: 16,
        v_dim: 16,
        format: DType::BF16.into(),
        order: BlockOrder::TokenMajor,
    };
    let layout = Arc::new(kvcore::KvLayout::new(shape)?);
    let arena = kvcore::KvArena::allocate(backend.as_ref(), MemoryKind::Device, layout)?;
    let rows = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::BF16, &[3, 2, 16])?;
    stream.write(&rows, &noise(1, 192))?;
    let slots = WriteSlots::unchecked([1, 5, 9]);
    let (k, v) = (rows.clone(), rows.clone());
    stream.scatter(&Scatter { arena: arena.clone(), layer: 1, k, v, slots, rotation: None })?;
    let rope = Arc::new(Rope::new(RopeConfig::new(16, 100.0), 16)?);
    stream.rope(&ApplyRope { rows: rows.clone(), positions: [1, 2, 3].into(), rope })?;
    let pairs = WritePairs::unchecked([(kvcore::BlockId(0), kvcore::BlockId(3))]);
    stream.copy_blocks(&CopyBlocks { arena: arena.clone(), pairs })?;
    let segment = Segment::new([kvcore::BlockId(3)].into(), 4, 0, 0);
    let queries: Vec<QueryRow> = (0..3).map(|at| QueryRow { logical: at, position: at as i64 }).collect();
    let work = Arc::new(AttendWork::new(queries, [AttendRows::new(0..3, [segment])]));
    let out = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::BF16, &[3, 2, 16])?;
    let attend = Attend {
        arena: arena.clone(),
        layer: 1,
        q: rows.clone(),
        rope: None,
        keys: KeyForm::Rotated,
        work,
        scale: 0.5,
        window: None,
        softcap: None,
        out,
        lse: None,
    };
    stream.attend(&attend)?;
    // One row alone, which the fused operator takes.
    let segment = Segment::new([kvcore::BlockId(3)].into(), 4, 0, 0);
    let last = QueryRow { logical: 3, position: 3 };
    stream.attend(&Attend {
        q: attend.q.slice(0, 0, 1)?,
        work: Arc::new(AttendWork::new([last], [AttendRows::new(0..1, [segment])])),
        out: attend.out.slice(0, 0, 1)?,
        ..attend
    })?;
    let pool = backend.reserve(MemoryKind::Device, 3 << 20)?;
    pool.unmap(0..pool.granularity())?;
    pool.map(0..pool.granularity())?;
    let event = stream.record()?;
    second.wait_for(&event)?;
    event.wait()?;
    let (k, v) = (rows.clone(), rows.clone().contiguous(backend.as_ref(), second.as_ref())?);
    second.gather(&Gather { arena, layer: 1, slots: [1, -1, 9].into(), k, v, rotation: None })?;
    second.read(&rows, &mut [0; 192])?;
    let pinned = allocate_tensor(backend.as_ref(), MemoryKind::Pinned, DType::U8, &[96])?;
    second.write(&pinned, &[1; 96])?;
    for _ in 0..80 {
        let small = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::U8, &[96])?;
        second.copy_tensor(&CopyTensor { src: pinned.clone(), dst: small })?;
    }
    second.synchronize()
}

#[test]
fn memory_of_another_device_is_foreign() {
    let _beside = beside_others();
    let (Some(one), Some(other)) = (opened(EAGER), opened(LAZY)) else { return };
    let view = upload(other.as_ref(), DType::U8, &[64], &noise(1, 64));
    let here = allocate_tensor(one.as_ref(), MemoryKind::Device, DType::U8, &[64]).unwrap();
    let stream = one.stream().unwrap();
    let foreign = |result: Result<()>| {
        assert!(matches!(result, Err(Error::ForeignHandle { backend: "ascend", .. })), "{result:?}");
    };
    foreign(stream.copy_tensor(&CopyTensor { src: here, dst: view.clone() }));
    foreign(stream.read(&view, &mut [0; 64]));
    foreign(stream.write(&view, &[0; 64]));
}

#[test]
fn no_work_is_no_work() {
    let _beside = beside_others();
    let Some(backend) = opened(LAZY) else { return };
    let stream = backend.stream().unwrap();
    let shape = KvShape {
        num_layers: 1,
        num_blocks: 2,
        block_size: 2,
        k_heads: 1,
        v_heads: 1,
        k_dim: 4,
        v_dim: 4,
        format: DType::F32.into(),
        order: BlockOrder::TokenMajor,
    };
    let arena = arena(backend.as_ref(), shape);
    let storage = backend.allocate(MemoryKind::Device, 16).unwrap();
    let none = TensorView::new(storage, DType::F32, &[0, 1, 4]).unwrap();
    let (k, v) = (none.clone(), none.clone());
    let slots = WriteSlots::unchecked([]);
    stream.scatter(&Scatter { arena: arena.clone(), layer: 0, k, v, slots, rotation: None }).unwrap();
    let one = upload(backend.as_ref(), DType::F32, &[1, 1, 4], &[0; 16]);
    let (k, v) = (one.clone(), one.clone());
    let slots = WriteSlots::unchecked([-1]);
    stream.scatter(&Scatter { arena: arena.clone(), layer: 0, k, v, slots, rotation: None }).unwrap();
    let (k, v) = (none.clone(), none.clone());
    stream
        .gather(&Gather { arena: arena.clone(), layer: 0, slots: [].into(), k, v, rotation: None })
        .unwrap();
    stream.copy_tensor(&CopyTensor { src: none.clone(), dst: none.clone() }).unwrap();
    let rope = Arc::new(Rope::new(RopeConfig::new(4, 100.0), 16).unwrap());
    stream.rope(&ApplyRope { rows: none.clone(), positions: [].into(), rope }).unwrap();
    stream.copy_blocks(&CopyBlocks { arena, pairs: WritePairs::unchecked([]) }).unwrap();
    stream.write(&none, &[]).unwrap();
    stream.read(&none, &mut []).unwrap();
    stream.synchronize().unwrap();
}
