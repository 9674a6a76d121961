//! The attention mass of tokens: their softmax weights, summed over rows and heads.

use std::any::Any;
use std::sync::Arc;

use kvcore::{
    Attend, AttendMass, AttendRows, AttendWork, BlockOrder, DType, Dims, Error, KeyForm, KvShape, MemoryKind,
    MergeGroup, Pairing, QueryRow, Rope, RopeConfig, SelectionUnit, Storage, TensorView,
};

use super::attend::{AttendTrial, HEADS, after_a_chunk, entry, reused, rows, segment, with_batch};
use super::mla::{Latents, mixed};
use super::quant::each;
use super::sparse::select;
use crate::bench::{Bench, Failure, Outcome, close, ensure, equal};
use crate::oracle;

/// Runs an attention, and checks the mass of each of its entries.
fn check(b: &Bench, trial: &AttendTrial, what: &str) -> Outcome {
    b.stream.attend(&trial.op)?;
    check_entries(b, trial, None, what)
}

/// Runs an attention over latents, and checks the mass of each of its entries.
fn check_latents(b: &Bench, latents: &Latents, what: &str) -> Outcome {
    let op = latents.op(b)?;
    b.stream.attend_mla(&op)?;
    check_entries(b, &latents.trial, Some((&op.q_latent, &latents.q_latent)), what)
}

fn check_entries(
    b: &Bench,
    trial: &AttendTrial,
    latent: Option<(&TensorView, &Vec<f32>)>,
    what: &str,
) -> Outcome {
    let AttendTrial { op, q, k, v } = trial;
    let (q_latent, of_latents) = latent.unzip();
    for (index, rows) in op.work.batch().iter().enumerate() {
        // The sums lie in a larger tensor, whose other elements must not change.
        let n = rows.tokens_before();
        let before: Vec<f32> = (0..n + 5).map(|i| i as f32 / 8.0).collect();
        let run = || {
            let whole = b.upload(DType::F32, &[n + 5], &before)?;
            let mass = AttendMass {
                attend: op.clone(),
                q_latent: q_latent.cloned(),
                entry: index,
                sums: whole.slice(0, 3, n + 3)?,
            };
            b.stream.attend_mass(&mass)?;
            Ok::<_, Failure>((b.download(&whole)?, mass))
        };
        let (sums, mass) = run()?;
        let queries = (&q[..], of_latents.map(Vec::as_slice));
        let mut expected = before.clone();
        expected[3..n + 3].copy_from_slice(&oracle::attend_mass(&mass, queries, (k, v), &before[3..n + 3]));
        close(&format!("{what}, entry {index}"), &sums, &expected, 2e-5)?;
        equal(&format!("{what}, entry {index} again"), &run()?.0, &sums)?;
    }
    Ok(())
}

/// Rows of several sequences: a question after a chunk at an offset, a decode row, and a row without reused
/// tokens.
pub(super) fn weights_are_added_for_each_token(b: &Bench) -> Outcome {
    for order in [BlockOrder::HeadMajor, BlockOrder::TokenMajor] {
        let at = rows(&[(9, 46), (10, 47), (3, 3), (30, 507), (4, 4)]);
        // row 2 is in no entry
        let batch = vec![
            entry(0..2, reused(40, &[0, 2])),
            entry(3..4, reused(500, &[7, 1])),
            entry(4..5, vec![segment(&[3, 5], 5, 0, 0)]),
        ];
        let mut trial = AttendTrial::new(b, order, &at, batch)?;
        check(b, &trial, "several sequences")?;
        (trial.op.layer, trial.op.scale) = (0, 0.1);
        check(b, &trial, "another layer")?;
    }
    Ok(())
}

pub(super) fn heads_may_share_keys(b: &Bench) -> Outcome {
    for (order, k_heads, v_heads) in
        [(BlockOrder::HeadMajor, 1, 6), (BlockOrder::TokenMajor, 3, 1), (BlockOrder::TokenMajor, 6, 2)]
    {
        let shape = b.arena(order)?.layout().shape().clone();
        let arena = b.arena_of(KvShape { k_heads, v_heads, ..shape })?;
        let batch = vec![entry(0..2, reused(40, &[0, 2]))];
        let mut trial = AttendTrial::over(b, arena, &rows(&[(9, 46), (10, 47)]), batch)?;
        check(b, &trial, "heads that share keys")?;
        trial.op.rope = None;
        trial.op = with_batch(&trial.op, [entry(0..2, reused(0, &[0, 2]))]);
        check(b, &trial, "queries that are already rotated")?;
    }
    Ok(())
}

