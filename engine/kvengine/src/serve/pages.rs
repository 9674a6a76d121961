//! Page-sparse decoding: each answer token attends only to the blocks that may contain the keys closest to
//! its queries.
//!
//! In each layer, the blocks with the largest [bounds](super::bounds) are selected. The first block and the
//! last blocks are always included.

use std::ops::Range;

use kvcore::{LayerRopes, Segment, Selection, SelectionUnit, SequenceInput};
use kvmodel::FreshQueries;

use super::bounds::{PageBounds, chosen};
use crate::error::Result;
use crate::request::SparseDecode;
use crate::runner::Runner;

/// The number of blocks to read keys from at a time.
const READ: usize = 256;

/// A sample that attends to only part of its context in a pass.
pub(super) struct SparseSample<'a> {
    /// The index of the sample's input in the batch.
    pub(super) entry: usize,
    pub(super) setting: SparseDecode,
    pub(super) bounds: &'a mut PageBounds,
}

impl SparseSample<'_> {
    /// Returns true if the sample selects blocks in a layer. It does not in a layer with a window, which sees
    /// few blocks anyway.
    pub(super) fn selects(&self, layer: usize, windowed: bool) -> bool {
        layer >= self.setting.dense_layers && !windowed
    }

    /// Returns the blocks to attend to in a layer. Before that, reads the keys of blocks that have no bounds
    /// yet.
    pub(super) fn select(
        &mut self,
        (runner, ropes, layer): (&Runner, &LayerRopes, usize),
        input: &SequenceInput,
        queries: &FreshQueries,
        row: usize,
    ) -> Result<Selection> {
        let config = runner.model.config();
        let shape = runner.caches.sequences.first().arena().layout().shape();
        let (block_size, heads) = (shape.block_size, config.heads);
        let mut factors = Vec::new();
        for segment in input.segments.iter() {
            let pages = segment.len.div_ceil(block_size);
            factors.extend(std::iter::repeat_n(config.softmax_scale * segment.logit_scale, pages));
        }
        let total = factors.len();
        // The last block is still growing, so its bounds are not kept.
        let known = total - 1;
        let bounds = self.bounds.layer(layer, config.num_layers());
        let latent = queries.latent.is_some();
        let width = if latent { shape.k_dim + shape.v_dim } else { shape.k_heads * shape.k_dim };
        let mut first = 0;
        for segment in input.segments.iter() {
            let next = first + segment.len.div_ceil(block_size);
            while bounds.pages() < next.min(known) {
                let from = bounds.pages() - first;
                let end = (from + READ).min(next.min(known) - first);
                let tokens = from * block_size..segment.len.min(end * block_size);
                bounds.add(&read_keys(runner, ropes, layer, (segment, tokens), latent)?, width, block_size);
            }
            first = next;
        }
        let (q, latent) = queries.rows(row..row + 1);
        let nearness = match latent {
            None => bounds.nearness(q, (heads, shape.k_heads), &factors[..known]),
            Some(latent) => {
                let joined = joined((q, shape.k_dim), (latent, shape.v_dim));
                bounds.nearness(&joined, (heads, 1), &factors[..known])
            }
        };
        let indices = chosen(&nearness, total, self.setting.pages);
        let offsets = [0, indices.len() as u32].into();
        Ok(Selection { unit: SelectionUnit::Blocks, offsets, indices: indices.into() })
    }
}

/// Returns the keys of some tokens in a segment. With latent attention, each key is followed by its latent.
fn read_keys(
    runner: &Runner,
    ropes: &LayerRopes,
    layer: usize,
    (segment, tokens): (&Segment, Range<usize>),
    latent: bool,
) -> Result<Vec<f32>> {
    let count = tokens.len().max(1);
    let (k, v) = runner.model.keys_in_use(&runner.device(), ropes, layer, segment, tokens)?;
    Ok(if latent { joined((&k, k.len() / count), (&v, v.len() / count)) } else { k })
}

/// Joins two matrices row by row: each row of `a` is followed by the same row of `b`. The rows are `a_width`
/// and `b_width` elements wide.
fn joined((a, a_width): (&[f32], usize), (b, b_width): (&[f32], usize)) -> Vec<f32> {
    let rows = a.chunks_exact(a_width.max(1)).zip(b.chunks_exact(b_width.max(1)));
    rows.flat_map(|(a, b)| a.iter().chain(b)).copied().collect()
}
