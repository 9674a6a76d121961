//! Cases for scatter and gather.

use std::sync::Arc;

use kvcore::{
    BlockOrder, DType, Error, Gather, KvArena, KvPlane, KvShape, Pairing, Rope, RopeConfig, Rotation,
    RowRotation, Scatter, TensorView, WriteSlots,
};

use crate::bench::{Bench, Failure, Outcome, ensure, equal, numbers, rounded, rounded_once};
use crate::oracle;

const ORDERS: [BlockOrder; 2] = [BlockOrder::HeadMajor, BlockOrder::TokenMajor];
/// Slots out of order, in several blocks, with padding.
const SLOTS: [i64; 6] = [35, 0, -1, 7, 20, -9];

fn scatter(arena: &KvArena, layer: usize, k: TensorView, v: TensorView, slots: &[i64]) -> Scatter {
    Scatter { arena: arena.clone(), layer, k, v, slots: WriteSlots::unchecked(slots), rotation: None }
}

/// Returns a plane's values after rows `[n, heads, dim]` were stored in `slots` of `layer`.
fn placed(
    arena: &KvArena,
    plane: KvPlane,
    mut values: Vec<f32>,
    rows: &[f32],
    layer: usize,
    slots: &[i64],
) -> Vec<f32> {
    for (i, row) in rows.chunks(plane.dim).enumerate().filter(|(i, _)| slots[i / plane.heads] >= 0) {
        let slot = slots[i / plane.heads] as usize;
        let at = oracle::index(arena.layout(), plane.strides, layer, slot, i % plane.heads);
        values[at..at + plane.dim].copy_from_slice(row);
    }
    values
}

pub(super) fn scatter_puts_rows_where_slots_say(b: &Bench) -> Outcome {
    for order in ORDERS {
        let arena = b.arena(order)?;
        let (k0, v0) = b.fill(&arena, 3)?;
        let (k, v) = (numbers(4, 6 * 20), numbers(5, 6 * 12));
        let op = scatter(
            &arena,
            1,
            b.upload(b.dtype, &[6, 2, 10], &k)?,
            b.upload(b.dtype, &[6, 2, 6], &v)?,
            &SLOTS,
        );
        b.stream.scatter(&op)?;
        let (k1, v1) = b.contents(&arena)?;
        equal("K", &k1, &placed(&arena, arena.k_plane(), k0, &rounded(b.dtype, &k), 1, &SLOTS))?;
        equal("V", &v1, &placed(&arena, arena.v_plane(), v0, &rounded(b.dtype, &v), 1, &SLOTS))?;
    }
    Ok(())
}

pub(super) fn k_and_v_may_differ_in_heads(b: &Bench) -> Outcome {
    for (order, k_heads, v_heads) in [(ORDERS[0], 2, 6), (ORDERS[1], 4, 1)] {
        let shape = b.arena(order)?.layout().shape().clone();
        let arena = b.arena_of(KvShape { k_heads, v_heads, ..shape })?;
        let (k0, v0) = b.fill(&arena, 13)?;
        let (k, v) = (numbers(14, 6 * k_heads * 10), numbers(15, 6 * v_heads * 6));
        let (k, v) = (rounded(b.dtype, &k), rounded(b.dtype, &v));
        let rows_k = b.upload(b.dtype, &[6, k_heads, 10], &k)?;
        let rows_v = b.upload(b.dtype, &[6, v_heads, 6], &v)?;
        b.stream.scatter(&scatter(&arena, 1, rows_k.clone(), rows_v.clone(), &SLOTS))?;
        let (k1, v1) = b.contents(&arena)?;
        equal("K", &k1, &placed(&arena, arena.k_plane(), k0, &k, 1, &SLOTS))?;
        equal("V", &v1, &placed(&arena, arena.v_plane(), v0, &v, 1, &SLOTS))?;
        let (out_k, out_v) = (b.tensor(b.dtype, &[6, k_heads, 10])?, b.tensor(b.dtype, &[6, v_heads, 6])?);
        b.stream.gather(&Gather {
            arena: arena.clone(),
            layer: 1,
            slots: SLOTS.into(),
            k: out_k.clone(),
            v: out_v.clone(),
            rotation: None,
        })?;
        for (what, out, rows) in [("K rows", out_k, k), ("V rows", out_v, v)] {
            let (got, width) = (b.download(&out)?, rows.len() / 6);
            for row in [0, 1, 3, 4] {
                equal(what, &got[row * width..][..width], &rows[row * width..][..width])?;
            }
        }
        let swapped = b.stream.scatter(&scatter(
            &arena,
            0,
            b.tensor(b.dtype, &[6, v_heads, 10])?,
            b.tensor(b.dtype, &[6, k_heads, 6])?,
            &SLOTS,
        ));
        ensure(matches!(swapped, Err(Error::Mismatch { .. })), || format!("swapped heads gave {swapped:?}"))?;
    }
    Ok(())
}