/// Row and block sizes that are whole numbers of matrix instructions' tiles, with more queries than fit into one
/// tile.
pub(super) fn many_queries_over_even_rows(b: &Bench) -> Outcome {
    let sizes = [
        (BlockOrder::TokenMajor, 16, 32, 64, (70, 70)),
        (BlockOrder::HeadMajor, 8, 64, 32, (13, 20)),
        (BlockOrder::TokenMajor, 16, 256, 16, (90, 9)),
    ];
    for (order, block_size, k_dim, v_dim, (stored, fresh)) in sizes {
        let (at, mut batch) = after_a_chunk(stored, fresh);
        let mut segments = batch[0].segments.to_vec();
        segments[0].blocks = (0..stored.div_ceil(block_size) as u32).map(kvcore::BlockId).collect();
        segments[1].blocks = (0..9).rev().map(kvcore::BlockId).collect();
        batch[0].segments = segments.into();
        let shape = b.arena(order)?.layout().shape().clone();
        let arena = b.arena_of(KvShape { block_size, k_dim, v_dim, ..shape })?;
        let mut trial = AttendTrial::over(b, arena, &at, batch)?;
        trial.op.scale = 0.1;
        check(b, &trial, "many queries")?;
        trial.op.window = Some(33);
        check(b, &trial, "many queries, a window")?;
    }
    Ok(())
}

pub(super) fn windows_factors_and_overlapping_positions(b: &Bench) -> Outcome {
    let at = rows(&[(9, 14), (10, 15)]);
    let mut segments = reused(8, &[0, 2]);
    (segments[0].logit_scale, segments[1].logit_scale) = (0.7, 1.6);
    segments[1].merge_group = 1;
    let mut trial = AttendTrial::new(b, BlockOrder::TokenMajor, &at, vec![entry(0..2, segments)])?;
    let groups = [MergeGroup::default(); 2];
    trial.op.work = Arc::new(AttendWork::with_groups(at, trial.op.work.batch(), groups));
    for window in [None, Some(1), Some(4), Some(9), Some(100)] {
        trial.op.window = window;
        check(b, &trial, "segments with factors")?;
    }
    trial.op.softcap = Some(1.5);
    check(b, &trial, "soft-capped logits")?;
    let work = &trial.op.work;
    let groups = [MergeGroup::default(), MergeGroup { lse_scale: 0.7 }];
    trial.op.work = Arc::new(AttendWork::with_groups(work.rows(), work.batch(), groups));
    check(b, &trial, "a log-sum-exp over groups with factors")?;
    // The last three segments start at the same position, and there are rows in each of them.
    let segments = vec![
        segment(&[4], 3, 0, 0),
        segment(&[0, 2], 6, 3, 3),
        segment(&[8, 1], 6, 9, 0).at_offset(3),
        segment(&[5, 7], 5, 15, 3),
    ];
    let at = rows(&[(3, 3), (8, 8), (9, 3), (17, 5), (19, 7)]);
    let mut trial = AttendTrial::new(b, BlockOrder::HeadMajor, &at, vec![entry(0..5, segments)])?;
    check(b, &trial, "overlapping positions")?;
    trial.op.window = Some(3);
    check(b, &trial, "overlapping positions in a window")
}

pub(super) fn empty_segments_and_rows_that_see_nothing(b: &Bench) -> Outcome {
    let nothing = || segment(&[], 0, 0, 0);
    let at = rows(&[(2, 2), (9, 9), (3, 3), (4, 4), (5, 5)]);
    let batch = vec![
        // The first row is before all tokens.
        entry(0..2, vec![nothing(), segment(&[1], 4, 5, 5), nothing(), segment(&[3, 6], 3, 9, 9)]),
        entry(2..3, vec![nothing(), nothing()]),
        entry(3..4, vec![]),
        // An entry without rows.
        entry(5..5, vec![segment(&[1], 4, 0, 0), segment(&[2], 1, 4, 4)]),
    ];
    check(b, &AttendTrial::new(b, BlockOrder::TokenMajor, &at, batch)?, "empty segments")
}

pub(super) fn keys_may_lie_unrotated(b: &Bench) -> Outcome {
    let interleaved = RopeConfig { pairing: Pairing::Interleaved, ..RopeConfig::new(10, 300.0) };
    for offset in [0, 3, 1000] {
        let at = rows(&[(9, offset + 6), (10, offset + 7)]);
        let mut trial =
            AttendTrial::new(b, BlockOrder::HeadMajor, &at, vec![entry(0..2, reused(offset, &[0, 2]))])?;
        trial.op.keys = KeyForm::Unrotated;
        check(b, &trial, "unrotated keys")?;
        trial.op.rope = Some(Arc::new(Rope::new(interleaved.clone(), 4096)?));
        trial.op.window = Some(7);
        check(b, &trial, "unrotated keys in a window")?;
        trial.op.keys = KeyForm::Rotated;
        check(b, &trial, "another pairing")?;
    }
    Ok(())
}

pub(super) fn quantised_blocks(b: &Bench) -> Outcome {
    each(b, |format| {
        for (order, keys) in [
            (BlockOrder::TokenMajor, KeyForm::Rotated),
            (BlockOrder::HeadMajor, KeyForm::Rotated),
            (BlockOrder::TokenMajor, KeyForm::Unrotated),
        ] {
            let shape = b.arena(order)?.layout().shape().clone();
            let arena = b.arena_of(KvShape { format, k_dim: 16, v_dim: 8, ..shape })?;
            let batch = vec![entry(0..2, reused(40, &[0, 2]))];
            let mut trial = AttendTrial::over(b, arena, &rows(&[(9, 46), (10, 47)]), batch)?;
            trial.op.keys = keys;
            check(b, &trial, "quantised blocks")?;
        }
        Ok(())
    })
}

