//! The number of operators for a batch must not grow with the number of sequences or of chunks per sequence.

use std::sync::Arc;

use kvcore::{
    Attend, AttendRows, AttendWork, Backend, BlockId, BlockOrder, DType, KeyForm, KvShape, MemoryKind,
    QueryRow, Rope, RopeConfig, Segment, allocate_tensor,
};

use crate::common::{arena, download, noise, opened, upload};
use crate::simulator::{LAZY, alone};

const DIM: usize = 16;

/// Returns a batch of decoding sequences, each with `chunks` chunks at different offsets.
fn batch(sequences: usize, chunks: usize) -> Arc<AttendWork> {
    let rows: Vec<QueryRow> = (0..sequences).map(|_| QueryRow { logical: 99, position: 99 }).collect();
    let entry = |row: usize| {
        let chunk = |number: usize| {
            let block = BlockId(((row + 3 * number) % 16) as u32);
            Segment::new([block].into(), 4 - row % 2, 8 * number, 0).at_offset((5 * number + row) as i64)
        };
        AttendRows::new(row..row + 1, (0..chunks).map(chunk).collect::<Vec<_>>())
    };
    Arc::new(AttendWork::new(rows, (0..sequences).map(entry).collect::<Vec<_>>()))
}

#[test]
fn a_batch_takes_as_many_operators_as_two_sequences_and_equals_each_alone() {
    let Some((simulator, _alone)) = alone() else { return };
    let backend = opened(LAZY).unwrap();
    let stream = backend.stream().unwrap();
    let shape = KvShape {
        num_layers: 1,
        num_blocks: 16,
        block_size: 4,
        k_heads: 2,
        v_heads: 2,
        k_dim: DIM,
        v_dim: DIM,
        format: DType::F32.into(),
        order: BlockOrder::TokenMajor,
    };
    let pool = arena(backend.as_ref(), shape);
    for plane in [pool.k_plane(), pool.v_plane()] {
        let floats: Vec<u8> = noise(7, plane.storage.len() / 4)
            .iter()
            .flat_map(|&byte| (f32::from(byte) / 64.0 - 2.0).to_ne_bytes())
            .collect();
        let n = floats.len() / 4;
        let view = kvcore::TensorView::new(Arc::clone(plane.storage), DType::F32, &[n]).unwrap();
        stream.write(&view, &floats).unwrap();
    }
    let rope = Arc::new(Rope::new(RopeConfig::new(DIM, 100.0), 1024).unwrap());
    let run = |work: &Arc<AttendWork>| {
        let rows = work.rows().len();
        let floats: Vec<u8> = (0..rows * 4 * DIM)
            .flat_map(|at| (((at % (4 * DIM)) as f32 / 17.0).sin()).to_ne_bytes())
            .collect();
        let q = upload(backend.as_ref(), DType::F32, &[rows, 4, DIM], &floats);
        let out = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[rows, 4, DIM]).unwrap();
        simulator.trace(LAZY);
        stream
            .attend(&Attend {
                arena: pool.clone(),
                layer: 0,
                q,
                rope: Some(Arc::clone(&rope)),
                keys: KeyForm::Rotated,
                work: Arc::clone(work),
                scale: 0.25,
                window: None,
                softcap: None,
                out: out.clone(),
                lse: None,
            })
            .unwrap();
        let operators = simulator.trace(LAZY).iter().filter(|line| line.starts_with("operator")).count();
        (operators, download(stream.as_ref(), &out))
    };
    let (of_two, _) = run(&batch(2, 1));
    for (sequences, chunks) in [(2, 5), (16, 1), (16, 5)] {
        let work = batch(sequences, chunks);
        let (operators, together) = run(&work);
        assert_eq!(operators, of_two, "{sequences} sequences of {chunks} chunks");
        for (row, entry) in work.batch().iter().enumerate() {
            let segments = Arc::clone(&entry.segments);
            let alone = AttendWork::new([work.rows()[row]], [AttendRows::new(0..1, segments)]);
            let (_, expected) = run(&Arc::new(alone));
            let own = &together[row * 4 * DIM * 4..(row + 1) * 4 * DIM * 4];
            assert_eq!(own, expected, "sequence {row}");
        }
    }
}
