//! Checks that operations lock only the bytes that they use. A host view locks one layer while operations on
//! other layers run in the same thread, so an operation that waited for the view would never return.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use kvbackend_cpu::{CpuBackend, CpuOptions, CpuStorage, HostView, HostViewMut, KernelSet};
use kvcore::{
    Attend, AttendRows, AttendWork, Backend, BlockId, BlockOrder, CopyTensor, DType, Gather, KeyForm,
    KvArena, KvLayout, KvShape, MemoryKind, OwnedStorage, QueryRow, Rope, RopeConfig, RotateKeys, Rotation,
    RowRotation, Scatter, Segment, Stream, TensorView, WritePairs, WriteSlots,
};
use rstest::rstest;

const LAYERS: usize = 3;
const HEADS: usize = 2;
const DIM: usize = 8;
const BLOCK: usize = 4;

fn arena(backend: &CpuBackend, format: &str, order: BlockOrder) -> KvArena {
    let shape = KvShape {
        num_layers: LAYERS,
        num_blocks: 4,
        block_size: BLOCK,
        k_heads: HEADS,
        v_heads: HEADS,
        k_dim: DIM,
        v_dim: DIM,
        format: format.parse().unwrap(),
        order,
    };
    KvArena::allocate(backend, MemoryKind::Device, Arc::new(KvLayout::new(shape).unwrap())).unwrap()
}

/// Returns the bytes of one layer in every storage of an arena.
fn layer(arena: &KvArena, layer: usize) -> Vec<TensorView> {
    let part = |storage: &Arc<dyn kvcore::Storage>| {
        let bytes = storage.len() / LAYERS;
        let storage = OwnedStorage::from_arc(Arc::clone(storage)).unwrap();
        storage.view_at(layer * bytes, DType::U8, &[bytes]).unwrap()
    };
    arena.storages().map(part).collect()
}

fn rows(values: f32, rows: usize) -> TensorView {
    let storage = CpuStorage::from_vec(vec![values; rows * HEADS * DIM]).unwrap();
    TensorView::new(Arc::new(storage), DType::F32, &[rows, HEADS, DIM]).unwrap()
}

fn pairs() -> WritePairs {
    WritePairs::unchecked([(BlockId(0), BlockId(1))].into_iter().collect::<Arc<[_]>>())
}

/// Runs every kind of operation on one layer.
fn all_of_a_layer(stream: &dyn Stream, arena: &KvArena, layer: usize) {
    let rope = Arc::new(Rope::new(RopeConfig::new(DIM, 10_000.0), 64).unwrap());
    let slots: Arc<[i64]> = (0..BLOCK as i64).collect();
    let dtype = if arena.layout().shape().format.is_quantized() { DType::F32 } else { DType::BF16 };
    let bytes = vec![0u8; BLOCK * HEADS * DIM * dtype.bits() / 8];
    let gathered = || {
        let storage = Arc::new(CpuStorage::allocate(MemoryKind::System, bytes.len()).unwrap());
        TensorView::new(storage, dtype, &[BLOCK, HEADS, DIM]).unwrap()
    };
    for rotation in [None, Some(RowRotation { rope: Arc::clone(&rope), positions: slots.clone() })] {
        let (k, v, slots) = (rows(1.0, BLOCK), rows(2.0, BLOCK), WriteSlots::unchecked(slots.clone()));
        stream.scatter(&Scatter { arena: arena.clone(), layer, k, v, slots, rotation }).unwrap();
    }
    let (k, v, rotation) = (gathered(), gathered(), Rotation { rope: Arc::clone(&rope), delta: 3 });
    stream.gather(&Gather { arena: arena.clone(), layer, k, v, slots, rotation: None }).unwrap();
    let (src, dst) = (arena.clone(), arena.clone());
    stream.rotate_keys(&RotateKeys { src, dst, layer, pairs: pairs(), rotation }).unwrap();
    let segment = Segment::new([BlockId(1)].into_iter().collect::<Arc<[_]>>(), BLOCK, 0, 0);
    let out = rows(0.0, 1);
    let attend = Attend {
        arena: arena.clone(),
        layer,
        q: rows(1.0, 1),
        rope: Some(rope),
        keys: KeyForm::default(),
        work: Arc::new(AttendWork::new(
            [QueryRow { logical: BLOCK - 1, position: BLOCK as i64 - 1 }],
            [AttendRows::new(0..1, [segment])],
        )),
        scale: 1.0,
        window: None,
        softcap: None,
        out: out.clone(),
        lse: None,
    };
    stream.attend(&attend).unwrap();
    assert!(HostView::<f32>::of(&out).unwrap().iter().all(|x| (x - 2.0).abs() < 0.1), "values of 2 only");
}

