//! Captured graphs on the double: their launches, their memory, and who may take part.

use std::sync::Arc;

use kvbackend_cuda::CudaBackend;
use kvbackend_cuda::dense::{DenseSteps, StoredKind};
use kvcore::{
    Attend, AttendRows, AttendWork, Backend, BlockId, BlockOrder, DType, Error, Graph, GraphCache, GraphKey,
    GraphRun, KeyForm, KvArena, KvShape, MemoryKind, QueryRow, Rope, RopeConfig, RowRotation, Scatter,
    Segment, StepInputs, Stream, TensorView, WriteSlots, allocate_tensor,
};

use crate::common::{arena, download, noise, opened, upload};
use crate::double::{EAGER, LAZY, alone};

const DIM: usize = 64;
const LAYERS: usize = 3;

struct Bench {
    backend: Arc<CudaBackend>,
    stream: Arc<dyn Stream>,
    arena: KvArena,
    rope: Arc<Rope>,
    rows: TensorView,
    out: TensorView,
}

impl Bench {
    fn new(device: usize) -> Self {
        let backend = opened(device).unwrap();
        let shape = KvShape {
            num_layers: LAYERS,
            num_blocks: 32,
            block_size: 16,
            k_heads: 2,
            v_heads: 2,
            k_dim: DIM,
            v_dim: DIM,
            format: DType::BF16.into(),
            order: BlockOrder::TokenMajor,
        };
        let bytes: Vec<u8> = noise(3, 2 * DIM)
            .iter()
            .flat_map(|&byte| (f32::from(byte) / 128.0 - 1.0).to_ne_bytes())
            .collect();
        Self {
            arena: arena(backend.as_ref(), shape),
            stream: backend.stream().unwrap(),
            rope: Arc::new(Rope::new(RopeConfig::new(DIM, 10_000.0), 4096).unwrap()),
            rows: upload(backend.as_ref(), DType::F32, &[1, 2, DIM], &bytes),
            out: allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[1, 2, DIM]).unwrap(),
            backend,
        }
    }

    fn enqueue(&self, step: &StepInputs) -> kvcore::Result<()> {
        for layer in 0..LAYERS {
            let (rope, positions) = (Arc::clone(&self.rope), Arc::clone(&step.positions));
            self.stream.scatter(&Scatter {
                arena: self.arena.clone(),
                layer,
                k: self.rows.clone(),
                v: self.rows.clone(),
                slots: step.slots.clone(),
                rotation: Some(RowRotation { rope, positions }),
            })?;
            self.stream.attend(&Attend {
                arena: self.arena.clone(),
                layer,
                q: self.rows.clone(),
                rope: Some(Arc::clone(&self.rope)),
                keys: KeyForm::Rotated,
                work: Arc::clone(&step.work),
                scale: 0.125,
                window: None,
                softcap: None,
                out: self.out.clone(),
                lse: None,
            })?;
        }
        Ok(())
    }

    fn capture(&self, step: &StepInputs) -> Arc<dyn Graph> {
        self.stream.capture(step, &mut || self.enqueue(step)).unwrap()
    }
}

/// Returns the step of a sequence at position `at`, over `at + 1` tokens of its own.
fn step(at: usize) -> StepInputs {
    let blocks: Arc<[BlockId]> = (0..=at / 16).map(|block| BlockId(block as u32)).collect();
    let row = QueryRow { logical: at, position: at as i64 };
    let entry = AttendRows::new(0..1, [Segment::new(blocks, at + 1, 0, 0)]);
    StepInputs {
        tokens: [(at % 7) as u32].into(),
        positions: [row.position].into(),
        slots: WriteSlots::unchecked(vec![at as i64]),
        work: Arc::new(AttendWork::new([row], [entry])),
    }
}

fn queued<'a>(trace: &'a [Vec<String>], kind: &str) -> Vec<&'a [String]> {
    trace.iter().filter(|line| line[0] == kind).map(|line| &line[1..]).collect()
}

#[test]
fn a_replay_is_one_copy_and_one_launch() {
    let Some((double, _alone)) = alone() else { return };
    let bench = Bench::new(LAZY);
    bench.enqueue(&step(99)).unwrap();
    let mut cache = GraphCache::new(2);
    let mut runs = Vec::new();
    double.trace(LAZY);
    for at in 20..26 {
        let (step, stream) = (step(at), bench.stream.as_ref());
        let key = GraphKey::of(&step, DType::BF16);
        runs.push(cache.run(stream, key, &step, &mut || bench.enqueue(&step)).unwrap().0);
        let trace = double.trace(LAZY);
        match runs.last().unwrap() {
            GraphRun::Eager => assert!(queued(&trace, "kernel").len() >= 2 * LAYERS),
            GraphRun::Captured => assert_eq!(queued(&trace, "graph").len(), 1, "{trace:?}"),
            GraphRun::Replayed => {
                assert_eq!(queued(&trace, "graph").len(), 1, "{trace:?}");
                assert_eq!(queued(&trace, "memcpy_htod").len(), 1, "{trace:?}");
                assert_eq!(queued(&trace, "kernel").len(), 0, "{trace:?}");
            }
        }
    }
    assert_eq!(runs[..3], [GraphRun::Eager, GraphRun::Captured, GraphRun::Replayed]);
    bench.stream.synchronize().unwrap();
}

