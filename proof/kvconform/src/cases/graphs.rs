//! Captured graphs: a replay with new lists gives the same bits as the eager step.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::ScopedJoinHandle;

use kvcore::{
    Attend, AttendMla, AttendRows, AttendWork, BlockId, BlockOrder, BlockPool, BlockTable, CopyBlocks,
    CopyTensor, DType, Error, Graph, GraphCache, GraphKey, GraphRun, KeyForm, KvArena, KvFormat, KvShape,
    QueryRow, Rope, RopeConfig, RowRotation, Scatter, Segment, Selection, SelectionUnit, StepInputs,
    TensorView, WritePairs, WriteSlots,
};

use crate::bench::{Bench, Failure, Outcome, encode, ensure, numbers};

pub(crate) const LAYERS: usize = 2;
const ROWS: usize = 2;
const HEADS: usize = 4;
const BLOCK: usize = 16;
const BLOCKS: usize = 40;

/// A decode step of a two-layer model: stores new rows, then attends to chunks and to each sequence's own
/// tail.
pub(crate) struct DecodeStep<'a> {
    b: &'a Bench,
    arena: KvArena,
    rope: Arc<Rope>,
    rows: [TensorView; 3],
    /// Queries in the latent's space, if attention is latent.
    latent: Option<TensorView>,
    pub(crate) out: TensorView,
    lse: TensorView,
}

impl<'a> DecodeStep<'a> {
    pub(crate) fn new(b: &'a Bench, format: KvFormat, dims: (usize, usize)) -> Outcome<Self> {
        Self::of(b, format, dims, 2)
    }

    /// Creates a step of a model with latent attention, in which all heads read the same row of each plane.
    fn latent(b: &'a Bench, format: KvFormat, (k_dim, v_dim): (usize, usize)) -> Outcome<Self> {
        let queries = numbers(4, ROWS * HEADS * v_dim);
        let latent = b.upload(DType::F32, &[ROWS, HEADS, v_dim], &queries)?;
        Ok(Self { latent: Some(latent), ..Self::of(b, format, (k_dim, v_dim), 1)? })
    }

    fn of(b: &'a Bench, format: KvFormat, (k_dim, v_dim): (usize, usize), kv_heads: usize) -> Outcome<Self> {
        let shape = KvShape {
            num_layers: LAYERS,
            num_blocks: BLOCKS,
            block_size: BLOCK,
            k_heads: kv_heads,
            v_heads: kv_heads,
            k_dim,
            v_dim,
            format,
            order: BlockOrder::TokenMajor,
        };
        let arena = b.arena_of(shape)?;
        b.fill(&arena, 40)?;
        let rope = Rope::new(RopeConfig { rotary_dim: 8, ..RopeConfig::new(k_dim, 300.0) }, 4096)?;
        let rows = |seed, heads: usize, dim: usize| {
            b.upload(DType::F32, &[ROWS, heads, dim], &numbers(seed, ROWS * heads * dim))
        };
        Ok(Self {
            b,
            arena,
            rope: Arc::new(rope),
            rows: [rows(1, kv_heads, k_dim)?, rows(2, kv_heads, v_dim)?, rows(3, HEADS, k_dim)?],
            latent: None,
            out: b.tensor(DType::F32, &[ROWS, HEADS, v_dim])?,
            lse: b.tensor(DType::F32, &[ROWS, HEADS])?,
        })
    }

    fn scatter(&self, layer: usize, step: &StepInputs) -> Scatter {
        let [k, v, _] = self.rows.clone();
        let (rope, positions) = (Arc::clone(&self.rope), Arc::clone(&step.positions));
        let (arena, slots) = (self.arena.clone(), step.slots.clone());
        Scatter { arena, layer, k, v, slots, rotation: Some(RowRotation { rope, positions }) }
    }

