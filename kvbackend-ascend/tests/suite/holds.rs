//! Memory that enqueued work uses must live until the work is done, even if the caller drops it. The lazy
//! device runs nothing before the wait at the end of each test.

use std::sync::Arc;

use kvcore::{
    ApplyRope, Attend, AttendRows, AttendWork, Backend, BlockOrder, CopyTensor, DType, Gather, KeyForm,
    KvArena, KvShape, MemoryKind, QueryRow, Rope, RopeConfig, RowRotation, Scatter, Segment, Stream,
    TensorView, WriteSlots, allocate_tensor,
};

use crate::common::{arena, noise, opened, upload};
use crate::simulator::{LAZY, alone};

fn pool(backend: &dyn Backend) -> KvArena {
    arena(
        backend,
        KvShape {
            num_layers: 1,
            num_blocks: 8,
            block_size: 4,
            k_heads: 2,
            v_heads: 2,
            k_dim: 8,
            v_dim: 8,
            format: DType::F16.into(),
            order: BlockOrder::HeadMajor,
        },
    )
}

fn rows(backend: &dyn Backend, count: usize) -> TensorView {
    upload(backend, DType::F32, &[count, 2, 8], bytemuck::cast_slice(&vec![0.5f32; count * 16]))
}

fn rope() -> Arc<Rope> {
    Arc::new(Rope::new(RopeConfig::new(8, 100.0), 64).unwrap())
}

/// Runs `enqueue` many times, and waits only afterwards. The memory that `enqueue` allocates and drops must
/// live until this wait, and must then be freed.
fn held(name: &str, enqueue: impl Fn(&dyn Backend, &dyn Stream, i64)) {
    let Some((simulator, _alone)) = alone() else { return };
    let backend = opened(LAZY).unwrap();
    let before = {
        let stream = backend.stream().unwrap();
        enqueue(backend.as_ref(), stream.as_ref(), 0);
        stream.synchronize().unwrap();
        drop(stream);
        simulator.live(LAZY)
    };
    let stream = backend.stream().unwrap();
    for i in 1..120 {
        enqueue(backend.as_ref(), stream.as_ref(), i);
    }
    stream.synchronize().unwrap_or_else(|error| panic!("{name}: {error}"));
    drop(stream);
    assert_eq!(simulator.live(LAZY), before, "{name}");
}

#[test]
fn tensors_of_copies_and_written_bytes() {
    held("copies", |backend, stream, i| {
        let view = allocate_tensor(backend, MemoryKind::Device, DType::U8, &[500]).unwrap();
        let copy = allocate_tensor(backend, MemoryKind::Pinned, DType::U8, &[500]).unwrap();
        stream.write(&view, &noise(i as u64, 500)).unwrap();
        stream.copy_tensor(&CopyTensor { src: view, dst: copy }).unwrap();
    });
}

#[test]
fn pools_rows_lists_and_angles() {
    held("scatter and gather", |backend, stream, i| {
        let (arena, rope) = (pool(backend), rope());
        let (k, v) = (rows(backend, 3), rows(backend, 3));
        let rotation = Some(RowRotation { rope: rope.clone(), positions: [i % 9, 3, 4].into() });
        let slots = WriteSlots::unchecked([i % 20, -1, 25]);
        stream.scatter(&Scatter { arena: arena.clone(), layer: 0, k, v, slots, rotation }).unwrap();
        let out = || allocate_tensor(backend, MemoryKind::Device, DType::F16, &[2, 2, 8]).unwrap();
        let rotation = Some(kvcore::Rotation { rope, delta: i % 7 });
        let gather = Gather { arena, layer: 0, slots: [25, i % 20].into(), k: out(), v: out(), rotation };
        stream.gather(&gather).unwrap();
    });
}