pub(super) fn scatter_takes_head_major_rows(b: &Bench) -> Outcome {
    let arena = b.arena(BlockOrder::HeadMajor)?;
    let (k, v) = (numbers(6, 2 * 3 * 10), numbers(7, 2 * 3 * 6));
    let heads_first = |dim, values: &[f32]| -> Outcome<TensorView> {
        Ok(b.upload(b.dtype, &[2, 3, dim], values)?.permute(&[1, 0, 2])?)
    };
    b.stream.scatter(&scatter(&arena, 0, heads_first(10, &k)?, heads_first(6, &v)?, &[1, 2, 30]))?;
    let tokens_first: Vec<f32> = (0..3)
        .flat_map(|t| (0..2).flat_map(move |h| (0..10).map(move |i| (h * 3 + t) * 10 + i)))
        .map(|i| k[i])
        .collect();
    let empty = vec![0.0; arena.layout().k_bytes() * 8 / b.dtype.bits()];
    let expected = placed(&arena, arena.k_plane(), empty, &rounded(b.dtype, &tokens_first), 0, &[1, 2, 30]);
    equal("K from head-major rows", &b.contents(&arena)?.0, &expected)
}

pub(super) fn scatter_rounds_f32_rows(b: &Bench) -> Outcome {
    let arena = b.arena(BlockOrder::TokenMajor)?;
    let (k, v) = (numbers(8, 20), numbers(9, 12));
    let rows = scatter(
        &arena,
        0,
        b.upload(DType::F32, &[1, 2, 10], &k)?,
        b.upload(DType::F32, &[1, 2, 6], &v)?,
        &[5],
    );
    b.stream.scatter(&rows)?;
    let empty = vec![0.0; arena.layout().k_bytes() * 8 / b.dtype.bits()];
    equal(
        "K rounded to nearest even",
        &b.contents(&arena)?.0,
        &placed(&arena, arena.k_plane(), empty, &rounded(b.dtype, &k), 0, &[5]),
    )
}

pub(super) fn scatter_keeps_nan_and_infinity(b: &Bench) -> Outcome {
    let arena = b.arena(BlockOrder::TokenMajor)?;
    let mut k = vec![1.0; 20];
    (k[0], k[7], k[19]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY);
    let v = vec![f32::NAN; 12];
    b.stream.scatter(&scatter(
        &arena,
        0,
        b.upload(b.dtype, &[1, 2, 10], &k)?,
        b.upload(b.dtype, &[1, 2, 6], &v)?,
        &[0],
    ))?;
    let (stored, values) = b.contents(&arena)?;
    equal("K", &stored[..20], &k)?;
    equal("V", &values[..12], &v)
}

pub(super) fn wrong_scatters_are_refused_and_write_nothing(b: &Bench) -> Outcome {
    let arena = b.arena(BlockOrder::TokenMajor)?;
    let (k0, v0) = b.fill(&arena, 1)?;
    let (k, v) = (b.tensor(b.dtype, &[2, 2, 10])?, b.tensor(b.dtype, &[2, 2, 6])?);
    let mut wrong = vec![
        ("a slot past the end", scatter(&arena, 0, k.clone(), v.clone(), &[0, 36])),
        ("a layer past the end", scatter(&arena, 2, k.clone(), v.clone(), &[0, 1])),
        ("more slots than rows", scatter(&arena, 0, k.clone(), v.clone(), &[0, 1, 2])),
        ("V of K's width", scatter(&arena, 0, k.clone(), k.clone(), &[0, 1])),
        ("heads as the last axis", scatter(&arena, 0, k.permute(&[0, 2, 1])?, v.clone(), &[0, 1])),
    ];
    if b.dtype != DType::F16 {
        let other = b.tensor(DType::F16, &[2, 2, 10])?;
        wrong.push(("another element type", scatter(&arena, 0, other, v, &[0, 1])));
    }
    for (what, op) in wrong {
        if b.stream.scatter(&op).is_ok() {
            return Err(Failure::new(format!("{what} was accepted")));
        }
    }
    let (k1, v1) = b.contents(&arena)?;
    equal("K after refused scatters", &k1, &k0)?;
    equal("V after refused scatters", &v1, &v0)
}

pub(super) fn gather_reads_what_scatter_wrote(b: &Bench) -> Outcome {
    for order in ORDERS {
        let arena = b.arena(order)?;
        b.fill(&arena, 2)?;
        let (k, v) = (numbers(10, 6 * 20), numbers(11, 6 * 12));
        let (rows_k, rows_v) = (b.upload(b.dtype, &[6, 2, 10], &k)?, b.upload(b.dtype, &[6, 2, 6], &v)?);
        b.stream.scatter(&scatter(&arena, 1, rows_k, rows_v, &SLOTS))?;
        let marker = vec![0.5; 6 * 20];
        let (out_k, out_v) = (b.upload(b.dtype, &[6, 2, 10], &marker)?, b.tensor(b.dtype, &[6, 2, 6])?);
        let op = Gather {
            arena: arena.clone(),
            layer: 1,
            slots: SLOTS.into(),
            k: out_k.clone(),
            v: out_v.clone(),
            rotation: None,
        };
        b.stream.gather(&op)?;
        let (mut k, mut v) = (rounded(b.dtype, &k), rounded(b.dtype, &v));
        for padded in [2, 5] {
            k[padded * 20..][..20].fill(0.5);
            v[padded * 12..][..12].fill(0.0);
        }
        equal("K rows", &b.download(&out_k)?, &k)?;
        equal("V rows", &b.download(&out_v)?, &v)?;
    }
    Ok(())
}

