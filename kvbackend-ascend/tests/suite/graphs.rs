//! Captured graphs on the simulator: their capacity, their memory, and the dense steps that they contain.

use std::sync::Arc;

use kvbackend_ascend::dense::AscendDenseSteps;
use kvconform::devices::{DIM, OneRow, row_step as step};
use kvcore::{
    AttendRows, AttendWork, Backend, BlockId, DType, Error, Graph, GraphCache, GraphKey, QueryRow, Segment,
    StepInputs, TensorView, WriteSlots,
};

use crate::common::{download, noise, opened};
use crate::simulator::{EAGER, LAZY, alone};

/// ACL's code for an invalidated capture.
const CAPTURE_INVALIDATED: i32 = 507_903;

/// Returns the one-row fixture on a device.
fn row_on(device: usize) -> OneRow {
    OneRow::new(opened(device).unwrap().as_ref()).unwrap()
}

/// Returns the number of enqueued tasks of the given kind.
fn queued(trace: &[String], kind: &str) -> usize {
    trace.iter().filter(|line| line.split(' ').next() == Some(kind)).count()
}

#[test]
fn a_capture_that_is_broken_does_not_lose_the_device() {
    let Some((simulator, _alone)) = alone() else { return };
    let bench = row_on(EAGER);
    let step = step(20);
    simulator.fail("aclmdlRICaptureEnd", 1, CAPTURE_INVALIDATED);
    let broken = bench.capture(&step).map(drop);
    assert!(matches!(broken, Err(Error::Device { .. })), "{broken:?}");
    bench.enqueue(&step).unwrap();
    bench.stream.synchronize().unwrap();
}

