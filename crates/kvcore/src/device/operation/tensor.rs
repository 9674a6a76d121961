//! Copies of tensors of any strides, inside a memory or between two.

use super::{apart, writable};
use crate::base::{Error, Result, same};
use crate::device::TensorView;

/// Copies every element of `src` to the same index of `dst`, bit for bit, whatever the element type.
///
/// Both have the same shape and element type; their strides and the memory that they lie in are free.
/// It is what makes a view contiguous, and what moves tensors between host and device
/// ([`TensorView::h2d`], [`TensorView::d2h`]). An axis of `src` may have stride 0 (a repeated row).
///
/// Elements smaller than a byte are copied in whole bytes: their rows are dense, and begin and end on
/// a byte.
#[derive(Debug, Clone)]
pub struct CopyTensor {
    /// What is read.
    pub src: TensorView,
    /// What is written.
    pub dst: TensorView,
}

impl CopyTensor {
    /// Checks shapes, types and that the operands are apart.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for other extents, [`Error::DTypeMismatch`]; [`Error::Aliased`] when the
    /// operands lie in one storage and the bytes from the first to the last element of one reach into
    /// those of the other, or when two elements of `dst` may share an address;
    /// [`Error::InvalidStrides`] for rows that begin or end inside a byte.
    pub fn check(&self) -> Result<()> {
        let Self { src, dst } = self;
        same("rank of a tensor copy", dst.shape().len(), src.shape().len())?;
        for (&expected, &got) in dst.shape().iter().zip(src.shape()) {
            same("extent of a tensor copy", expected, got)?;
        }
        if src.dtype() != dst.dtype() {
            return Err(Error::DTypeMismatch {
                what: "tensor copy",
                expected: dst.dtype(),
                got: src.dtype(),
            });
        }
        writable("destination of a tensor copy", dst)?;
        whole_rows("source of a tensor copy", src)?;
        whole_rows("destination of a tensor copy", dst)?;
        apart("source and destination of a tensor copy", dst, src)
    }

    /// Bytes written.
    pub fn bytes(&self) -> usize {
        self.dst.len() * self.dst.dtype().bits() / 8
    }
}

/// Rows of elements smaller than a byte must be whole bytes.
fn whole_rows(what: &'static str, view: &TensorView) -> Result<()> {
    let per_byte = (8 / view.dtype().bits()).max(1);
    if per_byte == 1 || view.is_empty() {
        return Ok(());
    }
    let invalid = |reason| Err(Error::InvalidStrides { what, reason });
    let (Some((&row, outer)), Some((&step, strides))) =
        (view.shape().split_last(), view.strides().split_last())
    else {
        return invalid(format!("one {} element is no whole byte", view.dtype()));
    };
    if step != 1 || !row.is_multiple_of(per_byte) {
        return invalid(format!(
            "a row of {row} {} elements {step} apart is not in whole bytes",
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