pub(super) fn scatter_rotates_keys_on_the_way(b: &Bench) -> Outcome {
    let positions: [i64; 6] = [0, 1, i64::MAX, 1500, 37, i64::MIN];
    for (order, pairing, dtype) in [
        (BlockOrder::TokenMajor, Pairing::HalfSplit, b.dtype),
        (BlockOrder::HeadMajor, Pairing::Interleaved, b.dtype),
        (BlockOrder::TokenMajor, Pairing::Interleaved, DType::F32),
    ] {
        let yarn = super::blocks::yarn()?;
        let config = RopeConfig { pairing, rotary_dim: 8, ..yarn.config().clone() };
        let rope = Arc::new(Rope::new(config, 4096)?);
        let arena = b.arena(order)?;
        let (k0, v0) = b.fill(&arena, 13)?;
        let (k, v) = (rounded(dtype, &numbers(14, 6 * 20)), rounded(dtype, &numbers(15, 6 * 12)));
        let rows = (b.upload(dtype, &[6, 2, 10], &k)?, b.upload(dtype, &[6, 2, 6], &v)?);
        let rotation = RowRotation { rope: Arc::clone(&rope), positions: positions.into() };
        let op = Scatter { rotation: Some(rotation), ..scatter(&arena, 1, rows.0, rows.1, &SLOTS) };
        b.stream.scatter(&op)?;
        let factor = f64::from(rope.attention_factor());
        let rotated = |(i, row): (usize, &[f32])| {
            // Padding has no position.
            let position = if SLOTS[i / 2] < 0 { 0 } else { positions[i / 2] };
            oracle::rotate(row, &rope, position, factor)
        };
        let k: Vec<f32> = k.chunks(10).enumerate().flat_map(rotated).map(|x| x as f32).collect();
        let (k1, v1) = b.contents(&arena)?;
        rounded_once("rotated keys", b.dtype, &k1, &placed(&arena, arena.k_plane(), k0, &k, 1, &SLOTS))?;
        let v = rounded(b.dtype, &v);
        equal("values", &v1, &placed(&arena, arena.v_plane(), v0, &v, 1, &SLOTS))?;
        let rows = (b.tensor(dtype, &[1, 2, 10])?, b.tensor(dtype, &[1, 2, 6])?);
        for (what, positions) in [("a position past the table", vec![4096]), ("no position", vec![])] {
            let rotation = RowRotation { rope: Arc::clone(&rope), positions: positions.into() };
            let rows = (rows.0.clone(), rows.1.clone());
            let op = Scatter { rotation: Some(rotation), ..scatter(&arena, 1, rows.0, rows.1, &[0]) };
            ensure(b.stream.scatter(&op).is_err(), || format!("{what} was accepted"))?;
        }
    }
    Ok(())
}

pub(super) fn gather_rotates_keys_on_the_way(b: &Bench) -> Outcome {
    let arena = b.arena(BlockOrder::TokenMajor)?;
    let (k0, _) = b.fill(&arena, 12)?;
    let rope = Arc::new(Rope::new(RopeConfig { rotary_dim: 8, ..RopeConfig::new(10, 100.0) }, 4096)?);
    let (k, v) = (b.tensor(b.dtype, &[2, 2, 10])?, b.tensor(b.dtype, &[2, 2, 6])?);
    let mut op = Gather {
        arena: arena.clone(),
        layer: 0,
        slots: [6, 21].into(),
        k: k.clone(),
        v,
        rotation: Some(Rotation { rope: Arc::clone(&rope), delta: -321 }),
    };
    b.stream.gather(&op)?;
    let mut expected = Vec::new();
    for slot in [6, 21] {
        for head in 0..2 {
            let at = oracle::index(arena.layout(), arena.layout().k_strides(), 0, slot, head);
            expected.extend(oracle::rotate(&k0[at..at + 10], &rope, -321, 1.0).iter().map(|&x| x as f32));
        }
    }
    rounded_once("rotated keys", b.dtype, &b.download(&k)?, &expected)?;
    op.rotation = Some(Rotation { rope, delta: 4096 });
    let far = b.stream.gather(&op);
    ensure(matches!(far, Err(Error::OutOfRange { .. })), || format!("a distance past the table gave {far:?}"))
}