    fn attend(&self, layer: usize, step: &StepInputs) -> Attend {
        Attend {
            arena: self.arena.clone(),
            layer,
            q: self.rows[2].clone(),
            rope: Some(Arc::clone(&self.rope)),
            keys: KeyForm::default(),
            work: Arc::clone(&step.work),
            scale: 0.3,
            window: (layer == 1).then_some(150),
            softcap: None,
            out: self.out.clone(),
            lse: Some(self.lse.clone()),
        }
    }

    pub(crate) fn enqueue(&self, step: &StepInputs) -> kvcore::Result<()> {
        for layer in 0..LAYERS {
            self.b.stream.scatter(&self.scatter(layer, step))?;
            let attend = self.attend(layer, step);
            match self.latent.clone() {
                None => self.b.stream.attend(&attend)?,
                Some(q_latent) => self.b.stream.attend_mla(&AttendMla { attend, q_latent })?,
            }
        }
        Ok(())
    }

    pub(crate) fn capture(&self, step: &StepInputs) -> Outcome<Arc<dyn Graph>> {
        Ok(self.b.stream.capture(step, &mut || self.enqueue(step))?)
    }

    /// Writes new rows, keys and values for step `number`.
    fn write(&self, number: usize) -> Outcome {
        for (view, seed) in self.rows.iter().zip(1..) {
            let values = numbers(seed + 10 * number as u32, view.len());
            self.b.stream.write(view, &encode(DType::F32, &values))?;
        }
        Ok(())
    }

    /// Returns the bits of all results so far, and of the pool.
    fn bits(&self) -> Outcome<Vec<u32>> {
        let (k, v) = self.b.contents(&self.arena)?;
        let (out, lse) = (self.b.download(&self.out)?, self.b.download(&self.lse)?);
        Ok([out, lse, k, v].iter().flatten().map(|x| x.to_bits()).collect())
    }
}

fn blocks(range: std::ops::Range<u32>) -> Arc<[BlockId]> {
    range.map(BlockId).collect()
}

/// Returns a step of two sequences, whose own tails have the given numbers of tokens. Both sequences see the
/// chunks, each given as `(blocks, length, offset)`.
fn step(chunks: &[(std::ops::Range<u32>, usize, i64)], tails: [usize; ROWS]) -> StepInputs {
    let (mut rows, mut batch, mut slots) = (Vec::new(), Vec::new(), Vec::new());
    for (row, (first, tail)) in [10u32, 26].into_iter().zip(tails).enumerate() {
        let (mut segments, mut logical) = (Vec::new(), 0);
        for (of, len, offset) in chunks {
            segments.push(Segment::new(blocks(of.clone()), *len, logical, 2).at_offset(*offset + row as i64));
            logical += len;
        }
        let own =
            Segment::new(blocks(first..first + tail.div_ceil(BLOCK) as u32), tail, logical, logical as i64);
        segments.push(own);
        let last = logical + tail - 1;
        rows.push(QueryRow { logical: last, position: last as i64 });
        slots.push(i64::from(first) * BLOCK as i64 + tail as i64 - 1);
        batch.push(AttendRows::new(row..row + 1, segments));
    }
    StepInputs {
        tokens: [3, 4].into(),
        positions: rows.iter().map(|row| row.position).collect(),
        slots: WriteSlots::unchecked(slots),
        work: Arc::new(AttendWork::new(rows, batch)),
    }
}

/// Returns a step of two sequences without chunks. The first sequence has `n` tokens.
pub(crate) fn own_tokens(n: usize) -> StepInputs {
    step(&[], [n, 3])
}

/// Returns steps that differ in everything that a replay may change: slots, positions, lengths, offsets,
/// blocks, a missing chunk, and enough tokens that attention is divided differently.
fn steps() -> Vec<StepInputs> {
    vec![
        step(&[(1..4, 40, 9), (4..6, 30, 5)], [20, 3]),
        step(&[(1..4, 40, 9), (4..6, 30, 5)], [21, 4]),
        step(&[(5..8, 48, 30), (0..1, 7, 0)], [16, 17]),
        step(&[(1..4, 40, 9), (4..6, 0, 5)], [33, 1]),
        step(&[(2..4, 32, 2), (4..6, 30, 77)], [250, 220]),
        step(&[(1..4, 40, 9), (4..6, 30, 5)], [22, 5]),
    ]
}

