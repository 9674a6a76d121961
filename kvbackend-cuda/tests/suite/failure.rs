//! Errors that say what to do, and devices that go on beside one that is lost.

use std::sync::Arc;

use kvcore::{
    ApplyRope, AttendWork, Backend, BlockOrder, CopyBlocks, CopyTensor, DType, Error, Gather, KvShape,
    MemoryKind, Result, Rope, RopeConfig, Scatter, StepInputs, TensorView, WritePairs, WriteSlots,
    allocate_tensor,
};

use crate::common::{arena, download, noise, opened, upload};
use crate::double::{EAGER, LAZY, SMALL, alone, beside_others};

/// Codes of the driver.
const OUT_OF_MEMORY: i32 = 2;
const ILLEGAL_ADDRESS: i32 = 700;
const INVALID_VALUE: i32 = 1;

fn is_lost<T>(result: &Result<T>) -> bool {
    matches!(result, Err(Error::DeviceLost { backend: "cuda", .. }))
}

#[test]
fn a_device_that_is_not_there_is_named_beside_those_that_are() {
    let _beside = beside_others();
    let Some(_) = opened(EAGER) else { return };
    let options = kvbackend_cuda::CudaOptions { device: 99, ..kvbackend_cuda::CudaOptions::default() };
    let Err(Error::NoDevice { reason, .. }) = kvbackend_cuda::CudaBackend::with_options(&options) else {
        panic!("device 99 was opened")
    };
    assert!(reason.contains("no device 99") && reason.contains("0 to "), "{reason}");
    let devices = kvbackend_cuda::devices().unwrap();
    assert!(!devices.is_empty() && devices[0].total_memory > 0 && devices[0].driver >= 12_000);
    assert!(devices[0].unfit.is_none() && devices[0].compute_capability.0 >= 8);
}

#[test]
fn memory_that_is_full_is_an_error_with_the_free_bytes_and_nothing_is_held() {
    let Some((double, _alone)) = alone() else { return };
    let backend = opened(SMALL).unwrap();
    let before = double.live_bytes(SMALL);
    let refused = backend.allocate(MemoryKind::Device, 1 << 30);
    let says = |reason: &str| reason.contains("bytes are free");
    assert!(
        matches!(&refused, Err(Error::Allocation { bytes: 0x4000_0000, reason, .. }) if says(reason)),
        "{refused:?}"
    );
    let refused = backend.reserve(MemoryKind::Device, 1 << 30).map(drop);
    assert!(matches!(&refused, Err(Error::Allocation { .. })), "{refused:?}");
    assert_eq!(double.live_bytes(SMALL), before);
    assert!(backend.allocate(MemoryKind::Device, 1 << 20).is_ok(), "the device goes on");
}

#[test]
fn another_program_that_fills_the_card_is_an_allocation_error() {
    let Some((double, _alone)) = alone() else { return };
    let backend = opened(SMALL).unwrap();
    double.limit(SMALL, double.live_bytes(SMALL));
    let refused = backend.allocate(MemoryKind::Device, 1 << 20);
    assert!(matches!(refused, Err(Error::Allocation { .. })), "{refused:?}");
    double.limit(SMALL, 64 << 20);
    assert!(backend.allocate(MemoryKind::Device, 1 << 20).is_ok());
    // Memory in pieces: free, but not for this request.
    double.fail("cuMemAllocFromPoolAsync", 1, OUT_OF_MEMORY);
    let refused = backend.allocate(MemoryKind::Device, 1 << 20);
    assert!(
        matches!(&refused, Err(Error::Allocation { reason, .. }) if reason.contains("not in one piece")),
        "{refused:?}"
    );
}

#[test]
fn pinned_memory_that_the_system_refuses_is_an_allocation_error() {
    let Some((double, _alone)) = alone() else { return };
    let backend = opened(EAGER).unwrap();
    double.fail("cuMemHostAlloc", 1, OUT_OF_MEMORY);
    let refused = backend.allocate(MemoryKind::Pinned, 4096);
    assert!(matches!(refused, Err(Error::Allocation { kind: MemoryKind::Pinned, .. })), "{refused:?}");
}

/// Returns a stream and a copy of memory that is freed behind the back of its storage.
pub(crate) fn copy_of_freed_memory(backend: &Arc<kvbackend_cuda::CudaBackend>) -> CopyTensor {
    let owned = backend.allocate(MemoryKind::Device, 4096).unwrap();
    // SAFETY: the memory is freed below, which is what the test is about: the device faults, the process does not.
    let lent = unsafe { backend.lent(owned.address(), 4096, Arc::new(())) }.unwrap();
    drop(owned);
    let src = TensorView::new(Arc::new(lent), DType::U8, &[4096]).unwrap();
    let dst = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::U8, &[4096]).unwrap();
    CopyTensor { src, dst }
}

