//! Access to the elements of a tensor in host memory, as a slice.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use bytemuck::Pod;
use kvcore::{Error, Result, TensorView};

use super::{Access, ByteSpan, cpu};

// Decision: docs/decisions/backend-cpu.md#host-views-hold-the-lock-of-their-range
/// A read guard for the elements of a contiguous tensor. Other readers can continue, but operations that
/// write to the elements wait.
///
/// A view shows only the results of completed work, so first wait for the streams that write to the tensor.
/// While a thread holds a view, it MUST NOT run or wait for operations that write to its elements, because
/// they wait for the view.
///
/// ```
/// use kvbackend_cpu::{CpuBackend, HostView, HostViewMut};
/// use kvcore::{Backend, DType, MemoryKind, allocate_tensor};
///
/// let backend = CpuBackend::new();
/// let tensor = allocate_tensor(backend.as_ref(), MemoryKind::System, DType::F32, &[2, 2])?;
/// HostViewMut::<f32>::of(&tensor)?.copy_from_slice(&[1.0, 2.0, 3.0, 4.0]);
/// let row = tensor.select(0, 1)?;
/// assert_eq!(HostView::<f32>::of(&row)?[..], [3.0, 4.0]);
/// # Ok::<(), kvcore::Error>(())
/// ```
pub struct HostView<'a, T>(Elements<'a, T>);

/// A write guard for the elements of a contiguous tensor.
///
/// While a thread holds a view, it MUST NOT run or wait for operations that use the view's elements, because
/// they wait for the view. Otherwise, this type is like [`HostView`].
pub struct HostViewMut<'a, T>(Elements<'a, T>);

/// The elements of a tensor, and the lock on them.
struct Elements<'a, T> {
    start: NonNull<T>,
    len: usize,
    /// Holds the lock while the view lives.
    _access: Access<'a>,
}

impl<'a, T: Pod> Elements<'a, T> {
    fn of(tensor: &'a TensorView, write: bool) -> Result<Self> {
        cpu(tensor.storage())?;
        let (width, bits) = (8 * size_of::<T>(), tensor.dtype().bits());
        if width != bits && width != 8 {
            return Err(Error::mismatch("bits of an element", bits, width));
        }
        let span =
            ByteSpan::new(tensor.storage(), tensor.host_range(tensor.dtype().bytes_for(tensor.len())?)?);
        let mut access = if write { Access::new(&[], &[&span]) } else { Access::new(&[&span], &[]) }?;
        let misaligned = |bytes: &[u8]| {
            let address = bytes.as_ptr() as u64;
            Error::Misaligned { what: "a host view", address, align: align_of::<T>() }
        };
        let (start, len) = if write {
            let bytes = access.parts().write(&span)?.values;
            let error = misaligned(bytes);
            let values = bytemuck::try_cast_slice_mut::<u8, T>(bytes).map_err(|_| error)?;
            (NonNull::from(&mut *values).cast(), values.len())
        } else {
            let bytes = access.read(&span)?.values;
            let values = bytemuck::try_cast_slice::<u8, T>(bytes).map_err(|_| misaligned(bytes))?;
            (NonNull::from(values).cast(), values.len())
        };
        Ok(Self { start, len, _access: access })
    }

    fn as_slice(&self) -> &[T] {
        // SAFETY: `of` took `start` and `len` from a slice of locked bytes that are elements of `T`, and the
        // lock is held while `self` lives. Only `as_mut_slice` writes to them, and it borrows `self` mutably.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<'a, T: Pod> HostView<'a, T> {
    /// Waits for operations that are writing to the tensor's elements, and locks them. `T` must have the size
    /// of the tensor's elements, or be a single byte.
    ///
    /// # Errors
    /// Returns [`Error::ForeignHandle`] if the tensor is in another backend's memory, [`Error::Mismatch`] if
    /// the size of `T` differs, [`Error::Misaligned`] if the elements are not aligned for `T`, and
    /// [`Error::InvalidStrides`] if the tensor is not contiguous.
    pub fn of(tensor: &'a TensorView) -> Result<Self> {
        Elements::of(tensor, false).map(Self)
    }
}

impl<'a, T: Pod> HostViewMut<'a, T> {
    /// Waits for operations that are using the tensor's elements, and locks them. `T` must have the size of
    /// the tensor's elements, or be a single byte.
    ///
    /// # Errors
    /// Returns the errors of [`HostView::of`], and [`Error::Unsupported`] for memory that was lent for
    /// reading only.
    pub fn of(tensor: &'a TensorView) -> Result<Self> {
        Elements::of(tensor, true).map(Self)
    }
}

impl<T: Pod> Deref for HostView<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        self.0.as_slice()
    }
}

impl<T: Pod> Deref for HostViewMut<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        self.0.as_slice()
    }
}

impl<T: Pod> DerefMut for HostViewMut<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: `of` took `start` and `len` from a slice of bytes that are locked for writing and are
        // elements of `T`. The lock is held while `self` lives, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.0.start.as_ptr(), self.0.len) }
    }
}

impl<T> fmt::Debug for HostView<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostView({} elements)", self.0.len)
    }
}

impl<T> fmt::Debug for HostViewMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostViewMut({} elements)", self.0.len)
    }
}

#[cfg(test)]
mod tests {
    use kvcore::Compared::Number;
    use std::sync::Arc;

    use kvcore::{DType, Dims};

    use super::*;
    use crate::CpuStorage;

    #[test]
    fn views_of_disjoint_parts_live_side_by_side() {
        let storage = Arc::new(CpuStorage::from_vec((0..6).collect::<Vec<u32>>()).unwrap());
        let all = TensorView::new(storage, DType::F32, &[3, 2]).unwrap();
        let (first, last) = (all.select(0, 0).unwrap(), all.select(0, 2).unwrap());
        // This test has only one thread, so a view that had to wait would never return.
        let (from, mut to) = (HostView::<u32>::of(&first).unwrap(), HostViewMut::<u32>::of(&last).unwrap());
        to.copy_from_slice(&from);
        assert_eq!((to.len(), HostView::<u8>::of(&first).unwrap().len()), (2, 8));
        drop(to);
        assert_eq!(HostView::<u32>::of(&all).unwrap()[..], [0, 1, 2, 3, 0, 1]);
    }

    #[test]
    fn wrong_widths_alignments_and_strides_are_refused() {
        let storage = Arc::new(CpuStorage::from_vec(vec![0u8; 16]).unwrap());
        let bytes = TensorView::new(storage, DType::U8, &[4, 4]).unwrap();
        assert!(matches!(
            HostView::<f32>::of(&bytes),
            Err(Error::Mismatch { expected: Number(8), got: Number(32), .. })
        ));
        assert!(matches!(HostView::<()>::of(&bytes), Err(Error::Mismatch { .. })));
        let turned = bytes.permute(&[1, 0]).unwrap();
        assert!(matches!(HostView::<u8>::of(&turned), Err(Error::InvalidStrides { .. })));
        let one = Dims::new(&[1]).unwrap();
        let odd = TensorView::with_strides(bytes.storage().clone(), DType::F16, one, one, 0);
        // A byte vector may begin at an odd address, depending on the allocator.
        let aligned = bytes.storage().address().is_multiple_of(2);
        assert_eq!(odd.is_ok_and(|view| HostView::<u16>::of(&view).is_ok()), aligned);
    }
}
