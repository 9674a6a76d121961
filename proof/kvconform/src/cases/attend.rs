//! Cases for attention over segments.

use std::sync::Arc;

use kvcore::{
    Attend, AttendRows, AttendWork, BlockId, BlockOrder, DType, Dims, Error, KeyForm, KvArena, KvShape,
    MergeGroup, Pairing, QueryRow, Rope, RopeConfig, RopeScaling, Segment, Storage, TensorView,
};

use crate::bench::{Bench, Outcome, close, ensure, equal, numbers, rounded, rounded_once};
use crate::oracle;

pub(super) const HEADS: usize = 6;
/// The value of output rows that must not be written.
pub(super) const UNTOUCHED: f32 = 0.25;

pub(super) fn segment(blocks: &[u32], len: usize, logical_start: usize, stored_start: i64) -> Segment {
    Segment::new(blocks.iter().map(|&id| BlockId(id)).collect(), len, logical_start, stored_start)
}

/// An [`Attend`] over filled memory, with the values that the oracle needs.
pub(super) struct AttendTrial {
    pub(super) op: Attend,
    pub(super) q: Vec<f32>,
    pub(super) k: Vec<f32>,
    pub(super) v: Vec<f32>,
}

/// Returns the operation with other entries over the same rows and groups.
pub(super) fn with_batch(op: &Attend, batch: impl Into<Vec<AttendRows>>) -> Attend {
    let work = AttendWork::with_groups(op.work.rows(), batch, Arc::clone(op.work.groups()));
    Attend { work: Arc::new(work), ..op.clone() }
}

impl AttendTrial {
    pub(super) fn new(
        b: &Bench,
        order: BlockOrder,
        rows: &[QueryRow],
        batch: Vec<AttendRows>,
    ) -> Outcome<Self> {
        Self::over(b, b.arena(order)?, rows, batch)
    }

    /// Creates an [`Attend`] over an arena of the given shape and format.
    pub(super) fn over(
        b: &Bench,
        arena: KvArena,
        rows: &[QueryRow],
        batch: Vec<AttendRows>,
    ) -> Outcome<Self> {
        let (k, v) = b.fill(&arena, 40)?;
        let (k_dim, v_dim) = (arena.layout().shape().k_dim, arena.layout().shape().v_dim);
        let q = numbers(41, rows.len() * HEADS * k_dim).iter().map(|x| 2.0 * x).collect::<Vec<_>>();
        let q = rounded(b.dtype, &q);
        let untouched =
            |shape: &[usize]| b.upload(DType::F32, shape, &vec![UNTOUCHED; shape.iter().product()]);
        let op = Attend {
            layer: 1,
            q: b.upload(b.dtype, &[rows.len(), HEADS, k_dim], &q)?,
            rope: Some(Arc::new(Rope::new(
                RopeConfig { rotary_dim: 8, ..RopeConfig::new(k_dim, 300.0) },
                4096,
            )?)),
            keys: KeyForm::default(),
            work: Arc::new(AttendWork::new(rows, batch)),
            scale: 0.4,
            window: None,
            softcap: None,
            out: untouched(&[rows.len(), HEADS, v_dim])?,
            lse: Some(untouched(&[rows.len(), HEADS])?),
            arena,
        };
        Ok(Self { op, q, k, v })
    }

    pub(super) fn check(&self, b: &Bench, what: &str) -> Outcome {
        b.stream.attend(&self.op)?;
        self.compare(b, what, &oracle::attend(&self.op, &self.q, &self.k, &self.v, UNTOUCHED))
    }

    /// Compares the output and the log-sum-exps with the expected ones.
    pub(super) fn compare(&self, b: &Bench, what: &str, (out, lse): &(Vec<f32>, Vec<f32>)) -> Outcome {
        close(what, &b.download(&self.op.out)?, out, 1e-5)?;
        match &self.op.lse {
            Some(view) => close(what, &b.download(view)?, lse, 1e-5),
            None => Ok(()),
        }
    }
}

pub(super) fn rows(list: &[(usize, i64)]) -> Vec<QueryRow> {
    list.iter().map(|&(logical, position)| QueryRow { logical, position }).collect()
}

pub(super) fn entry(rows: std::ops::Range<usize>, segments: Vec<Segment>) -> AttendRows {
    AttendRows::new(rows, segments)
}