#[test]
fn a_graph_keeps_its_memory_and_gives_it_back() {
    let Some((double, _alone)) = alone() else { return };
    for device in [EAGER, LAZY] {
        let before = (double.live_bytes(device), double.live_objects(device));
        let bench = Bench::new(device);
        bench.enqueue(&step(40)).unwrap();
        let expected = download(bench.stream.as_ref(), &bench.out);
        let graph = bench.capture(&step(20));
        let Bench { backend, stream, arena, rope, rows, out } = bench;
        drop((arena, rope, rows));
        // Other work takes memory and replaces the lists that the stream keeps.
        let taken: Vec<_> =
            (0..20).map(|i| upload(backend.as_ref(), DType::U8, &[4096], &noise(i, 4096))).collect();
        for _ in 0..40 {
            graph.replay(&step(40)).unwrap();
        }
        drop(taken);
        // A replay outlives its graph.
        drop(graph);
        assert_eq!(download(stream.as_ref(), &out), expected, "device {device}");
        drop((out, stream, backend));
        assert_eq!((double.live_bytes(device), double.live_objects(device)), before, "device {device}");
    }
}

#[test]
fn a_graph_that_is_gone_leaves_nothing_of_the_driver() {
    let Some((double, _alone)) = alone() else { return };
    let bench = Bench::new(EAGER);
    let use_one = || {
        let graph = bench.capture(&step(4));
        graph.replay(&step(4)).unwrap();
        drop(graph);
        bench.stream.synchronize().unwrap();
        // An allocation waits for the frees before it.
        drop(bench.backend.allocate(MemoryKind::Device, 64).unwrap());
        double.live_objects(EAGER)
    };
    bench.enqueue(&step(4)).unwrap();
    let counts = [(); 32].map(|()| use_one());
    // A stream keeps the events of its batches and makes one more whenever all are still in flight, so the count may rise by a few.
    // One object that stays would add one for each graph.
    let grown = counts[31].saturating_sub(counts[0]);
    assert!(grown < 8, "{grown} more after 31 graphs: {counts:?}");
}

#[test]
fn replays_count_as_the_operations_that_they_run() {
    let Some((_, _alone)) = alone() else { return };
    let bench = Bench::new(EAGER);
    let counts = |run: &dyn Fn()| {
        let before = bench.backend.counters();
        run();
        let since = bench.backend.counters().since(&before);
        (since.scatter_bytes, since.attend_calls)
    };
    let eager = counts(&|| bench.enqueue(&step(9)).unwrap());
    assert_ne!(eager, (0, 0));
    let graph = bench.capture(&step(9));
    assert_eq!(counts(&|| drop(bench.capture(&step(10)))), (0, 0));
    assert_eq!(counts(&|| graph.replay(&step(11)).unwrap()), eager);
    bench.stream.synchronize().unwrap();
}

#[test]
fn inputs_past_the_room_of_a_graph_ask_for_another_one() {
    let Some((_, _alone)) = alone() else { return };
    let bench = Bench::new(EAGER);
    bench.enqueue(&step(3)).unwrap();
    let graph = bench.capture(&step(3));
    let many = |n: usize| {
        let segments: Vec<_> = (0..n).map(|i| Segment::new([BlockId(1)].into(), 1, i, i as i64)).collect();
        let row = QueryRow { logical: n, position: 3 };
        let work = Arc::new(AttendWork::new([row], [AttendRows::new(0..1, segments)]));
        StepInputs { work, ..step(3) }
    };
    graph.replay(&many(8)).unwrap();
    assert_eq!(graph.replay(&many(60)), Err(Error::GraphOutgrown { what: "segments" }));
    // The table of angles has grown since: the graph reads the old one.
    bench.rope.table([2000]).unwrap();
    assert_eq!(graph.replay(&step(3)), Err(Error::GraphOutgrown { what: "positions" }));
    let (mut cache, key) = (GraphCache::new(1), GraphKey::of(&step(3), DType::BF16));
    let mut run = |inputs: &StepInputs| {
        cache.run(bench.stream.as_ref(), key, inputs, &mut || bench.enqueue(inputs)).unwrap().0
    };
    let runs = [step(3), step(4), step(5), many(60), many(61)].map(|inputs| run(&inputs));
    let names = runs.map(|run| format!("{run:?}"));
    assert_eq!(names, ["Eager", "Captured", "Replayed", "Captured", "Replayed"]);
    bench.stream.synchronize().unwrap();
}