fn formats(b: &Bench) -> Vec<(KvFormat, (usize, usize))> {
    let capabilities = b.backend.capabilities();
    [(b.dtype.into(), (10, 6)), (b.dtype.into(), (32, 64)), (KvFormat::Int8 { group: 16 }, (32, 32))]
        .into_iter()
        .filter(|(format, _)| capabilities.accepts(*format))
        .collect()
}

fn same_bits(what: &str, actual: &[u32], expected: &[u32]) -> Outcome {
    match actual.iter().zip(expected).position(|(a, e)| a != e) {
        None => ensure(actual.len() == expected.len(), || format!("{what}: other numbers of values")),
        Some(at) => Err(Failure::new(format!(
            "{what}: value {at} is {}, expected {}",
            f32::from_bits(actual[at]),
            f32::from_bits(expected[at])
        ))),
    }
}

pub(super) fn a_replay_equals_the_eager_step(b: &Bench) -> Outcome {
    for (format, dims) in formats(b) {
        replays(&DecodeStep::new(b, format, dims)?, DecodeStep::new(b, format, dims)?)?;
    }
    Ok(())
}

pub(super) fn a_latent_replay_equals_the_eager_step(b: &Bench) -> Outcome {
    for dims in [(10, 6), (64, 512)] {
        replays(&DecodeStep::latent(b, b.dtype.into(), dims)?, DecodeStep::latent(b, b.dtype.into(), dims)?)?;
    }
    Ok(())
}

/// Runs all steps eagerly, then as replays of a graph captured from one of the steps, and compares the
/// results.
fn replays<'a>(eager: &DecodeStep<'a>, replayed: DecodeStep<'a>) -> Outcome {
    let mut expected = Vec::new();
    for (number, step) in steps().iter().enumerate() {
        eager.write(number)?;
        eager.enqueue(step)?;
        expected.push(eager.bits()?);
    }
    let replayed = DecodeStep { rope: Arc::clone(&eager.rope), ..replayed };
    let untouched = replayed.bits()?;
    let graph = replayed.capture(&steps()[1])?;
    same_bits("what a capture changes", &replayed.bits()?, &untouched)?;
    let format = replayed.arena.layout().shape().format;
    for (number, (step, expected)) in steps().iter().zip(&expected).enumerate() {
        replayed.write(number)?;
        graph.replay(step)?;
        same_bits(&format!("replay {number}, {format}"), &replayed.bits()?, expected)?;
    }
    Ok(())
}

pub(super) fn replays_follow_each_other_without_a_wait(b: &Bench) -> Outcome {
    let decode = DecodeStep::new(b, b.dtype.into(), (32, 64))?;
    let steps = steps();
    // Steps read data that other steps have written, so the results repeat only after the first round.
    let mut expected = Vec::new();
    for step in steps.iter().chain(&steps) {
        decode.enqueue(step)?;
        expected.push(b.download(&decode.out)?);
    }
    let expected = expected.split_off(steps.len());
    let graph = decode.capture(&steps[0])?;
    let times = 8;
    let n = decode.out.len();
    let results = b.tensor(DType::F32, &[times * steps.len(), n])?;
    for (number, step) in std::iter::repeat_n(&steps, times).flatten().enumerate() {
        graph.replay(step)?;
        let dst = results.slice(0, number, number + 1)?;
        let src = TensorView::new(Arc::clone(decode.out.storage()), DType::F32, &[1, n])?;
        b.stream.copy_tensor(&CopyTensor { src, dst })?;
    }
    drop(graph);
    let results = b.download(&results)?;
    let expected: Vec<f32> = std::iter::repeat_n(expected, times).flatten().flatten().collect();
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    same_bits("replays in a row", &bits(&results), &bits(&expected))
}

