//! Places of rows in a pool: one layer of a plane as a matrix of rows, and the numbers of the rows that a list names.

use std::sync::Arc;

use kvcore::{KvFormat, KvPlane, MemoryKind, Result, Storage};

use super::unsupported;
use crate::bindings::types as sys;
use crate::operators::{Tensor, number};

/// One layer of K or V as a dense matrix. A row of a head, or of all heads where they lie one behind the other, is one or
/// several rows of the matrix.
#[derive(Debug, Clone)]
pub(super) struct PlaneRows {
    /// `[rows, unit]`.
    pub(super) matrix: Tensor,
    pub(super) geometry: Geometry,
}

/// Where rows lie in the matrix of a layer, in rows of the matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Geometry {
    pub(super) heads: usize,
    pub(super) dim: usize,
    /// Heads that have rows of their own; 1 where the heads of a token lie one behind the other.
    apart: usize,
    /// Rows of the matrix that make one row of such a head.
    parts: usize,
    block: usize,
    token: usize,
    head: usize,
    block_size: usize,
}

/// Checks that operators reach a storage.
pub(super) fn on_device(what: &str, storage: &Arc<dyn Storage>) -> Result<()> {
    match storage.kind() {
        MemoryKind::Device => Ok(()),
        other => Err(unsupported(format!("{what} in {other} memory; copy it to the device first"))),
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl PlaneRows {
    /// Describes one layer of a dense plane.
    pub(super) fn new(plane: &KvPlane<'_>, layer: usize, extents: (usize, usize)) -> Result<Self> {
        let KvFormat::Dense(dtype) = plane.format else {
            return Err(unsupported(format!("caches in {}", plane.format.name())));
        };
        on_device("a pool", plane.storage)?;
        let ((num_blocks, block_size), s) = (extents, plane.strides);
        let dtype = number(dtype)?;
        let (apart, width) = if s.head == plane.dim || plane.heads == 1 {
            (1, plane.heads * plane.dim)
        } else {
            (plane.heads, plane.dim)
        };
        let unit = [s.block, s.token, if apart == 1 { 0 } else { s.head }].into_iter().fold(width, gcd);
        let last = s.at(0, num_blocks - 1, block_size - 1, plane.heads - 1) + plane.dim;
        let rows = last / unit;
        if i32::try_from(rows).is_err() {
            return Err(unsupported(format!("a layer of {rows} rows, more than 2^31; use several pools")));
        }
        let at = plane.storage.address() + (layer * s.layer * crate::operators::bytes_of(dtype)) as u64;
        let geometry = Geometry {
            heads: plane.heads,
            dim: plane.dim,
            apart,
            parts: width / unit,
            block: s.block / unit,
            token: s.token / unit,
            head: if apart == 1 { 0 } else { s.head / unit },
            block_size,
        };
        Ok(Self { matrix: Tensor::dense(at, dtype, &[rows, unit]), geometry })
    }

    pub(super) fn dtype(&self) -> sys::aclDataType {
        self.matrix.dtype()
    }

    /// Returns elements of the matrix for `rows` rows that an index names, as `[rows, unit]`.
    pub(super) fn unit(&self) -> usize {
        self.matrix.dim(1)
    }
}

impl Geometry {
    /// Returns the numbers of the rows of slots, in the order `[slots, heads, dim]`.
    pub(super) fn by_slot(&self, slots: impl ExactSizeIterator<Item = usize>) -> Vec<i32> {
        let mut index = Vec::with_capacity(slots.len() * self.apart * self.parts);
        for slot in slots {
            let at = self.at(slot / self.block_size, slot % self.block_size);
            for head in 0..self.apart {
                self.push(&mut index, at + head * self.head);
            }
        }
        index
    }

    /// Returns the numbers of the rows of tokens, each in a block, in the order that [`is_by_head`](Self::is_by_head) says.
    pub(super) fn by_head(&self, tokens: &[(usize, usize)]) -> Vec<i32> {
        let mut index = Vec::with_capacity(tokens.len() * self.apart * self.parts);
        for head in 0..self.apart {
            for &(block, token) in tokens {
                self.push(&mut index, self.at(block, token) + head * self.head);
            }
        }
        index
    }

    /// Returns how many rows of the matrix a slot has.
    pub(super) fn rows_of_slot(&self) -> usize {
        self.apart * self.parts
    }

    /// Returns whether rows of tokens are in the order `[heads, tokens, dim]`, and not `[tokens, heads, dim]`.
    pub(super) fn is_by_head(&self) -> bool {
        self.apart > 1 || self.heads == 1
    }

    fn at(&self, block: usize, token: usize) -> usize {
        block * self.block + token * self.token
    }

    fn push(&self, index: &mut Vec<i32>, first: usize) {
        // `PlaneRows::new` has checked that all rows have numbers of 31 bits.
        index.extend((first..first + self.parts).map(|row| row as i32));
    }

    /// Returns the numbers that tell geometries apart.
    pub(super) fn key(&self) -> [u64; 8] {
        [self.heads, self.dim, self.apart, self.parts, self.block, self.token, self.head, self.block_size]
            .map(|n| n as u64)
    }
}
