//! One layer of K or V as a matrix of rows.

use std::sync::Arc;

use kvcore::{KvArena, KvFormat, KvPlane, PlaneStrides, Result, Storage};

use super::codes;
use super::geometry::{PlaneGeometry, RowGeometry, RowNumbers};
use super::plans::StepWork;
use crate::bindings::types as sys;
use crate::errors::unsupported;
use crate::memory::on_device;
use crate::operators::{Tensor, bytes_of, number};
use crate::queue::Work;

/// One layer of K or V, or of their codes, as a dense matrix. A head's row consists of one or more matrix
/// rows. If a token's heads are contiguous, they form a single row, which consists of one or more matrix
/// rows.
#[derive(Debug, Clone)]
pub(super) struct PlaneMatrix {
    /// The matrix, `[rows, unit]`.
    matrix: Tensor,
    pub(super) geometry: RowGeometry,
    /// The codes' scales, as rows with one value per group.
    pub(super) scales: Option<Box<PlaneMatrix>>,
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl PlaneMatrix {
    /// Describes one layer of an arena's plane.
    pub(super) fn new(arena: &KvArena, plane: &KvPlane<'_>, layer: usize) -> Result<Self> {
        let shape = arena.layout().shape();
        let extents = (shape.num_blocks, shape.block_size);
        let rows =
            StoredRows { storage: plane.storage, strides: plane.strides, heads: plane.heads, dim: plane.dim };
        match (plane.format, plane.scales) {
            (KvFormat::Dense(dtype), _) => rows.of_layer(layer, extents, number(dtype)?),
            (KvFormat::Int8 { .. }, Some((storage, scales))) => {
                let codes = rows.of_layer(layer, extents, sys::ACL_INT8)?;
                let of_scales = StoredRows { storage, strides: scales.strides, dim: scales.per_row, ..rows };
                let scales = of_scales.of_layer(layer, extents, sys::ACL_FLOAT16)?;
                Ok(Self { scales: Some(Box::new(scales)), ..codes })
            }
            (format, _) => Err(unsupported(format!("caches in {}", format.name()))),
        }
    }

    /// Describes one layer of K and of V.
    pub(super) fn both(arena: &KvArena, layer: usize) -> Result<[Self; 2]> {
        Ok([Self::new(arena, &arena.k_plane(), layer)?, Self::new(arena, &arena.v_plane(), layer)?])
    }

    /// Returns the geometry of the plane and of its scales.
    pub(super) fn geometries(&self) -> PlaneGeometry {
        (self.geometry, self.scales.as_ref().map(|scales| scales.geometry))
    }

    /// Reads matrix rows in their stored type.
    fn take(&self, work: &mut Work<'_>, numbers: &Tensor) -> Result<Tensor> {
        let rows = work.temporary(self.matrix.dtype(), &[numbers.dim(0), self.matrix.dim(1)])?;
        work.take_rows(&self.matrix, numbers, &rows)?;
        Ok(rows)
    }

    /// Reads rows into a dense tensor `[rows, heads, dim]` of the plane's element type.
    pub(super) fn read_into(&self, work: &mut Work<'_>, numbers: &RowNumbers, out: &Tensor) -> Result<()> {
        if self.scales.is_none() {
            let rows = out.reshaped(&[numbers.rows.dim(0), self.matrix.dim(1)]);
            return work.take_rows(&self.matrix, &numbers.rows, &rows);
        }
        let found = self.read(work, numbers)?;
        work.convert(&found, out)
    }

    /// Reads rows in the order of their indices; for slots, the result is `[rows, heads, dim]`.
    pub(super) fn read(&self, work: &mut Work<'_>, numbers: &RowNumbers) -> Result<Tensor> {
        let (heads, dim) = (self.geometry.heads, self.geometry.dim);
        let found = self.take(work, &numbers.rows)?;
        let count = found.dim(0) * found.dim(1) / (heads * dim);
        let found = found.reshaped(&[count, heads, dim]);
        let (Some(scales), Some(numbers)) = (&self.scales, &numbers.scales) else { return Ok(found) };
        let scales = scales.take(work, numbers)?;
        codes::decoded(work, &found, &scales)
    }

    /// Reads the rows of `rows · tokens` tokens, whose indices must be in the order of
    /// [`RowGeometry::by_head`]. Returns `[rows, heads, tokens, dim]` in f32.
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

    /// Writes rows `[rows, heads, dim]` of any element type.
    pub(super) fn write(
        &self,
        work: &mut StepWork<'_, '_>,
        numbers: &RowNumbers,
        rows: &Tensor,
    ) -> Result<()> {
        let put = |work: &mut Work<'_>, plane: &Self, numbers: &Tensor, rows: &Tensor| {
            let rows = rows.reshaped(&[numbers.dim(0), plane.matrix.dim(1)]);
            work.put_rows(&plane.matrix, numbers, &rows)
        };
        if let (Some(scales), Some(of_scales)) = (&self.scales, &numbers.scales) {
            let rows = work.in_f32(rows)?;
            let group = self.geometry.dim / scales.geometry.dim;
            let (codes, factors) = codes::encoded(work, &rows, group)?;
            put(work, self, &numbers.rows, &codes)?;
            return put(work, scales, of_scales, &factors);
        }
        let rounded = self.rounded(work, rows)?;
        put(work, self, &numbers.rows, &rounded)
    }

