//! Copies whole blocks within an arena or between arenas, with or without rotating their keys.

use kvcore::{BlockId, CopyBlocks, KvArena, KvFormat, KvPlane, Result, RotateKeys, SwapBlocks};

use super::locked::with_locked;
use super::rotate::{RotateRows, RotationTable};
use super::runs::CopyRuns;
use super::{Fast, queues, share};
use crate::memory::ByteSpan;
use crate::plane::{PlaneSpans, RowAt, RowLayout};

impl Fast {
    pub(crate) fn copy_blocks(&self, op: &CopyBlocks) -> Result<()> {
        self.copy_layers(&op.arena, &op.arena, &op.pairs)
    }

    pub(crate) fn swap_blocks(&self, op: &SwapBlocks) -> Result<()> {
        self.copy_layers(&op.src, &op.dst, &op.pairs)
    }

    pub(crate) fn rotate_keys(&self, op: &RotateKeys) -> Result<()> {
        let s = op.src.layout().shape();
        let copy = BlockPairs::new((&op.src, &op.dst), op.layer..op.layer + 1, &op.pairs);
        let KvFormat::Dense(dtype) = s.format else {
            self.rotate_codes(op, &copy)?;
            return self.copy_plane(&copy, &op.src.v_plane(), &op.dst.v_plane());
        };
        let table = RotationTable::of_rotation(&op.rotation)?;
        let (k, to_k) = (op.src.k_plane(), op.dst.k_plane());
        let (a, b) = (RowLayout::codes(&k), RowLayout::codes(&to_k));
        let spans = copy.spans(&k, &to_k);
        let (source, target) = (spans.0.codes, spans.1.codes);
        with_locked(&[&source], &[&target], |locked| {
            let (from, to) = (locked.origin(&source)?, locked.target(&target)?);
            let bytes = op.pairs.len() * s.block_size * k.heads * a.row_bytes();
            let (parts, stream) = (self.parts(op.pairs.len(), bytes), self.streams(bytes));
            self.workers.run(parts, &|part| {
                let tokens = copy.tokens(share(0..op.pairs.len(), part, parts));
                let tokens = tokens.map(|(x, y)| (a.bytes(x).start, b.bytes(y).start, op.rotation.delta));
                let head_strides = (a.head_bytes(), b.head_bytes());
                // SAFETY: the operation's check rejected destinations that appear twice and blocks that are
                // both source and destination, and `share` gives each thread its own pairs. The check bounded
                // the rotary dimension by `k.dim`.
                unsafe {
                    self.level.run(RotateRows {
                        from,
                        to,
                        heads: k.heads,
                        head_strides,
                        dim: k.dim,
                        dtype,
                        table: &table,
                        factor: 1.0,
                        stream,
                        tokens,
                    });
                }
            });
            Ok(())
        })?;
        self.copy_plane(&copy, &op.src.v_plane(), &op.dst.v_plane())
    }

    fn copy_layers(&self, src: &KvArena, dst: &KvArena, pairs: &[(BlockId, BlockId)]) -> Result<()> {
        let layout = src.layout();
        let layers = layout.shape().num_layers;
        // If layers are large, they are copied one by one, so that operations on other layers can continue.
        let step = if self.streams(layout.block_bytes() / layers * pairs.len()) { 1 } else { layers };
        for first in (0..layers).step_by(step) {
            let copy = BlockPairs::new((src, dst), first..first + step, pairs);
            self.copy_plane(&copy, &src.k_plane(), &dst.k_plane())?;
            self.copy_plane(&copy, &src.v_plane(), &dst.v_plane())?;
        }
        Ok(())
    }

    /// Copies a plane's codes, and its scales if they are stored per block.
    fn copy_plane(&self, copy: &BlockPairs, src: &KvPlane, dst: &KvPlane) -> Result<()> {
        let codes = (RowLayout::codes(src), RowLayout::codes(dst));
        let (from, to) = copy.spans(src, dst);
        self.copy_runs(copy, src.heads, codes, (&from.codes, &to.codes))?;
        if let (Some(from), Some(to)) = (&from.scales, &to.scales)
            && let (Some(a), Some(b)) = (RowLayout::scales(src), RowLayout::scales(dst))
            && src.scales.is_some_and(|(_, scales)| !scales.is_static())
        {
            self.copy_runs(copy, src.heads, (a, b), (from, to))?;
        }
        Ok(())
    }

