//! Captured graphs on a double: their launches and their memory.

use kvcore::{DType, GraphCache, GraphKey, GraphRun};

use super::{DeviceRig, DriverDouble, DriverFault, EAGER, LAZY, same, same_bytes};
use crate::bench::{Bench, Outcome, ensure};
use crate::cases::graphs::{DecodeStep, LAYERS, own_tokens as step};
use crate::raw::{download, noise, upload};

/// Opens a device as a bench in bf16.
fn bench<R: DeviceRig>(rig: &R, device: usize) -> Outcome<Bench> {
    Ok(Bench::new(rig.open(device)?, DType::BF16)?)
}

fn decode(bench: &Bench) -> Outcome<DecodeStep<'_>> {
    DecodeStep::new(bench, DType::BF16.into(), (64, 64))
}

pub(super) fn a_replay_is_one_copy_and_one_launch<R: DeviceRig>(
    rig: &R,
    double: &dyn DriverDouble,
) -> Outcome {
    let b = bench(rig, LAZY)?;
    let decode = decode(&b)?;
    decode.enqueue(&step(100))?;
    let (mut cache, mut runs) = (GraphCache::new(2), Vec::new());
    double.queued(LAZY);
    for n in 21..27 {
        let (step, stream) = (step(n), b.stream.as_ref());
        let key = GraphKey::of(&step, DType::BF16);
        let run = cache.run(stream, key, &step, &mut || decode.enqueue(&step))?.0;
        let queued = double.queued(LAZY);
        let fits = match run {
            GraphRun::Eager => queued.kernels >= 2 * LAYERS && queued.graphs == 0,
            GraphRun::Captured => queued.graphs == 1,
            GraphRun::Replayed => (queued.graphs, queued.uploads, queued.kernels) == (1, 1, 0),
        };
        ensure(fits, || format!("{run:?} enqueued {queued:?}"))?;
        runs.push(run);
    }
    same("runs", &runs[..3], &[GraphRun::Eager, GraphRun::Captured, GraphRun::Replayed])?;
    Ok(b.stream.synchronize()?)
}

pub(super) fn a_graph_keeps_its_memory_and_gives_it_back<R: DeviceRig>(
    rig: &R,
    double: &dyn DriverDouble,
) -> Outcome {
    for device in [EAGER, LAZY] {
        let before = double.live(device);
        let b = bench(rig, device)?;
        let decode = decode(&b)?;
        decode.enqueue(&step(41))?;
        let expected = download(b.stream.as_ref(), &decode.out)?;
        let graph = decode.capture(&step(21))?;
        let out = decode.out.clone();
        drop(decode);
        // Other work takes memory and replaces the lists that the stream keeps.
        let other = |i| upload(b.backend.as_ref(), DType::U8, &[4096], &noise(i, 4096));
        let taken = (0..20).map(other).collect::<kvcore::Result<Vec<_>>>()?;
        for _ in 0..40 {
            graph.replay(&step(41))?;
        }
        drop(taken);
        // A replay outlives its graph.
        drop(graph);
        same_bytes(&format!("device {device}"), &download(b.stream.as_ref(), &out)?, &expected)?;
        drop((out, b));
        same(&format!("left on device {device}"), double.live(device), before)?;
    }
    Ok(())
}

pub(super) fn a_dropped_graph_leaves_nothing_of_the_driver<R: DeviceRig>(
    rig: &R,
    double: &dyn DriverDouble,
) -> Outcome {
    let b = bench(rig, EAGER)?;
    let decode = decode(&b)?;
    decode.enqueue(&step(5))?;
    let mut live = Vec::new();
    for _ in 0..32 {
        let graph = decode.capture(&step(5))?;
        graph.replay(&step(5))?;
        drop(graph);
        b.stream.synchronize()?;
        // An allocation waits for the frees before it.
        b.tensor(DType::U8, &[64])?;
        live.push(double.live(EAGER));
    }
    // The count may rise by a few: a stream keeps the events of its batches, and creates one more whenever
    // all are in flight. An object that a graph leaves behind would add one for each graph.
    let (first, last) = (live[0], live[31]);
    ensure(last.objects < first.objects + 8 && last.bytes == first.bytes, || format!("{live:?}"))
}

pub(super) fn a_step_whose_capture_finds_no_memory_runs_as_before<R: DeviceRig>(
    rig: &R,
    double: &dyn DriverDouble,
) -> Outcome {
    let b = bench(rig, EAGER)?;
    let decode = decode(&b)?;
    let (mut cache, key) = (GraphCache::new(2), GraphKey::of(&step(4), DType::BF16));
    let mut run = |n: usize| -> Outcome<(GraphRun, u64)> {
        let inputs = step(n);
        let run = cache.run(b.stream.as_ref(), key, &inputs, &mut || decode.enqueue(&inputs))?.0;
        Ok((run, cache.counts().refused))
    };
    same("at first", run(4)?, (GraphRun::Eager, 0))?;
    let (function, code) = double.fault(DriverFault::DeviceMemory);
    double.fail(function, 1, code);
    same("without memory", run(5)?, (GraphRun::Eager, 1))?;
    same("it is not tried again", run(6)?, (GraphRun::Eager, 1))?;
    let got = download(b.stream.as_ref(), &decode.out)?;
    decode.enqueue(&step(6))?;
    same_bytes("the step without a graph", &got, &download(b.stream.as_ref(), &decode.out)?)
}