pub(super) fn latents(b: &Bench) -> Outcome {
    each(b, |format| {
        let (at, batch) = mixed();
        let mut latents = Latents::new(b, BlockOrder::HeadMajor, format, &at, batch)?;
        check_latents(b, &latents, "latents")?;
        (latents.trial.op.window, latents.trial.op.softcap) = (Some(5), Some(2.0));
        check_latents(b, &latents, "latents with a window and a soft-cap")?;
        latents.trial.op.keys = KeyForm::Unrotated;
        check_latents(b, &latents, "latents with keys that are not rotated")
    })?;
    let (at, batch): (Vec<QueryRow>, Vec<AttendRows>) = after_a_chunk(13, 9);
    let shape = b.arena(BlockOrder::TokenMajor)?.layout().shape().clone();
    let shape = KvShape { block_size: 8, k_dim: 64, v_dim: 512, ..shape };
    let mut latents = Latents::over(b, &shape, &at, batch)?;
    latents.trial.op.scale = 0.05;
    check_latents(b, &latents, "latents of the usual widths")
}

pub(super) fn wrong_masses_are_refused(b: &Bench) -> Outcome {
    let at = rows(&[(9, 46), (10, 47)]);
    let op = AttendTrial::new(b, BlockOrder::TokenMajor, &at, vec![entry(0..2, reused(40, &[0, 2]))])?.op;
    b.stream.attend(&op)?;
    let sums = |n: usize| b.tensor(DType::F32, &[n]);
    let good = AttendMass { attend: op.clone(), q_latent: None, entry: 0, sums: sums(9)? };
    b.stream.attend_mass(&good)?;
    let view = |storage: &Arc<dyn Storage>, stride: usize| {
        let (shape, strides) = (Dims::new(&[9])?, Dims::new(&[stride])?);
        TensorView::with_strides(Arc::clone(storage), DType::F32, shape, strides, 0)
    };
    let (single, spaced) = (b.tensor(DType::F32, &[9])?, b.tensor(DType::F32, &[27])?);
    let large_lse = b.tensor(DType::F32, &[2, HEADS])?;
    let of_large_lse = Attend { lse: Some(large_lse.clone()), ..op.clone() };
    let chosen = entry(0..2, reused(40, &[0, 2])).selecting(select(SelectionUnit::Tokens, &[&[0], &[1]]));
    for (what, mass) in [
        ("sums of the rows' own tokens too", AttendMass { sums: sums(11)?, ..good.clone() }),
        ("too few sums", AttendMass { sums: sums(8)?, ..good.clone() }),
        ("sums in rows", AttendMass { sums: b.tensor(DType::F32, &[1, 9])?, ..good.clone() }),
        ("sums of another type", AttendMass { sums: b.tensor(DType::F16, &[9])?, ..good.clone() }),
        ("one sum for all tokens", AttendMass { sums: view(single.storage(), 0)?, ..good.clone() }),
        ("sums with gaps", AttendMass { sums: view(spaced.storage(), 2)?, ..good.clone() }),
        (
            "an attention without sums",
            AttendMass { attend: Attend { lse: None, ..op.clone() }, ..good.clone() },
        ),
        ("latent queries of several heads", AttendMass { q_latent: Some(op.q.clone()), ..good.clone() }),
        ("a layer past the end", AttendMass { attend: Attend { layer: 2, ..op.clone() }, ..good.clone() }),
        ("a selection", AttendMass { attend: with_batch(&op, [chosen]), ..good.clone() }),
    ] {
        ensure(b.stream.attend_mass(&mass).is_err(), || format!("{what} was accepted"))?;
    }
    let result = b.stream.attend_mass(&AttendMass { entry: 1, ..good.clone() });
    ensure(matches!(result, Err(Error::OutOfRange { what: "entry", .. })), || {
        format!("an entry past the end gave {result:?}")
    })?;
    for (what, sums, attend) in [
        ("sums in the arena", view(op.arena.k(), 1)?, op.clone()),
        ("sums in the queries", view(op.q.storage(), 1)?, op.clone()),
        ("sums in the log-sum-exps", view(large_lse.storage(), 1)?, of_large_lse),
    ] {
        let result = b.stream.attend_mass(&AttendMass { sums, attend, ..good.clone() });
        ensure(matches!(result, Err(Error::Aliased { .. })), || format!("{what} gave {result:?}"))?;
    }
    let sums = TensorView::new(Arc::new(Foreign), DType::F32, &[9])?;
    let result = b.stream.attend_mass(&AttendMass { sums, ..good });
    ensure(result.is_err(), || "sums in memory of no backend were accepted".to_owned())
}

/// Memory that belongs to no backend.
#[derive(Debug)]
struct Foreign;

impl Storage for Foreign {
    fn len(&self) -> usize {
        36
    }
    fn address(&self) -> u64 {
        1 << 40
    }
    fn kind(&self) -> MemoryKind {
        MemoryKind::Device
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}
