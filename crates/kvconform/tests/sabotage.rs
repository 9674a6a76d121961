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
    SwapNothing,
    ReadZeros,
    RopeOtherPairing,
    RotateTooFar,
    AttendIgnoresOffsets,
    AttendIgnoresCausality,
    AttendIgnoresWindow,
    AttendIgnoresGroups,
    AttendIgnoresSoftcap,
    AttendScalesTwice,
    AttendForgetsLse,
    AttendOtherKvHead,
    EventsDoNotOrder,
}

/// Each fault with the case that is there to catch it.
const FAULTS: [(Fault, &str); 17] = [
    (Fault::ScatterNextSlot, "rows::scatter_puts_rows_where_slots_say"),
    (Fault::ScatterWritesPadding, "rows::scatter_puts_rows_where_slots_say"),
    (Fault::GatherWithoutRotation, "rows::gather_rotates_keys_on_the_way"),
    (Fault::CopyOneLayer, "blocks::copy_moves_all_layers_and_nothing_else"),
    (Fault::SwapNothing, "blocks::swap_goes_between_layouts"),
    (Fault::ReadZeros, "memory::host_copies_round_trip"),
    (Fault::RopeOtherPairing, "rope::rows_are_rotated_in_both_pairings"),
    (Fault::RotateTooFar, "blocks::rotated_copies_equal_keys_rotated_there"),
    (Fault::AttendIgnoresOffsets, "attend::segments_at_offsets"),
    (Fault::AttendIgnoresCausality, "attend::causality_goes_by_logical_order"),
    (Fault::AttendIgnoresWindow, "attend::windows_go_by_position"),
    (Fault::AttendIgnoresGroups, "attend::softcap_temperature_and_groups"),
    (Fault::AttendIgnoresSoftcap, "attend::softcap_temperature_and_groups"),
    (Fault::AttendScalesTwice, "attend::prefill_and_decode_in_one_call"),
    (Fault::AttendForgetsLse, "attend::prefill_and_decode_in_one_call"),
    (Fault::AttendOtherKvHead, "attend::prefill_and_decode_in_one_call"),
    (Fault::EventsDoNotOrder, "order::events_order_streams"),
];

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
        true
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
        self.inner.read(src, dst)?;
        if self.fault == Fault::ReadZeros {
            dst.fill(0);
        }
        Ok(())
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
        op.check()?;
        if self.fault == Fault::SwapNothing { Ok(()) } else { self.inner.swap_blocks(op) }
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
        match self.fault {
            Fault::AttendIgnoresWindow => op.window = None,
            Fault::AttendIgnoresSoftcap => op.softcap = None,
            Fault::AttendScalesTwice => op.scale *= op.scale,
            Fault::AttendForgetsLse => op.lse = None,
            // Heads in groups of three share a KV head; from the second on, the wrong one.
            Fault::AttendOtherKvHead => {
                let heads = op.q.shape()[1];
                let part = |view: &TensorView| view.slice(1, heads / 2, heads);
                (op.q, op.out, op.lse) =
                    (part(&op.q)?, part(&op.out)?, op.lse.as_ref().map(part).transpose()?);
            }
            _ => {}
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
fn a_wrong_kernel_fails_the_case_that_is_there_for_it(
    #[values(DType::F32, DType::F16, DType::BF16)] dtype: DType,
) {
    for (fault, case) in FAULTS {
        let failed = failures(fault, dtype);
        println!("{fault:?} in {dtype} is caught by {failed:?}");
        assert!(failed.contains(&case), "{fault:?} in {dtype} passes {case}");
    }
}

#[test]
fn the_wrapper_without_a_fault_passes() {
    assert_eq!(failures(Fault::None, DType::F32), [] as [&str; 0]);
}
