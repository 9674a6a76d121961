//! A suite that cannot fail proves nothing: each deliberately wrong backend must be caught by a case.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::any::Any;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::{Arc, Mutex};

use kvbackend_cpu::{CpuBackend, Execution};
use kvconform::{Bench, CASES};
use kvcore::{
    ApplyRope, Attend, AttendMass, AttendMla, AttendRows, AttendWork, Backend, BlockId, Capabilities,
    Checked, CopyBlocks, CopyTensor, CounterSnapshot, Counters, DType, Dequantize, Dims, DoneCall, Error,
    Event, Gather, Graph, KeyForm, KvArena, MemoryKind, Operation, Pairing, Quantize, ReservedStorage,
    Result, Rope, RopeConfig, RotateKeys, Rotation, Scatter, Segment, Selection, SelectionUnit, StepInputs,
    Storage, Stream, SwapBlocks, TensorView, WritePairs, WriteSlots, check_granules,
};
use rstest::rstest;

#[path = "sabotage/faults.rs"]
mod faults;

use faults::{BackendFault, FAULTS};

#[derive(Debug)]
struct Wrong {
    inner: Arc<dyn Backend>,
    fault: BackendFault,
    /// Freed memory, to allocate again without clearing it.
    kept: Mutex<Vec<Arc<dyn Storage>>>,
}

#[derive(Debug)]
struct WrongStream {
    inner: Arc<dyn Stream>,
    fault: BackendFault,
    /// A second stream of the backend, for work that overtakes the first.
    ahead: Arc<dyn Stream>,
    /// The window of the first call with each work, by the work's ID.
    windows: Mutex<HashMap<u64, Option<usize>>>,
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
    fn on_done(self: Arc<Self>, _: DoneCall) {}
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Backend for Wrong {
    fn name(&self) -> &'static str {
        "wrong"
    }
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.inner.capabilities();
        match self.fault {
            BackendFault::ListsARequiredKernelAsMissing => capabilities.missing.push("gather"),
            BackendFault::ListsWhatItHasAsMissing
            | BackendFault::RefusesWithAnotherError
            | BackendFault::LacksQuantize => {
                capabilities.missing.push("quantize");
            }
            BackendFault::LacksReserve => capabilities.missing.push("reserve"),
            BackendFault::HidesAFormat => capabilities.formats.retain(|&f| f != "int4"),
            _ => {}
        }
        capabilities
    }
    fn allocate(&self, kind: MemoryKind, bytes: usize) -> Result<Arc<dyn Storage>> {
        if self.fault != BackendFault::ReusedMemoryIsDirty {
            return self.inner.allocate(kind, bytes);
        }
        let mut kept = self.kept.lock().unwrap();
        let fits = |s: &&Arc<dyn Storage>| s.kind() == kind && s.len() == bytes && Arc::strong_count(s) == 1;
        if let Some(used) = kept.iter().find(fits) {
            return Ok(Arc::clone(used));
        }
        kept.push(self.inner.allocate(kind, bytes)?);
        Ok(Arc::clone(&kept[kept.len() - 1]))
    }
    fn reserve(&self, kind: MemoryKind, bytes: usize) -> Result<Arc<dyn ReservedStorage>> {
        if self.fault == BackendFault::LacksReserve {
            return Err(Error::Unsupported { backend: "wrong", what: "reserve".to_owned() });
        }
        let inner = self.inner.reserve(kind, bytes)?;
        Ok(Arc::new(WrongReserved { inner, fault: self.fault, hidden: Mutex::default() }))
    }
    fn stream(&self) -> Result<Arc<dyn Stream>> {
        let (inner, ahead) = (self.inner.stream()?, self.inner.stream()?);
        Ok(Arc::new(WrongStream { inner, fault: self.fault, ahead, windows: Mutex::default() }))
    }
    fn counters(&self) -> CounterSnapshot {
        self.inner.counters()
    }
}

/// Reserved memory that violates its contract.
#[derive(Debug)]
struct WrongReserved {
    inner: Arc<dyn ReservedStorage>,
    fault: BackendFault,
    /// Granules that are marked as unmapped, but are still mapped.
    hidden: Mutex<BTreeSet<usize>>,
}

