//! Cases for attention over latents.

use std::sync::Arc;

use kvcore::{
    AttendMla, AttendRows, BlockOrder, DType, Error, KeyForm, KvFormat, KvShape, QueryRow, RotateKeys,
    Rotation, SelectionUnit, TensorView,
};

use super::attend::{AttendTrial, HEADS, UNTOUCHED, after_a_chunk, entry, reused, rows, segment, with_batch};
use super::blocks::pairs;
use super::quant::each;
use super::sparse::select;
use crate::bench::{Bench, Outcome, close, ensure, numbers, rounded};
use crate::oracle;

/// The model's `qk_rope_head_dim`: the number of elements in the rotated part of a key.
const ROPE_DIM: usize = 8;
const RANK: usize = 24;

/// An attention operation over filled latents, with the values that the oracle needs.
pub(super) struct Latents {
    pub(super) trial: AttendTrial,
    pub(super) q_latent: Vec<f32>,
    rank: usize,
}

impl Latents {
    pub(super) fn new(
        b: &Bench,
        order: BlockOrder,
        format: KvFormat,
        at: &[QueryRow],
        batch: Vec<AttendRows>,
    ) -> Outcome<Self> {
        let shape = b.arena(order)?.layout().shape().clone();
        Self::over(b, &KvShape { format, k_dim: ROPE_DIM, v_dim: RANK, ..shape }, at, batch)
    }

    pub(super) fn over(b: &Bench, shape: &KvShape, at: &[QueryRow], batch: Vec<AttendRows>) -> Outcome<Self> {
        let rank = shape.v_dim;
        let arena = b.arena_of(KvShape { k_heads: 1, v_heads: 1, ..shape.clone() })?;
        let trial = AttendTrial::over(b, arena, at, batch)?;
        let q_latent = rounded(b.dtype, &numbers(60, at.len() * HEADS * rank));
        Ok(Self { trial, q_latent, rank })
    }

    pub(super) fn op(&self, b: &Bench) -> Outcome<AttendMla> {
        let shape = [self.trial.op.work.rows().len(), HEADS, self.rank];
        Ok(AttendMla { attend: self.trial.op.clone(), q_latent: b.upload(b.dtype, &shape, &self.q_latent)? })
    }

    fn check(&self, b: &Bench, what: &str) -> Outcome {
        let (op, t) = (self.op(b)?, &self.trial);
        b.stream.attend_mla(&op)?;
        t.compare(b, what, &oracle::attend_mla(&op, &t.q, &self.q_latent, &t.k, &t.v, UNTOUCHED))
    }
}

/// Returns prefill rows, a decode row and a row of another sequence, all at offsets.
pub(super) fn mixed() -> (Vec<QueryRow>, Vec<AttendRows>) {
    let at = rows(&[(9, 46), (10, 47), (30, 507), (4, 4)]);
    let batch = vec![
        entry(0..2, reused(40, &[0, 2])),
        entry(2..3, reused(500, &[7, 1])),
        entry(3..4, vec![segment(&[3, 5], 5, 0, 0)]),
    ];
    (at, batch)
}

pub(super) fn the_latent_is_key_and_value(b: &Bench) -> Outcome {
    for order in [BlockOrder::HeadMajor, BlockOrder::TokenMajor] {
        let (at, batch) = mixed();
        let mut latents = Latents::new(b, order, b.dtype.into(), &at, batch)?;
        latents.check(b, "latents")?;
        latents.trial.op.window = Some(5);
        latents.trial.op.softcap = Some(2.0);
        latents.check(b, "latents with a window and a soft-cap")?;
    }
    Ok(())
}

/// Latents in the same sizes as `attend::many_queries_over_even_rows`.
pub(super) fn many_queries_over_even_latents(b: &Bench) -> Outcome {
    for order in [BlockOrder::HeadMajor, BlockOrder::TokenMajor] {
        many_queries(b, order, (16, 32, 96), after_a_chunk(27, 70), 0.1)?;
    }
    Ok(())
}

/// DeepSeek's widths: the rotated part of a key is narrow, and a latent is wide.
pub(super) fn latents_of_the_usual_widths(b: &Bench) -> Outcome {
    many_queries(b, BlockOrder::TokenMajor, (8, 64, 512), after_a_chunk(13, 9), 0.05)
}

fn many_queries(
    b: &Bench,
    order: BlockOrder,
    (block_size, k_dim, v_dim): (usize, usize, usize),
    (at, batch): (Vec<QueryRow>, Vec<AttendRows>),
    scale: f32,
) -> Outcome {
    let shape = b.arena(order)?.layout().shape().clone();
    let shape = KvShape { block_size, k_dim, v_dim, ..shape };
    let mut latents = Latents::over(b, &shape, &at, batch)?;
    latents.trial.op.scale = scale;
    latents.check(b, &format!("many queries, latents of {v_dim}"))
}

