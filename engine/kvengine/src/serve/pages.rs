//! Page-sparse decode: a token of an answer attends to the blocks whose keys its queries may meet best.
//!
//! Of every full block that a sample sees, the least and the largest number in each place of its keys are kept. They bound the product
//! of any query with any key of the block from above, and the blocks with the largest bounds are selected, layer by layer. The first
//! block and the last ones are always among them. (Quest, Tang et al., 2024.)

use kvcore::{LayerRopes, Segment, Selection, SelectionUnit, SequenceInput};
use kvmodel::FreshQueries;

use super::plan::Feed;
use super::{Rank, Scheduler};
use crate::engine::Engine;
use crate::error::{Error, Result};

/// The blocks at the end of a sample's sequence that are always seen: the one that grows, and the one before.
const LAST: usize = 2;
/// The fewest blocks that leave a choice, beside the first and the last ones.
const FEWEST: usize = 1 + LAST + 1;
/// The blocks whose keys are read at a time.
const READ: usize = 256;

/// Decode steps that attend to a part of a long context.
///
/// The answer is an approximation, whose error `cargo bench -p kvlab --bench sparse_decode` measures. Prompts
/// are computed with everything in sight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SparseDecode {
    /// The number of blocks that a token attends to in a layer, at least 4. With fewer, everything is seen.
    pub pages: usize,
    /// The first layers, which attend to everything. Attention is spread widely there.
    pub dense_layers: usize,
}

impl SparseDecode {
    /// Attends to `pages` blocks in all layers but the first two.
    pub fn new(pages: usize) -> Self {
        Self { pages, dense_layers: 2 }
    }

    /// Checks the setting for a model whose layers all have a window of at most so many tokens, or for another one.
    pub(super) fn check(self, widest_window: Option<usize>) -> Result<()> {
        if self.pages < FEWEST {
            return Err(Error::Pages(
                "take at least 4 blocks: the first one, the last two, and one that is chosen",
            ));
        }
        match widest_window {
            Some(_) => {
                Err(Error::Pages("all layers of this model have a window, and see few tokens already"))
            }
            None => Ok(()),
        }
    }
}

/// The bounds of a sample's blocks, as far as they are known.
#[derive(Debug, Default)]
pub(super) struct PageBounds {
    /// Of each layer.
    layers: Vec<Bounds>,
}

/// The bounds of one layer: the least and the largest number in each place of each key head, block by block.
#[derive(Debug, Default)]
struct Bounds {
    least: Vec<f32>,
    largest: Vec<f32>,
    pages: usize,
}

impl Bounds {
    /// Adds blocks of so many tokens, the last one perhaps shorter. `keys` are those of `width` numbers for each token.
    fn add(&mut self, keys: &[f32], width: usize, block_size: usize) {
        for page in keys.chunks((width * block_size).max(1)) {
            let at = self.least.len();
            self.least.extend_from_slice(&page[..width]);
            self.largest.extend_from_slice(&page[..width]);
            for key in page.chunks_exact(width.max(1)).skip(1) {
                for ((least, largest), &x) in
                    self.least[at..].iter_mut().zip(&mut self.largest[at..]).zip(key)
                {
                    (*least, *largest) = (least.min(x), largest.max(x));
                }
            }
            self.pages += 1;
        }
    }

    /// Returns, for each block, how near the largest bound of any head comes to the largest of all blocks: 0 at best. A bound is
    /// multiplied by its block's factor. `q` has `heads` queries, of which each key head meets as many.
    fn nearness(&self, q: &[f32], (heads, kv_heads): (usize, usize), factors: &[f32]) -> Vec<f32> {
        let (dim, pages) = (q.len() / heads.max(1), self.pages.min(factors.len()));
        let (width, group) = (kv_heads * dim, heads / kv_heads.max(1));
        let mut nearest = vec![f32::NEG_INFINITY; pages];
        let mut bounds = vec![0.0f32; pages];
        for (head, q) in q.chunks_exact(dim.max(1)).enumerate() {
            let from = head / group.max(1) * dim;
            let mut most = f32::NEG_INFINITY;
            for (page, bound) in bounds.iter_mut().enumerate() {
                let at = page * width + from;
                *bound = upper(q, &self.least[at..at + dim], &self.largest[at..at + dim]) * factors[page];
                most = most.max(*bound);
            }
            for (nearest, bound) in nearest.iter_mut().zip(&bounds) {
                *nearest = nearest.max(bound - most);
            }
        }
        nearest
    }
}