pub(super) fn prefill_and_decode_in_one_call(b: &Bench) -> Outcome {
    for order in [BlockOrder::HeadMajor, BlockOrder::TokenMajor] {
        let at = rows(&[(0, 0), (1, 1), (2, 2), (9, 9), (77, 77), (4, 4), (5, 5)]);
        let batch = vec![
            entry(0..3, vec![segment(&[5, 2], 3, 0, 0)]),
            entry(3..4, vec![segment(&[1, 0, 8], 10, 0, 0)]),
            // row 4 is in no entry
            entry(5..7, vec![segment(&[7, 3], 6, 0, 0)]),
        ];
        AttendTrial::new(b, order, &at, batch)?.check(b, "mixed batch")?;
    }
    Ok(())
}

/// Returns a prompt of `fresh` tokens after a chunk of `stored` tokens: the prompt's rows, and one sequence
/// of segments. The chunk ends inside a block and was stored at other positions.
pub(super) fn after_a_chunk(stored: usize, fresh: usize) -> (Vec<QueryRow>, Vec<AttendRows>) {
    let chunk = segment(&[5, 2], stored, 0, 0).at_offset(9);
    let own = segment(&[1, 8, 3, 0, 7], fresh, stored, stored as i64 + 9);
    let at: Vec<_> = (stored..stored + fresh).map(|t| (t, t as i64 + 9)).collect();
    (rows(&at), vec![entry(0..fresh, vec![chunk, own])])
}

/// Row and block sizes that are whole numbers of matrix instructions' tiles, with more queries per head than fit
/// into one instruction. The prompt's last tile is partial.
pub(super) fn many_queries_over_even_rows(b: &Bench) -> Outcome {
    for (order, k_dim, v_dim) in [(BlockOrder::TokenMajor, 32, 64), (BlockOrder::HeadMajor, 64, 32)] {
        many_queries(b, order, (16, k_dim, v_dim), after_a_chunk(27, 75), 0.2)?;
    }
    Ok(())
}

/// Heads with more elements than a workgroup has threads, or than fit into a large tile.
pub(super) fn wide_heads(b: &Bench) -> Outcome {
    for (order, k_dim, v_dim) in [(BlockOrder::TokenMajor, 256, 256), (BlockOrder::HeadMajor, 192, 136)] {
        many_queries(b, order, (8, k_dim, v_dim), after_a_chunk(13, 38), 0.1)?;
    }
    Ok(())
}

/// Checks many queries, with and without a window.
fn many_queries(
    b: &Bench,
    order: BlockOrder,
    (block_size, k_dim, v_dim): (usize, usize, usize),
    (at, batch): (Vec<QueryRow>, Vec<AttendRows>),
    scale: f32,
) -> Outcome {
    let shape = b.arena(order)?.layout().shape().clone();
    let arena = b.arena_of(KvShape { block_size, k_dim, v_dim, ..shape })?;
    let mut trial = AttendTrial::over(b, arena, &at, batch)?;
    trial.op.scale = scale;
    trial.check(b, &format!("many queries, heads of {k_dim} and {v_dim}"))?;
    trial.op.window = Some(20);
    trial.check(b, &format!("many queries in a window, heads of {k_dim} and {v_dim}"))
}

pub(super) fn k_and_v_may_differ_in_heads(b: &Bench) -> Outcome {
    for (order, k_heads, v_heads) in [(BlockOrder::HeadMajor, 2, 6), (BlockOrder::TokenMajor, 3, 1)] {
        let shape = b.arena(order)?.layout().shape().clone();
        let arena = b.arena_of(KvShape { k_heads, v_heads, ..shape })?;
        let batch = vec![entry(0..2, reused(40, &[0, 2])), entry(2..3, vec![segment(&[1, 8], 7, 0, 0)])];
        AttendTrial::over(b, arena, &rows(&[(9, 46), (10, 47), (6, 6)]), batch)?
            .check(b, "heads of K and V that differ")?;
    }
    Ok(())
}

/// Returns a system prompt, a chunk stored at position 0 and used at an offset, and the tokens of the
/// question.
pub(super) fn reused(offset: i64, chunk: &[u32]) -> Vec<Segment> {
    vec![segment(&[4], 3, 0, 0), segment(chunk, 6, 3, 0).at_offset(offset), segment(&[6], 2, 9, offset + 6)]
}