#[test]
fn inputs_past_the_room_of_a_graph_ask_for_another_one() {
    let Some((_, _alone)) = alone() else { return };
    let bench = row_on(EAGER);
    bench.enqueue(&step(3)).unwrap();
    let graph = bench.capture(&step(3)).unwrap();
    // `n` chunks, each at a different offset.
    let many = |n: usize| {
        let chunk = |i: usize| Segment::new([BlockId(1)].into(), 1, i, i as i64).at_offset(3 * i as i64);
        let row = QueryRow { logical: n, position: 3 };
        let entry = AttendRows::new(0..1, (0..n).map(chunk).collect::<Vec<_>>());
        StepInputs { work: Arc::new(AttendWork::new([row], [entry])), ..step(3) }
    };
    graph.replay(&many(8)).unwrap();
    assert_eq!(graph.replay(&many(60)), Err(Error::GraphOutgrown { what: "offsets" }));
    let far = StepInputs { work: step(511).work, ..step(3) };
    graph.replay(&far).unwrap();
    let farther = StepInputs {
        work: {
            let row = QueryRow { logical: 520, position: 520 };
            let twice = |start| Segment::new((0..32).map(BlockId).collect(), 260, start, start as i64);
            Arc::new(AttendWork::new([row], [AttendRows::new(0..1, [twice(0), twice(260)])]))
        },
        ..step(3)
    };
    assert_eq!(graph.replay(&farther), Err(Error::GraphOutgrown { what: "tokens" }));
    let row = QueryRow { logical: 3, position: 3 };
    let of_groups = |scale: f32| {
        let group = kvcore::MergeGroup { lse_scale: scale };
        let segment = Segment::new([BlockId(0)].into(), 3, 0, 0);
        let work = AttendWork::with_groups([row], [AttendRows::new(0..1, [segment])], [group]);
        StepInputs { work: Arc::new(work), ..step(3) }
    };
    assert_eq!(graph.replay(&of_groups(0.5)), Err(Error::GraphOutgrown { what: "merge groups" }));
    let nowhere = StepInputs { slots: WriteSlots::unchecked(vec![-1]), ..step(3) };
    assert!(matches!(graph.replay(&nowhere), Err(Error::GraphOutgrown { .. })));
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
fn a_capture_takes_no_replay_and_keeps_the_lists_of_one_operation() {
    let Some((_, _alone)) = alone() else { return };
    for device in [EAGER, LAZY] {
        let bench = row_on(device);
        let inputs = step(40);
        bench.enqueue(&inputs).unwrap();
        let expected = download(bench.stream.as_ref(), &bench.out);
        let graph = bench.stream.capture(&inputs, &mut || bench.attend(2, &inputs)).unwrap();
        bench.stream.write(&bench.out, &[0; 4 * 2 * DIM]).unwrap();
        graph.replay(&inputs).unwrap();
        assert_eq!(download(bench.stream.as_ref(), &bench.out), expected);
        match bench.stream.capture(&inputs, &mut || graph.replay(&inputs)) {
            Err(Error::Unsupported { what, .. }) => assert!(what.contains("a replay"), "{what}"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn replays_that_are_ahead_take_a_bounded_amount_of_pinned_memory() {
    let Some((simulator, _alone)) = alone() else { return };
    let bench = row_on(LAZY);
    let inputs = step(3);
    bench.enqueue(&inputs).unwrap();
    let graph = bench.capture(&inputs).unwrap();
    let pinned = [40, 200].map(|times| {
        for _ in 0..times {
            graph.replay(&inputs).unwrap();
        }
        simulator.live(LAZY)[1]
    });
    assert_eq!(pinned[0], pinned[1]);
    bench.stream.synchronize().unwrap();
}

#[test]
fn dense_steps_join_a_capture() {
    let Some((simulator, _alone)) = alone() else { return };
    for device in [EAGER, LAZY] {
        let backend = opened(device).unwrap();
        let stream = backend.stream().unwrap();
        let steps = AscendDenseSteps::new(&backend).unwrap();
        let floats = |seed, n| -> Vec<f32> {
            noise(seed, n).iter().map(|&byte| f32::from(byte) / 64.0 - 2.0).collect()
        };
        let table = steps.weight(9, DIM, &floats(1, 9 * DIM)).unwrap();
        let matrix = steps.weight(48, DIM, &floats(2, 48 * DIM)).unwrap();
        let norm = steps.weight(1, DIM, &floats(3, DIM)).unwrap();
        let pass = |tokens: &[u32]| -> kvcore::Result<TensorView> {
            let x = steps.embed(&table, tokens, 2.0)?;
            let x = steps.add(&x, &steps.rms_norm(&x, &norm, 1e-5)?)?;
            steps.project(&x, &matrix, None)
        };
        let read = |x: &TensorView| {
            let mut values = Vec::new();
            AscendDenseSteps::order(stream.as_ref(), steps.stream()).unwrap();
            steps.read(x, &mut values).unwrap();
            values.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        let inputs = step(3);
        let mut logits = None;
        let graph = stream
            .capture(&inputs, &mut || {
                AscendDenseSteps::order(stream.as_ref(), steps.stream())?;
                logits = Some(pass(&inputs.tokens)?);
                AscendDenseSteps::order(steps.stream(), stream.as_ref())
            })
            .unwrap();
        let logits = logits.unwrap();
        for at in 0..7 {
            let inputs = step(at);
            let expected = read(&pass(&inputs.tokens).unwrap());
            simulator.trace(device);
            graph.replay(&inputs).unwrap();
            // Work that runs at the same time as the replay must not use the graph's memory.
            pass(&[8]).unwrap();
            assert_eq!(read(&logits), expected, "token {at}, device {device}");
            let trace = simulator.trace(device);
            assert_eq!(queued(&trace, "graph"), 1, "{trace:?}");
        }
        let wrong = StepInputs { tokens: [9].into(), ..step(0) };
        assert!(matches!(graph.replay(&wrong), Err(Error::OutOfRange { what: "token", .. })));
        stream.synchronize().unwrap();
    }
}

#[test]
fn graphs_of_a_stream_share_the_memory_between_their_operators() {
    let Some((simulator, _alone)) = alone() else { return };
    let at_first = simulator.live(LAZY);
    let bench = row_on(LAZY);
    let bytes = |run: &dyn Fn() -> Arc<dyn Graph>| {
        let before = simulator.live(LAZY)[0];
        let graph = run();
        (simulator.live(LAZY)[0] - before, graph)
    };
    bench.enqueue(&step(3)).unwrap();
    let (of_one, first) = bytes(&|| bench.capture(&step(3)).unwrap());
    let (of_two, second) = bytes(&|| bench.capture(&step(40)).unwrap());
    assert!(of_one > 1 << 20, "{of_one} bytes");
    assert!(of_two < 1 << 18, "the second has {of_two} bytes of its own");
    for (graph, at) in [(&first, 5), (&second, 40), (&first, 9)] {
        graph.replay(&step(at)).unwrap();
        let got = download(bench.stream.as_ref(), &bench.out);
        bench.enqueue(&step(at)).unwrap();
        assert_eq!(got, download(bench.stream.as_ref(), &bench.out), "token {at}");
    }
    drop((first, second, bench));
    assert_eq!(simulator.live(LAZY), at_first);
}

#[test]
fn every_call_that_a_capture_makes_may_be_refused_and_nothing_is_held() {
    let Some((simulator, _alone)) = alone() else { return };
    let everything = || -> kvcore::Result<()> {
        let bench = row_on(EAGER);
        let inputs = step(3);
        bench.enqueue(&inputs)?;
        let graph = bench.capture(&inputs)?;
        graph.replay(&step(4))?;
        graph.replay(&step(5))?;
        bench.stream.synchronize()
    };
    everything().unwrap();
    let (before, mut seen) = (simulator.live(EAGER), 0);
    let entries = [
        "aclmdlRICaptureBegin",
        "aclmdlRICaptureEnd",
        "aclmdlRIExecuteAsync",
        "aclrtMemcpy",
        "aclnnIndexSelect",
    ];
    for entry in entries {
        for after in [1, 2, 9] {
            simulator.fail(entry, after, 107_000);
            let result = everything();
            simulator.fail(entry, 0, 0);
            seen += usize::from(result.is_err());
            assert_eq!(simulator.live(EAGER), before, "call {after} of {entry} failed: {result:?}");
        }
        everything().unwrap_or_else(|error| panic!("after {entry} had failed: {error}"));
    }
    assert!(seen > 6, "only {seen} of the failures were seen");
}
