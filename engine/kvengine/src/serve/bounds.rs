//! Bounds on the keys of blocks, for page-sparse decoding.
//!
//! For every full block that a sample sees, this module keeps the minimum and maximum of each key element,
//! which give an upper bound on the dot product of any query with any key in the block. (Quest, Tang et al.,
//! 2024.)

use crate::request::SparseDecode;

// Decision: docs/decisions/models.md#sparse-decode-chooses-blocks-by-bounds-on-their-keys
/// The key bounds of a sample's blocks in each layer, for the blocks whose keys have been read.
#[derive(Debug, Default)]
pub(super) struct PageBounds {
    layers: Vec<LayerBounds>,
}

impl PageBounds {
    /// Returns a layer's bounds, for a model with `layers` layers.
    pub(super) fn layer(&mut self, layer: usize, layers: usize) -> &mut LayerBounds {
        self.layers.resize_with(layers, LayerBounds::default);
        &mut self.layers[layer]
    }
}

/// The key bounds for one layer: each block's minimum and maximum of each key element.
#[derive(Debug, Default)]
pub(super) struct LayerBounds {
    least: Vec<f32>,
    largest: Vec<f32>,
    pages: usize,
}

impl LayerBounds {
    /// Returns the number of blocks whose bounds are known.
    pub(super) fn pages(&self) -> usize {
        self.pages
    }

    /// Adds the bounds of the next blocks, whose keys are given with `width` elements per token. Each block
    /// has `block_size` tokens, but the last may be shorter.
    pub(super) fn add(&mut self, keys: &[f32], width: usize, block_size: usize) {
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

    /// Returns the nearness of each block, which is at most 0. For each query head, takes the upper bound of
    /// the block's dot products, multiplied by the block's factor, and subtracts the largest such value of
    /// all blocks. The nearness is the maximum of these differences over all heads. `q` contains `heads`
    /// queries, the same number for each key head.
    pub(super) fn nearness(&self, q: &[f32], (heads, kv_heads): (usize, usize), factors: &[f32]) -> Vec<f32> {
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

/// Returns the largest dot product of `q` with any vector between `least` and `largest`.
fn upper(q: &[f32], least: &[f32], largest: &[f32]) -> f32 {
    // The compiler vectorises independent sums and single-instruction comparisons.
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

/// Chooses `pages` of `total` blocks: the first block, the last blocks, and the nearest of the other blocks.
/// Returns their indices in ascending order.
pub(super) fn chosen(nearness: &[f32], total: usize, pages: usize) -> Vec<u32> {
    let always = |page: usize| page == 0 || page + SparseDecode::LAST >= total;
    let mut others: Vec<usize> = (0..nearness.len().min(total)).filter(|&page| !always(page)).collect();
    let room = pages.saturating_sub(1 + SparseDecode::LAST).min(others.len());
    if room < others.len() {
        // Of equally near blocks, later blocks are preferred.
        others.select_nth_unstable_by(room, |&a, &b| nearness[b].total_cmp(&nearness[a]).then(b.cmp(&a)));
        others.truncate(room);
    }
    let always = (0..total).filter(|&page| always(page));
    let mut chosen: Vec<u32> = others.into_iter().chain(always).map(|page| page as u32).collect();
    chosen.sort_unstable();
    chosen
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn numbers(n: usize) -> impl Strategy<Value = Vec<f32>> {
        prop::collection::vec(-3.0f32..3.0, n)
    }

    proptest! {
        /// Tests that no dot product of a query with a key exceeds the bound of the key's block, and that
        /// each head's best block has nearness 0.
        #[test]
        fn a_bound_is_above_every_product((q, keys) in (numbers(2 * 12), numbers(2 * 3 * 11))) {
            // There are eleven keys with two heads of three elements, in blocks of four keys. Each key head
            // has two queries, so there are four queries of three elements.
            let (q, width, block_size) = (&q[..4 * 3], 6, 4);
            let mut bounds = LayerBounds::default();
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
        assert_eq!(chosen(&nearness, 7, 6), [0, 1, 3, 4, 5, 6], "of equally near blocks, the later ones");
        assert_eq!(chosen(&nearness, 7, 7), [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(chosen(&nearness, 7, 4), [0, 3, 5, 6]);
    }
}
