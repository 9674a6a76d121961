//! Quantised arenas on real memory: their scales, their bytes, and the calls that they refuse.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use kvbackend_cpu::{CpuBackend, Execution};
use kvcore::{
    Backend, BlockId, BlockOrder, DType, Dequantize, Error, KvArena, KvFormat, KvLayout, KvShape, MemoryKind,
    Quantize, Scatter, Stream, TensorView, WritePairs, WriteSlots, allocate_tensor,
};

fn layout(format: &str) -> Arc<KvLayout> {
    let shape = KvShape {
        num_layers: 2,
        num_blocks: 3,
        block_size: 4,
        k_heads: 2,
        v_heads: 1,
        k_dim: 16,
        v_dim: 8,
        format: format.parse().unwrap(),
        order: BlockOrder::TokenMajor,
    };
    Arc::new(KvLayout::new(shape).unwrap())
}

fn arena(backend: &CpuBackend, format: &str) -> KvArena {
    KvArena::allocate(backend, MemoryKind::Device, layout(format)).unwrap()
}

/// Returns the static scales of K and V.
fn scales(stream: &dyn Stream, arena: &KvArena) -> [Vec<f32>; 2] {
    [arena.k_plane(), arena.v_plane()].map(|plane| {
        let (storage, layout) = plane.scales.unwrap();
        let view = TensorView::new(Arc::clone(storage), DType::F32, &[layout.bytes / 4]).unwrap();
        let mut bytes = vec![0; layout.bytes];
        stream.read(&view, &mut bytes).unwrap();
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    })
}

#[test]
fn static_scales_are_one_until_they_are_set_and_wrong_ones_change_nothing() {
    for execution in [Execution::Immediate, Execution::Deferred] {
        let backend = CpuBackend::with_execution(execution);
        let stream = backend.stream().unwrap();
        let arena = arena(&backend, "fp8-e4m3:head");
        assert_eq!(scales(stream.as_ref(), &arena), [vec![1.0; 4], vec![1.0; 2]]);
        arena.set_scales(stream.as_ref(), &[1.0, 2.0, 3.0, 4.0], &[0.5, 0.25]).unwrap();
        let set = [vec![1.0, 2.0, 3.0, 4.0], vec![0.5, 0.25]];
        assert_eq!(scales(backend.stream().unwrap().as_ref(), &arena), set, "in force on every stream");
        for (k, v) in [
            (vec![9.0; 2], vec![9.0; 2]),
            (vec![9.0; 4], vec![9.0; 4]),
            (vec![9.0; 4], vec![9.0, 0.0]),
            (vec![9.0; 4], vec![9.0, f32::NAN]),
            (vec![9.0, 9.0, 9.0, f32::INFINITY], vec![9.0; 2]),
            (vec![9.0, 9.0, 9.0, -1.0], vec![9.0; 2]),
        ] {
            assert!(arena.set_scales(stream.as_ref(), &k, &v).is_err(), "{k:?} {v:?}");
        }
        assert_eq!(scales(stream.as_ref(), &arena), set);
    }
    let backend = CpuBackend::new();
    for format in ["bf16", "int8:8"] {
        let refused = arena(&backend, format).set_scales(backend.stream().unwrap().as_ref(), &[1.0], &[1.0]);
        assert!(matches!(refused, Err(Error::InvalidFormat { .. })), "{format}");
    }
}

#[test]
fn an_arena_has_scales_exactly_if_its_format_has() {
    let backend = CpuBackend::new();
    let memory = |bytes| backend.allocate(MemoryKind::System, bytes).unwrap();
    let (dense, quantised) = (layout("f16"), layout("int8:8"));
    let storages = |l: &KvLayout| (memory(l.k_bytes()), memory(l.v_bytes()));
    let (k, v) = storages(&quantised);
    let without = KvArena::from_storage(k.clone(), v.clone(), Arc::clone(&quantised));
    assert!(matches!(without, Err(Error::InvalidFormat { format: KvFormat::Int8 { group: 8 }, .. })));
    let (k_scales, v_scales) = (quantised.k_scales().unwrap().bytes, quantised.v_scales().unwrap().bytes);
    let with = |a, b| KvArena::with_scales(k.clone(), v.clone(), a, b, Arc::clone(&quantised));
    assert!(with(memory(k_scales), memory(v_scales)).is_ok());
    assert!(matches!(with(memory(k_scales - 1), memory(v_scales)), Err(Error::TooLarge { .. })));
    assert!(matches!(with(k.clone(), memory(v_scales)), Err(Error::Aliased { .. })));
    let (k, v) = storages(&dense);
    let needless = KvArena::with_scales(k, v, memory(64), memory(64), dense);
    assert!(matches!(needless, Err(Error::InvalidFormat { .. })));
}

#[test]
fn bytes_are_counted_with_the_scales_of_blocks() {
    let backend = CpuBackend::new();
    let stream = backend.stream().unwrap();
    let (dense, quantised) = (arena(&backend, "bf16"), arena(&backend, "int4:8"));
    let pairs: Arc<[_]> = [(BlockId(0), BlockId(2)), (BlockId(2), BlockId(1))].into();
    let op = Quantize {
        src: dense.clone(),
        dst: quantised.clone(),
        pairs: WritePairs::unchecked(Arc::clone(&pairs)),
    };
    stream.quantize(&op).unwrap();
    stream
        .dequantize(&Dequantize {
            src: quantised.clone(),
            dst: dense.clone(),
            pairs: WritePairs::unchecked(pairs),
        })
        .unwrap();
    let rows =
        |heads, dim| allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F16, &[3, heads, dim]);
    let (k, v) = (rows(2, 16).unwrap(), rows(1, 8).unwrap());
    stream
        .scatter(&Scatter {
            arena: quantised,
            layer: 0,
            k,
            v,
            slots: WriteSlots::unchecked([0, -1, 5]),
            rotation: None,
        })
        .unwrap();
    let counters = backend.counters();
    let (elements, groups) = (2 * 16 + 8, 5);
    assert_eq!(counters.quantize_bytes, 2 * 2 * 4 * (elements / 2 + groups * 2));
    assert_eq!(counters.dequantize_bytes, 2 * 2 * 4 * elements * 2);
    assert_eq!(counters.scatter_bytes, 2 * (elements / 2 + groups * 2));
}

#[test]
fn rows_of_codes_are_refused_before_anything_runs() {
    let backend = CpuBackend::with_execution(Execution::Deferred);
    let stream = backend.stream().unwrap();
    for format in ["f32", "int8:8"] {
        let rows = |dtype, heads, dim| {
            allocate_tensor(backend.as_ref(), MemoryKind::Device, dtype, &[1, heads, dim])
        };
        let (k, v) = (rows(DType::I8, 2, 16).unwrap(), rows(DType::F32, 1, 8).unwrap());
        let op = Scatter {
            arena: arena(&backend, format),
            layer: 0,
            k,
            v,
            slots: WriteSlots::unchecked([0]),
            rotation: None,
        };
        assert!(matches!(stream.scatter(&op), Err(Error::NotComputed { got: DType::I8, .. })), "{format}");
    }
    assert_eq!(backend.counters().scatter_bytes, 0);
}