    fn copy_runs(
        &self,
        copy: &BlockPairs,
        heads: usize,
        (a, b): (RowLayout, RowLayout),
        (src, dst): (&ByteSpan<'_>, &ByteSpan<'_>),
    ) -> Result<()> {
        let bytes = copy.rows() * heads * a.row_bytes();
        let (parts, stream) = (self.parts(copy.pairs(), bytes), self.streams(bytes));
        let run = copy.run(heads, a, b);
        with_locked(&[src], &[dst], |locked| {
            let (from, to) = (locked.origin(src)?, locked.target(dst)?);
            self.workers.run(parts, &|part| {
                let offsets = queues(share(0..copy.pairs(), part, parts), |pairs| {
                    copy.runs(run, heads, pairs).map(|(x, y)| (a.bytes(x).start, b.bytes(y).start))
                });
                // SAFETY: the operation's check rejected destinations that appear twice and blocks that are
                // both source and destination, and `share` gives each thread its own pairs.
                unsafe {
                    self.level.run(CopyRuns { from, to, bytes: run.rows * a.row_bytes(), offsets, stream });
                }
            });
            Ok(())
        })
    }
}

/// The pairs of blocks to copy, and the layers to copy them in.
pub(super) struct BlockPairs<'a> {
    /// The source and destination arenas.
    arenas: (&'a KvArena, &'a KvArena),
    layers: std::ops::Range<usize>,
    block_size: usize,
    pairs: &'a [(BlockId, BlockId)],
}

/// The shape of the longest runs of rows that are contiguous in both arenas.
#[derive(Clone, Copy)]
struct RunShape {
    /// Number of rows in a run.
    rows: usize,
    /// True if each head has its own run.
    by_head: bool,
    /// True if each token has its own run.
    by_token: bool,
}

impl<'a> BlockPairs<'a> {
    pub(super) fn new(
        arenas: (&'a KvArena, &'a KvArena),
        layers: std::ops::Range<usize>,
        pairs: &'a [(BlockId, BlockId)],
    ) -> Self {
        Self { arenas, layers, block_size: arenas.0.layout().shape().block_size, pairs }
    }

    /// Returns the bytes of the layers to copy, in a plane of the source and in a plane of the destination.
    pub(super) fn spans<'b>(&self, src: &KvPlane<'b>, dst: &KvPlane<'b>) -> (PlaneSpans<'b>, PlaneSpans<'b>) {
        let (from, to) = self.arenas;
        (PlaneSpans::new(from, src, &self.layers), PlaneSpans::new(to, dst, &self.layers))
    }

    pub(super) fn pairs(&self) -> usize {
        self.pairs.len()
    }

    /// Returns the number of rows to copy per head.
    pub(super) fn rows(&self) -> usize {
        self.layers.len() * self.pairs.len() * self.block_size
    }

    /// Returns the shape of the longest runs that are contiguous in both arenas: whole blocks, tokens, heads,
    /// or rows.
    fn run(&self, heads: usize, a: RowLayout, b: RowLayout) -> RunShape {
        let dense = |rows: usize, inner: usize, outer: Option<usize>| {
            [a, b].iter().all(|layout| {
                let (head, token) = (layout.strides().head, layout.strides().token);
                let (inner, outer) =
                    if inner == 0 { (head, outer.map(|_| token)) } else { (token, outer.map(|_| head)) };
                inner == layout.row_elements() && outer.is_none_or(|outer| outer == rows * inner)
            })
        };
        let block = self.block_size;
        if dense(heads, 0, Some(0)) || dense(block, 1, Some(0)) {
            RunShape { rows: heads * block, by_head: false, by_token: false }
        } else if dense(heads, 0, None) {
            RunShape { rows: heads, by_head: false, by_token: true }
        } else if dense(block, 1, None) {
            RunShape { rows: block, by_head: true, by_token: false }
        } else {
            RunShape { rows: 1, by_head: true, by_token: true }
        }
    }

    /// Returns the first row of each run of the given pairs, in the source and in the destination.
    fn runs(
        &self,
        run: RunShape,
        heads: usize,
        pairs: std::ops::Range<usize>,
    ) -> impl Iterator<Item = (RowAt, RowAt)> {
        let (layers, tokens) = (self.layers.clone(), if run.by_token { self.block_size } else { 1 });
        let heads = if run.by_head { heads } else { 1 };
        layers.flat_map(move |layer| {
            self.pairs[pairs.clone()].iter().flat_map(move |&(from, to)| {
                (0..tokens).flat_map(move |token| {
                    (0..heads).map(move |head| {
                        let at = RowAt { layer, block: from.index(), token, head };
                        (at, at.block(to))
                    })
                })
            })
        })
    }

    /// Returns the row of head 0 for each token of the given pairs, in the source and in the destination.
    pub(super) fn tokens(&self, pairs: std::ops::Range<usize>) -> impl Iterator<Item = (RowAt, RowAt)> {
        self.runs(RunShape { rows: 1, by_head: false, by_token: true }, 1, pairs)
    }
}
