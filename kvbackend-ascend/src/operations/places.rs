//! Places of rows in a pool: one layer of a plane as a matrix of rows, and the numbers of the rows that a list names.

use std::sync::Arc;

use kvcore::{KvFormat, KvPlane, MemoryKind, PlaneStrides, Result, Storage};

use super::turn::in_f32;
use super::{codes, unsupported};
use crate::bindings::types as sys;
use crate::operators::{Tensor, number};
use crate::stream::Work;

/// One layer of K or V, or of their codes, as a dense matrix. A row of a head, or of all heads where they lie one behind the
/// other, is one or several rows of the matrix.
#[derive(Debug, Clone)]
pub(super) struct PlaneRows {
    /// `[rows, unit]`.
    matrix: Tensor,
    pub(super) geometry: Geometry,
    /// The scales of codes, as rows of one number for each group.
    pub(super) scales: Option<Box<PlaneRows>>,
}

/// Numbers of rows in the matrix of a plane, and in that of its scales.
#[derive(Debug, Clone)]
pub(super) struct RowNumbers {
    pub(super) rows: Tensor,
    pub(super) scales: Option<Tensor>,
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
    /// Describes one layer of a plane.
    pub(super) fn new(plane: &KvPlane<'_>, layer: usize, extents: (usize, usize)) -> Result<Self> {
        let rows =
            Rows { storage: plane.storage, strides: plane.strides, heads: plane.heads, dim: plane.dim };
        match (plane.format, plane.scales) {
            (KvFormat::Dense(dtype), _) => rows.of_layer(layer, extents, number(dtype)?),
            (KvFormat::Int8 { .. }, Some((storage, scales))) => {
                let codes = rows.of_layer(layer, extents, sys::ACL_INT8)?;
                let of_scales = Rows { storage, strides: scales.strides, dim: scales.per_row, ..rows };
                let scales = of_scales.of_layer(layer, extents, sys::ACL_FLOAT16)?;
                Ok(Self { scales: Some(Box::new(scales)), ..codes })
            }
            (format, _) => Err(unsupported(format!("caches in {}", format.name()))),
        }
    }

    /// Makes the numbers of rows by the geometry of the matrix, and by that of the scales.
    pub(super) fn numbers(&self, mut of: impl FnMut(&Geometry) -> Result<Tensor>) -> Result<RowNumbers> {
        let scales = self.scales.as_ref().map(|scales| of(&scales.geometry)).transpose()?;
        Ok(RowNumbers { rows: of(&self.geometry)?, scales })
    }

    /// Reads rows of the matrix as they are stored.
    fn take(&self, work: &mut Work<'_>, numbers: &Tensor) -> Result<Tensor> {
        let rows = work.temporary(self.matrix.dtype(), &[numbers.dim(0), self.matrix.dim(1)])?;
        work.take_rows(&self.matrix, numbers, &rows)?;
        Ok(rows)
    }

    /// Reads rows to a dense tensor of their type, `[rows, heads, dim]`.
    pub(super) fn read_into(&self, work: &mut Work<'_>, numbers: &RowNumbers, out: &Tensor) -> Result<()> {
        if self.scales.is_none() {
            let rows = out.reshaped(&[numbers.rows.dim(0), self.matrix.dim(1)]);
            return work.take_rows(&self.matrix, &numbers.rows, &rows);
        }
        let found = self.read(work, numbers)?;
        work.convert(&found, out)
    }

    /// Reads rows in their order in the list, `[rows, heads, dim]` for slots.
    pub(super) fn read(&self, work: &mut Work<'_>, numbers: &RowNumbers) -> Result<Tensor> {
        let (heads, dim) = (self.geometry.heads, self.geometry.dim);
        let found = self.take(work, &numbers.rows)?;
        let count = found.dim(0) * found.dim(1) / (heads * dim);
        let found = found.reshaped(&[count, heads, dim]);
        let (Some(scales), Some(numbers)) = (&self.scales, &numbers.scales) else { return Ok(found) };
        let scales = scales.take(work, numbers)?;
        codes::decoded(work, &found, &scales)
    }

    /// Reads rows of `rows · tokens` tokens, whose numbers are in the order of [`Geometry::by_head`], as `[rows, heads, tokens,
    /// dim]` in f32.
    pub(super) fn read_by_head(
        &self,
        work: &mut Work<'_>,
        numbers: &RowNumbers,
        (rows, tokens): (usize, usize),
    ) -> Result<Tensor> {
        let found = self.take(work, &numbers.rows)?;
        let x = self.geometry.on_heads(work, &found, (rows, tokens))?;
        let (Some(scales), Some(numbers)) = (&self.scales, &numbers.scales) else { return Ok(x) };
        let found = scales.take(work, numbers)?;
        let factors = scales.geometry.on_heads(work, &found, (rows, tokens))?;
        codes::decoded(work, &x, &factors)
    }

