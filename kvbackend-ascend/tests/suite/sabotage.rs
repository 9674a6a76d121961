//! What if the backend forgot a synchronisation, an event or a free? Each of these calls is made to do nothing, and the
//! conformance suite or the count of what is left must notice.

use kvconform::{Bench, CASES};
use kvcore::{Backend, CopyTensor, DType, MemoryKind, allocate_tensor};

use crate::common::opened;
use crate::simulator::{EAGER, LAZY, Simulator, alone};

/// Runs a row of cases that together use every part of the backend. Returns the first failure, or what was left behind.
fn verdict(simulator: &Simulator, device: usize) -> Result<(), String> {
    let before = simulator.live(device);
    let backend = opened(device).ok_or("the device cannot be opened")?;
    let chosen = CASES.iter().filter(|case| {
        [
            "order::",
            "memory::",
            "reserve::",
            "rows::scatter_puts",
            "tensor::tensors_go",
            "rope::rows",
            "attend::softcap",
            "attend::sequences_decode",
            "graphs::replays_follow",
        ]
        .iter()
        .any(|group| case.name.starts_with(group))
    });
    let mut failure = None;
    for case in chosen {
        let bench = Bench::new(backend.clone(), DType::BF16).map_err(|error| error.to_string())?;
        if let Err(error) = case.run(&bench) {
            failure.get_or_insert(format!("{}: {error}", case.name));
        }
    }
    if failure.is_none() {
        failure = not_given_back(simulator, device, backend.as_ref()).err();
    }
    drop(backend);
    let after = simulator.live(device);
    match failure {
        Some(failure) => Err(failure),
        None if after != before => Err(format!("left behind: {before:?} became {after:?}")),
        None => Ok(()),
    }
}

/// Checks that all that a backend hands out is given back while the backend lives.
fn not_given_back(simulator: &Simulator, device: usize, backend: &dyn Backend) -> Result<(), String> {
    let use_everything = || -> kvcore::Result<()> {
        let view = allocate_tensor(backend, MemoryKind::Device, DType::U8, &[8 << 20])?;
        let pinned = allocate_tensor(backend, MemoryKind::Pinned, DType::U8, &[4096])?;
        let pool = backend.reserve(MemoryKind::Device, 5 << 20)?;
        pool.unmap(0..pool.granularity())?;
        let stream = backend.stream()?;
        stream.write(&view, &vec![1; 8 << 20])?;
        stream.write(&pinned, &[1; 4096])?;
        // So many pieces of memory that the stream cuts its work into batches.
        for _ in 0..150 {
            let small = allocate_tensor(backend, MemoryKind::Device, DType::U8, &[16])?;
            stream.copy_tensor(&CopyTensor { src: view.slice(0, 0, 16)?, dst: small })?;
        }
        stream.record()?.wait()
    };
    let mut counts = Vec::new();
    for _ in 0..3 {
        use_everything().map_err(|error| error.to_string())?;
        counts.push(simulator.live(device));
    }
    if counts[1] == counts[2] { Ok(()) } else { Err(format!("{:?} became {:?}", counts[1], counts[2])) }
}

const CALLS: [&str; 28] = [
    "aclrtStreamWaitEvent",
    "aclrtRecordEvent",
    "aclrtSynchronizeStream",
    "aclrtSynchronizeEvent",
    "aclrtMemsetAsync",
    "aclrtMemcpyAsync",
    "aclrtMemcpy",
    "aclrtFree",
    "aclrtFreeHost",
    "aclrtUnmapMem",
    "aclrtFreePhysical",
    "aclrtReleaseMemAddress",
    "aclrtDestroyEvent",
    "aclrtDestroyStream",
    "aclmdlRIExecuteAsync",
    "aclmdlRIDestroy",
    "aclDestroyTensor",
    "aclDestroyScalar",
    "aclDestroyIntArray",
    "aclDestroyTensorList",
    "aclnnScatterPaKvCache",
    "aclnnFusedInferAttentionScoreV2",
    "aclnnInplaceIndexCopy",
    "aclnnIndexSelect",
    "aclnnInplaceCopy",
    "aclnnCast",
    "aclnnBatchMatMul",
    "aclnnReduceSum",
];

#[test]
fn a_call_that_does_nothing_is_noticed() {
    let Some((simulator, _alone)) = alone() else { return };
    for device in [EAGER, LAZY] {
        assert_eq!(verdict(simulator, device), Ok(()), "nothing is wrong on device {device}");
    }
    for call in CALLS {
        simulator.ignore(call, true);
        let verdict = verdict(simulator, LAZY);
        simulator.reset();
        let Err(reason) = verdict else { panic!("nobody notices that {call} does nothing") };
        println!("{call}: {reason}");
    }
}