impl Storage for WrongReserved {
    fn len(&self) -> usize {
        self.inner.len()
    }
    fn address(&self) -> u64 {
        self.inner.address()
    }
    fn kind(&self) -> MemoryKind {
        self.inner.kind()
    }
    fn as_any(&self) -> &dyn Any {
        self.inner.as_any()
    }
}

impl ReservedStorage for WrongReserved {
    fn granularity(&self) -> usize {
        self.inner.granularity()
    }
    fn map(&self, range: Range<usize>) -> Result<()> {
        let checked = check_granules(&range, self.granularity(), self.len());
        match self.fault {
            BackendFault::RangesAreNotChecked if checked.is_err() => return Ok(()),
            BackendFault::MapClearsWhatIsMapped => self.inner.unmap(range.clone())?,
            BackendFault::UnmapKeepsContents => {
                self.hidden.lock().unwrap().retain(|granule| !range.contains(granule));
            }
            _ => {}
        }
        self.inner.map(range)
    }
    fn unmap(&self, range: Range<usize>) -> Result<()> {
        let granule = self.granularity();
        let checked = check_granules(&range, granule, self.len());
        match self.fault {
            BackendFault::RangesAreNotChecked if checked.is_err() => return Ok(()),
            BackendFault::UnmapKeepsContents => {
                checked?;
                self.hidden.lock().unwrap().extend(range.step_by(granule));
                return Ok(());
            }
            BackendFault::UnmapTakesNeighbours if checked.is_ok() && range.end < self.len() => {
                self.inner.unmap(range.end..range.end + granule)?;
                self.inner.map(range.end..range.end + granule)?;
            }
            _ => {}
        }
        self.inner.unmap(range)
    }
    fn mapped_bytes(&self) -> usize {
        self.inner.mapped_bytes() - self.hidden.lock().unwrap().len() * self.granularity()
    }
}

impl WrongStream {
    /// Changes the bytes of an arena's scales, if it has any.
    fn change_scales(&self, arena: &KvArena, change: impl Fn(&mut [u8], DType)) -> Result<()> {
        for (storage, scales) in [arena.k_plane(), arena.v_plane()].into_iter().filter_map(|p| p.scales) {
            let view = TensorView::new(Arc::clone(storage), DType::U8, &[scales.bytes])?;
            let mut bytes = vec![0; scales.bytes];
            self.inner.read(&view, &mut bytes)?;
            change(&mut bytes, scales.dtype);
            self.inner.write(&view, &bytes)?;
        }
        Ok(())
    }

    /// Returns an attend with the fault's changes.
    fn spoilt(&self, op: &Attend) -> Result<Attend> {
        let (mut op, id) = (op.clone(), op.work.id());
        let change = |segment: &Segment| match self.fault {
            BackendFault::AttendIgnoresOffsets | BackendFault::MlaIgnoresRope => segment.clone().at_offset(0),
            BackendFault::AttendIgnoresCausality => Segment { logical_start: 0, ..segment.clone() },
            BackendFault::AttendIgnoresGroups => Segment { merge_group: 0, ..segment.clone() },
            _ => segment.clone(),
        };
        let reselect = |selection: &Selection| match self.fault {
            BackendFault::SelectionIgnored => None,
            BackendFault::SelectionOfOtherUnits => {
                Some(Selection { unit: SelectionUnit::Tokens, ..selection.clone() })
            }
            _ => Some(selection.clone()),
        };
        let entry = |e: &AttendRows| AttendRows {
            rows: e.rows.clone(),
            segments: e.segments.iter().map(change).collect(),
            selection: e.selection.as_ref().and_then(reselect),
        };
        let batch: Vec<_> = op.work.batch().iter().map(entry).collect();
        op.work = Arc::new(AttendWork::with_groups(op.work.rows(), batch, Arc::clone(op.work.groups())));
        match self.fault {
            BackendFault::AttendIgnoresWindow => op.window = None,
            BackendFault::AttendKeepsTheWindowOfItsWork => {
                op.window = *self.windows.lock().unwrap().entry(id).or_insert(op.window);
            }
            BackendFault::AttendIgnoresSoftcap => op.softcap = None,
            BackendFault::AttendScalesTwice => op.scale *= op.scale,
            BackendFault::AttendForgetsLse => op.lse = None,
            BackendFault::AttendTakesKeysAsRotated => op.keys = KeyForm::Rotated,
            // Three query heads share a KV head. Starting at the second half, they get the wrong one.
            BackendFault::AttendOtherKvHead => {
                let heads = op.q.shape()[1];
                let part = |view: &TensorView| view.slice(1, heads / 2, heads);
                (op.q, op.out, op.lse) =
                    (part(&op.q)?, part(&op.out)?, op.lse.as_ref().map(part).transpose()?);
            }
            _ => {}
        }
        Ok(op)
    }