#[rstest]
fn operations_of_other_layers_do_not_wait(
    #[values(KernelSet::Fast, KernelSet::Reference)] kernels: KernelSet,
    #[values("bf16", "int8:8", "fp8-e4m3")] format: &str,
    #[values(BlockOrder::TokenMajor, BlockOrder::HeadMajor)] order: BlockOrder,
) {
    let backend = CpuBackend::with_options(&CpuOptions { kernels, ..CpuOptions::default() }).unwrap();
    let (stream, arena) = (backend.stream().unwrap(), arena(&backend, format, order));
    let middle = layer(&arena, 1);
    let held: Vec<HostViewMut<u8>> = middle.iter().map(|part| HostViewMut::of(part).unwrap()).collect();
    let before: Vec<Vec<u8>> = held.iter().map(|part| part.to_vec()).collect();
    all_of_a_layer(stream.as_ref(), &arena, 0);
    all_of_a_layer(stream.as_ref(), &arena, 2);
    assert!(held.iter().zip(&before).all(|(now, before)| now[..] == before[..]));
}

#[test]
fn an_operation_of_the_same_layer_waits_for_the_view() {
    let backend = CpuBackend::new();
    let arena = arena(&backend, "bf16", BlockOrder::TokenMajor);
    let middle = layer(&arena, 1);
    let mut held = HostViewMut::<u8>::of(&middle[0]).unwrap();
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| all_of_a_layer(backend.stream().unwrap().as_ref(), &arena, 1));
        // The view's writes precede all operations on this layer, because they wait for the view.
        held.fill(0xff);
        drop(held);
        worker.join().unwrap();
    });
    let after = HostView::<u8>::of(&middle[0]).unwrap();
    let block = after.len() / 4;
    assert!(after[..2 * block].chunks(2).all(|element| element != [0xff, 0xff]), "written after the view");
    assert!(after[2 * block..].iter().all(|&byte| byte == 0xff), "no operation writes these blocks");
}

#[rstest]
fn disjoint_views_of_one_storage_do_not_wait(
    #[values(KernelSet::Fast, KernelSet::Reference)] kernels: KernelSet,
) {
    let backend = CpuBackend::with_options(&CpuOptions { kernels, ..CpuOptions::default() }).unwrap();
    let stream = backend.stream().unwrap();
    let storage = CpuStorage::from_vec((0..24).map(|i| i as f32).collect()).unwrap();
    let all = TensorView::new(Arc::new(storage), DType::F32, &[3, 8]).unwrap();
    let [first, middle, last] = [0, 1, 2].map(|row| all.select(0, row).unwrap());
    let held = HostViewMut::<f32>::of(&middle).unwrap();
    stream.copy_tensor(&CopyTensor { src: first.clone(), dst: last.clone() }).unwrap();
    stream.write(&first, bytemuck::cast_slice(&[9.0f32; 8])).unwrap();
    drop(held);
    let values = HostView::<f32>::of(&all).unwrap();
    assert_eq!((values[0], values[8], values[16], values[23]), (9.0, 8.0, 0.0, 7.0));
}
