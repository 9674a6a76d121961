//! Quantised caches: every format with every kernel.

use std::sync::Arc;

use kvcore::{
    BlockOrder, CopyBlocks, DType, Dequantize, Error, Fp8Kind, Gather, KeyForm, KvArena, KvFormat, KvPlane,
    KvShape, Quantize, RotateKeys, Rotation, ScaleScope, Scatter, SwapBlocks, TensorView, WriteSlots,
};

use super::attend::{AttendTrial, entry, reused, rows, segment};
use super::blocks::{for_tokens, pairs, yarn};
use crate::bench::{Bench, Failure, Outcome, ensure, equal, numbers, rounded, rounded_once};
use crate::oracle;

const fn fp8(kind: Fp8Kind, scales: ScaleScope) -> KvFormat {
    KvFormat::Fp8 { kind, scales }
}

const FORMATS: [KvFormat; 8] = [
    KvFormat::Int8 { group: 8 },
    KvFormat::Int8 { group: 2 },
    KvFormat::Int4 { group: 8 },
    KvFormat::Int4 { group: 4 },
    fp8(Fp8Kind::E4M3, ScaleScope::PerTensor),
    fp8(Fp8Kind::E4M3, ScaleScope::PerHead),
    fp8(Fp8Kind::E5M2, ScaleScope::PerTensor),
    fp8(Fp8Kind::E5M2, ScaleScope::PerHead),
];
const SLOTS: [i64; 4] = [35, 0, -1, 7];
const TOKENS: [usize; 3] = [0, 1, 3];

/// Checks a claim for every format. A backend must refuse the formats that it does not list.
pub(super) fn each(b: &Bench, claim: impl Fn(KvFormat) -> Outcome) -> Outcome {
    let capabilities = b.backend.capabilities();
    FORMATS.into_iter().try_for_each(|format| {
        let outcome = claim(format);
        if capabilities.accepts(format) {
            outcome.map_err(|f| Failure { message: format!("{format}: {}", f.message), ..f })
        } else {
            super::refused(b, format.name(), outcome)
        }
    })
}

fn arena(b: &Bench, format: KvFormat, order: BlockOrder) -> Outcome<KvArena> {
    let shape = b.arena(order)?.layout().shape().clone();
    let arena = b.arena_of(KvShape { format, k_heads: 2, v_heads: 3, k_dim: 16, v_dim: 8, ..shape })?;
    if let (Some(k), Some(v)) = (arena.layout().k_scales(), arena.layout().v_scales())
        && k.is_static()
    {
        let scales = |bytes: usize| (0..bytes / 4).map(|i| 0.01 + 0.002 * i as f32).collect::<Vec<_>>();
        arena.set_scales(b.stream.as_ref(), &scales(k.bytes), &scales(v.bytes))?;
    }
    Ok(arena)
}

/// Returns one row per slot of a plane. Most elements are small, and some are fifty times as large.
fn outliers(plane: &KvPlane, seed: u32) -> Vec<f32> {
    let n = SLOTS.len() * plane.heads * plane.dim;
    numbers(seed, n).iter().enumerate().map(|(i, x)| if i % 11 == 3 { *x } else { x / 50.0 }).collect()
}

fn scatter(b: &Bench, arena: &KvArena, dtype: DType, k: &[f32], v: &[f32]) -> Outcome {
    let rows =
        |plane: KvPlane, values: &[f32]| b.upload(dtype, &[SLOTS.len(), plane.heads, plane.dim], values);
    Ok(b.stream.scatter(&Scatter {
        arena: arena.clone(),
        layer: 1,
        k: rows(arena.k_plane(), k)?,
        v: rows(arena.v_plane(), v)?,
        slots: WriteSlots::unchecked(SLOTS),
        rotation: None,
    })?)
}

/// Returns gathered rows of K and V.
fn gather(
    b: &Bench,
    arena: &KvArena,
    dtype: DType,
    rotation: Option<Rotation>,
) -> Outcome<(Vec<f32>, Vec<f32>)> {
    let rows = |plane: KvPlane| b.tensor(dtype, &[SLOTS.len(), plane.heads, plane.dim]);
    let (k, v) = (rows(arena.k_plane())?, rows(arena.v_plane())?);
    b.stream.gather(&Gather {
        arena: arena.clone(),
        layer: 1,
        slots: SLOTS.into(),
        k: k.clone(),
        v: v.clone(),
        rotation,
    })?;
    Ok((b.download(&k)?, b.download(&v)?))
}

