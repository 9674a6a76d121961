//! Every code of every element type, and the rounding of f32, which must match bit for bit.

use std::sync::Arc;

use half::{bf16, f16};
use kvbackend_wgpu::WgpuOptions;
use kvcore::{
    ApplyRope, Backend, BlockOrder, DType, Fp8Kind, Gather, KvArena, KvFormat, KvShape, MemoryKind, Rope,
    RopeConfig, Rotation, Scatter, Stream, WriteSlots, allocate_tensor,
};

use crate::common::{arena, contents, download, opened, upload};

/// The number of elements per row.
const DIM: usize = 64;
const ROWS: usize = 1024;

/// Returns an arena for [`ROWS`] rows of one head.
fn cache(backend: &dyn Backend, format: KvFormat) -> KvArena {
    arena(
        backend,
        KvShape {
            num_layers: 1,
            num_blocks: ROWS / 16,
            block_size: 16,
            k_heads: 1,
            v_heads: 1,
            k_dim: DIM,
            v_dim: DIM,
            format,
            order: BlockOrder::TokenMajor,
        },
    )
}

/// Scatters rows of values to both K and V of a new arena.
fn scattered(backend: &dyn Backend, stream: &dyn Stream, format: KvFormat, values: &[f32]) -> KvArena {
    let arena = cache(backend, format);
    let rows = upload(backend, DType::F32, &[ROWS, 1, DIM], bytemuck::cast_slice(values));
    let slots = (0..ROWS as i64).collect::<Vec<_>>();
    stream
        .scatter(&Scatter {
            arena: arena.clone(),
            layer: 0,
            k: rows.clone(),
            v: rows,
            slots: WriteSlots::unchecked(slots),
            rotation: None,
        })
        .unwrap();
    arena
}

/// Returns values of every magnitude: each exponent, with mantissas at, just below and just above the points
/// at which f16 and bf16 round, and non-finite values.
fn awkward() -> Vec<f32> {
    let mut values = vec![0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN];
    for exponent in 0..255u32 {
        for mantissa in
            [0, 1, 0xfff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x3001, 0x7fff, 0x8000, 0x8001, 0x18000, 0x7f_ffff]
        {
            for shift in [0, 3, 7] {
                let bits = exponent << 23 | (mantissa << shift & 0x7f_ffff);
                values.extend([f32::from_bits(bits), f32::from_bits(bits | 1 << 31)]);
            }
        }
    }
    values.resize(ROWS * DIM, 1.0);
    values
}

fn both(run: impl Fn(&dyn Backend, &dyn Stream, &str)) {
    for packed_f16 in [false, true] {
        let Some(backend) = opened(&WgpuOptions { packed_f16, ..WgpuOptions::default() }) else { return };
        run(
            backend.as_ref(),
            backend.stream().unwrap().as_ref(),
            if packed_f16 { "packed" } else { "native" },
        );
    }
}

#[test]
fn f32_is_rounded_to_nearest_even_as_on_the_host() {
    both(|backend, stream, how| {
        let values = awkward();
        for dtype in [DType::F16, DType::BF16] {
            let arena = scattered(backend, stream, dtype.into(), &values);
            let [k, v] = contents(stream, &arena);
            assert_eq!(k, v);
            for (bytes, &x) in k.chunks_exact(2).zip(&values) {
                let got = u16::from_le_bytes([bytes[0], bytes[1]]);
                let (expected, nan) = match dtype {
                    DType::F16 => (f16::from_f32(x).to_bits(), f16::from_bits(got).is_nan()),
                    _ => (bf16::from_f32(x).to_bits(), bf16::from_bits(got).is_nan()),
                };
                assert!(
                    got == expected || (x.is_nan() && nan),
                    "{how} {dtype}: {x:e} is {got:#x}, not {expected:#x}"
                );
            }
        }
    });
}

