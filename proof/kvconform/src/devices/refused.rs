//! Driver calls that fail: each causes an error, nothing stays held, and the next backend works.

use std::sync::Arc;

use kvcore::{
    ApplyRope, Attend, AttendRows, AttendWork, Backend, BlockId, BlockOrder, CopyBlocks, CopyTensor, DType,
    Gather, KeyForm, KvShape, MemoryKind, QueryRow, Result, Rope, RopeConfig, Scatter, Segment, StepInputs,
    WritePairs, WriteSlots, allocate_tensor,
};

use super::{DeviceRig, DriverDouble, EAGER, LAZY, bytes_on, same};
use crate::bench::{Failure, Outcome, ensure};
use crate::raw::{arena, noise};

/// Repeatedly uses each part of a backend once on two devices, with a different driver call failing each
/// time. `functions` are driver functions; `codes` lists which call of each function fails, and with which
/// code. At least `least` of the failures must cause errors.
///
/// # Errors
/// Returns a failure that names a call after which something was left behind or the backend did not work.
pub fn refused_calls<R: DeviceRig>(
    rig: &R,
    functions: &[&str],
    codes: &[(usize, i32)],
    least: usize,
) -> Outcome {
    let Some(double) = rig.double() else {
        crate::skip("calls that are refused need the double of the driver");
        return Ok(());
    };
    refused_in(double, functions, codes, least, || everything(rig, EAGER, LAZY))
}

/// Runs `work` once with each failure.
pub(super) fn refused_in(
    double: &dyn DriverDouble,
    functions: &[&str],
    codes: &[(usize, i32)],
    least: usize,
    work: impl Fn() -> Result<()>,
) -> Outcome {
    work()?;
    let left = || [EAGER, LAZY].map(|device| double.live(device));
    let (before, mut seen) = (left(), 0);
    for function in functions {
        for &(after, code) in codes {
            double.fail(function, after, code);
            let result = work();
            double.fail(function, 0, 0);
            seen += usize::from(result.is_err());
            let what = || format!("call {after} of {function} failed with {code}: {result:?}");
            same("what is held", left(), before)
                .map_err(|failure| Failure::new(format!("{}; {failure}", what())))?;
        }
        work().map_err(|error| Failure::new(format!("after {function} had failed: {error}")))?;
    }
    ensure(seen >= least, || format!("only {seen} of the failures were seen"))
}

/// Opens two devices and uses each part of the backend once.
fn everything<R: DeviceRig>(rig: &R, device: usize, other: usize) -> Result<()> {
    let (backend, giver) = (rig.open(device)?, rig.open(other)?);
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
    let arena = arena(backend.as_ref(), shape)?;
    let tensor =
        |backend: &dyn Backend| allocate_tensor(backend, MemoryKind::Device, DType::BF16, &[3, 2, 16]);
    let rows = tensor(backend.as_ref())?;
    stream.write(&rows, &noise(1, 192))?;
    let (k, v) = (rows.clone(), rows.clone());
    let slots = WriteSlots::unchecked([1, 5, 9]);
    stream.scatter(&Scatter { arena: arena.clone(), layer: 1, k, v, slots, rotation: None })?;
    let rope = Arc::new(Rope::new(RopeConfig::new(16, 100.0), 16)?);
    stream.rope(&ApplyRope { rows: rows.clone(), positions: [1, 2, 3].into(), rope })?;
    let pairs = WritePairs::unchecked([(BlockId(0), BlockId(3))]);
    stream.copy_blocks(&CopyBlocks { arena: arena.clone(), pairs })?;
    let out = tensor(backend.as_ref())?;
    // Backends may compute many rows and a single row with different code, so both cases run.
    for queries in [0..3, 3..4] {
        let n = queries.len();
        let at = queries.map(|at| QueryRow { logical: at, position: at as i64 });
        let segment = Segment::new([BlockId(3)].into(), 4, 0, 0);
        stream.attend(&Attend {
            arena: arena.clone(),
            layer: 1,
            q: rows.slice(0, 0, n)?,
            rope: None,
            keys: KeyForm::Rotated,
            work: Arc::new(AttendWork::new(at.collect::<Vec<_>>(), [AttendRows::new(0..n, [segment])])),
            scale: 0.5,
            window: None,
            softcap: None,
            out: out.slice(0, 0, n)?,
            lse: None,
        })?;
    }
    let pool = backend.reserve(MemoryKind::Device, 3 << 20)?;
    pool.unmap(0..pool.granularity())?;
    pool.map(0..pool.granularity())?;
    let event = stream.record()?;
    second.wait_for(&event)?;
    event.wait()?;
    let v = allocate_tensor(backend.as_ref(), MemoryKind::Device, rows.dtype(), rows.shape())?;
    let k = rows.clone();
    second.gather(&Gather { arena, layer: 1, slots: [1, -1, 9].into(), k, v, rotation: None })?;
    second.read(&rows, &mut [0; 192])?;
    let pinned = allocate_tensor(backend.as_ref(), MemoryKind::Pinned, DType::U8, &[96])?;
    second.write(&pinned, &[1; 96])?;
    // Use so many pieces of memory that the stream splits its work into batches.
    for _ in 0..80 {
        second.copy_tensor(&CopyTensor { src: pinned.clone(), dst: bytes_on(backend.as_ref(), 96)? })?;
    }
    let work = Arc::new(AttendWork::new([], []));
    let step = StepInputs { tokens: [].into(), positions: [].into(), slots: WriteSlots::default(), work };
    let copy = CopyTensor { src: rows.slice(0, 0, 1)?, dst: rows.slice(0, 1, 2)? };
    let graph = second.capture(&step, &mut || second.copy_tensor(&copy))?;
    graph.replay(&step)?;
    second.copy_tensor(&CopyTensor { src: tensor(giver.as_ref())?, dst: rows })?;
    second.synchronize()
}