    /// Applies the fault's changes to scales after rows or blocks have been stored.
    fn spoil_scales(&self, arena: &KvArena) -> Result<()> {
        match self.fault {
            // A sixteenth larger: the mantissa's fourth bit is incremented.
            BackendFault::ScalesTooLarge => self.change_scales(arena, |bytes, dtype| {
                let (at, step) = if dtype == DType::F16 { (0, 0x40) } else { (2, 0x08) };
                for scale in bytes.chunks_exact_mut(dtype.bits() / 8) {
                    scale[at] = scale[at].wrapping_add(step);
                }
            }),
            BackendFault::HidesNan => self.change_scales(arena, |bytes, dtype| {
                if dtype == DType::F16 {
                    bytes.chunks_exact_mut(2).filter(|s| s[1] & 0x7f > 0x7b).for_each(|s| s[1] = 0x3c);
                }
            }),
            _ => Ok(()),
        }
    }
}

impl Stream for WrongStream {
    /// Replaces the only entry point, because some faults skip checks.
    fn run(&self, operation: Operation<'_>) -> Result<()> {
        match operation {
            Operation::Scatter(op) => self.scatter(op),
            Operation::Gather(op) => self.gather(op),
            Operation::CopyBlocks(op) => self.copy_blocks(op),
            Operation::SwapBlocks(op) => self.swap_blocks(op),
            Operation::CopyTensor(op) => self.copy_tensor(op),
            Operation::ApplyRope(op) => self.rope(op),
            Operation::RotateKeys(op) => self.rotate_keys(op),
            Operation::Attend(op) => self.attend(op),
            Operation::AttendMla(op) => self.attend_mla(op),
            Operation::AttendMass(op) => self.attend_mass(op),
            Operation::Quantize(op) => self.quantize(op),
            Operation::Dequantize(op) => self.dequantize(op),
        }
    }
    fn launch(&self, operation: Checked<'_>) -> Result<()> {
        self.inner.launch(operation)
    }
    fn owns(&self, storage: &Arc<dyn Storage>) -> Result<()> {
        self.inner.owns(storage)
    }
    fn counters(&self) -> &Counters {
        self.inner.counters()
    }
    fn record(&self) -> Result<Arc<dyn Event>> {
        if self.fault == BackendFault::EventsDoNotOrder { Ok(Arc::new(Never)) } else { self.inner.record() }
    }
    fn wait_for(&self, event: &Arc<dyn Event>) -> Result<()> {
        if self.fault == BackendFault::EventsDoNotOrder { Ok(()) } else { self.inner.wait_for(event) }
    }
    fn synchronize(&self) -> Result<()> {
        self.inner.synchronize()
    }
    fn write(&self, dst: &TensorView, src: &[u8]) -> Result<()> {
        match self.fault {
            BackendFault::WritesOvertake => {
                self.ahead.write(dst, src).and_then(|()| self.ahead.synchronize())
            }
            BackendFault::LargeWritesAreCut if src.len() > 1 << 20 => {
                self.inner.write(&dst.slice(0, 0, 1 << 20)?, &src[..1 << 20])
            }
            _ => self.inner.write(dst, src),
        }
    }
    fn read(&self, src: &TensorView, dst: &mut [u8]) -> Result<()> {
        self.inner.read(src, dst)?;
        if self.fault == BackendFault::ReadZeros {
            dst.fill(0);
        }
        Ok(())
    }
    fn capture(&self, _: &StepInputs, _: &mut dyn FnMut() -> Result<()>) -> Result<Arc<dyn Graph>> {
        Err(Error::Unsupported { backend: "wrong", what: "captures of graphs".to_owned() })
    }
}