#[test]
fn every_half_is_read_as_it_is() {
    both(|backend, stream, how| {
        for dtype in [DType::F16, DType::BF16] {
            let codes: Vec<u16> = (0..=u16::MAX).collect();
            let rows = upload(backend, dtype, &[ROWS, 1, DIM], bytemuck::cast_slice(&codes));
            // A rotation by 0 positions converts every element to f32, multiplies it by 1, and converts it
            // back.
            let rope = Arc::new(Rope::new(RopeConfig::new(DIM, 10_000.0), 16).unwrap());
            stream.rope(&ApplyRope { rows: rows.clone(), positions: vec![0; ROWS].into(), rope }).unwrap();
            let after: Vec<u16> = bytemuck::pod_collect_to_vec(&download(stream, &rows));
            for (i, (&before, &after)) in codes.iter().zip(&after).enumerate() {
                let value = |bits: u16| match dtype {
                    DType::F16 => f16::from_bits(bits).to_f32(),
                    _ => bf16::from_bits(bits).to_f32(),
                };
                // The other element of the pair is multiplied by a sine of 0, which turns infinity into NaN.
                let partner = value(codes[i ^ (DIM / 2)]);
                let (x, y) = (value(before), value(after));
                let expected = if partner.is_finite() { x } else { f32::NAN };
                assert!(
                    x == y || (y.is_nan() && expected.is_nan()),
                    "{how} {dtype}: {before:#x} became {after:#x}"
                );
            }
        }
    });
}

#[test]
fn every_fp8_code_is_read_and_written_as_on_the_host() {
    both(|backend, stream, how| {
        for kind in [Fp8Kind::E4M3, Fp8Kind::E5M2] {
            let format: KvFormat =
                if kind == Fp8Kind::E4M3 { "fp8-e4m3" } else { "fp8-e5m2" }.parse().unwrap();
            let values = awkward();
            let arena = scattered(backend, stream, format, &values);
            let [k, _] = contents(stream, &arena);
            for (&code, &x) in k.iter().zip(&values) {
                let expected = kind.encode(x);
                let nan = x.is_nan() || kind.decode(expected).is_nan();
                let same = code == expected || (nan && kind.decode(code).is_nan());
                assert!(same, "{how} {format}: {x:e} is {code:#x}, not {expected:#x}");
            }
            let codes: Vec<u8> = (0..ROWS * DIM).map(|i| i as u8).collect();
            let arena = cache(backend, format);
            let view = kvcore::TensorView::new(Arc::clone(arena.k()), DType::U8, &[codes.len()]).unwrap();
            stream.write(&view, &codes).unwrap();
            let rows = || allocate_tensor(backend, MemoryKind::Device, DType::F32, &[ROWS, 1, DIM]).unwrap();
            let (k, v) = (rows(), rows());
            let slots = (0..ROWS as i64).collect::<Vec<_>>();
            stream
                .gather(&Gather { arena, layer: 0, slots: slots.into(), k: k.clone(), v, rotation: None })
                .unwrap();
            let read: Vec<f32> = bytemuck::pod_collect_to_vec(&download(stream, &k));
            for (&code, &x) in codes.iter().zip(&read) {
                let expected = kind.decode(code);
                assert!(
                    x == expected || (x.is_nan() && expected.is_nan()),
                    "{how} {format}: {code:#x} is {x}"
                );
            }
        }
    });
}

#[test]
fn elements_that_no_rotation_touches_keep_their_bits() {
    both(|backend, stream, how| {
        for dtype in [DType::F16, DType::BF16] {
            let codes: Vec<u16> = (0..=u16::MAX).collect();
            let arena = cache(backend, dtype.into());
            let view = kvcore::TensorView::new(Arc::clone(arena.k()), dtype, &[codes.len()]).unwrap();
            stream.write(&view, bytemuck::cast_slice(&codes)).unwrap();
            let rows = || allocate_tensor(backend, MemoryKind::Device, dtype, &[ROWS, 1, DIM]).unwrap();
            let (k, v) = (rows(), rows());
            let rope = Arc::new(
                Rope::new(RopeConfig { rotary_dim: 2, ..RopeConfig::new(DIM, 10_000.0) }, 16).unwrap(),
            );
            let (slots, rotation) = ((0..ROWS as i64).collect(), Some(Rotation { rope, delta: 3 }));
            stream.gather(&Gather { arena, layer: 0, slots, k: k.clone(), v, rotation }).unwrap();
            let after: Vec<u16> = bytemuck::pod_collect_to_vec(&download(stream, &k));
            for (row, before) in after.chunks(DIM).zip(codes.chunks(DIM)) {
                assert_eq!(row[2..], before[2..], "{how} {dtype}");
            }
        }
    });
}