#[test]
fn an_illegal_address_loses_the_device_and_no_other() {
    let Some((_, _alone)) = alone() else { return };
    for (device, other) in [(EAGER, LAZY), (LAZY, EAGER)] {
        let (backend, beside) = (opened(device).unwrap(), opened(other).unwrap());
        let stream = backend.stream().unwrap();
        let copy = copy_of_freed_memory(&backend);
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
fn every_call_that_the_driver_refuses_is_an_error_and_nothing_is_held() {
    let Some((double, alone)) = alone() else { return };
    drop(alone);
    let Some((double_again, _alone)) = crate::double::alone() else { return };
    assert!(std::ptr::eq(double, double_again));
    let entries = [
        "cuCtxGetCurrent",
        "cuStreamCreate",
        "cuMemPoolCreate",
        "cuMemPoolSetAttribute",
        "cuMemAllocFromPoolAsync",
        "cuMemsetD8Async",
        "cuStreamSynchronize",
        "cuMemHostAlloc",
        "cuMemHostGetDevicePointer",
        "cuMemcpyAsync",
        "cuMemcpyHtoDAsync",
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuLaunchKernel",
        "cuEventCreate",
        "cuEventRecord",
        "cuEventSynchronize",
        "cuStreamWaitEvent",
        "cuMemAddressReserve",
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemGetAllocationGranularity",
        "cuStreamBeginCapture_v2",
        "cuStreamEndCapture",
        "cuGraphInstantiateWithFlags",
        "cuGraphLaunch",
        "cuMemcpyPeerAsync",
        "cuDeviceCanAccessPeer",
        "cuCtxEnablePeerAccess",
    ];
    let mut seen = 0;
    let left = || [EAGER, LAZY].map(|device| (double.live_bytes(device), double.live_objects(device)));
    for entry in entries {
        for (after, code) in
            [(1, INVALID_VALUE), (2, INVALID_VALUE), (4, INVALID_VALUE), (1, ILLEGAL_ADDRESS)]
        {
            let before = left();
            double.fail(entry, after, code);
            let result = everything(EAGER, LAZY);
            double.fail(entry, 0, 0);
            seen += usize::from(result.is_err());
            assert_eq!(left(), before, "call {after} of {entry} failed with {code}: {result:?}");
        }
        everything(EAGER, LAZY).unwrap_or_else(|error| panic!("after {entry} had failed: {error}"));
    }
    assert!(seen > 50, "only {seen} of the failures were seen");
}

/// Opens two devices and uses each part of the backend once.
fn everything(device: usize, other: usize) -> Result<()> {
    let open = |device| {
        kvbackend_cuda::CudaBackend::with_options(&kvbackend_cuda::CudaOptions {
            device,
            ..kvbackend_cuda::CudaOptions::default()
        })
    };
    let (backend, giver) = (open(device)?, open(other)?);
    let (stream, second) = (backend.stream()?, backend.stream()?);
    let shape = KvShape {
        num_layers: 2,
        num_blocks: 4,
        block_size: 4,
        k_heads: 2,
        v_heads: 2,
        k_dim: 8,
        v_dim: 8,
        format: DType::BF16.into(),
        order: BlockOrder::TokenMajor,
    };
    let layout = Arc::new(kvcore::KvLayout::new(shape)?);
    let arena = kvcore::KvArena::allocate(backend.as_ref(), MemoryKind::Device, layout)?;
    let rows = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::BF16, &[3, 2, 8])?;
    stream.write(&rows, &noise(1, 96))?;
    let slots = WriteSlots::unchecked([1, 5, 9]);
    let (k, v) = (rows.clone(), rows.clone());
    stream.scatter(&Scatter { arena: arena.clone(), layer: 1, k, v, slots, rotation: None })?;
    let rope = Arc::new(Rope::new(RopeConfig::new(8, 100.0), 16)?);
    stream.rope(&ApplyRope { rows: rows.clone(), positions: [1, 2, 3].into(), rope })?;
    let pairs = WritePairs::unchecked([(kvcore::BlockId(0), kvcore::BlockId(3))]);
    stream.copy_blocks(&CopyBlocks { arena, pairs })?;
    let pool = backend.reserve(MemoryKind::Device, 3 << 20)?;
    pool.unmap(0..pool.granularity())?;
    pool.map(0..pool.granularity())?;
    let event = stream.record()?;
    second.wait_for(&event)?;
    event.wait()?;
    second.read(&rows, &mut [0; 96])?;
    let pinned = allocate_tensor(backend.as_ref(), MemoryKind::Pinned, DType::U8, &[96])?;
    second.write(&pinned, &[1; 96])?;
    let work = Arc::new(AttendWork::new([], []));
    let step = StepInputs { tokens: [].into(), positions: [].into(), slots: WriteSlots::default(), work };
    let copy = CopyTensor { src: rows.slice(0, 0, 1)?, dst: rows.slice(0, 1, 2)? };
    let graph = second.capture(&step, &mut || second.copy_tensor(&copy))?;
    graph.replay(&step)?;
    let src = allocate_tensor(giver.as_ref(), MemoryKind::Device, DType::BF16, &[3, 2, 8])?;
    second.copy_tensor(&CopyTensor { src, dst: rows })?;
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
        assert!(matches!(result, Err(Error::ForeignHandle { backend: "cuda", .. })), "{result:?}");
    };
    // A stream may read tensors of another device, and writes to none.
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