pub(super) fn segments_at_offsets(b: &Bench) -> Outcome {
    for offset in [0, 3, 1000] {
        let at = rows(&[(9, offset + 6), (10, offset + 7)]);
        let trial =
            AttendTrial::new(b, BlockOrder::TokenMajor, &at, vec![entry(0..2, reused(offset, &[0, 2]))])?;
        trial.check(b, "a chunk used at an offset")?;
        let here = b.download(&trial.op.out)?;
        let at_zero = reused(offset, &[0, 2]).into_iter().map(|s| s.at_offset(0)).collect();
        let ignored = with_batch(&trial.op, [entry(0..2, at_zero)]);
        b.stream.attend(&ignored)?;
        let differs = here.iter().zip(&b.download(&ignored.out)?).any(|(x, y)| (x - y).abs() > 1e-3);
        ensure(differs == (offset != 0), || format!("offset {offset} makes a difference: {differs}"))?;
    }
    Ok(())
}

pub(super) fn the_same_blocks_at_two_offsets_at_once(b: &Bench) -> Outcome {
    let at = rows(&[(9, 9), (9, 505)]);
    let batch = vec![entry(0..1, reused(3, &[0, 2])), entry(1..2, reused(499, &[0, 2]))];
    let trial = AttendTrial::new(b, BlockOrder::HeadMajor, &at, batch)?;
    let before = b.contents(&trial.op.arena)?;
    trial.check(b, "two requests over the same blocks")?;
    let after = b.contents(&trial.op.arena)?;
    equal("K after reading", &after.0, &before.0)?;
    equal("V after reading", &after.1, &before.1)?;
    let twice = [reused(3, &[0, 2]), vec![segment(&[0, 2], 6, 11, 0).at_offset(700)]].concat();
    AttendTrial::new(b, BlockOrder::HeadMajor, &rows(&[(30, 720)]), vec![entry(0..1, twice)])?
        .check(b, "the same chunk twice in one prompt")
}

pub(super) fn causality_goes_by_logical_order(b: &Bench) -> Outcome {
    // The last two segments start at the same position, and there are rows in both of them.
    let segments = vec![segment(&[4], 3, 0, 0), segment(&[0, 2], 6, 3, 3), segment(&[5, 7], 5, 9, 3)];
    let at = rows(&[(3, 3), (8, 8), (9, 3), (11, 5), (13, 7)]);
    AttendTrial::new(b, BlockOrder::TokenMajor, &at, vec![entry(0..5, segments)])?
        .check(b, "overlapping positions")
}

pub(super) fn windows_go_by_position(b: &Bench) -> Outcome {
    for window in [1, 4, 7, 100] {
        let at = rows(&[(9, 46), (10, 47)]);
        let mut trial =
            AttendTrial::new(b, BlockOrder::TokenMajor, &at, vec![entry(0..2, reused(40, &[0, 2]))])?;
        trial.op.window = Some(window);
        trial.check(b, "sliding window")?;
    }
    Ok(())
}

pub(super) fn softcap_temperature_and_groups(b: &Bench) -> Outcome {
    let at = rows(&[(9, 14), (10, 15)]);
    let mut segments = reused(8, &[0, 2]);
    segments[1].logit_scale = 1.6;
    segments[1].merge_group = 1;
    let mut trial = AttendTrial::new(b, BlockOrder::TokenMajor, &at, vec![entry(0..2, segments)])?;
    let groups = [MergeGroup::default(), MergeGroup { lse_scale: 0.7 }];
    trial.op.work = Arc::new(AttendWork::with_groups(at, trial.op.work.batch(), groups));
    trial.check(b, "a group with a temperature and a scale")?;
    trial.op.softcap = Some(1.5);
    trial.check(b, "soft-capped logits")
}

