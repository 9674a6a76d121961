//! Checks that the suite would notice a backend that forgets a synchronisation, an event or a free. Driver
//! functions are made to do nothing, and a case or the count of remaining objects must detect it.

use kvcore::{Backend, CopyTensor, DType, MemoryKind, allocate_tensor};

use super::{DeviceRig, DriverDouble, EAGER, LAZY, bytes_on};
use crate::bench::{Bench, Failure, Outcome};
use crate::cases::CASES;

/// Name prefixes of cases that together use every part of a backend.
const CHOSEN: [&str; 10] = [
    "order::",
    "memory::",
    "reserve::",
    "rows::scatter_puts",
    "tensor::tensors_go",
    "rope::rows",
    "attend::softcap",
    "attend::sequences_decode",
    "graphs::a_replay",
    "graphs::replays_follow",
];

/// Makes each of these driver functions do nothing, and checks that a case on the lazy device fails or that
/// the double still holds something afterwards. Prints how each missing function was detected.
///
/// # Errors
/// Returns a failure that names a function whose absence nothing detects, or a case that fails although
/// nothing is wrong.
pub fn silent_calls<R: DeviceRig>(rig: &R, functions: &[&str]) -> Outcome {
    let Some(double) = rig.double() else {
        crate::skip("functions that do nothing need the double of the driver");
        return Ok(());
    };
    for device in [EAGER, LAZY] {
        verdict(rig, double, device)
            .map_err(|failure| Failure::new(format!("nothing is wrong on device {device}: {failure}")))?;
    }
    for function in functions {
        double.ignore(function, true);
        let verdict = verdict(rig, double, LAZY);
        double.reset();
        match verdict {
            Ok(()) => return Err(Failure::new(format!("nothing misses {function} when it does nothing"))),
            Err(reason) => println!("{function}: {reason}"),
        }
    }
    Ok(())
}

/// Runs the chosen cases on a device until one fails. Returns this failure, or a failure if objects were left
/// behind.
fn verdict<R: DeviceRig>(rig: &R, double: &dyn DriverDouble, device: usize) -> Outcome {
    let before = double.live(device);
    let backend = rig.open(device)?;
    let mut chosen = CASES.iter().filter(|case| CHOSEN.iter().any(|name| case.name.starts_with(name)));
    let mut outcome = chosen.try_for_each(|case| {
        let bench = Bench::new(backend.clone(), DType::BF16)?;
        case.run(&bench).map_err(|failure| Failure::new(format!("{}: {failure}", case.name)))
    });
    // The eager device does not free memory at predictable times.
    if outcome.is_ok() && device == LAZY {
        outcome = gives_back(double, device, backend.as_ref());
    }
    drop(backend);
    outcome?;
    super::same("left behind", double.live(device), before)
}

/// Checks that everything a backend creates for its callers is freed while the backend is still alive.
fn gives_back(double: &dyn DriverDouble, device: usize, backend: &dyn Backend) -> Outcome {
    let use_everything = || -> kvcore::Result<()> {
        let view = bytes_on(backend, 8 << 20)?;
        let pinned = allocate_tensor(backend, MemoryKind::Pinned, DType::U8, &[4096])?;
        let pool = backend.reserve(MemoryKind::Device, 5 << 20)?;
        pool.unmap(0..pool.granularity())?;
        let stream = backend.stream()?;
        stream.write(&view, &vec![1; 8 << 20])?;
        stream.write(&pinned, &[1; 4096])?;
        // Use so many pieces of memory that the stream splits its work into batches.
        for _ in 0..150 {
            stream.copy_tensor(&CopyTensor { src: view.slice(0, 0, 16)?, dst: bytes_on(backend, 16)? })?;
        }
        stream.record()?.wait()?;
        drop((view, pinned, pool, stream));
        // An allocation waits for all earlier frees.
        (0..2).try_for_each(|_| backend.allocate(MemoryKind::Device, 64).map(drop))
    };
    let mut live = Vec::new();
    for _ in 0..3 {
        use_everything()?;
        live.push(double.live(device));
    }
    super::same("left after all was dropped", live[2], live[1])
}
