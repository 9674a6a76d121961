//! Rows that share 32-bit words with their neighbours: no bit may be lost, no matter how many rows are moved
//! at the same time.

use std::sync::Arc;

use kvbackend_cpu::CpuBackend;
use kvcore::{
    ApplyRope, Backend, BlockOrder, CopyTensor, DType, Dims, KvArena, KvFormat, KvShape, Rope, RopeConfig,
    Scatter, TensorView, WriteSlots,
};

use crate::common::{arena, contents, download, noise, shared, upload};

/// The number of rows, enough for many workgroups.
const ROWS: usize = 4096;

fn shape(format: KvFormat, dim: usize, order: BlockOrder) -> KvShape {
    KvShape {
        num_layers: 1,
        num_blocks: ROWS / 16,
        block_size: 16,
        k_heads: 3,
        v_heads: 1,
        k_dim: dim,
        v_dim: dim + 1,
        format,
        order,
    }
}

/// Scatters the same rows to slots in shuffled order.
fn scattered(backend: &dyn Backend, shape: &KvShape, from: DType, seed: u64) -> KvArena {
    let arena = arena(backend, shape.clone());
    let finite = |bytes: Vec<u8>| -> Vec<u8> {
        // Elements of f32 rows have moderate values; elements of other types have arbitrary bits.
        if from != DType::F32 {
            return bytes;
        }
        bytes.chunks_exact(4).flat_map(|b| (f32::from(b[0]) - f32::from(b[1]) / 3.0).to_ne_bytes()).collect()
    };
    let rows = |heads: usize, dim: usize| {
        let bytes = finite(noise(seed, ROWS * heads * dim * from.bits() / 8));
        upload(backend, from, &[ROWS, heads, dim], &bytes)
    };
    let (k, v) = (rows(shape.k_heads, shape.k_dim), rows(shape.v_heads, shape.v_dim));
    let slots = (0..ROWS as i64).map(|i| i * 2341 % ROWS as i64).collect::<Vec<_>>();
    backend
        .stream()
        .unwrap()
        .scatter(&Scatter {
            arena: arena.clone(),
            layer: 0,
            k,
            v,
            slots: WriteSlots::unchecked(slots),
            rotation: None,
        })
        .unwrap();
    arena
}

#[test]
fn rows_of_odd_sizes_are_scattered_side_by_side() {
    let Some(backend) = shared() else { return };
    let cpu = CpuBackend::new();
    for order in [BlockOrder::TokenMajor, BlockOrder::HeadMajor] {
        for dim in [1, 2, 3, 5, 7, 9] {
            for (format, from) in [
                (DType::F16.into(), DType::F16),
                (DType::BF16.into(), DType::BF16),
                (DType::BF16.into(), DType::F32),
                (KvFormat::Int8 { group: 1 }, DType::F32),
            ] {
                for seed in 1..4 {
                    let shape = shape(format, dim, order);
                    let [ours, theirs] = [backend.as_ref() as &dyn Backend, cpu.as_ref()].map(|backend| {
                        contents(backend.stream().unwrap().as_ref(), &scattered(backend, &shape, from, seed))
                    });
                    assert!(ours == theirs, "{format} from {from}, rows of {dim}, {order:?}, seed {seed}");
                }
            }
        }
    }
}

#[test]
fn elements_between_others_are_written_alone() {
    let Some(backend) = shared() else { return };
    let stream = backend.stream().unwrap();
    let n = 50_000;
    for dtype in [DType::U8, DType::BF16, DType::F32] {
        let width = dtype.bits() / 8;
        for offset in 0..4 {
            let (before, new) = (noise(7, 4 * n * width), noise(8, n * width));
            let base = upload(backend.as_ref(), dtype, &[4 * n], &before);
            let (shape, strides) = (Dims::new(&[n]).unwrap(), Dims::new(&[4]).unwrap());
            let dst =
                TensorView::with_strides(Arc::clone(base.storage()), dtype, shape, strides, offset).unwrap();
            let src = upload(backend.as_ref(), dtype, &[n], &new);
            stream.copy_tensor(&CopyTensor { src, dst }).unwrap();
            let mut expected = before;
            for (i, element) in new.chunks_exact(width).enumerate() {
                expected[(4 * i + offset) * width..][..width].copy_from_slice(element);
            }
            assert!(download(stream.as_ref(), &base) == expected, "every fourth {dtype} from {offset}");
        }
    }
}

#[test]
fn rows_in_place_are_read_before_they_are_written() {
    let Some(backend) = shared() else { return };
    let cpu = CpuBackend::new();
    let rope = Arc::new(Rope::new(RopeConfig { rotary_dim: 6, ..RopeConfig::new(7, 100.0) }, 64).unwrap());
    let values: Vec<u8> = noise(9, ROWS * 3 * 7)
        .iter()
        .flat_map(|&b| half::bf16::from_f32(f32::from(b)).to_le_bytes())
        .collect();
    let turned = |backend: &dyn Backend| {
        let stream = backend.stream().unwrap();
        let rows = upload(backend, DType::BF16, &[ROWS, 3, 7], &values);
        let positions = (0..ROWS as i64).map(|i| i % 64 - 30).collect();
        stream.rope(&ApplyRope { rows: rows.clone(), positions, rope: Arc::clone(&rope) }).unwrap();
        download(stream.as_ref(), &rows)
    };
    let (ours, theirs) = (turned(backend.as_ref()), turned(cpu.as_ref()));
    let far = ours.chunks_exact(2).zip(theirs.chunks_exact(2)).filter(|(a, b)| {
        let bits = |x: &[u8]| i32::from(i16::from_le_bytes([x[0], x[1]]));
        (bits(a) - bits(b)).abs() > 1
    });
    assert_eq!(far.count(), 0, "elements differ by more than a rounding");
}

#[test]
fn a_slot_that_occurs_twice_holds_one_of_its_rows() {
    let Some(backend) = shared() else { return };
    let stream = backend.stream().unwrap();
    let arena = arena(backend.as_ref(), shape(DType::BF16.into(), 5, BlockOrder::TokenMajor));
    // Every element of row i has the bits of the integer i, so that mixed rows can be detected.
    let rows = |heads: usize, dim: usize| {
        let bytes: Vec<u8> = (0..ROWS as u16)
            .flat_map(|i| std::iter::repeat_n(i.to_le_bytes(), heads * dim))
            .flatten()
            .collect();
        upload(backend.as_ref(), DType::BF16, &[ROWS, heads, dim], &bytes)
    };
    let (k, v) = (rows(3, 5), rows(1, 6));
    let slots: Arc<[i64]> = (0..ROWS as i64).map(|i| i % 100).collect();
    stream
        .scatter(&Scatter {
            arena: arena.clone(),
            layer: 0,
            k,
            v,
            slots: WriteSlots::unchecked(Arc::clone(&slots)),
            rotation: None,
        })
        .unwrap();
    let [k, v] = contents(stream.as_ref(), &arena);
    for slot in 0..100 {
        let of = |bytes: &[u8], n: usize| -> Vec<u16> {
            bytes[slot * 2 * n..][..2 * n].chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect()
        };
        for row in [of(&k, 15), of(&v, 6)] {
            assert!(
                row.iter().all(|x| *x == row[0]) && row[0] as usize % 100 == slot,
                "slot {slot} has {row:?}"
            );
        }
    }
}