#[test]
fn a_void_permit_is_refused_by_a_replay() {
    let Some((_, _alone)) = alone() else { return };
    let bench = Bench::new(EAGER);
    let pool = kvcore::BlockPool::new(0..32).unwrap();
    let mut table = kvcore::BlockTable::new(&pool, 16).unwrap();
    let slots = table.grow(1).unwrap();
    let inputs = StepInputs { slots, ..step(0) };
    bench.enqueue(&inputs).unwrap();
    let graph = bench.capture(&inputs);
    graph.replay(&inputs).unwrap();
    let _twin = table.fork().unwrap();
    assert_eq!(graph.replay(&inputs), Err(Error::PermitVoid { what: "slots" }));
    bench.stream.synchronize().unwrap();
}

#[test]
fn a_capture_belongs_to_its_thread_and_its_streams() {
    let Some((double, _alone)) = alone() else { return };
    let bench = Bench::new(LAZY);
    let inputs = step(5);
    bench.enqueue(&inputs).unwrap();
    let other = bench.backend.stream().unwrap();
    double.trace(LAZY);
    bench.enqueue(&inputs).unwrap();
    let kernels = || queued(&double.trace(LAZY), "kernel").len();
    let of_a_step = kernels();
    let unsupported = |result: kvcore::Result<()>, what: &str| match result {
        Err(Error::Unsupported { what: named, .. }) => assert!(named.contains(what), "{named}"),
        other => panic!("{other:?}"),
    };
    // Work of another thread waits until the capture has ended, and is no part of it.
    let graph = std::thread::scope(|scope| {
        let ((begun, seen), mut waiting) = (std::sync::mpsc::channel(), None);
        let (bench, inputs) = (&bench, &inputs);
        let graph = bench.stream.capture(inputs, &mut || {
            let begun = begun.clone();
            waiting = Some(scope.spawn(move || {
                begun.send(()).unwrap();
                (bench.enqueue(inputs), bench.stream.synchronize())
            }));
            seen.recv().unwrap();
            bench.enqueue(inputs)
        });
        assert_eq!(waiting.unwrap().join().unwrap(), (Ok(()), Ok(())));
        graph.unwrap()
    });
    assert_eq!(kernels(), of_a_step, "the other thread's step ran outside of the graph");
    graph.replay(&inputs).unwrap();
    let lost = bench.stream.capture(&inputs, &mut || {
        let copy = kvcore::CopyTensor { src: bench.rows.clone(), dst: bench.out.clone() };
        other.copy_tensor(&copy)
    });
    unsupported(lost.map(drop), "has not joined");
    // A stream that joins takes part; one that is not waited for again ends the capture.
    let join = |back: bool| {
        bench.stream.capture(&inputs, &mut || {
            other.wait_for(&bench.stream.record()?)?;
            other.copy_tensor(&kvcore::CopyTensor { src: bench.rows.clone(), dst: bench.out.clone() })?;
            if back { bench.stream.wait_for(&other.record()?) } else { Ok(()) }
        })
    };
    let copied = join(true).unwrap();
    assert!(join(false).is_err());
    copied.replay(&inputs).unwrap();
    let (out, rows) = (download(bench.stream.as_ref(), &bench.out), download(other.as_ref(), &bench.rows));
    assert_eq!(out, rows);
    bench.enqueue(&inputs).unwrap();
    bench.stream.synchronize().unwrap();
    other.synchronize().unwrap();
}

