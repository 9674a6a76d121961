//! Cases for allocation, and for copies from and to the host.

use kvcore::{DType, Error, MemoryKind, allocate_tensor};

use crate::bench::{Bench, Outcome, ensure, equal, numbers, rounded};
use crate::raw::{download, noise};

pub(super) fn is_zeroed_and_refuses_nothing(b: &Bench) -> Outcome {
    let view = b.tensor(b.dtype, &[1000])?;
    equal("fresh memory", &b.download(&view)?, &[0.0; 1000])?;
    let none = b.backend.allocate(MemoryKind::Device, 0);
    ensure(matches!(none, Err(Error::Zero { .. })), || format!("no bytes gave {none:?}"))
}

/// An allocator that reuses freed memory must clear it, because it may hold another tenant's keys.
pub(super) fn reused_memory_is_zeroed(b: &Bench) -> Outcome {
    for kind in b.backend.capabilities().memory {
        for bytes in [64, 4096, 1 << 16] {
            for round in 0..3 {
                let view = allocate_tensor(b.backend.as_ref(), kind, DType::U8, &[bytes])?;
                let mut seen = vec![1; bytes];
                b.stream.read(&view, &mut seen)?;
                ensure(seen.iter().all(|&byte| byte == 0), || {
                    format!("{bytes} bytes of {kind} memory are not zeroed in round {round}")
                })?;
                b.stream.write(&view, &vec![0xa5; bytes])?;
                b.stream.synchronize()?;
            }
        }
    }
    Ok(())
}

pub(super) fn host_copies_round_trip(b: &Bench) -> Outcome {
    let values = numbers(1, 37);
    let view = b.upload(b.dtype, &[37], &values)?;
    equal("whole tensor", &b.download(&view)?, &rounded(b.dtype, &values))?;
    let part = view.slice(0, 5, 12)?;
    equal("a slice at an odd offset", &b.download(&part)?, &rounded(b.dtype, &values[5..12]))
}

pub(super) fn host_copies_check_length_and_density(b: &Bench) -> Outcome {
    let view = b.tensor(DType::F32, &[4, 6])?;
    let short = b.stream.write(&view, &[0; 95]);
    ensure(matches!(short, Err(Error::Mismatch { .. })), || format!("a short write gave {short:?}"))?;
    let column = view.slice(1, 0, 2)?;
    let holes = b.stream.read(&column, &mut [0; 32]);
    ensure(matches!(holes, Err(Error::InvalidStrides { .. })), || format!("a read with holes gave {holes:?}"))
}

/// A stream may stage a small write in its own memory, and may copy a large write straight from the caller's
/// bytes. In both cases, the caller may reuse the bytes after the call.
pub(super) fn a_caller_may_reuse_the_bytes_that_it_wrote(b: &Bench) -> Outcome {
    let n = 3 << 20;
    let view = b.tensor(DType::U8, &[n])?;
    let mut bytes = noise(4, n);
    let mut expected = bytes.clone();
    b.stream.write(&view, &bytes)?;
    bytes.fill(7);
    b.stream.write(&view.slice(0, 5, 17)?, &[9; 12])?;
    expected[5..17].fill(9);
    let seen = download(b.stream.as_ref(), &view)?;
    let at = seen.iter().zip(&expected).position(|(a, e)| a != e);
    ensure(at.is_none(), || format!("byte {at:?} of {n} differs"))
}