/// Operations with the fault's changes.
impl WrongStream {
    fn scatter(&self, op: &Scatter) -> Result<()> {
        op.check()?;
        if self.fault == BackendFault::RefusesNoWork && op.slots.is_empty() {
            return Err(Error::Zero { what: "rows" });
        }
        let limit = op.arena.layout().num_slots() as i64;
        let slots = op.slots.iter().map(|&slot| match self.fault {
            BackendFault::ScatterNextSlot if slot >= 0 => (slot + 1) % limit,
            BackendFault::ScatterWritesPadding => slot.max(0),
            _ => slot,
        });
        let slots = WriteSlots::unchecked(slots.collect::<Arc<[_]>>());
        let rotation = op.rotation.clone().filter(|_| self.fault != BackendFault::ScatterWithoutRotation);
        self.inner.scatter(&Scatter { slots, rotation, ..op.clone() })?;
        self.spoil_scales(&op.arena)
    }
    fn gather(&self, op: &Gather) -> Result<()> {
        op.check()?;
        let rotation = op.rotation.clone().filter(|_| self.fault != BackendFault::GatherWithoutRotation);
        self.inner.gather(&Gather { rotation, ..op.clone() })
    }
    fn copy_blocks(&self, op: &CopyBlocks) -> Result<()> {
        op.check()?;
        if self.fault == BackendFault::CopyWithoutScales {
            let kept = std::cell::RefCell::new(std::collections::VecDeque::new());
            self.change_scales(&op.arena, |bytes, _| kept.borrow_mut().push_back(bytes.to_vec()))?;
            self.inner.copy_blocks(op)?;
            return self.change_scales(&op.arena, |bytes, _| {
                bytes.copy_from_slice(&kept.borrow_mut().pop_front().expect("one for each plane"));
            });
        }
        if self.fault != BackendFault::CopyOneLayer {
            return self.inner.copy_blocks(op);
        }
        let rope = Arc::new(Rope::new(RopeConfig::new(2, 10.0), 1)?);
        let rotation = Rotation { rope, delta: 0 };
        let (src, pairs) = (op.arena.clone(), op.pairs.clone());
        self.inner.rotate_keys(&RotateKeys { dst: src.clone(), src, layer: 0, pairs, rotation })
    }
    fn swap_blocks(&self, op: &SwapBlocks) -> Result<()> {
        op.check()?;
        if self.fault == BackendFault::SwapNothing { Ok(()) } else { self.inner.swap_blocks(op) }
    }
    fn copy_tensor(&self, op: &CopyTensor) -> Result<()> {
        let dense = |view: &TensorView| {
            let shape = Dims::new(view.shape())?;
            TensorView::with_strides(
                Arc::clone(view.storage()),
                view.dtype(),
                shape,
                shape.dense_strides()?,
                view.offset(),
            )
        };
        match self.fault {
            BackendFault::CopyTensorNothing => op.check(),
            BackendFault::CopyTensorChecksNothing if op.check().is_err() => Ok(()),
            BackendFault::CopyTensorForgetsStrides => {
                op.check()?;
                self.inner.copy_tensor(&CopyTensor { src: dense(&op.src)?, ..op.clone() })
            }
            _ => self.inner.copy_tensor(op),
        }
    }
    fn rope(&self, op: &ApplyRope) -> Result<()> {
        if self.fault != BackendFault::RopeOtherPairing {
            return self.inner.rope(op);
        }
        let pairing = match op.rope.pairing() {
            Pairing::HalfSplit => Pairing::Interleaved,
            Pairing::Interleaved => Pairing::HalfSplit,
        };
        let rope = Rope::new(RopeConfig { pairing, ..op.rope.config().clone() }, op.rope.max_positions())?;
        self.inner.rope(&ApplyRope { rope: Arc::new(rope), ..op.clone() })
    }
    fn rotate_keys(&self, op: &RotateKeys) -> Result<()> {
        let mut op = op.clone();
        if self.fault == BackendFault::RotateTooFar {
            op.rotation.delta += 1;
        }
        self.inner.rotate_keys(&op)
    }
    fn attend(&self, op: &Attend) -> Result<()> {
        match op.check() {
            Err(_) if self.fault == BackendFault::AcceptsAnyAttend => Ok(()),
            checked => checked.and_then(|()| self.inner.attend(&self.spoilt(op)?)),
        }
    }
    fn attend_mla(&self, op: &AttendMla) -> Result<()> {
        if self.fault == BackendFault::AcceptsAnyAttend && op.check().is_err() {
            return Ok(());
        }
        op.check()?;
        let mut op = AttendMla { attend: self.spoilt(&op.attend)?, ..op.clone() };
        match self.fault {
            BackendFault::MlaIgnoresLatents => return self.inner.attend(&op.attend),
            BackendFault::MlaIgnoresRope => op.attend.rope = None,
            _ => {}
        }
        self.inner.attend_mla(&op)
    }
    fn attend_mass(&self, op: &AttendMass) -> Result<()> {
        if self.fault == BackendFault::AcceptsAnyAttend && op.check().is_err() {
            return Ok(());
        }
        op.check()?;
        let mut op = AttendMass { attend: self.spoilt(&op.attend)?, ..op.clone() };
        let attend = &mut op.attend;
        match self.fault {
            BackendFault::MassReplacesSums => self.inner.write(&op.sums, &vec![0; op.bytes()])?,
            BackendFault::MassIgnoresWindow => attend.window = None,
            BackendFault::MassForgetsHeads => {
                let some = |view: &TensorView| view.slice(1, 0, 1);
                (attend.q, attend.out) = (some(&attend.q)?, some(&attend.out)?);
                attend.lse = attend.lse.as_ref().map(some).transpose()?;
            }
            BackendFault::MassIgnoresLatents => op.q_latent = None,
            _ => {}
        }
        self.inner.attend_mass(&op)
    }
    fn quantize(&self, op: &Quantize) -> Result<()> {
        let next = |&(from, to): &(BlockId, BlockId)| {
            (from, BlockId((to.0 + 1) % op.dst.layout().shape().num_blocks as u32))
        };
        match self.fault {
            BackendFault::QuantizeChecksNothing if op.check().is_err() => Ok(()),
            BackendFault::RefusesWithAnotherError => Err(Error::Zero { what: "quantize" }),
            BackendFault::LacksQuantize => {
                Err(Error::Unsupported { backend: "wrong", what: "quantize".to_owned() })
            }
            BackendFault::QuantizeNextBlock => self.inner.quantize(&Quantize {
                pairs: WritePairs::unchecked(op.pairs.iter().map(next).collect::<Arc<[_]>>()),
                ..op.clone()
            }),
            _ => {
                self.inner.quantize(op)?;
                self.spoil_scales(&op.dst)
            }
        }
    }
    fn dequantize(&self, op: &Dequantize) -> Result<()> {
        op.check()?;
        if self.fault == BackendFault::DequantizeNothing { Ok(()) } else { self.inner.dequantize(op) }
    }
}

