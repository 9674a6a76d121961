//! Captured graphs: the capacity of their lists, dense steps in them, and the memory that they share.

use std::sync::Arc;

use kvbackend_cuda::dense::{CudaSteps, StoredKind};
use kvconform::devices::{DIM, OneRow, row_step as step};
use kvcore::{
    AttendRows, AttendWork, Backend, BlockId, Error, Graph, QueryRow, Segment, StepInputs, TensorView,
};

use crate::common::{noise, opened};
use crate::double::{EAGER, LAZY, alone};

/// Returns the one-row fixture on a device.
fn row_on(device: usize) -> OneRow {
    OneRow::new(opened(device).unwrap().as_ref()).unwrap()
}

#[test]
fn inputs_past_the_room_of_a_graph_are_refused_by_name() {
    let Some((_, _alone)) = alone() else { return };
    let bench = row_on(EAGER);
    bench.enqueue(&step(3)).unwrap();
    let inputs = step(3);
    let graph = bench.capture(&inputs).unwrap();
    let many = |n: usize| {
        let segments: Vec<_> = (0..n).map(|i| Segment::new([BlockId(1)].into(), 1, i, i as i64)).collect();
        let row = QueryRow { logical: n, position: 3 };
        let work = Arc::new(AttendWork::new([row], [AttendRows::new(0..1, segments)]));
        StepInputs { work, ..step(3) }
    };
    graph.replay(&many(8)).unwrap();
    assert_eq!(graph.replay(&many(60)), Err(Error::GraphOutgrown { what: "segments" }));
    // The angle table has grown since the capture, but the graph reads the old table.
    bench.rope.table([2000]).unwrap();
    assert_eq!(graph.replay(&step(3)), Err(Error::GraphOutgrown { what: "positions" }));
    bench.stream.synchronize().unwrap();
}

#[test]
fn dense_steps_join_a_capture() {
    let Some((double, _alone)) = alone() else { return };
    for device in [EAGER, LAZY] {
        let backend = opened(device).unwrap();
        let stream = backend.stream().unwrap();
        let steps = CudaSteps::new(&backend).unwrap();
        let floats = |seed, n| -> Vec<u8> {
            noise(seed, n).iter().flat_map(|&byte| (f32::from(byte) / 64.0 - 2.0).to_ne_bytes()).collect()
        };
        let table = steps.weight(StoredKind::F32, 9, DIM, &floats(1, 9 * DIM)).unwrap();
        let matrix = steps.weight(StoredKind::F32, 48, DIM, &floats(2, 48 * DIM)).unwrap();
        let norm = steps.weight(StoredKind::F32, 1, DIM, &floats(3, DIM)).unwrap();
        let pass = |tokens: &[u32]| -> kvcore::Result<TensorView> {
            let x = steps.embed(&table, tokens, 1.0)?;
            let x = steps.add(&x, &steps.rms_norm(&x, &norm, 1e-5)?)?;
            steps.project(&x, &matrix, None)
        };
        let read = |x: &TensorView| {
            let mut values = Vec::new();
            CudaSteps::order(stream.as_ref(), steps.stream()).unwrap();
            steps.read(x, &mut values).unwrap();
            values.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        let inputs = step(3);
        let mut logits = None;
        let graph = stream
            .capture(&inputs, &mut || {
                CudaSteps::order(stream.as_ref(), steps.stream())?;
                logits = Some(pass(&inputs.tokens)?);
                CudaSteps::order(steps.stream(), stream.as_ref())
            })
            .unwrap();
        let logits = logits.unwrap();
        for at in 0..7 {
            let inputs = step(at);
            let expected = read(&pass(&inputs.tokens).unwrap());
            double.trace(device);
            graph.replay(&inputs).unwrap();
            // Work that runs at the same time as the replay must not use the graph's memory.
            pass(&[8]).unwrap();
            assert_eq!(read(&logits), expected, "token {at}, device {device}");
            let trace = double.trace(device);
            let graphs = trace.iter().filter(|line| line[0] == "graph").count();
            assert_eq!(graphs, 1, "{trace:?}");
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
    let steps = CudaSteps::new(&backend).unwrap();
    let bytes = vec![0; 4 * 48 * DIM];
    let table = steps.weight(StoredKind::F32, 48, DIM, &bytes).unwrap();
    // With sixteen rows, cuBLAS computes the product, which needs a workspace.
    let inputs = |first: u32| StepInputs { tokens: (first..first + 16).collect(), ..step(3) };
    let capture = |inputs: &StepInputs| {
        let mut logits = None;
        let graph = stream.capture(inputs, &mut || {
            CudaSteps::order(stream.as_ref(), steps.stream())?;
            let x = steps.embed(&table, &inputs.tokens, 2.0)?;
            let x = steps.add(&x, &x)?;
            logits = Some(steps.project(&x, &table, None)?);
            CudaSteps::order(steps.stream(), stream.as_ref())
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
    assert_ne!(address(&first), address(&second), "results that are held stay");
    for (graph, inputs) in [(&first.0, inputs(0)), (&second.0, inputs(16)), (&first.0, inputs(9))] {
        graph.replay(&inputs).unwrap();
    }
    drop((first, second, table, steps, stream, backend));
    assert_eq!(double.live_bytes(LAZY), at_first);
}
