//! What if the backend forgot a synchronisation, an event or a free? Each of these calls of the driver is made to do
//! nothing, and the conformance suite or the count of what is left must notice.

use kvconform::{Bench, CASES};
use kvcore::{Backend, CopyTensor, DType, MemoryKind, allocate_tensor};

use crate::common::opened;
use crate::double::{Double, EAGER, LAZY, alone};

/// Runs the conformance suite on a device. Returns the first failure, or what was left behind.
fn verdict(double: &Double, device: usize) -> Result<(), String> {
    let before = (double.live_bytes(device), double.live_objects(device));
    let backend = opened(device).ok_or("the device cannot be opened")?;
    // A row of cases that together use every part of the backend.
    let chosen = CASES.iter().filter(|case| {
        ["order::", "memory::", "reserve::", "rows::scatter_puts", "tensor::tensors_go", "graphs::a_replay"]
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
    // What the other device frees, it frees at a time of its own.
    if failure.is_none() && device == LAZY {
        failure = not_given_back(double, device, backend.as_ref()).err();
    }
    drop(backend);
    let after = (double.live_bytes(device), double.live_objects(device));
    match failure {
        Some(failure) => Err(failure),
        None if after != before => Err(format!("left behind: {before:?} became {after:?}")),
        None => Ok(()),
    }
}

/// Checks that all that a backend hands out is given back while the backend lives.
fn not_given_back(double: &Double, device: usize, backend: &dyn Backend) -> Result<(), String> {
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
        stream.record()?.wait()?;
        drop((view, pinned, pool, stream));
        // An allocation waits for what the device does about those before.
        backend.allocate(MemoryKind::Device, 64).map(drop)?;
        backend.allocate(MemoryKind::Device, 64).map(drop)
    };
    let left = || (double.live_bytes(device), double.live_objects(device));
    let mut counts = Vec::new();
    for _ in 0..3 {
        use_everything().map_err(|error| error.to_string())?;
        counts.push(left());
    }
    if counts[1] == counts[2] { Ok(()) } else { Err(format!("{:?} became {:?}", counts[1], counts[2])) }
}

/// Calls whose absence must be noticed on the device that works only when it is waited for.
const CALLS: [&str; 15] = [
    "cuStreamWaitEvent",
    "cuEventRecord",
    "cuStreamSynchronize",
    "cuEventSynchronize",
    "cuMemsetD8Async",
    "cuMemcpyAsync",
    "cuMemcpyHtoDAsync",
    "cuMemFreeAsync",
    "cuMemFreeHost",
    "cuMemUnmap",
    "cuMemAddressFree",
    "cuMemSetAccess",
    "cuEventDestroy",
    "cuMemRelease",
    "cuStreamDestroy",
];

#[test]
fn a_call_that_does_nothing_is_noticed() {
    let Some((double, _alone)) = alone() else { return };
    for device in [EAGER, LAZY] {
        assert_eq!(verdict(double, device), Ok(()), "nothing is wrong on device {device}");
    }
    for call in CALLS {
        double.ignore(call, true);
        let verdict = verdict(double, LAZY);
        double.ignore(call, false);
        let Err(reason) = verdict else { panic!("nobody notices that {call} does nothing") };
        println!("{call}: {reason}");
    }
}