    /// Returns a dense copy of the rows in the plane's type.
    pub(super) fn rounded(&self, work: &mut Work<'_>, rows: &Tensor) -> Result<Tensor> {
        work.dense_in(self.matrix.dtype(), rows)
    }

    /// Returns the layer as a paged cache for CANN's fused operators: `[blocks, heads, block_size, dim]` if
    /// heads have separate rows, otherwise `[blocks, block_size, heads, dim]`. Returns `None` if blocks have
    /// gaps or a different order, or if the type is not f16 or bf16.
    pub(super) fn pages(&self) -> Option<Tensor> {
        let RowGeometry { heads, dim, apart, parts, block, token, head, block_size } = self.geometry;
        let half = [sys::ACL_FLOAT16, sys::ACL_BF16].contains(&self.matrix.dtype());
        let of_block = apart * block_size;
        if !half || (parts, token, block) != (1, 1, of_block) || (apart > 1 && head != block_size) {
            return None;
        }
        let blocks = self.matrix.dim(0) / of_block;
        let inner = if apart > 1 { [heads, block_size] } else { [block_size, heads] };
        Some(self.matrix.reshaped(&[blocks, inner[0], inner[1], dim]))
    }
}

/// The rows of all layers in a storage.
#[derive(Clone, Copy)]
struct StoredRows<'a> {
    storage: &'a Arc<dyn Storage>,
    strides: PlaneStrides,
    heads: usize,
    dim: usize,
}

impl StoredRows<'_> {
    // Decision: docs/decisions/backend-ascend.md#indices-have-31-bits
    fn of_layer(
        self,
        layer: usize,
        (num_blocks, block_size): (usize, usize),
        dtype: sys::aclDataType,
    ) -> Result<PlaneMatrix> {
        let StoredRows { storage, strides: s, heads, dim } = self;
        on_device("a pool", storage)?;
        let (apart, width) = if s.head == dim || heads == 1 { (1, heads * dim) } else { (heads, dim) };
        let unit = [s.block, s.token, if apart == 1 { 0 } else { s.head }].into_iter().fold(width, gcd);
        let last = s.at(0, num_blocks - 1, block_size - 1, heads - 1) + dim;
        let rows = last / unit;
        if i32::try_from(rows).is_err() {
            return Err(unsupported(format!("a layer of {rows} rows, more than 2^31; use several pools")));
        }
        let at = storage.address() + (layer * s.layer * bytes_of(dtype)) as u64;
        let geometry = RowGeometry {
            heads,
            dim,
            apart,
            parts: width / unit,
            block: s.block / unit,
            token: s.token / unit,
            head: if apart == 1 { 0 } else { s.head / unit },
            block_size,
        };
        Ok(PlaneMatrix { matrix: Tensor::dense(at, dtype, &[rows, unit]), geometry, scales: None })
    }
}
