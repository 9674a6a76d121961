//! K or V of an arena as rows of f32, whatever the format.

use std::ops::Range;

use half::f16;
use kvcore::{BlockId, DType, Error, IntKind, KvFormat, KvPlane, PlaneStrides, Result};

use crate::NAME;
use crate::element::{Element, dispatch, elements, elements_mut};
use crate::memory::Parts;

/// Which row: one head's elements of one token.
#[derive(Clone, Copy)]
pub(crate) struct RowAt {
    pub(crate) layer: usize,
    pub(crate) block: usize,
    pub(crate) token: usize,
    pub(crate) head: usize,
}

impl RowAt {
    /// Head 0 of the token at `slot`.
    pub(crate) fn slot(layer: usize, slot: usize, block_size: usize) -> Self {
        Self { layer, block: slot / block_size, token: slot % block_size, head: 0 }
    }

    /// The same row of another block.
    pub(crate) fn block(self, block: BlockId) -> Self {
        Self { block: block.index(), ..self }
    }

    /// The same token's row of another head.
    pub(crate) fn head(self, head: usize) -> Self {
        Self { head, ..self }
    }
}

/// Where the codes or the scales of rows lie in their storage.
#[derive(Clone, Copy)]
pub(crate) struct Span {
    strides: PlaneStrides,
    bits: usize,
    elements: usize,
}

impl Span {
    /// The codes of a plane.
    pub(crate) fn codes(plane: &KvPlane) -> Self {
        Self { strides: plane.strides, bits: plane.format.storage_dtype().bits(), elements: plane.dim }
    }

    /// The scales of a plane.
    pub(crate) fn scales(plane: &KvPlane) -> Option<Self> {
        plane.scales.map(|(_, scales)| Self {
            strides: scales.strides,
            bits: scales.dtype.bits(),
            elements: scales.per_row,
        })
    }

    /// Where one row lies, in bytes.
    pub(crate) fn bytes(&self, at: RowAt) -> Range<usize> {
        let start = self.strides.at(at.layer, at.block, at.token, at.head) * self.bits / 8;
        start..start + self.row_bytes()
    }

    /// Strides in elements.
    pub(crate) fn strides(&self) -> PlaneStrides {
        self.strides
    }

    /// Bytes from one head's row to the next.
    pub(crate) fn head_bytes(&self) -> usize {
        self.strides.head * self.bits / 8
    }

    /// Bytes from one token's row to the next, within a block.
    pub(crate) fn token_bytes(&self) -> usize {
        self.strides.token * self.bits / 8
    }

    /// Elements of one row.
    pub(crate) fn row_elements(&self) -> usize {
        self.elements
    }

    /// Bytes of one row.
    pub(crate) fn row_bytes(&self) -> usize {
        self.elements * self.bits / 8
    }
}

/// Rows of a plane, to read.
pub(crate) struct Rows<'a> {
    format: KvFormat,
    codes: (Span, &'a [u8]),
    scales: Option<(Span, &'a [u8])>,
}

impl<'a> Rows<'a> {
    /// The rows of a plane whose storages are locked.
    pub(crate) fn new(plane: &KvPlane, parts: &mut Parts<'a>) -> Result<Self> {
        let codes = (Span::codes(plane), parts.read(plane.storage)?);
        let scales = plane.scales.map(|(storage, _)| parts.read(storage)).transpose()?;
        Ok(Self { format: plane.format, codes, scales: Span::scales(plane).zip(scales) })
    }

    /// A row's codes, and its scales if it has any.
    fn row(&self, at: RowAt) -> (&'a [u8], &'a [u8]) {
        let scales = self.scales.map_or(&[][..], |(span, bytes)| &bytes[span.bytes(at)]);
        (&self.codes.1[self.codes.0.bytes(at)], scales)
    }

    /// A row: where it lies if it is f32, otherwise decoded into `buffer`.
    pub(crate) fn read<'b>(&'b self, at: RowAt, buffer: &'b mut [f32]) -> Result<&'b [f32]> {
        let (codes, scales) = self.row(at);
        if self.format == KvFormat::Dense(DType::F32) {
            return elements(codes);
        }
        decode(self.format, codes, scales, buffer)?;
        Ok(buffer)
    }
}

/// Rows of a plane, to read and to write.
pub(crate) struct RowsMut<'a> {
    format: KvFormat,
    codes: (Span, &'a mut [u8]),
    scales: Option<(Span, &'a mut [u8])>,
}

impl<'a> RowsMut<'a> {
    /// The rows of a plane whose storages are locked to write.
    pub(crate) fn new(plane: &KvPlane, parts: &mut Parts<'a>) -> Result<Self> {
        let codes = (Span::codes(plane), parts.write(plane.storage)?);
        let scales = plane.scales.map(|(storage, _)| parts.write(storage)).transpose()?;
        Ok(Self { format: plane.format, codes, scales: Span::scales(plane).zip(scales) })
    }

    /// Reads a row.
    pub(crate) fn read(&self, at: RowAt, row: &mut [f32]) -> Result<()> {
        let codes = &self.codes.1[self.codes.0.bytes(at)];
        let scales = self.scales.as_ref().map_or(&[][..], |(span, bytes)| &bytes[span.bytes(at)]);
        decode(self.format, codes, scales, row)
    }

    /// Writes a row: rounds it, or quantises it.
    pub(crate) fn write(&mut self, at: RowAt, row: &[f32]) -> Result<()> {
        let codes = &mut self.codes.1[self.codes.0.bytes(at)];
        let scales = self.scales.as_mut().map_or(&mut [][..], |(span, bytes)| &mut bytes[span.bytes(at)]);
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