#[test]
fn plans_masks_and_memory_between_operators() {
    held("attend", |backend, stream, i| {
        let (arena, rope) = (pool(backend), rope());
        let count = 1 + i as usize % 5;
        let (k, v) = (rows(backend, 8), rows(backend, 8));
        let slots = WriteSlots::unchecked([0, 1, 2, 3, 4, 5, 6, 7]);
        stream.scatter(&Scatter { arena: arena.clone(), layer: 0, k, v, slots, rotation: None }).unwrap();
        let blocks = [kvcore::BlockId(0), kvcore::BlockId(1)];
        let queries: Vec<QueryRow> =
            (0..count).map(|row| QueryRow { logical: row + 2, position: row as i64 + 2 }).collect();
        let segment = Segment::new(blocks.into(), 8, 0, 0).at_offset(i % 3);
        let out = allocate_tensor(backend, MemoryKind::Device, DType::F32, &[count, 2, 8]).unwrap();
        stream
            .attend(&Attend {
                arena,
                layer: 0,
                q: rows(backend, count),
                rope: Some(rope),
                keys: KeyForm::Rotated,
                work: Arc::new(AttendWork::new(queries, [AttendRows::new(0..count, [segment])])),
                scale: 0.3,
                window: None,
                softcap: Some(3.0),
                out,
                lse: None,
            })
            .unwrap();
    });
}

#[test]
fn rows_that_are_rotated_in_place() {
    held("rope", |backend, stream, i| {
        let rows = rows(backend, 2);
        stream.rope(&ApplyRope { rows, positions: [i % 60, 1].into(), rope: rope() }).unwrap();
    });
}

/// Work must hold the device lists that it reuses.
#[test]
fn lists_that_are_used_again() {
    let Some((_, _alone)) = alone() else { return };
    let backend = opened(LAZY).unwrap();
    let shape = KvShape { num_blocks: 512, ..pool(backend.as_ref()).layout().shape().clone() };
    let (arena, stream) = (arena(backend.as_ref(), shape), backend.stream().unwrap());
    let scatter = |slots: &WriteSlots| {
        let (k, v) = (rows(backend.as_ref(), slots.len()), rows(backend.as_ref(), slots.len()));
        let (arena, slots) = (arena.clone(), slots.clone());
        stream.scatter(&Scatter { arena, layer: 0, k, v, slots, rotation: None }).unwrap();
    };
    let few = WriteSlots::unchecked([3, 5]);
    let queries = [QueryRow { logical: 5, position: 5 }];
    let segment = Segment::new([kvcore::BlockId(0), kvcore::BlockId(1)].into(), 6, 0, 0);
    let work = Arc::new(AttendWork::new(queries, [AttendRows::new(0..1, [segment])]));
    let attend = || {
        let out = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[1, 2, 8]).unwrap();
        let attend = Attend {
            arena: arena.clone(),
            layer: 0,
            q: rows(backend.as_ref(), 1),
            rope: None,
            keys: KeyForm::Rotated,
            work: work.clone(),
            scale: 0.3,
            window: None,
            softcap: None,
            out,
            lse: None,
        };
        stream.attend(&attend).unwrap();
    };
    for _ in 0..2 {
        stream.synchronize().unwrap();
        scatter(&few);
        attend();
    }
    // Enough larger lists that no list memory is left for the first one.
    for i in 0..60i64 {
        scatter(&WriteSlots::unchecked((i..i + 1500).collect::<Vec<_>>()));
    }
    stream.synchronize().unwrap();
}

#[test]
fn streams_that_are_dropped_with_work() {
    held("streams", |backend, _, i| {
        let stream = backend.stream().unwrap();
        let view = allocate_tensor(backend, MemoryKind::Device, DType::U8, &[500]).unwrap();
        stream.write(&view, &noise(i as u64, 500)).unwrap();
        drop(stream);
        let other = backend.stream().unwrap();
        assert_eq!(crate::common::download(other.as_ref(), &view), noise(i as u64, 500));
    });
}

#[test]
fn events_that_nothing_waits_for() {
    held("events", |_, stream, _| drop(stream.record().unwrap()));
}

#[test]
fn events_that_another_stream_waits_for() {
    let Some((simulator, _alone)) = alone() else { return };
    let backend = opened(LAZY).unwrap();
    let before = simulator.live(LAZY);
    let (one, other) = (backend.stream().unwrap(), backend.stream().unwrap());
    for _ in 0..100 {
        let event = one.record().unwrap();
        other.wait_for(&event).unwrap();
        drop(event);
        let event = other.record().unwrap();
        one.wait_for(&event).unwrap();
    }
    other.synchronize().unwrap();
    one.synchronize().unwrap();
    drop((one, other));
    assert_eq!(simulator.live(LAZY), before);
}