/// Reads a plane's rows at [`SLOTS`] from `values`, the contents of the plane. Padding rows are zero.
fn stored(arena: &KvArena, plane: &KvPlane, values: &[f32]) -> Vec<f32> {
    let mut rows = Vec::new();
    for slot in SLOTS {
        for head in 0..plane.heads {
            match usize::try_from(slot) {
                Ok(slot) => {
                    let at = oracle::index(arena.layout(), plane.strides, 1, slot, head);
                    rows.extend_from_slice(&values[at..at + plane.dim]);
                }
                Err(_) => rows.extend(vec![0.0; plane.dim]),
            }
        }
    }
    rows
}

/// Returns the number of elements per scale in a head's row, and the static scale, if there is one.
fn scale_of(b: &Bench, plane: &KvPlane, layer: usize, head: usize) -> Outcome<(usize, f64)> {
    match (plane.format, plane.scales) {
        (KvFormat::Int8 { group } | KvFormat::Int4 { group }, _) => Ok((group, 0.0)),
        (_, Some((storage, scales))) => {
            let n = scales.bytes / 4;
            let all = b.download(&TensorView::new(Arc::clone(storage), DType::F32, &[n])?)?;
            Ok((plane.dim, f64::from(all[scales.strides.at(layer, 0, 0, head)])))
        }
        (format, None) => Err(Failure::new(format!("{format} without scales"))),
    }
}

/// Checks that every element of `actual` matches `row` within the format's error bound.
fn within_bound(
    what: &str,
    format: KvFormat,
    group: usize,
    scale: f64,
    actual: &[f32],
    row: &[f32],
) -> Outcome {
    for (part, expected) in actual.chunks(group).zip(row.chunks(group)) {
        let amax = expected.iter().fold(0f64, |m, x| m.max(f64::from(x.abs())));
        for (&a, &e) in part.iter().zip(expected) {
            let allowed = oracle::error_bound(format, f64::from(e), amax, scale) * 1.0001 + 1e-7;
            let near = (f64::from(a) - f64::from(e)).abs() <= allowed;
            ensure(near, || format!("{what}: {e} became {a}, allowed is {allowed}"))?;
        }
    }
    Ok(())
}

pub(super) fn rows_read_back_within_the_bound_of_their_format(b: &Bench) -> Outcome {
    each(b, |format| {
        for order in [BlockOrder::HeadMajor, BlockOrder::TokenMajor] {
            let arena = arena(b, format, order)?;
            let (k, v) = (arena.k_plane(), arena.v_plane());
            let (rows_k, rows_v) = (outliers(&k, 50), outliers(&v, 51));
            scatter(b, &arena, b.dtype, &rows_k, &rows_v)?;
            let (all_k, all_v) = b.contents(&arena)?;
            for (plane, rows, all) in [(&k, &rows_k, &all_k), (&v, &rows_v, &all_v)] {
                let (rows, kept) = (rounded(b.dtype, rows), stored(&arena, plane, all));
                for (i, (row, kept)) in rows.chunks(plane.dim).zip(kept.chunks(plane.dim)).enumerate() {
                    if TOKENS.contains(&(i / plane.heads)) {
                        let (group, scale) = scale_of(b, plane, 1, i % plane.heads)?;
                        within_bound("a scattered row", format, group, scale, kept, row)?;
                    }
                }
                let (written, nonzero) = (TOKENS.len() * plane.heads * plane.dim, |x: &&f32| **x != 0.0);
                let count = all.iter().filter(nonzero).count();
                ensure(count <= written, || format!("{count} elements are set, {written} were written"))?;
            }
            for dtype in DType::COMPUTE {
                let (got_k, got_v) = gather(b, &arena, dtype, None)?;
                equal("gathered K", &got_k, &rounded(dtype, &stored(&arena, &k, &all_k)))?;
                equal("gathered V", &got_v, &rounded(dtype, &stored(&arena, &v, &all_v)))?;
            }
        }
        Ok(())
    })
}

pub(super) fn what_is_not_finite_never_becomes_finite(b: &Bench) -> Outcome {
    each(b, |format| {
        let arena = arena(b, format, BlockOrder::TokenMajor)?;
        let (k, v) = (arena.k_plane(), arena.v_plane());
        let mut rows_k = outliers(&k, 52);
        for (token, x) in TOKENS.into_iter().zip([f32::NAN, f32::INFINITY, f32::NEG_INFINITY]) {
            rows_k[token * 32 + 9 * token] = x;
        }
        let rows_v = vec![0.0; SLOTS.len() * v.heads * v.dim];
        scatter(b, &arena, b.dtype, &rows_k, &rows_v)?;
        let (got, zeros) = gather(b, &arena, DType::F32, None)?;
        equal("zeros", &zeros, &rows_v)?;
        let group = scale_of(b, &k, 1, 0)?.0;
        for (token, (got, row)) in got.chunks(32).zip(rows_k.chunks(32)).enumerate() {
            if !TOKENS.contains(&token) {
                continue;
            }
            for (got, row) in got.chunks(group).zip(row.chunks(group)) {
                let spoiled = row.iter().any(|x| !x.is_finite());
                for (x, y) in got.iter().zip(row) {
                    let right = match format {
                        KvFormat::Int8 { .. } | KvFormat::Int4 { .. } => x.is_nan() == spoiled,
                        KvFormat::Fp8 { kind: Fp8Kind::E5M2, .. } if y.is_infinite() => x == y,
                        _ => x.is_nan() != y.is_finite(),
                    };
                    ensure(right, || format!("{y} became {x}"))?;
                }
            }
        }
        Ok(())
    })
}