pub(super) fn a_cache_captures_what_comes_twice(b: &Bench) -> Outcome {
    let (eager, cached) =
        (DecodeStep::new(b, b.dtype.into(), (32, 64))?, DecodeStep::new(b, b.dtype.into(), (32, 64))?);
    // A backend that cannot capture returns its error here.
    cached.capture(&steps()[0])?;
    let (mut cache, mut runs) = (GraphCache::new(4), Vec::new());
    for (number, tail) in (20..32).enumerate() {
        let step = step(&[(1..4, 40, 9), (4..6, 30, 5)], [tail, 3]);
        eager.write(number)?;
        cached.write(number)?;
        eager.enqueue(&step)?;
        let key = GraphKey::of(&step, b.dtype);
        runs.push(cache.run(b.stream.as_ref(), key, &step, &mut || cached.enqueue(&step))?.0);
        same_bits(&format!("step {number}"), &cached.bits()?, &eager.bits()?)?;
    }
    let wanted = [GraphRun::Eager, GraphRun::Captured, GraphRun::Replayed, GraphRun::Replayed];
    ensure(runs[..4] == wanted && cache.counts().replayed >= 8, || format!("{runs:?}"))
}

/// Checks that a recorded function is refused with a message that contains `name`, and that the stream still
/// works.
fn refused(
    b: &Bench,
    decode: &DecodeStep<'_>,
    name: &str,
    record: &mut dyn FnMut() -> kvcore::Result<()>,
) -> Outcome {
    let step = &steps()[0];
    let outcome = b.stream.capture(step, record);
    match &outcome {
        Err(Error::Unsupported { backend, what }) if *backend == b.backend.name() && what.contains(name) => {}
        other => return Err(Failure::new(format!("{name} in a capture: {other:?}"))),
    }
    decode.enqueue(step)?;
    Ok(b.stream.synchronize()?)
}

pub(super) fn what_cannot_be_captured_is_refused_by_name(b: &Bench) -> Outcome {
    let decode = DecodeStep::new(b, b.dtype.into(), (10, 6))?;
    let captured = steps().swap_remove(0);
    decode.capture(&captured)?;
    let (stream, other) = (b.stream.as_ref(), &steps()[2]);
    let pairs = || WritePairs::unchecked(vec![(BlockId(1), BlockId(9))]);
    let copy = CopyBlocks { arena: decode.arena.clone(), pairs: pairs() };
    refused(b, &decode, "copy_blocks", &mut || stream.copy_blocks(&copy))?;
    refused(b, &decode, "scatter", &mut || stream.scatter(&decode.scatter(0, other)))?;
    refused(b, &decode, "attend", &mut || stream.attend(&decode.attend(0, other)))?;
    refused(b, &decode, "read", &mut || stream.read(&decode.lse, &mut [0; 4 * ROWS * HEADS]))?;
    refused(b, &decode, "write", &mut || stream.write(&decode.lse, &[0; 4 * ROWS * HEADS]))?;
    refused(b, &decode, "wait", &mut || stream.synchronize())?;
    refused(b, &decode, "wait", &mut || stream.record()?.wait())?;
    // A refusal counts even if the recording continues.
    refused(b, &decode, "copy_blocks", &mut || {
        let _ = stream.copy_blocks(&copy);
        decode.enqueue(&steps()[0]).or(Ok(()))
    })?;
    let step = steps().swap_remove(0);
    let unit = SelectionUnit::Tokens;
    let entry = step.work.batch()[0].clone();
    let selecting = entry.selecting(Selection { unit, offsets: [0, 1].into(), indices: [0].into() });
    let work = Arc::new(AttendWork::new(step.work.rows(), [selecting]));
    let step = StepInputs { work, ..step };
    match stream.capture(&step, &mut || stream.attend(&decode.attend(0, &step))) {
        Err(Error::Unsupported { what, .. }) if what.contains("selection") => {}
        other => return Err(Failure::new(format!("a selection in a capture: {other:?}"))),
    }
    // An error of the recorded function also ends the capture.
    let own = Error::Overflow { what: "this test" };
    let outcome = stream.capture(&captured, &mut || decode.enqueue(&captured).and(Err(own.clone())));
    ensure(outcome.as_ref().err() == Some(&own), || format!("an own error became {outcome:?}"))?;
    decode.capture(&captured)?.replay(&captured)?;
    Ok(stream.synchronize()?)
}