/// A backend may cache what it derives from an [`AttendWork`], but layers that differ in anything besides the
/// work must not share the cached result.
pub(super) fn layers_share_the_work_of_a_step(b: &Bench) -> Outcome {
    let at = rows(&[(9, 46), (10, 47)]);
    let mut trial = AttendTrial::new(b, BlockOrder::TokenMajor, &at, vec![entry(0..2, reused(40, &[0, 2]))])?;
    let other_rope = RopeConfig { rotary_dim: 4, ..RopeConfig::new(10, 20.0) };
    let ropes = [trial.op.rope.clone(), Some(Arc::new(Rope::new(other_rope, 4096)?))];
    for step in 0..2 {
        for (layer, window, rope, keys) in [
            (0, None, 0, KeyForm::Rotated),
            (1, None, 0, KeyForm::Rotated),
            (1, Some(5), 0, KeyForm::Rotated),
            (0, Some(2), 1, KeyForm::Rotated),
            (1, None, 1, KeyForm::Unrotated),
            (0, Some(2), 0, KeyForm::Rotated),
            (0, Some(3), 0, KeyForm::Rotated),
            (0, None, 0, KeyForm::Rotated),
        ] {
            let rope = ropes[rope].clone();
            trial.op = Attend { layer, window, rope, keys, ..trial.op };
            trial.check(b, &format!("step {step}, layer {layer}, window {window:?}, {keys:?}"))?;
        }
        // The next step edits the work in place: different rows over shorter segments.
        let work = Arc::get_mut(&mut trial.op.work);
        let edited = work.map(|work| {
            work.edit(|rows, batch| {
                rows.swap(0, 1);
                let shorter = |segment: &Segment| Segment { len: segment.len - 1, ..segment.clone() };
                batch[0].segments = batch[0].segments.iter().map(shorter).collect();
            });
        });
        ensure(edited.is_some(), || "the backend keeps a work that it ran".to_owned())?;
    }
    Ok(())
}

pub(super) fn rows_that_see_nothing_are_zero(b: &Bench) -> Outcome {
    let at = rows(&[(2, 2), (3, 3)]);
    let batch = vec![entry(0..1, vec![segment(&[1], 4, 9, 9)]), entry(1..2, vec![segment(&[], 0, 0, 0)])];
    let trial = AttendTrial::new(b, BlockOrder::TokenMajor, &at, batch)?;
    trial.check(b, "rows that see nothing")?;
    equal("output", &b.download(&trial.op.out)?, &vec![0.0; 2 * HEADS * 6])?;
    if let Some(lse) = &trial.op.lse {
        equal("log-sum-exp", &b.download(lse)?, &[f32::NEG_INFINITY; 2 * HEADS])?;
    }
    Ok(())
}

pub(super) fn nan_reaches_the_output(b: &Bench) -> Outcome {
    let batch = vec![entry(0..1, vec![segment(&[3, 1], 6, 0, 0)])];
    let mut trial = AttendTrial::new(b, BlockOrder::TokenMajor, &rows(&[(5, 5)]), batch)?;
    trial.op.q = b.upload(b.dtype, &[1, HEADS, 10], &[f32::NAN; HEADS * 10])?;
    b.stream.attend(&trial.op)?;
    equal("output of NaN queries", &b.download(&trial.op.out)?, &[f32::NAN; HEADS * 6])
}

pub(super) fn rotated_queries_need_no_table(b: &Bench) -> Outcome {
    let at = rows(&[(5, 5)]);
    let mut trial =
        AttendTrial::new(b, BlockOrder::TokenMajor, &at, vec![entry(0..1, vec![segment(&[3, 1], 6, 0, 0)])])?;
    trial.op.rope = None;
    trial.check(b, "queries as they are")?;
    trial.op = with_batch(&trial.op, [entry(0..1, vec![segment(&[3, 1], 6, 0, 0).at_offset(4)])]);
    ensure(b.stream.attend(&trial.op).is_err(), || "an offset without a table was accepted".to_owned())
}

