//! Tensor copies with any strides, within one kind of memory or between two kinds.

use super::entry::Storages;
use super::{apart, writable};
use crate::base::{Error, Result, same};
use crate::device::TensorView;

/// Copies every element of `src` to the same index of `dst`, bit for bit, for any element type.
///
/// Both views must have the same shape and element type. Their strides and kinds of memory may differ. Use
/// this operation to make a view contiguous, or to move tensors between host and device ([`TensorView::h2d`],
/// [`TensorView::d2h`]). An axis of `src` may have stride 0 (a repeated row).
///
/// Elements smaller than a byte are copied as whole bytes, so their rows must be dense, and must begin and
/// end on byte boundaries.
#[derive(Debug, Clone)]
pub struct CopyTensor {
    /// View to read.
    pub src: TensorView,
    /// View to write.
    pub dst: TensorView,
}

impl CopyTensor {
    /// Checks shapes and element types, and that the operands do not overlap.
    ///
    /// # Errors
    /// - Returns [`Error::Mismatch`] if the shapes differ.
    /// - Returns [`Error::Mismatch`] if the element types differ.
    /// - Returns [`Error::Aliased`] if the operands overlap ([`TensorView::overlaps`]).
    /// - Returns [`Error::InvalidStrides`] if two elements of `dst` may share an address, or if a row begins
    ///   or ends inside a byte.
    pub fn check(&self) -> Result<()> {
        let Self { src, dst } = self;
        same("rank of a tensor copy", dst.shape().len(), src.shape().len())?;
        for (&expected, &got) in dst.shape().iter().zip(src.shape()) {
            same("extent of a tensor copy", expected, got)?;
        }
        same("tensor copy", dst.dtype(), src.dtype())?;
        writable("destination of a tensor copy", dst)?;
        whole_rows("source of a tensor copy", src)?;
        whole_rows("destination of a tensor copy", dst)?;
        apart("source and destination of a tensor copy", dst, src)
    }

    /// Returns the number of bytes written.
    pub fn bytes(&self) -> usize {
        self.dst.len() * self.dst.dtype().bits() / 8
    }

    /// Adds the memory that the operation touches to `storages`.
    pub(super) fn storages<'a>(&'a self, storages: &mut Storages<'a>) {
        storages.view(&self.src);
        storages.view(&self.dst);
    }
}

/// Checks that rows of elements smaller than a byte consist of whole bytes.
fn whole_rows(what: &'static str, view: &TensorView) -> Result<()> {
    let per_byte = (8 / view.dtype().bits()).max(1);
    if per_byte == 1 || view.is_empty() {
        return Ok(());
    }
    let invalid = |reason| Err(Error::InvalidStrides { what, reason });
    let (Some((&row, outer)), Some((&step, strides))) =
        (view.shape().split_last(), view.strides().split_last())
    else {
        return invalid(format!("one {} element is not a whole number of bytes", view.dtype()));
    };
    if step != 1 || !row.is_multiple_of(per_byte) {
        return invalid(format!(
            "a row of {row} {} elements {step} apart does not consist of whole bytes",
            view.dtype()
        ));
    }
    match outer.iter().zip(strides).find(|&(&n, stride)| n > 1 && !stride.is_multiple_of(per_byte)) {
        Some((_, stride)) => {
            invalid(format!("the stride {stride} of {} elements ends inside a byte", view.dtype()))
        }
        None => Ok(()),
    }
}