/// Returns the largest product of `q` with a vector between two others.
fn upper(q: &[f32], least: &[f32], largest: &[f32]) -> f32 {
    // Sums side by side, and a comparison that is an instruction: the compiler makes vectors of them.
    let product = |q: f32, a: f32, b: f32| if q * a > q * b { q * a } else { q * b };
    let ((q, q_end), (a, a_end), (b, b_end)) =
        (q.as_chunks::<8>(), least.as_chunks::<8>(), largest.as_chunks::<8>());
    let mut sums = [0.0f32; 8];
    for ((q, a), b) in q.iter().zip(a).zip(b) {
        for i in 0..8 {
            sums[i] += product(q[i], a[i], b[i]);
        }
    }
    let end: f32 = q_end.iter().zip(a_end).zip(b_end).map(|((q, a), b)| product(*q, *a, *b)).sum();
    sums.iter().sum::<f32>() + end
}

/// Returns the numbers of `pages` of `total` blocks, ascending: the first, the last ones, and the nearest of the others.
fn chosen(nearness: &[f32], total: usize, pages: usize) -> Vec<u32> {
    let always = |page: usize| page == 0 || page + LAST >= total;
    let mut others: Vec<usize> = (0..nearness.len().min(total)).filter(|&page| !always(page)).collect();
    let room = pages.saturating_sub(1 + LAST).min(others.len());
    if room < others.len() {
        // Of equally near ones, the later.
        others.select_nth_unstable_by(room, |&a, &b| nearness[b].total_cmp(&nearness[a]).then(b.cmp(&a)));
        others.truncate(room);
    }
    let mut all: Vec<u32> =
        others.into_iter().chain((0..total).filter(|&page| always(page))).map(|p| p as u32).collect();
    all.sort_unstable();
    all
}

/// A sample in a pass that attends to a part of what it sees.
pub(super) struct Sparse {
    /// The number of its input in the batch.
    pub(super) entry: usize,
    rank: Rank,
    branch: usize,
    setting: SparseDecode,
    bounds: PageBounds,
}

impl Sparse {
    /// Returns the selection of a layer. Reads the keys of blocks that are new.
    pub(super) fn select(
        &mut self,
        (engine, ropes, layer): (&Engine, &LayerRopes, usize),
        input: &SequenceInput,
        queries: &FreshQueries,
        row: usize,
    ) -> Result<Selection> {
        let config = engine.model.config();
        let shape = engine.caches.sequences().arena().layout().shape();
        let (block_size, heads) = (shape.block_size, config.heads);
        let mut factors = Vec::new();
        for segment in input.segments.iter() {
            let pages = segment.len.div_ceil(block_size);
            factors.extend(std::iter::repeat_n(config.softmax_scale * segment.logit_scale, pages));
        }
        let total = factors.len();
        // The last block grows.
        let known = total - 1;
        self.bounds.layers.resize_with(config.num_layers(), Bounds::default);
        let latent = queries.latent.is_some();
        let bounds = &mut self.bounds.layers[layer];
        let mut first = 0;
        for segment in input.segments.iter() {
            let next = first + segment.len.div_ceil(block_size);
            while bounds.pages < next.min(known) {
                let from = bounds.pages - first;
                let end = (from + READ).min(next.min(known) - first);
                let keys =
                    rows(engine, ropes, layer, (segment, from * block_size..end * block_size), latent)?;
                let width = if latent { shape.k_dim + shape.v_dim } else { shape.k_heads * shape.k_dim };
                bounds.add(&keys, width, block_size);
            }
            first = next;
        }
        let of_row = |all: &[f32]| {
            let width = all.len() / queries_rows(queries, heads, shape.k_dim);
            all[row * width..(row + 1) * width].to_vec()
        };
        let (mut q, mut kv_heads) = (of_row(&queries.q), shape.k_heads);
        if let Some(latent) = &queries.latent {
            // Each query beside the one that meets the latents.
            let latent = of_row(latent);
            let both = q.chunks_exact(shape.k_dim.max(1)).zip(latent.chunks_exact(shape.v_dim.max(1)));
            q = both.flat_map(|(q, latent)| q.iter().chain(latent)).copied().collect();
            kv_heads = 1;
        }
        let nearness = bounds.nearness(&q, (heads, kv_heads), &factors[..known]);
        let indices = chosen(&nearness, total, self.setting.pages);
        let offsets = [0, indices.len() as u32].into();
        Ok(Selection { unit: SelectionUnit::Blocks, offsets, indices: indices.into() })
    }
}

/// Returns the number of rows of queries.
fn queries_rows(queries: &FreshQueries, heads: usize, k_dim: usize) -> usize {
    (queries.q.len() / (heads * k_dim).max(1)).max(1)
}