pub(super) fn keys_may_lie_unrotated(b: &Bench) -> Outcome {
    let yarn = RopeScaling::Yarn {
        factor: 4.0,
        attention_factor: 1.25,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_max_position: 64,
        truncate: true,
    };
    let scaled = RopeConfig { scaling: yarn, pairing: Pairing::Interleaved, ..RopeConfig::new(10, 300.0) };
    let scaled = Arc::new(Rope::new(scaled, 4096)?);
    for (order, offset) in
        [(BlockOrder::HeadMajor, 0), (BlockOrder::TokenMajor, 3), (BlockOrder::HeadMajor, 1000)]
    {
        let at = rows(&[(9, offset + 6), (10, offset + 7)]);
        let mut trial = AttendTrial::new(b, order, &at, vec![entry(0..2, reused(offset, &[0, 2]))])?;
        trial.op.keys = KeyForm::Unrotated;
        trial.check(b, "unrotated keys")?;
        trial.op.rope = Some(Arc::clone(&scaled));
        trial.op.window = Some(7);
        trial.check(b, "unrotated keys under an attention factor and a window")?;
        trial.op.rope = None;
        let result = b.stream.attend(&trial.op);
        ensure(matches!(result, Err(Error::InvalidRope(_))), || {
            format!("no rotary embedding gave {result:?}")
        })?;
        // At the chunk's offset, token 9999 is past the end of the table, regardless of the query's rotation.
        trial.op.rope = Some(Arc::clone(&scaled));
        trial.op = with_batch(&trial.op, [entry(0..2, reused(9999, &[0, 2]))]);
        let result = b.stream.attend(&trial.op);
        ensure(matches!(result, Err(Error::OutOfRange { .. })), || format!("position 9999 gave {result:?}"))?;
    }
    Ok(())
}

pub(super) fn wrong_attends_are_refused(b: &Bench) -> Outcome {
    let at = rows(&[(0, 0), (1, 1)]);
    let good =
        AttendTrial::new(b, BlockOrder::TokenMajor, &at, vec![entry(0..2, vec![segment(&[0], 2, 0, 0)])])?.op;
    b.stream.attend(&good)?;
    let with = |batch: Vec<AttendRows>| with_batch(&good, batch);
    let small: KvArena = b.arena(BlockOrder::TokenMajor)?;
    let grouped = Segment { merge_group: 1, ..segment(&[0], 2, 0, 0) };
    for (what, op) in [
        ("a block past the end", with(vec![entry(0..2, vec![segment(&[9], 2, 0, 0)])])),
        ("a segment longer than its blocks", with(vec![entry(0..2, vec![segment(&[0], 5, 0, 0)])])),
        ("rows past the end", with(vec![entry(1..3, vec![segment(&[0], 2, 0, 0)])])),
        ("a row in two entries", with(vec![entry(0..2, vec![]), entry(1..2, vec![])])),
        ("an unknown merge group", with(vec![entry(0..2, vec![grouped])])),
        ("a layer past the end", Attend { layer: 2, ..good.clone() }),
        (
            "heads that k_heads and v_heads do not divide",
            Attend {
                q: b.tensor(b.dtype, &[2, 3, 10])?,
                out: b.tensor(DType::F32, &[2, 3, 6])?,
                lse: None,
                ..good.clone()
            },
        ),
        ("an offset past the table", with(vec![entry(0..2, vec![segment(&[0], 2, 0, 0).at_offset(-5000)])])),
        (
            "output of another width",
            Attend { out: b.tensor(DType::F32, &[2, HEADS, 10])?, arena: small, ..good.clone() },
        ),
    ] {
        ensure(b.stream.attend(&op).is_err(), || format!("{what} was accepted"))?;
    }
    let lse = |storage: &Arc<dyn Storage>, strides: [usize; 2]| {
        let (shape, strides) = (Dims::new(&[2, HEADS])?, Dims::new(&strides)?);
        TensorView::with_strides(Arc::clone(storage), DType::F32, shape, strides, 0)
    };
    let apart = b.tensor(DType::F32, &[2, HEADS])?;
    for (what, strides) in [("one log-sum-exp for all rows", [0, 1]), ("one for all heads", [1, 0])] {
        let result = b.stream.attend(&Attend { lse: Some(lse(apart.storage(), strides)?), ..good.clone() });
        ensure(matches!(result, Err(Error::InvalidStrides { what: "lse", .. })), || {
            format!("{what} gave {result:?}")
        })?;
    }
    for (what, lse) in [
        ("a log-sum-exp in the arena", lse(good.arena.v(), [HEADS, 1])?),
        ("a log-sum-exp in the queries", lse(good.q.storage(), [HEADS, 1])?),
        ("a log-sum-exp in the output", lse(good.out.storage(), [HEADS, 1])?),
    ] {
        let result = b.stream.attend(&Attend { lse: Some(lse), ..good.clone() });
        ensure(matches!(result, Err(Error::Aliased { .. })), || format!("{what} gave {result:?}"))?;
    }
    Ok(())
}