pub(super) fn gathered_keys_are_rotated_in_f32(b: &Bench) -> Outcome {
    each(b, |format| {
        let (arena, rope) = (arena(b, format, BlockOrder::HeadMajor)?, yarn()?);
        let (all, _) = b.fill(&arena, 53)?;
        let plane = arena.k_plane();
        let rotation = Some(Rotation { rope: rope.clone(), delta: -321 });
        let (got, _) = gather(b, &arena, b.dtype, rotation)?;
        let rows = stored(&arena, &plane, &all);
        for (got, row) in got.chunks(plane.dim).zip(rows.chunks(plane.dim)) {
            let expected: Vec<f32> =
                oracle::rotate(row, &rope, -321, 1.0).iter().map(|&x| x as f32).collect();
            rounded_once("rotated keys", b.dtype, got, &expected)?;
        }
        Ok(())
    })
}

pub(super) fn copies_move_codes_and_scales(b: &Bench) -> Outcome {
    each(b, |format| {
        let src = arena(b, format, BlockOrder::TokenMajor)?;
        let (k0, v0) = b.fill(&src, 54)?;
        b.stream.copy_blocks(&CopyBlocks { arena: src.clone(), pairs: pairs(&[(2, 8), (5, 1)]) })?;
        let (k1, v1) = b.contents(&src)?;
        for block in [(2, 8), (5, 1), (2, 2), (0, 0), (7, 7)] {
            for_tokens((&src, &k0), (&src, &k1), block, true, |_, old, new| equal("K", new, old))?;
            for_tokens((&src, &v0), (&src, &v1), block, false, |_, old, new| equal("V", new, old))?;
        }
        let dst = arena(b, format, BlockOrder::HeadMajor)?;
        b.fill(&dst, 54)?; // the same static scales
        b.stream.swap_blocks(&SwapBlocks { src: src.clone(), dst: dst.clone(), pairs: pairs(&[(3, 0)]) })?;
        let (k2, v2) = b.contents(&dst)?;
        for_tokens((&src, &k0), (&dst, &k2), (3, 0), true, |_, old, new| equal("swapped K", new, old))?;
        for_tokens((&src, &v0), (&dst, &v2), (3, 0), false, |_, old, new| equal("swapped V", new, old))?;
        let other = arena(b, KvFormat::Int8 { group: 4 }, BlockOrder::HeadMajor)?;
        let mixed = b.stream.swap_blocks(&SwapBlocks { src, dst: other, pairs: pairs(&[(3, 0)]) });
        ensure(matches!(mixed, Err(Error::Mismatch { .. })), || format!("two formats gave {mixed:?}"))
    })
}

pub(super) fn rotated_keys_are_quantised_again(b: &Bench) -> Outcome {
    each(b, |format| {
        let (arena, rope) = (arena(b, format, BlockOrder::TokenMajor)?, yarn()?);
        let (k0, v0) = b.fill(&arena, 55)?;
        let rotation = Rotation { rope: rope.clone(), delta: 777 };
        let (src, dst) = (arena.clone(), arena.clone());
        b.stream.rotate_keys(&RotateKeys { src, dst, layer: 1, pairs: pairs(&[(0, 7)]), rotation })?;
        let (k1, v1) = b.contents(&arena)?;
        let plane = arena.k_plane();
        let mut head = 0;
        for_tokens((&arena, &k0), (&arena, &k1), (0, 7), true, |layer, old, new| {
            let (group, scale) = scale_of(b, &plane, layer, head % plane.heads)?;
            head += 1;
            if layer == 0 {
                return Ok(());
            }
            let there: Vec<f32> = oracle::rotate(old, &rope, 777, 1.0).iter().map(|&x| x as f32).collect();
            within_bound("a key moved by a distance", format, group, scale, new, &there)
        })?;
        for_tokens((&arena, &v0), (&arena, &v1), (0, 7), false, |layer, old, new| {
            if layer == 1 { equal("values", new, old) } else { Ok(()) }
        })?;
        for_tokens((&arena, &k0), (&arena, &k1), (0, 0), true, |_, old, new| equal("the original", new, old))
    })
}

