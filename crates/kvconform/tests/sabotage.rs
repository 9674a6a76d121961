//! A suite that cannot fail proves nothing: each deliberately wrong kernel must be caught.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::any::Any;
use std::sync::Arc;

use kvbackend_cpu::CpuBackend;
use kvconform::{Bench, CASES};
use kvcore::kernels::{
    ApplyRope, Attend, AttendRows, CopyBlocks, Gather, Kernels, RotateKeys, Rotation, Scatter, Segment,
    SwapBlocks,
};
use kvcore::{
    Backend, Capabilities, CounterSnapshot, DType, Event, MemoryKind, Pairing, Result, Rope, RopeConfig,
    Storage, Stream, TensorView,
};
use rstest::rstest;

/// What is wrong with the backend.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    None,
    ScatterNextSlot,
    ScatterWritesPadding,
    GatherWithoutRotation,
    CopyOneLayer,
    RopeOtherPairing,
    RotateTooFar,
    AttendIgnoresOffsets,
    AttendIgnoresCausality,
    AttendIgnoresWindow,
    AttendIgnoresGroups,
    EventsDoNotOrder,
}

#[derive(Debug)]
struct Wrong {
    inner: Arc<dyn Backend>,
    fault: Fault,
}

#[derive(Debug)]
struct WrongStream {
    inner: Arc<dyn Stream>,
    fault: Fault,
}

#[derive(Debug)]
struct Never;

impl Event for Never {
    fn wait(&self) -> Result<()> {
        Ok(())
    }
    fn is_done(&self) -> bool {
        false
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Backend for Wrong {
    fn name(&self) -> &'static str {
        "wrong"
    }
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
    fn allocate(&self, kind: MemoryKind, bytes: usize) -> Result<Arc<dyn Storage>> {
        self.inner.allocate(kind, bytes)
    }
    fn stream(&self) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(WrongStream { inner: self.inner.stream()?, fault: self.fault }))
    }
    fn counters(&self) -> CounterSnapshot {
        self.inner.counters()
    }
}

impl Stream for WrongStream {
    fn record(&self) -> Result<Arc<dyn Event>> {
        if self.fault == Fault::EventsDoNotOrder { Ok(Arc::new(Never)) } else { self.inner.record() }
    }
    fn wait_for(&self, event: &Arc<dyn Event>) -> Result<()> {
        if self.fault == Fault::EventsDoNotOrder { Ok(()) } else { self.inner.wait_for(event) }
    }
    fn synchronize(&self) -> Result<()> {
        self.inner.synchronize()
    }
    fn write(&self, dst: &TensorView, src: &[u8]) -> Result<()> {
        self.inner.write(dst, src)
    }
    fn read(&self, src: &TensorView, dst: &mut [u8]) -> Result<()> {
        self.inner.read(src, dst)
    }
}

impl Kernels for WrongStream {
    fn scatter(&self, op: &Scatter) -> Result<()> {
        op.check()?;
        let limit = op.arena.layout().num_slots() as i64;
        let slots = op.slots.iter().map(|&slot| match self.fault {
            Fault::ScatterNextSlot if slot >= 0 => (slot + 1) % limit,
            Fault::ScatterWritesPadding => slot.max(0),
            _ => slot,
        });
        self.inner.scatter(&Scatter { slots: slots.collect(), ..op.clone() })
    }
    fn gather(&self, op: &Gather) -> Result<()> {
        op.check()?;
        let rotation = op.rotation.clone().filter(|_| self.fault != Fault::GatherWithoutRotation);
        self.inner.gather(&Gather { rotation, ..op.clone() })
    }
    fn copy_blocks(&self, op: &CopyBlocks) -> Result<()> {
        op.check()?;
        if self.fault != Fault::CopyOneLayer {
            return self.inner.copy_blocks(op);
        }
        let rope = Arc::new(Rope::new(RopeConfig::new(2, 10.0), 1)?);
        let rotation = Rotation { rope, delta: 0 };
        let (src, pairs) = (op.arena.clone(), Arc::clone(&op.pairs));
        self.inner.rotate_keys(&RotateKeys { dst: src.clone(), src, layer: 0, pairs, rotation })
    }
    fn swap_blocks(&self, op: &SwapBlocks) -> Result<()> {
        self.inner.swap_blocks(op)
    }
    fn rope(&self, op: &ApplyRope) -> Result<()> {
        if self.fault != Fault::RopeOtherPairing {
            return self.inner.rope(op);
        }
        let pairing = match op.rope.pairing() {
            Pairing::HalfSplit => Pairing::Interleaved,
            Pairing::Interleaved => Pairing::HalfSplit,
        };
        let rope = Rope::new(RopeConfig { pairing, ..*op.rope.config() }, op.rope.max_positions())?;
        self.inner.rope(&ApplyRope { rope: Arc::new(rope), ..op.clone() })
    }
    fn rotate_keys(&self, op: &RotateKeys) -> Result<()> {
        let mut op = op.clone();
        if self.fault == Fault::RotateTooFar {
            op.rotation.delta += 1;
        }
        self.inner.rotate_keys(&op)
    }
    fn attend(&self, op: &Attend) -> Result<()> {
        op.check()?;
        let mut op = op.clone();
        let change = |segment: &Segment| match self.fault {
            Fault::AttendIgnoresOffsets => segment.clone().at_offset(0),
            Fault::AttendIgnoresCausality => Segment { logical_start: 0, ..segment.clone() },
            Fault::AttendIgnoresGroups => Segment { merge_group: 0, ..segment.clone() },
            _ => segment.clone(),
        };
        let entry = |e: &AttendRows| AttendRows {
            rows: e.rows.clone(),
            segments: e.segments.iter().map(change).collect(),
        };
        op.batch = op.batch.iter().map(entry).collect();
        if self.fault == Fault::AttendIgnoresWindow {
            op.window = None;
        }
        self.inner.attend(&op)
    }
}

fn failures(fault: Fault, dtype: DType) -> Vec<&'static str> {
    let inner: Arc<dyn Backend> = CpuBackend::with_execution(if fault == Fault::EventsDoNotOrder {
        kvbackend_cpu::Execution::Deferred
    } else {
        kvbackend_cpu::Execution::Immediate
    });
    let backend = Arc::new(Wrong { inner, fault });
    CASES
        .iter()
        .filter(|case| {
            let bench = Bench::new(backend.clone(), dtype).expect("a stream");
            (case.run)(&bench).is_err()
        })
        .map(|case| case.name)
        .collect()
}

#[rstest]
fn a_wrong_kernel_fails(
    #[values(
        Fault::ScatterNextSlot,
        Fault::ScatterWritesPadding,
        Fault::GatherWithoutRotation,
        Fault::CopyOneLayer,
        Fault::RopeOtherPairing,
        Fault::RotateTooFar,
        Fault::AttendIgnoresOffsets,
        Fault::AttendIgnoresCausality,
        Fault::AttendIgnoresWindow,
        Fault::AttendIgnoresGroups,
        Fault::EventsDoNotOrder
    )]
    fault: Fault,
) {
    for dtype in DType::ALL {
        let failed = failures(fault, dtype);
        println!("{fault:?} in {dtype} is caught by {failed:?}");
        assert!(!failed.is_empty(), "{fault:?} in {dtype} passes the whole suite");
    }
}

#[test]
fn the_wrapper_without_a_fault_passes() {
    assert_eq!(failures(Fault::None, DType::F32), [] as [&str; 0]);
}
