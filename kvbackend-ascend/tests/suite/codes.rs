//! The codes and scales of int8 caches, which must match their definition bit for bit.

use std::sync::Arc;

use half::f16;
use kvcore::{
    Backend, BlockOrder, DType, IntKind, KvFormat, KvShape, Scatter, Storage, Stream, TensorView, WriteSlots,
};

use crate::common::{arena, download, noise, opened, upload};
use crate::simulator::{LAZY, with_others};

const DIM: usize = 32;
const GROUP: usize = 8;

/// Returns rows with groups of all magnitudes, including zeros, the smallest and largest numbers, and
/// non-finite numbers.
fn rows() -> Vec<f32> {
    let bytes = noise(5, 4 * 64 * DIM);
    let mut rows: Vec<f32> = bytes
        .chunks_exact(4)
        .enumerate()
        .map(|(at, b)| {
            // Each group has its own exponent, from below the smallest f16 to above the largest f16.
            let exponent = (at / GROUP) as i32 % 64 - 40;
            (f32::from(b[0]) - 127.5 + f32::from(b[1]) / 256.0) * 2f32.powi(exponent)
        })
        .collect();
    let special = [
        0.0,
        f32::MIN_POSITIVE,
        1e-37,
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        65504.0 * 127.0,
        f32::MAX,
    ];
    for (group, x) in rows.chunks_exact_mut(GROUP).zip(special) {
        group.fill(x / 3.0);
        group[2] = x;
    }
    rows
}

fn bytes_of(stream: &dyn Stream, storage: &Arc<dyn Storage>) -> Vec<u8> {
    let view = TensorView::new(Arc::clone(storage), DType::U8, &[storage.len()]).unwrap();
    download(stream, &view)
}

#[test]
fn codes_and_scales_follow_their_definition() {
    let _others = with_others();
    let Some(backend) = opened(LAZY) else { return };
    let (rows, tokens) = (rows(), 64);
    let shape = KvShape {
        num_layers: 1,
        num_blocks: 4,
        block_size: 16,
        k_heads: 1,
        v_heads: 1,
        k_dim: DIM,
        v_dim: DIM,
        format: KvFormat::Int8 { group: GROUP },
        order: BlockOrder::TokenMajor,
    };
    let arena = arena(backend.as_ref(), shape);
    let floats: Vec<u8> = rows.iter().flat_map(|x| x.to_ne_bytes()).collect();
    let view = upload(backend.as_ref(), DType::F32, &[tokens, 1, DIM], &floats);
    let stream = backend.stream().unwrap();
    let slots = WriteSlots::unchecked((0..tokens as i64).collect::<Vec<_>>());
    let (k, v) = (view.clone(), view);
    stream.scatter(&Scatter { arena: arena.clone(), layer: 0, k, v, slots, rotation: None }).unwrap();
    let plane = arena.k_plane();
    let codes = bytes_of(stream.as_ref(), plane.storage);
    let scales = bytes_of(stream.as_ref(), plane.scales.unwrap().0);
    for (token, row) in rows.chunks_exact(DIM).enumerate() {
        let (mut expected, mut of_groups) = (vec![0; DIM], vec![f16::ZERO; DIM / GROUP]);
        IntKind::Int8.encode_row(row, GROUP, &mut expected, &mut of_groups).unwrap();
        for (group, scale) in of_groups.iter().enumerate() {
            let number = token * (DIM / GROUP) + group;
            let got = f16::from_ne_bytes([scales[2 * number], scales[2 * number + 1]]);
            assert!(got == *scale || (got.is_nan() && scale.is_nan()), "group {number}: {got} for {scale}");
            let part = token * DIM + group * GROUP..token * DIM + (group + 1) * GROUP;
            let codes = &codes[part];
            // Codes that read back as NaN are arbitrary.
            if !scale.is_nan() {
                assert_eq!(codes, &expected[group * GROUP..(group + 1) * GROUP], "group {number}: {row:?}");
            }
        }
    }
}
