//! Reads and writes the keys or values of an arena as f32 rows, in every format.

use std::ops::Range;

use half::f16;
use kvcore::{BlockId, DType, Error, IntKind, KvArena, KvFormat, KvPlane, KvShape, PlaneStrides, Result};
use smallvec::SmallVec;

use crate::NAME;
use crate::element::{Element, dispatch, elements, elements_mut};
use crate::memory::{ByteSpan, LockedParts, Window, WindowMut};

/// The position of a row, which holds the elements of one head of one token.
#[derive(Clone, Copy)]
pub(crate) struct RowAt {
    pub(crate) layer: usize,
    pub(crate) block: usize,
    pub(crate) token: usize,
    pub(crate) head: usize,
}

impl RowAt {
    /// Returns the row of head 0 for the token at `slot`.
    pub(crate) fn slot(layer: usize, slot: usize, block_size: usize) -> Self {
        Self { layer, block: slot / block_size, token: slot % block_size, head: 0 }
    }

    /// Returns the row with the same layer, token and head in another block.
    pub(crate) fn block(self, block: BlockId) -> Self {
        Self { block: block.index(), ..self }
    }

    /// Returns the row of another head for the same token.
    pub(crate) fn head(self, head: usize) -> Self {
        Self { head, ..self }
    }
}

/// The layout of a plane's codes, or of its scales, in their storage.
#[derive(Clone, Copy)]
pub(crate) struct RowLayout {
    strides: PlaneStrides,
    bits: usize,
    elements: usize,
}

impl RowLayout {
    /// Returns the layout of a plane's codes.
    pub(crate) fn codes(plane: &KvPlane) -> Self {
        Self { strides: plane.strides, bits: plane.format.storage_dtype().bits(), elements: plane.dim }
    }

    /// Returns the layout of a plane's scales, if its format has scales.
    pub(crate) fn scales(plane: &KvPlane) -> Option<Self> {
        plane.scales.map(|(_, scales)| Self {
            strides: scales.strides,
            bits: scales.dtype.bits(),
            elements: scales.per_row,
        })
    }

    /// Returns the byte range of one row in the storage.
    pub(crate) fn bytes(&self, at: RowAt) -> Range<usize> {
        let start = self.strides.at(at.layer, at.block, at.token, at.head) * self.bits / 8;
        start..start + self.row_bytes()
    }

    /// Returns the strides, in elements.
    pub(crate) fn strides(&self) -> PlaneStrides {
        self.strides
    }

    /// Returns the distance in bytes between the rows of consecutive heads.
    pub(crate) fn head_bytes(&self) -> usize {
        self.strides.head * self.bits / 8
    }

    /// Returns the distance in bytes between the rows of consecutive tokens in a block.
    pub(crate) fn token_bytes(&self) -> usize {
        self.strides.token * self.bits / 8
    }

    /// Returns the number of elements per row.
    pub(crate) fn row_elements(&self) -> usize {
        self.elements
    }

    /// Returns the number of bytes per row.
    pub(crate) fn row_bytes(&self) -> usize {
        self.elements * self.bits / 8
    }

    /// Returns the byte range from the first to the last row of the given layers. The plane has `heads`
    /// heads.
    fn extent(&self, shape: &KvShape, heads: usize, layers: &Range<usize>) -> Range<usize> {
        let first = self.strides.at(layers.start, 0, 0, 0);
        let last = (layers.end - 1, shape.num_blocks - 1, shape.block_size - 1, heads - 1);
        let last = self.strides.at(last.0, last.1, last.2, last.3);
        first * self.bits / 8..((last + self.elements) * self.bits).div_ceil(8)
    }
}

/// The byte ranges of some layers of a plane: their codes, and their scales if the format has scales.
#[derive(Clone)]
pub(crate) struct PlaneSpans<'a> {
    pub(crate) codes: ByteSpan<'a>,
    pub(crate) scales: Option<ByteSpan<'a>>,
}

impl<'a> PlaneSpans<'a> {
    /// Returns the byte ranges of one layer of an arena's plane.
    pub(crate) fn of_layer(arena: &KvArena, plane: &KvPlane<'a>, layer: usize) -> Self {
        Self::new(arena, plane, &(layer..layer + 1))
    }

    /// Returns the byte ranges of a range of layers of an arena's plane.
    pub(crate) fn new(arena: &KvArena, plane: &KvPlane<'a>, layers: &Range<usize>) -> Self {
        let shape = arena.layout().shape();
        let span =
            |storage, layout: RowLayout| ByteSpan::new(storage, layout.extent(shape, plane.heads, layers));
        let scales = plane.scales.map(|(storage, _)| storage).zip(RowLayout::scales(plane));
        Self {
            codes: span(plane.storage, RowLayout::codes(plane)),
            scales: scales.map(|(storage, layout)| span(storage, layout)),
        }
    }

    /// Returns the byte range of the codes and, if there are scales, the byte range of the scales.
    pub(crate) fn all(&self) -> SmallVec<[&ByteSpan<'a>; 2]> {
        std::iter::once(&self.codes).chain(&self.scales).collect()
    }
}