pub(super) fn wrong_inputs_are_refused_and_write_nothing(b: &Bench) -> Outcome {
    let decode = DecodeStep::new(b, b.dtype.into(), (10, 6))?;
    let right = steps().swap_remove(0);
    decode.enqueue(&right)?;
    let graph = decode.capture(&right)?;
    graph.replay(&right)?;
    let before = decode.bits()?;
    let slots = |slots: Vec<i64>| StepInputs { slots: WriteSlots::unchecked(slots), ..right.clone() };
    let far = step(&[(38..41, 40, 9), (4..6, 30, 5)], [20, 3]);
    let wrong = [
        ("a slot past the pool", slots(vec![0, (BLOCK * BLOCKS) as i64])),
        ("one slot for two rows", slots(vec![0])),
        ("a block past the pool", StepInputs { work: far.work, ..right.clone() }),
        ("a position past the limit", StepInputs { positions: [0, 5000].into(), ..right.clone() }),
    ];
    for (what, inputs) in &wrong {
        ensure(graph.replay(inputs).is_err(), || format!("{what} was replayed"))?;
    }
    same_bits("after refused replays", &decode.bits()?, &before)
}

pub(super) fn replays_count_as_the_operations_that_they_run(b: &Bench) -> Outcome {
    let decode = DecodeStep::new(b, b.dtype.into(), (10, 6))?;
    let counts = |run: &dyn Fn() -> Outcome| {
        let before = b.backend.counters();
        run()?;
        let since = b.backend.counters().since(&before);
        Ok::<_, Failure>((since.scatter_bytes, since.attend_calls))
    };
    let eager = counts(&|| Ok(decode.enqueue(&own_tokens(9))?))?;
    let graph = decode.capture(&own_tokens(9))?;
    let captured = counts(&|| decode.capture(&own_tokens(10)).map(drop))?;
    let replayed = counts(&|| Ok(graph.replay(&own_tokens(11))?))?;
    b.stream.synchronize()?;
    ensure(eager != (0, 0) && captured == (0, 0) && replayed == eager, || {
        format!("a step counts {eager:?}, its capture {captured:?}, its replay {replayed:?}")
    })
}

pub(super) fn a_cache_captures_again_what_has_outgrown_its_graph(b: &Bench) -> Outcome {
    let (eager, cached) =
        (DecodeStep::new(b, b.dtype.into(), (32, 64))?, DecodeStep::new(b, b.dtype.into(), (32, 64))?);
    // Chunks with different offsets.
    let chunks = |n: usize| {
        let chunks: Vec<_> = (0..n).map(|i| (1..2, 1, 3 * i as i64)).collect();
        step(&chunks, [20, 3])
    };
    let (small, large) = (chunks(8), chunks(60));
    let graph = cached.capture(&small)?;
    let outgrown = graph.replay(&large);
    ensure(matches!(outgrown, Ok(()) | Err(Error::GraphOutgrown { .. })), || format!("{outgrown:?}"))?;
    let again = if outgrown.is_ok() { GraphRun::Replayed } else { GraphRun::Captured };
    // The replay may have written to the pool, so both pools are set to the same state by the same step.
    eager.enqueue(&large)?;
    cached.enqueue(&large)?;
    let (mut cache, key) = (GraphCache::new(1), GraphKey::of(&small, b.dtype));
    let wanted = [GraphRun::Eager, GraphRun::Captured, GraphRun::Replayed, again, GraphRun::Replayed];
    for (number, (inputs, wanted)) in [&small, &small, &small, &large, &large].iter().zip(wanted).enumerate()
    {
        eager.write(number)?;
        cached.write(number)?;
        eager.enqueue(inputs)?;
        let run = cache.run(b.stream.as_ref(), key, inputs, &mut || cached.enqueue(inputs))?.0;
        ensure(run == wanted, || format!("step {number} was {run:?}, expected {wanted:?}"))?;
        same_bits(&format!("step {number}"), &cached.bits()?, &eager.bits()?)?;
    }
    Ok(())
}