/// Returns keys of some tokens of a segment, at their place; with latent attention, each beside its latent.
fn rows(
    engine: &Engine,
    ropes: &LayerRopes,
    layer: usize,
    (segment, tokens): (&Segment, std::ops::Range<usize>),
    latent: bool,
) -> Result<Vec<f32>> {
    let tokens = tokens.start..tokens.end.min(segment.len);
    let count = tokens.len().max(1);
    let (k, v) = engine.keys_at_place(ropes, layer, segment, tokens)?;
    if !latent {
        return Ok(k);
    }
    let both = k.chunks_exact((k.len() / count).max(1)).zip(v.chunks_exact((v.len() / count).max(1)));
    Ok(both.flat_map(|(k, v)| k.iter().chain(v)).copied().collect())
}

impl Scheduler {
    /// Takes the bounds of all samples that see more blocks than they attend to.
    pub(super) fn sparse_of(
        &mut self,
        engine: &Engine,
        feeds: &[Feed],
        inputs: &[SequenceInput],
    ) -> Vec<Sparse> {
        let block_size = engine.caches.sequences().arena().layout().shape().block_size;
        let mut sparse = Vec::new();
        for (entry, (feed, input)) in feeds.iter().zip(inputs).enumerate() {
            let (Some(at), Some(branch)) = (self.place(feed.rank), feed.branch) else { continue };
            let live = &mut self.running[at];
            let Some(setting) = live.request.sparse.filter(|_| input.tokens.len() == 1) else { continue };
            let seen: usize = input.segments.iter().map(|segment| segment.len.div_ceil(block_size)).sum();
            let it = &mut live.branches[branch];
            if seen > setting.pages && !it.answer().is_empty() {
                let bounds = it.pages.take().unwrap_or_default();
                sparse.push(Sparse { entry, rank: feed.rank, branch, setting, bounds });
            }
        }
        sparse
    }
}

impl Sparse {
    /// Returns whether the sample chooses blocks in a layer. A window leaves few blocks as it is.
    pub(super) fn wants(&self, layer: usize, windowed: bool) -> bool {
        layer >= self.setting.dense_layers && !windowed
    }

    /// Gives the bounds back to their sample.
    pub(super) fn put_back(self, scheduler: &mut Scheduler) {
        if let Some(at) = scheduler.place(self.rank) {
            scheduler.running[at].branches[self.branch].pages = Some(self.bounds);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn numbers(n: usize) -> impl Strategy<Value = Vec<f32>> {
        prop::collection::vec(-3.0f32..3.0, n)
    }

    proptest! {
        /// No key of a block meets a query better than the block's bound says, and the best block of a head is as near as can be.
        #[test]
        fn a_bound_is_above_every_product((q, keys) in (numbers(2 * 12), numbers(2 * 3 * 11))) {
            // Eleven keys of two heads of three numbers, in blocks of four; two queries meet each key head, for four of twelve.
            let (q, width, block_size) = (&q[..4 * 3], 6, 4);
            let mut bounds = Bounds::default();
            bounds.add(&keys, width, block_size);
            prop_assert_eq!(bounds.pages, 3);
            let nearness = bounds.nearness(q, (4, 2), &[1.0; 3]);
            prop_assert!(nearness.iter().all(|x| *x <= 0.0) && nearness.contains(&0.0));
            for (head, q) in q.chunks(3).enumerate() {
                for (i, key) in keys.chunks(width).enumerate() {
                    let key = &key[head / 2 * 3..][..3];
                    let product: f32 = q.iter().zip(key).map(|(q, k)| q * k).sum();
                    let at = i / block_size * width + head / 2 * 3;
                    let bound = upper(q, &bounds.least[at..at + 3], &bounds.largest[at..at + 3]);
                    prop_assert!(product <= bound + 1e-4, "{product} above {bound}");
                }
            }
        }
    }

    #[test]
    fn the_ends_and_the_nearest_blocks_are_chosen_in_order() {
        let nearness = [-9.0, -1.0, -5.0, -0.5, -5.0, -7.0];
        assert_eq!(chosen(&nearness, 7, 5), [0, 1, 3, 5, 6]);
        assert_eq!(chosen(&nearness, 7, 6), [0, 1, 3, 4, 5, 6], "of equally near ones, the later");
        assert_eq!(chosen(&nearness, 7, 7), [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(chosen(&nearness, 7, 4), [0, 3, 5, 6]);
    }

    #[test]
    fn settings_that_leave_no_choice_are_refused() {
        assert!(matches!(SparseDecode::new(3).check(None), Err(Error::Pages(_))));
        assert!(matches!(SparseDecode::new(4).check(Some(24)), Err(Error::Pages(_))));
        assert!(SparseDecode::new(4).check(None).is_ok());
    }
}
