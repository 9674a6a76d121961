//! Checks the positions of a file's tensors: each must be aligned and inside the file, and no two may
//! overlap.

use std::collections::HashSet;
use std::ops::Range;

use super::failure::{AGAIN, GgufFailure, wrong};
use super::fields::{Header, TensorPlace};
use crate::dense::{StoredType, bytes_of};

/// A tensor with the range of its bytes in the file.
#[derive(Debug)]
pub(super) struct PlacedTensor<'a> {
    pub(super) place: &'a TensorPlace,
    /// The element type; `None` if it is not supported.
    pub(super) dtype: Option<StoredType>,
    /// The range of the tensor's bytes in the file. If the element type is not supported, the range
    /// covers only the first byte.
    pub(super) bytes: Range<usize>,
}

/// Returns all tensors of a file of `length` bytes, ordered by their position in the file.
///
/// # Errors
/// Returns an error that names a tensor if the tensor occurs twice, is not aligned, extends past the end of
/// the file, or overlaps another tensor.
pub(super) fn placed(header: &Header, length: usize) -> Result<Vec<PlacedTensor<'_>>, GgufFailure> {
    let mut names = HashSet::new();
    if let Some(place) = header.tensors.iter().find(|place| !names.insert(&place.name)) {
        return wrong(format!("tensor {:?} occurs twice; {AGAIN}", place.name));
    }
    let mut all =
        header.tensors.iter().map(|place| one(header, place, length)).collect::<Result<Vec<_>, _>>()?;
    all.sort_by_key(|placed| placed.bytes.start);
    for pair in all.windows(2) {
        let [first, second] = pair else { continue };
        if second.bytes.start < first.bytes.end {
            let (a, b) = (&first.place, &second.place);
            return wrong(format!(
                "tensors {:?} at {} and {:?} at {} overlap; {AGAIN}",
                a.name, a.offset, b.name, b.offset
            ));
        }
    }
    Ok(all)
}

fn one<'a>(header: &Header, place: &'a TensorPlace, length: usize) -> Result<PlacedTensor<'a>, GgufFailure> {
    let (name, at, alignment) = (&place.name, place.offset, header.alignment);
    if !at.is_multiple_of(alignment) {
        return wrong(format!(
            "tensor {name:?} is at {at}, which is not a multiple of the alignment {alignment} (general.alignment; \
             default: 32); {AGAIN}"
        ));
    }
    let dtype = type_of(place.dtype);
    let bytes = match dtype {
        Some(dtype) => bytes_of(dtype, &place.shape)
            .map_err(|problem| GgufFailure::Wrong(format!("tensor {name:?} {problem}; {AGAIN}")))?,
        None => 1,
    };
    let start = header.data.checked_add(at).and_then(|start| usize::try_from(start).ok());
    let range = start.and_then(|start| Some(start..start.checked_add(bytes)?));
    match range.filter(|range| range.end <= length) {
        Some(bytes) => Ok(PlacedTensor { place, dtype, bytes }),
        None => wrong(format!(
            "tensor {name:?} of {bytes} bytes at {at} extends past the end of the file of {length} bytes; {AGAIN}"
        )),
    }
}

/// Returns the element type for ggml's type ID, or `None` if it is not supported.
fn type_of(number: u32) -> Option<StoredType> {
    Some(match number {
        0 => StoredType::F32,
        1 => StoredType::F16,
        2 => StoredType::Q4_0,
        3 => StoredType::Q4_1,
        6 => StoredType::Q5_0,
        7 => StoredType::Q5_1,
        8 => StoredType::Q8_0,
        10 => StoredType::Q2K,
        11 => StoredType::Q3K,
        12 => StoredType::Q4K,
        13 => StoredType::Q5K,
        14 => StoredType::Q6K,
        20 => StoredType::Iq4Nl,
        30 => StoredType::BF16,
        _ => return None,
    })
}
