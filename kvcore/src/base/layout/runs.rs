//! The byte ranges of an arena's buffers that belong to given blocks.

use std::ops::Range;

use super::{KvLayout, KvShape, PlaneStrides};
use crate::base::DType;

/// The rows in one of an arena's buffers: K, V, or the scales of K or of V.
#[derive(Debug, Clone, Copy)]
struct RoleRows {
    strides: PlaneStrides,
    heads: usize,
    /// Number of elements in a row.
    len: usize,
    dtype: DType,
    bytes: usize,
}

impl KvLayout {
    /// Returns the byte ranges that belong only to `blocks`, in ascending order, for each buffer with
    /// per-block contents: K, V, and the scales of K and of V unless the scales are static.
    ///
    /// A range that reaches the end of its buffer ends at `usize::MAX` instead, so it also covers any bytes
    /// after the last block. If layers are the outermost axis, which is always the case unless the caller
    /// provided the strides, a buffer has at most one range per layer.
    pub fn runs(&self, blocks: &Range<u32>) -> Vec<Vec<Range<usize>>> {
        let s = &self.shape;
        let dtype = s.format.storage_dtype();
        let planes = [(&self.k, s.k_heads, s.k_dim), (&self.v, s.v_heads, s.v_dim)];
        let codes = planes.map(|(plane, heads, len)| {
            Some(RoleRows { strides: plane.strides, heads, len, dtype, bytes: plane.bytes })
        });
        let scales = planes.map(|(plane, heads, _)| {
            let scales = plane.scales.filter(|scales| !scales.is_static())?;
            let (strides, bytes) = (scales.strides, scales.bytes);
            Some(RoleRows { strides, heads, len: scales.per_row, dtype: scales.dtype, bytes })
        });
        let buffers = codes.into_iter().chain(scales).flatten();
        buffers.map(|rows| rows.runs(s, blocks)).collect()
    }
}