/// One row per sequence, with queries, cache and output of the same type, in sizes that devices have kernels
/// for. The tolerance allows for matrix units that round the rotated queries and the softmax weights to that
/// type.
pub(super) fn sequences_decode_in_the_type_of_their_cache(b: &Bench) -> Outcome {
    const DIM: usize = 32;
    let tolerance = match b.dtype {
        DType::F32 => 1e-5,
        DType::F16 => 4.0 / 1024.0,
        _ => 4.0 / 128.0,
    };
    for order in [BlockOrder::HeadMajor, BlockOrder::TokenMajor] {
        let arena = b.arena_of(KvShape {
            num_layers: 2,
            num_blocks: 12,
            block_size: 16,
            k_heads: 2,
            v_heads: 2,
            k_dim: DIM,
            v_dim: DIM,
            format: b.dtype.into(),
            order,
        })?;
        // Whole blocks shared by two rows, then each row's own tail, all moved by the same distance.
        let of_row = |row: usize, own: &[u32], len: usize| {
            let shared = segment(&[4, 2], 32, 0, 3).at_offset(5);
            entry(row..row + 1, vec![shared, segment(own, len, 32, 35).at_offset(5)])
        };
        let batch =
            vec![of_row(0, &[7], 16), of_row(1, &[9, 0], 21), entry(2..3, vec![segment(&[11], 1, 0, 8)])];
        let at = rows(&[(47, 55), (52, 60), (0, 8)]);
        let mut trial = AttendTrial::over(b, arena, &at, batch)?;
        trial.op.out = b.tensor(b.dtype, &[3, HEADS, DIM])?;
        b.stream.attend(&trial.op)?;
        let (out, lse) = oracle::attend(&trial.op, &trial.q, &trial.k, &trial.v, UNTOUCHED);
        close("sequences that decode", &b.download(&trial.op.out)?, &out, tolerance)?;
        if let Some(view) = &trial.op.lse {
            close("log-sum-exps of sequences that decode", &b.download(view)?, &lse, tolerance)?;
        }
    }
    Ok(())
}

/// The output starts one row after the queries in the same memory, with more rows than a device may process
/// at once.
pub(super) fn output_may_lie_where_queries_do(b: &Bench) -> Outcome {
    let n = 300;
    let at: Vec<_> = (0..n).map(|i| (5 + i % 2, 5)).collect();
    let batch = vec![entry(0..n, vec![segment(&[3, 1], 7, 0, 0)])];
    let mut trial = AttendTrial::new(b, BlockOrder::TokenMajor, &rows(&at), batch)?;
    let values = [&trial.q[..], &[0.0; HEADS * 10]].concat();
    let base = b.upload(b.dtype, &[n + 1, HEADS, 10], &values)?;
    trial.op.q = base.slice(0, 0, n)?;
    trial.op.out = base.slice(0, 1, n + 1)?.slice(2, 0, 6)?;
    trial.op.lse = None;
    b.stream.attend(&trial.op)?;
    let (expected, _) = oracle::attend(&trial.op, &trial.q, &trial.k, &trial.v, UNTOUCHED);
    let after = b.download(&base)?;
    let out: Vec<f32> = oracle::elements(&trial.op.out).into_iter().map(|i| after[i]).collect();
    rounded_once("output over its queries", b.dtype, &out, &expected)
}

pub(super) fn output_in_the_element_type(b: &Bench) -> Outcome {
    let at = rows(&[(9, 46), (10, 47)]);
    let mut trial = AttendTrial::new(b, BlockOrder::TokenMajor, &at, vec![entry(0..2, reused(40, &[0, 2]))])?;
    trial.op.out = b.tensor(b.dtype, &[2, HEADS, 6])?;
    trial.op.lse = None;
    b.stream.attend(&trial.op)?;
    let (out, _) = oracle::attend(&trial.op, &trial.q, &trial.k, &trial.v, UNTOUCHED);
    rounded_once("output rounded to the element type", b.dtype, &b.download(&trial.op.out)?, &out)
}