pub(super) fn queries_may_come_rotated(b: &Bench) -> Outcome {
    let batch = vec![entry(0..2, vec![segment(&[3, 1], 6, 0, 0)])];
    let at = rows(&[(5, 5), (3, 3)]);
    let mut latents = Latents::new(b, BlockOrder::TokenMajor, b.dtype.into(), &at, batch)?;
    latents.trial.op.rope = None;
    latents.check(b, "queries as they are")
}

pub(super) fn latents_may_be_selected(b: &Bench) -> Outcome {
    for (unit, first, second) in [
        (SelectionUnit::Tokens, [&[0, 2, 8][..], &[1, 3, 10]], [&[2, 3, 6, 7][..]]),
        (SelectionUnit::Blocks, [&[0, 2][..], &[]], [&[1, 3][..]]),
    ] {
        let (at, mut batch) = mixed();
        batch[0] = batch[0].clone().selecting(select(unit, &first));
        batch[1] = batch[1].clone().selecting(select(unit, &second));
        Latents::new(b, BlockOrder::TokenMajor, b.dtype.into(), &at, batch)?.check(b, "selected latents")?;
    }
    Ok(())
}

pub(super) fn latents_may_be_quantised(b: &Bench) -> Outcome {
    each(b, |format| {
        let (at, batch) = mixed();
        Latents::new(b, BlockOrder::HeadMajor, format, &at, batch)?.check(b, "quantised latents")
    })
}

pub(super) fn rotated_parts_may_lie_unrotated(b: &Bench) -> Outcome {
    each(b, |format| {
        let (at, batch) = mixed();
        let mut latents = Latents::new(b, BlockOrder::TokenMajor, format, &at, batch)?;
        latents.trial.op.keys = KeyForm::Unrotated;
        latents.check(b, "latents with keys that are not rotated")
    })
}

pub(super) fn moving_a_chunk_moves_the_rotated_part_only(b: &Bench) -> Outcome {
    let at = rows(&[(20, 140)]);
    let offset = vec![entry(0..1, vec![segment(&[0, 2], 7, 0, 0).at_offset(100)])];
    let mut latents = Latents::new(b, BlockOrder::TokenMajor, DType::F32.into(), &at, offset)?;
    latents.check(b, "a chunk at an offset")?;
    let there = b.download(&latents.trial.op.out)?;
    let op = &mut latents.trial.op;
    let rope = op.rope.clone().ok_or_else(|| crate::Failure::new("no table"))?;
    let (src, dst, rotation) = (op.arena.clone(), op.arena.clone(), Rotation { rope, delta: 100 });
    b.stream.rotate_keys(&RotateKeys { src, dst, layer: 1, pairs: pairs(&[(0, 4), (2, 5)]), rotation })?;
    *op = with_batch(op, [entry(0..1, vec![segment(&[4, 5], 7, 0, 100)])]);
    b.stream.attend_mla(&latents.op(b)?)?;
    close("a chunk whose keys were moved", &b.download(&latents.trial.op.out)?, &there, 1e-5)
}

pub(super) fn wrong_latent_attends_are_refused(b: &Bench) -> Outcome {
    let (at, batch) = mixed();
    let latents = Latents::new(b, BlockOrder::TokenMajor, b.dtype.into(), &at, batch)?;
    let good = latents.op(b)?;
    b.stream.attend_mla(&good)?;
    let q = |shape: &[usize]| b.tensor(b.dtype, shape);
    for (what, q_latent) in [
        ("latent queries of another width", q(&[4, HEADS, ROPE_DIM])?),
        ("latent queries for fewer rows", q(&[3, HEADS, RANK])?),
        ("latent queries for fewer heads", q(&[4, HEADS / 2, RANK])?),
        ("latent queries without heads", q(&[4, RANK])?),
        ("latent queries of codes", b.tensor(DType::I8, &[4, HEADS, RANK])?),
    ] {
        let result = b.stream.attend_mla(&AttendMla { q_latent, ..good.clone() });
        ensure(result.is_err(), || format!("{what} were accepted"))?;
    }
    let shape = good.attend.arena.layout().shape().clone();
    for (k_heads, v_heads) in [(2, 1), (1, 2)] {
        let arena = b.arena_of(KvShape { k_heads, v_heads, ..shape.clone() })?;
        let mut op = good.clone();
        op.attend.arena = arena;
        let result = b.stream.attend_mla(&op);
        ensure(matches!(result, Err(Error::Mismatch { .. })), || format!("several heads gave {result:?}"))?;
    }
    let mut op = good.clone();
    op.attend.lse = Some(TensorView::new(Arc::clone(op.q_latent.storage()), DType::F32, &[4, HEADS])?);
    let result = b.stream.attend_mla(&op);
    ensure(matches!(result, Err(Error::Aliased { .. })), || {
        format!("a log-sum-exp in the latent queries gave {result:?}")
    })
}