    /// Writes rows `[rows, heads, dim]` of any type.
    pub(super) fn write(&self, work: &mut Work<'_>, numbers: &RowNumbers, rows: &Tensor) -> Result<()> {
        let put = |work: &mut Work<'_>, plane: &Self, numbers: &Tensor, rows: &Tensor| {
            let rows = rows.reshaped(&[numbers.dim(0), plane.matrix.dim(1)]);
            work.put_rows(&plane.matrix, numbers, &rows)
        };
        if let (Some(scales), Some(of_scales)) = (&self.scales, &numbers.scales) {
            let rows = in_f32(work, rows)?;
            let group = self.geometry.dim / scales.geometry.dim;
            let (codes, factors) = codes::encoded(work, &rows, group)?;
            put(work, self, &numbers.rows, &codes)?;
            return put(work, scales, of_scales, &factors);
        }
        let rounded = self.rounded(work, rows)?;
        put(work, self, &numbers.rows, &rounded)
    }

    /// Returns rows in the type of the plane, dense.
    pub(super) fn rounded(&self, work: &mut Work<'_>, rows: &Tensor) -> Result<Tensor> {
        if rows.dtype() == self.matrix.dtype() && rows.is_dense() {
            return Ok(rows.clone());
        }
        let rounded = work.temporary(self.matrix.dtype(), &rows.dims())?;
        work.convert(rows, &rounded)?;
        Ok(rounded)
    }

    /// Returns the layer as what CANN calls a paged cache: blocks one behind the other, `[blocks, heads, block_size, dim]` if
    /// heads lie apart, else `[blocks, block_size, heads, dim]`. None if blocks have gaps or another order, and for types other
    /// than f16 and bf16.
    pub(super) fn pages(&self) -> Option<Tensor> {
        let Geometry { heads, dim, apart, parts, block, token, head, block_size } = self.geometry;
        let half = [sys::ACL_FLOAT16, sys::ACL_BF16].contains(&self.matrix.dtype());
        let of_block = apart * block_size;
        if !half || (parts, token, block) != (1, 1, of_block) || (apart > 1 && head != block_size) {
            return None;
        }
        let blocks = self.matrix.dim(0) / of_block;
        let inner = if apart > 1 { [heads, block_size] } else { [block_size, heads] };
        Some(self.matrix.reshaped(&[blocks, inner[0], inner[1], dim]))
    }

    /// Returns the numbers that tell geometries apart.
    pub(super) fn key(&self) -> impl Iterator<Item = u64> {
        let scales = self.scales.as_ref().map(|scales| scales.geometry.key());
        self.geometry.key().into_iter().chain(scales.into_iter().flatten())
    }
}

/// Rows of all layers of a storage.
#[derive(Clone, Copy)]
struct Rows<'a> {
    storage: &'a Arc<dyn Storage>,
    strides: PlaneStrides,
    heads: usize,
    dim: usize,
}

impl Rows<'_> {
    fn of_layer(
        self,
        layer: usize,
        (num_blocks, block_size): (usize, usize),
        dtype: sys::aclDataType,
    ) -> Result<PlaneRows> {
        let Rows { storage, strides: s, heads, dim } = self;
        on_device("a pool", storage)?;
        let (apart, width) = if s.head == dim || heads == 1 { (1, heads * dim) } else { (heads, dim) };
        let unit = [s.block, s.token, if apart == 1 { 0 } else { s.head }].into_iter().fold(width, gcd);
        let last = s.at(0, num_blocks - 1, block_size - 1, heads - 1) + dim;
        let rows = last / unit;
        if i32::try_from(rows).is_err() {
            return Err(unsupported(format!("a layer of {rows} rows, more than 2^31; use several pools")));
        }
        let at = storage.address() + (layer * s.layer * crate::operators::bytes_of(dtype)) as u64;
        let geometry = Geometry {
            heads,
            dim,
            apart,
            parts: width / unit,
            block: s.block / unit,
            token: s.token / unit,
            head: if apart == 1 { 0 } else { s.head / unit },
            block_size,
        };
        Ok(PlaneRows { matrix: Tensor::dense(at, dtype, &[rows, unit]), geometry, scales: None })
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

    /// Returns whether the tokens of a head lie one behind the other, and those of the next head behind them.
    pub(super) fn heads_lie_apart(&self) -> bool {
        self.apart > 1
    }

    /// Returns how many rows of the matrix a slot has.
    pub(super) fn rows_of_slot(&self) -> usize {
        self.apart * self.parts
    }

    /// Returns whether rows of tokens are in the order `[heads, tokens, dim]`, and not `[tokens, heads, dim]`.
    fn is_by_head(&self) -> bool {
        self.apart > 1 || self.heads == 1
    }

    /// Returns rows that were read in the order of [`by_head`](Self::by_head) as `[rows, heads, tokens, dim]` in f32.
    fn on_heads(
        &self,
        work: &mut Work<'_>,
        found: &Tensor,
        (rows, tokens): (usize, usize),
    ) -> Result<Tensor> {
        let (heads, dim) = (self.heads, self.dim);
        if self.is_by_head() {
            let found = found.reshaped(&[rows, heads, tokens, dim]);
            return if found.dtype() == sys::ACL_FLOAT { Ok(found) } else { in_f32(work, &found) };
        }
        in_f32(work, &found.reshaped(&[rows, tokens, heads, dim]).permuted(&[0, 2, 1, 3]))
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