impl RoleRows {
    /// Returns the byte ranges of `blocks`. The strides must not overlap (see `PlaneStrides::extent`): axes
    /// with a larger stride than the block axis are outside a block, and all other axes are inside it.
    fn runs(&self, shape: &KvShape, blocks: &Range<u32>) -> Vec<Range<usize>> {
        let s = self.strides;
        let axes = [(s.layer, shape.num_layers), (s.head, self.heads), (s.token, shape.block_size)];
        let is_outer = |stride: usize| shape.num_blocks > 1 && stride > s.block;
        let (mut starts, mut covered) = (vec![0], self.len);
        for (stride, count) in axes.into_iter().filter(|axis| axis.1 > 1) {
            if is_outer(stride) {
                starts = starts.iter().flat_map(|at| (0..count).map(move |i| at + i * stride)).collect();
            } else {
                covered += stride * (count - 1);
            }
        }
        starts.sort_unstable();
        let (first, last) = (blocks.start as usize * s.block, (blocks.end as usize - 1) * s.block);
        let byte = |element: usize| element * self.dtype.bits() / 8;
        let mut runs: Vec<Range<usize>> = Vec::with_capacity(starts.len());
        for at in starts {
            let (start, end) = (byte(at + first), byte(at + last + covered));
            let end = if end >= self.bytes { usize::MAX } else { end };
            match runs.last_mut() {
                Some(run) if run.end == start => run.end = end,
                _ => runs.push(start..end),
            }
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{BlockOrder, Fp8Kind, KvFormat, ScaleScope};

    const BLOCKS: usize = 5;

    fn shape(format: KvFormat, order: BlockOrder) -> KvShape {
        KvShape {
            num_layers: 3,
            num_blocks: BLOCKS,
            block_size: 4,
            k_heads: 2,
            v_heads: 3,
            k_dim: 8,
            v_dim: 6,
            format,
            order,
        }
    }

    /// Returns the block that owns each byte, found by walking over every element.
    fn owners(shape: &KvShape, strides: PlaneStrides, heads: usize, len: usize, bits: usize) -> Vec<usize> {
        let mut owner = Vec::new();
        for layer in 0..shape.num_layers {
            for block in 0..shape.num_blocks {
                for (token, head) in (0..shape.block_size).flat_map(|t| (0..heads).map(move |h| (t, h))) {
                    let at = strides.at(layer, block, token, head);
                    let (start, end) = (at * bits / 8, (at + len) * bits / 8);
                    owner.resize(owner.len().max(end), usize::MAX);
                    owner[start..end].fill(block);
                }
            }
        }
        owner
    }

    /// Asserts that the runs contain every byte of the range's blocks and no byte of any other block.
    fn check(layout: &KvLayout) {
        let s = layout.shape().clone();
        let bits = s.format.storage_dtype().bits();
        let mut buffers = vec![
            owners(&s, layout.k_strides(), s.k_heads, s.k_dim, bits),
            owners(&s, layout.v_strides(), s.v_heads, s.v_dim, bits),
        ];
        for (scales, heads) in [(layout.k_scales(), s.k_heads), (layout.v_scales(), s.v_heads)] {
            if let Some(scales) = scales.filter(|scales| !scales.is_static()) {
                buffers.push(owners(&s, scales.strides, heads, scales.per_row, 16));
            }
        }
        let blocks = s.num_blocks as u32;
        for range in (0..blocks).flat_map(|a| (a + 1..=blocks).map(move |b| a..b)) {
            let runs = layout.runs(&range);
            assert_eq!(runs.len(), buffers.len());
            for (runs, owner) in runs.iter().zip(&buffers) {
                for (at, &block) in owner.iter().enumerate().filter(|(_, block)| **block != usize::MAX) {
                    let inside = runs.iter().any(|run| run.contains(&at));
                    assert_eq!(inside, range.contains(&(block as u32)), "byte {at} of {range:?}: {runs:?}");
                }
                assert!(runs.windows(2).all(|pair| pair[0].end < pair[1].start), "{runs:?}");
            }
        }
    }

    #[test]
    fn runs_hold_every_byte_of_their_blocks_and_none_of_others() {
        let fp8 = KvFormat::Fp8 { kind: Fp8Kind::E4M3, scales: ScaleScope::PerHead };
        for order in [BlockOrder::HeadMajor, BlockOrder::TokenMajor] {
            for format in [DType::BF16.into(), KvFormat::Int8 { group: 2 }, KvFormat::Int4 { group: 2 }, fp8]
            {
                check(&KvLayout::new(shape(format, order)).unwrap());
                let single = KvShape { num_blocks: 1, ..shape(format, order) };
                check(&KvLayout::new(single).unwrap());
            }
        }
    }

    #[test]
    fn strides_of_any_order_are_followed() {
        // The axes, from the outermost inwards, are heads, blocks, layers and tokens, with gaps between them.
        let s = shape(DType::F32.into(), BlockOrder::TokenMajor);
        let strides = |dim: usize| {
            let (token, layer) = (dim + 1, 4 * (dim + 1));
            let block = 3 * layer + 7;
            PlaneStrides { layer, block, head: BLOCKS * block + 3, token }
        };
        let layout = KvLayout::with_strides(s, strides(8), strides(6)).unwrap();
        check(&layout);
        assert_eq!(layout.runs(&(1..3))[0].len(), 2, "a run a head");
    }

    #[test]
    fn all_blocks_are_one_run_to_the_end() {
        let layout = KvLayout::new(shape(DType::F16.into(), BlockOrder::TokenMajor)).unwrap();
        for runs in layout.runs(&(0..5)) {
            assert_eq!((runs.len(), runs[0].clone()), (1, 0..usize::MAX));
        }
        assert_eq!(layout.runs(&(4..5))[0][2].end, usize::MAX, "nothing else has the bytes after it");
    }
}