/// Read access to the rows of a plane.
pub(crate) struct PlaneRows<'a> {
    format: KvFormat,
    codes: (RowLayout, Window<'a>),
    scales: Option<(RowLayout, Window<'a>)>,
}

impl<'a> PlaneRows<'a> {
    /// Creates read access to a plane, whose bytes are removed from `parts`.
    pub(crate) fn new(plane: &KvPlane, spans: &PlaneSpans, parts: &mut LockedParts<'a>) -> Result<Self> {
        let codes = (RowLayout::codes(plane), parts.read(&spans.codes)?);
        let scales = spans.scales.as_ref().map(|scales| parts.read(scales)).transpose()?;
        Ok(Self { format: plane.format, codes, scales: RowLayout::scales(plane).zip(scales) })
    }

    /// Returns a row's codes and scales. The second slice is empty if the format has no scales.
    fn row(&self, at: RowAt) -> (&'a [u8], &'a [u8]) {
        let scales = self.scales.map_or(&[][..], |(layout, bytes)| bytes.get(layout.bytes(at)));
        (self.codes.1.get(self.codes.0.bytes(at)), scales)
    }

    /// Returns a row as f32, in place if the plane is f32. Otherwise, the row is decoded into `buffer`.
    pub(crate) fn read<'b>(&'b self, at: RowAt, buffer: &'b mut [f32]) -> Result<&'b [f32]> {
        let (codes, scales) = self.row(at);
        if self.format == KvFormat::Dense(DType::F32) {
            return elements(codes);
        }
        decode(self.format, codes, scales, buffer)?;
        Ok(buffer)
    }
}

/// Read and write access to the rows of a plane.
pub(crate) struct PlaneRowsMut<'a> {
    format: KvFormat,
    codes: (RowLayout, WindowMut<'a>),
    scales: Option<(RowLayout, WindowMut<'a>)>,
}

impl<'a> PlaneRowsMut<'a> {
    /// Creates read and write access to a plane, whose bytes are removed from `parts` and must be locked for
    /// writing.
    pub(crate) fn new(plane: &KvPlane, spans: &PlaneSpans, parts: &mut LockedParts<'a>) -> Result<Self> {
        let codes = (RowLayout::codes(plane), parts.write(&spans.codes)?);
        let scales = spans.scales.as_ref().map(|scales| parts.write(scales)).transpose()?;
        Ok(Self { format: plane.format, codes, scales: RowLayout::scales(plane).zip(scales) })
    }

    /// Decodes the row at `at` into `row`.
    pub(crate) fn read(&self, at: RowAt, row: &mut [f32]) -> Result<()> {
        let codes = &self.codes.1[self.codes.0.bytes(at)];
        let scales = self.scales.as_ref().map_or(&[][..], |(layout, bytes)| &bytes[layout.bytes(at)]);
        decode(self.format, codes, scales, row)
    }

    /// Writes a row, rounding or quantising it to the plane's format.
    pub(crate) fn write(&mut self, at: RowAt, row: &[f32]) -> Result<()> {
        let codes = &mut self.codes.1[self.codes.0.bytes(at)];
        let scales = self.scales.as_mut().map_or(&mut [][..], |(layout, bytes)| &mut bytes[layout.bytes(at)]);
        encode(self.format, row, codes, scales)
    }
}

fn decode(format: KvFormat, codes: &[u8], scales: &[u8], row: &mut [f32]) -> Result<()> {
    match format {
        KvFormat::Dense(dtype) => dispatch!(dtype, T => {
            for (x, y) in row.iter_mut().zip(elements::<T>(codes)?) {
                *x = y.to_f32();
            }
            Ok(())
        }),
        KvFormat::Int8 { group } => IntKind::Int8.decode_row(codes, group, elements::<f16>(scales)?, row),
        KvFormat::Int4 { group } => IntKind::Int4.decode_row(codes, group, elements::<f16>(scales)?, row),
        KvFormat::Fp8 { kind, .. } => {
            elements::<f32>(scales)?.iter().for_each(|&scale| kind.decode_row(codes, scale, row));
            Ok(())
        }
        other => Err(unsupported(other)),
    }
}

fn encode(format: KvFormat, row: &[f32], codes: &mut [u8], scales: &mut [u8]) -> Result<()> {
    match format {
        KvFormat::Dense(dtype) => dispatch!(dtype, T => {
            for (x, &y) in elements_mut::<T>(codes)?.iter_mut().zip(row) {
                *x = T::from_f32(y);
            }
            Ok(())
        }),
        KvFormat::Int8 { group } => IntKind::Int8.encode_row(row, group, codes, elements_mut::<f16>(scales)?),
        KvFormat::Int4 { group } => IntKind::Int4.encode_row(row, group, codes, elements_mut::<f16>(scales)?),
        KvFormat::Fp8 { kind, .. } => {
            elements::<f32>(scales)?.iter().for_each(|&scale| kind.encode_row(row, scale, codes));
            Ok(())
        }
        other => Err(unsupported(other)),
    }
}

pub(crate) fn unsupported(format: KvFormat) -> Error {
    Error::Unsupported { backend: NAME, what: format!("KV format {format}") }
}