pub(super) fn a_void_permit_is_refused_by_a_replay(b: &Bench) -> Outcome {
    let decode = DecodeStep::new(b, b.dtype.into(), (10, 6))?;
    let pool = BlockPool::new(0..BLOCKS as u32)?;
    let mut table = BlockTable::new(&pool, BLOCK)?;
    let inputs = StepInputs { slots: table.grow(ROWS)?, ..own_tokens(2) };
    decode.enqueue(&inputs)?;
    let graph = decode.capture(&inputs)?;
    graph.replay(&inputs)?;
    let _twin = table.fork()?;
    let void = graph.replay(&inputs);
    ensure(void == Err(Error::PermitVoid { what: "slots" }), || format!("{void:?}"))?;
    Ok(b.stream.synchronize()?)
}

pub(super) fn a_capture_belongs_to_its_thread_and_its_streams(b: &Bench) -> Outcome {
    let decode = DecodeStep::new(b, b.dtype.into(), (10, 6))?;
    let (inputs, other) = (own_tokens(6), b.backend.stream()?);
    decode.capture(&inputs)?;
    let attends = || b.backend.counters().attend_calls;
    // Another thread's work waits until the capture has ended, and is not part of it.
    let before = attends();
    let graph = std::thread::scope(|scope| {
        let ((begun, seen), mut waiting) = (channel(), None);
        let (decode, inputs) = (&decode, &inputs);
        let graph = b.stream.capture(inputs, &mut || {
            let begun = begun.clone();
            waiting = Some(scope.spawn(move || {
                let _ = begun.send(());
                decode.enqueue(inputs).and_then(|()| decode.b.stream.synchronize())
            }));
            let _ = seen.recv();
            decode.enqueue(inputs)
        });
        let waited = waiting.map(ScopedJoinHandle::join);
        ensure(matches!(waited, Some(Ok(Ok(())))), || format!("the other thread: {waited:?}"))?;
        Ok::<_, Failure>(graph?)
    })?;
    let outside = attends() - before;
    ensure(outside == LAYERS as u64, || format!("{outside} attends ran outside of the graph"))?;
    graph.replay(&inputs)?;
    let replayed = attends() - before - outside;
    ensure(replayed == LAYERS as u64, || format!("{replayed} attends ran in the graph"))?;
    // Another stream is not part of the capture until it has joined. A stream that has joined must be waited
    // for again.
    let copied = b.tensor(DType::F32, decode.out.shape())?;
    let copy = CopyTensor { src: decode.out.clone(), dst: copied.clone() };
    match b.stream.capture(&inputs, &mut || other.copy_tensor(&copy)) {
        Err(Error::Unsupported { what, .. }) if what.contains("has not joined") => {}
        outcome => return Err(Failure::new(format!("a stream that has not joined: {outcome:?}"))),
    }
    let join = |back: bool| {
        b.stream.capture(&inputs, &mut || {
            other.wait_for(&b.stream.record()?)?;
            other.copy_tensor(&copy)?;
            if back { b.stream.wait_for(&other.record()?) } else { Ok(()) }
        })
    };
    let joined = join(true)?;
    ensure(join(false).is_err(), || "a stream that joined was not waited for again".to_owned())?;
    joined.replay(&inputs)?;
    let bits = |view| Ok::<_, Failure>(b.download(view)?.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
    same_bits("a copy of a stream that joined", &bits(&copied)?, &bits(&decode.out)?)?;
    decode.enqueue(&inputs)?;
    b.stream.synchronize()?;
    Ok(other.synchronize()?)
}