#[test]
fn dense_steps_join_a_capture() {
    let Some((double, _alone)) = alone() else { return };
    for device in [EAGER, LAZY] {
        let backend = opened(device).unwrap();
        let stream = backend.stream().unwrap();
        let steps = DenseSteps::new(&backend).unwrap();
        let floats = |seed, n| -> Vec<u8> {
            noise(seed, n).iter().flat_map(|&byte| (f32::from(byte) / 64.0 - 2.0).to_ne_bytes()).collect()
        };
        let table = steps.weight(StoredKind::F32, 9, DIM, &floats(1, 9 * DIM)).unwrap();
        let matrix = steps.weight(StoredKind::F32, 48, DIM, &floats(2, 48 * DIM)).unwrap();
        let norm = steps.weight(StoredKind::F32, 1, DIM, &floats(3, DIM)).unwrap();
        let pass = |tokens: &[u32]| -> kvcore::Result<TensorView> {
            let x = steps.embed(&table, tokens)?;
            let x = steps.add(&x, &steps.rms_norm(&x, &norm, 1e-5)?)?;
            steps.project(&x, &matrix, None)
        };
        let read = |x: &TensorView| {
            let mut values = Vec::new();
            DenseSteps::order(stream.as_ref(), steps.stream()).unwrap();
            steps.read(x, &mut values).unwrap();
            values.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        let inputs = step(3);
        let mut logits = None;
        let graph = stream
            .capture(&inputs, &mut || {
                DenseSteps::order(stream.as_ref(), steps.stream())?;
                logits = Some(pass(&inputs.tokens)?);
                DenseSteps::order(steps.stream(), stream.as_ref())
            })
            .unwrap();
        let logits = logits.unwrap();
        for at in 0..7 {
            let inputs = step(at);
            let expected = read(&pass(&inputs.tokens).unwrap());
            double.trace(device);
            graph.replay(&inputs).unwrap();
            // Work beside the replay takes none of the graph's memory.
            pass(&[8]).unwrap();
            assert_eq!(read(&logits), expected, "token {at}, device {device}");
            let trace = double.trace(device);
            assert_eq!(queued(&trace, "graph").len(), 1, "{trace:?}");
        }
        let wrong = StepInputs { tokens: [9].into(), ..step(0) };
        assert!(matches!(graph.replay(&wrong), Err(Error::OutOfRange { what: "token", .. })));
        stream.synchronize().unwrap();
    }
}

#[test]
fn graphs_of_a_stream_share_the_memory_between_their_kernels() {
    let Some((double, _alone)) = alone() else { return };
    let at_first = double.live_bytes(LAZY);
    let backend = opened(LAZY).unwrap();
    let stream = backend.stream().unwrap();
    let steps = DenseSteps::new(&backend).unwrap();
    let bytes = vec![0; 4 * 48 * DIM];
    let table = steps.weight(StoredKind::F32, 48, DIM, &bytes).unwrap();
    // Sixteen rows: a product of the library, which needs memory to work in.
    let inputs = |first: u32| StepInputs { tokens: (first..first + 16).collect(), ..step(3) };
    let capture = |inputs: &StepInputs| {
        let mut logits = None;
        let graph = stream.capture(inputs, &mut || {
            DenseSteps::order(stream.as_ref(), steps.stream())?;
            let x = steps.embed(&table, &inputs.tokens)?;
            let x = steps.add(&x, &x)?;
            logits = Some(steps.project(&x, &table, None)?);
            DenseSteps::order(steps.stream(), stream.as_ref())
        });
        (graph.unwrap(), logits.unwrap())
    };
    let before = double.live_bytes(LAZY);
    let first = capture(&inputs(0));
    let of_one = double.live_bytes(LAZY) - before;
    let second = capture(&inputs(16));
    let of_two = double.live_bytes(LAZY) - before;
    assert!(of_one > 32 << 20, "{of_one} bytes");
    assert!(of_two - of_one < 1 << 20, "the second has {} bytes of its own", of_two - of_one);
    let address = |(_, logits): &(Arc<dyn Graph>, TensorView)| logits.storage().address();
    assert_ne!(address(&first), address(&second), "results that somebody holds stay");
    for (graph, inputs) in [(&first.0, inputs(0)), (&second.0, inputs(16)), (&first.0, inputs(9))] {
        graph.replay(&inputs).unwrap();
    }
    drop((first, second, table, steps, stream, backend));
    assert_eq!(double.live_bytes(LAZY), at_first);
}

#[test]
fn a_step_whose_capture_finds_no_memory_runs_as_before() {
    const OUT_OF_MEMORY: i32 = 2;
    let Some((double, _alone)) = alone() else { return };
    let bench = Bench::new(EAGER);
    let (mut cache, key) = (GraphCache::new(2), GraphKey::of(&step(3), DType::BF16));
    let mut run = |at: usize| {
        let inputs = step(at);
        let run = cache.run(bench.stream.as_ref(), key, &inputs, &mut || bench.enqueue(&inputs)).unwrap().0;
        (run, cache.counts().refused)
    };
    assert_eq!(run(3), (GraphRun::Eager, 0));
    double.fail("cuMemAllocFromPoolAsync", 1, OUT_OF_MEMORY);
    assert_eq!(run(4), (GraphRun::Eager, 1));
    assert_eq!(run(5), (GraphRun::Eager, 1), "it is not tried again");
    let got = download(bench.stream.as_ref(), &bench.out);
    bench.enqueue(&step(5)).unwrap();
    assert_eq!(got, download(bench.stream.as_ref(), &bench.out));
}
