//! Captured graphs: the room of this backend, the dense steps in them, and the memory that they share.

use std::sync::Arc;

use kvbackend_cuda::dense::{CudaSteps, StoredKind};
use kvcore::{
    Attend, AttendRows, AttendWork, Backend, BlockId, BlockOrder, DType, Error, Graph, KeyForm, KvArena,
    KvShape, MemoryKind, QueryRow, Rope, RopeConfig, RowRotation, Scatter, Segment, StepInputs, Stream,
    TensorView, WriteSlots, allocate_tensor,
};

use crate::common::{arena, noise, opened, upload};
use crate::double::{EAGER, LAZY, alone};

const DIM: usize = 64;
const LAYERS: usize = 3;

struct Bench {
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

#[test]
fn inputs_past_the_room_of_a_graph_are_refused_by_name() {
    let Some((_, _alone)) = alone() else { return };
    let bench = Bench::new(EAGER);
    bench.enqueue(&step(3)).unwrap();
    let inputs = step(3);
    let graph = bench.stream.capture(&inputs, &mut || bench.enqueue(&inputs)).unwrap();
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
            let x = steps.embed(&table, tokens)?;
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
            // Work that runs at the same time takes none of the graph's memory.
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
    // Sixteen rows: a product of the library, which needs memory to work in.
    let inputs = |first: u32| StepInputs { tokens: (first..first + 16).collect(), ..step(3) };
    let capture = |inputs: &StepInputs| {
        let mut logits = None;
        let graph = stream.capture(inputs, &mut || {
            CudaSteps::order(stream.as_ref(), steps.stream())?;
            let x = steps.embed(&table, &inputs.tokens)?;
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