pub(super) fn attend_reads_quantised_blocks(b: &Bench) -> Outcome {
    each(b, |format| {
        for order in [BlockOrder::HeadMajor, BlockOrder::TokenMajor] {
            let at = rows(&[(9, 46), (10, 47), (5, 5)]);
            let batch = vec![entry(0..2, reused(40, &[0, 2])), entry(2..3, vec![segment(&[1, 8], 6, 0, 0)])];
            let mut trial = AttendTrial::over(b, arena(b, format, order)?, &at, batch)?;
            trial.check(b, "quantised blocks")?;
            trial.op.keys = KeyForm::Unrotated;
            trial.check(b, "quantised blocks of keys that are not rotated")?;
        }
        Ok(())
    })
}

pub(super) fn blocks_are_quantised_and_back(b: &Bench) -> Outcome {
    each(b, |format| {
        let quantised = arena(b, format, BlockOrder::HeadMajor)?;
        let shape = KvShape { order: BlockOrder::TokenMajor, ..quantised.layout().shape().clone() };
        let dense = b.arena_of(KvShape { format: b.dtype.into(), num_blocks: 5, ..shape })?;
        let (k0, v0) = b.fill(&dense, 56)?;
        let list = pairs(&[(4, 8), (1, 0)]);
        b.stream.quantize(&Quantize { src: dense.clone(), dst: quantised.clone(), pairs: list })?;
        let (k1, v1) = b.contents(&quantised)?;
        for (keys, old, new) in [(true, &k0, &k1), (false, &v0, &v1)] {
            let plane = if keys { quantised.k_plane() } else { quantised.v_plane() };
            for block in [(4, 8), (1, 0)] {
                let mut head = 0;
                for_tokens((&dense, old), (&quantised, new), block, keys, |layer, old, new| {
                    let (group, scale) = scale_of(b, &plane, layer, head % plane.heads)?;
                    head += 1;
                    within_bound("a quantised row", format, group, scale, new, old)
                })?;
            }
            for_tokens((&quantised, new), (&quantised, new), (3, 3), keys, |_, _, row| {
                equal("an untouched block", row, &vec![0.0; row.len()])
            })?;
        }
        let back = pairs(&[(8, 0), (0, 2)]);
        b.stream.dequantize(&Dequantize { src: quantised.clone(), dst: dense.clone(), pairs: back })?;
        let (k2, v2) = b.contents(&dense)?;
        for (keys, old, new) in [(true, &k1, &k2), (false, &v1, &v2)] {
            for block in [(8, 0), (0, 2)] {
                for_tokens((&quantised, old), (&dense, new), block, keys, |_, old, new| {
                    equal("a dequantised row", new, &rounded(b.dtype, old))
                })?;
            }
        }
        for_tokens((&dense, &k0), (&dense, &k2), (4, 4), true, |_, old, new| equal("another block", new, old))
    })
}

pub(super) fn wrong_conversions_are_refused(b: &Bench) -> Outcome {
    each(b, |format| {
        let quantised = arena(b, format, BlockOrder::TokenMajor)?;
        let shape = KvShape { format: b.dtype.into(), ..quantised.layout().shape().clone() };
        let dense = b.arena_of(shape.clone())?;
        let other = b.arena_of(KvShape { block_size: 8, ..shape })?;
        let quantize = |src: &KvArena, dst: &KvArena, list: &[(u32, u32)]| {
            b.stream.quantize(&Quantize { src: src.clone(), dst: dst.clone(), pairs: pairs(list) })
        };
        let dequantize = |src: &KvArena, dst: &KvArena, list: &[(u32, u32)]| {
            b.stream.dequantize(&Dequantize { src: src.clone(), dst: dst.clone(), pairs: pairs(list) })
        };
        quantize(&dense, &quantised, &[(0, 0)])?;
        dequantize(&quantised, &dense, &[(0, 0)])?;
        for (what, result) in [
            ("a dense destination", quantize(&dense, &other, &[(0, 0)])),
            ("a quantised source", quantize(&quantised, &quantised, &[(0, 1)])),
            ("a quantised destination", dequantize(&quantised, &quantised, &[(0, 1)])),
            ("a dense source", dequantize(&dense, &other, &[(0, 1)])),
            ("blocks of another size", quantize(&other, &quantised, &[(0, 0)])),
            ("a source past the end", quantize(&dense, &quantised, &[(9, 0)])),
            ("a destination past the end", dequantize(&quantised, &dense, &[(0, 9)])),
            ("a destination twice", dequantize(&quantised, &dense, &[(0, 1), (2, 1)])),
        ] {
            ensure(result.is_err(), || format!("{what} was accepted"))?;
        }
        Ok(())
    })
}