/// Returns the chosen cases that fail on a backend with a fault.
fn failures(fault: BackendFault, dtype: DType, chosen: impl Fn(&str) -> bool) -> Vec<&'static str> {
    let inner: Arc<dyn Backend> = CpuBackend::with_execution(match fault {
        BackendFault::EventsDoNotOrder | BackendFault::WritesOvertake => Execution::Deferred,
        _ => Execution::Immediate,
    });
    let backend = Arc::new(Wrong { inner, fault, kept: Mutex::default() });
    let chosen = CASES.iter().filter(|case| chosen(case.name));
    let failing = chosen.filter(|case| {
        let bench = Bench::new(backend.clone(), dtype).expect("a stream");
        case.run(&bench).is_err()
    });
    failing.map(|case| case.name).collect()
}

#[rstest]
fn a_wrong_kernel_fails_the_case_that_is_there_for_it(
    #[values(DType::F32, DType::F16, DType::BF16)] dtype: DType,
) {
    for &(fault, case) in FAULTS {
        assert_eq!(failures(fault, dtype, |name| name == case), [case], "{fault:?} in {dtype} passes");
    }
}

#[test]
fn the_wrapper_without_a_fault_passes() {
    for fault in [BackendFault::None, BackendFault::LacksQuantize, BackendFault::LacksReserve] {
        assert_eq!(failures(fault, DType::F32, |_| true), [] as [&str; 0], "{fault:?}");
    }
}
