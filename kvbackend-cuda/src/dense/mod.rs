//! A model's dense steps on the device: everything between token IDs and logits, except attention.
//!
//! Steps take and return views in f32. They run one after another on their own stream, which
//! [`CudaSteps::order`] can synchronise with another stream. Weights keep their stored format. This crate's
//! kernels compute matrix products with few rows, and read the matrix once. cuBLAS, which is loaded at run
//! time, computes products with many rows.
//!
//! Products have f32 accuracy. For bf16 weights, activations are split into three bf16 terms; the tensor
//! cores compute the products of these terms exactly and add them in f32. Other weights are widened to f32.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvcore::device::queue::{CapturedStream, Hold, LoanMemory};
use kvcore::{CopyTensor, DType, Dims, Error, MemoryKind, Result, Storage, Stream, TensorView};
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::backend::CudaBackend;
use crate::device::CudaDevice;
use crate::memory::{self, CudaStorage};
use crate::queue::{CudaStream, Lowering};

mod blas;
mod matrix;
mod steps;
mod weight;

use blas::Blas;

pub use weight::{CudaWeight, StoredKind};

/// Runs a model's dense steps on one device.
pub struct CudaSteps {
    device: Arc<CudaDevice>,
    stream: CudaStream,
    blas: Mutex<Blas>,
    memory: Arc<LoanMemory<CudaStorage>>,
    /// The number of steps enqueued so far.
    enqueued: AtomicU64,
}

impl fmt::Debug for CudaSteps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DenseSteps on {:?}", self.device)
    }
}

impl Drop for CudaSteps {
    /// Waits for the enqueued work, because dropping the steps frees the activation memory.
    fn drop(&mut self) {
        let _ = self.stream.synchronize();
    }
}

impl CudaSteps {
    /// Creates the dense steps for a backend's device, with their own stream.
    ///
    /// # Errors
    /// Returns [`Error::NoDevice`] if cuBLAS is not found, or a device error.
    pub fn new(backend: &CudaBackend) -> Result<Self> {
        let device = Arc::clone(&backend.device);
        let stream = CudaStream::new(&device, &backend.tables)?;
        let blas = Mutex::new(Blas::new(&device, stream.raw())?);
        Ok(Self { device, stream, blas, memory: Arc::default(), enqueued: AtomicU64::new(0) })
    }

    /// Returns the number of steps enqueued so far.
    pub fn enqueued(&self) -> u64 {
        self.enqueued.load(Ordering::Acquire)
    }

    /// Returns the steps' stream.
    pub fn stream(&self) -> &CudaStream {
        &self.stream
    }

    /// Makes `after` wait for everything enqueued on `before` so far. One of the two must be the steps'
    /// stream.
    ///
    /// # Errors
    /// Returns [`Error::ForeignHandle`] if a stream belongs to another backend.
    pub fn order(before: &dyn Stream, after: &dyn Stream) -> Result<()> {
        after.wait_for(&before.record()?)
    }

    /// Allocates a result tensor in f32, with arbitrary contents.
    ///
    /// # Errors
    /// Returns [`Error::Allocation`] if the device is out of memory.
    pub fn rows(&self, shape: &[usize]) -> Result<TensorView> {
        let elements = shape.iter().try_fold(1usize, |all, &n| all.checked_mul(n));
        let bytes = elements.and_then(|n| n.checked_mul(size_of::<f32>()));
        let bytes = bytes.ok_or(Error::Overflow { what: "elements of activations" })?;
        TensorView::new(self.take(bytes)?, DType::F32, shape)
    }

    /// Allocates memory for a result. If the device is out of memory, frees unused activation memory and
    /// tries again.
    fn take(&self, bytes: usize) -> Result<Arc<dyn Storage>> {
        let memory = self.lender()?;
        match self.take_from(&memory, bytes) {
            Err(Error::Allocation { .. }) if Arc::ptr_eq(&memory, &self.memory) => {
                self.stream.synchronize()?;
                self.memory.clear();
                self.take_from(&memory, bytes)
            }
            taken => taken,
        }
    }

    fn take_from(&self, memory: &Arc<LoanMemory<CudaStorage>>, bytes: usize) -> Result<Arc<dyn Storage>> {
        memory.take(bytes, |bytes| {
            let storage = CudaStorage::allocate(&self.device, MemoryKind::Device, bytes)?;
            Ok(storage.lent_by(Arc::as_ptr(memory) as usize))
        })
    }

    /// Returns the pool that lends memory for activations. During a capture, this is the graph's own pool,
    /// which no other work uses between replays.
    fn lender(&self) -> Result<Arc<LoanMemory<CudaStorage>>> {
        self.stream.state().recorded(|recording| {
            Ok(recording.map_or_else(|| Arc::clone(&self.memory), |it| it.activations(&self.memory)))
        })
    }

    /// Enqueues launches, and holds `uses` until the work is done. Activations from the current pool are not
    /// held, because only later work on the same stream reuses their memory.
    fn enqueue(
        &self,
        uses: &[&Arc<dyn Storage>],
        prepare: impl FnOnce(&mut Lowering<'_>) -> Result<()>,
    ) -> Result<()> {
        let lender = Arc::as_ptr(&self.lender()?) as usize;
        let mut held: SmallVec<[_; 4]> = SmallVec::new();
        for &storage in uses {
            if memory::of(&self.device, storage)?.lender() != Some(lender) {
                held.push(Hold::Storage(Arc::clone(storage)));
            }
        }
        self.stream.enqueue(|to| {
            prepare(to)?;
            held.into_iter().for_each(|hold| to.hold(hold));
            Ok(())
        })?;
        self.count();
        Ok(())
    }

    /// Counts a step that was enqueued. A caller that sees a new count must order its stream again.
    fn count(&self) {
        self.enqueued.fetch_add(1, Ordering::Release);
    }

    /// Returns `x` if it is dense, or a dense copy otherwise.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn dense(&self, x: &TensorView) -> Result<TensorView> {
        if x.is_contiguous() { Ok(x.clone()) } else { self.copy(x) }
    }

    /// Returns a dense copy of `x`.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn copy(&self, x: &TensorView) -> Result<TensorView> {
        let copy = self.rows(x.shape())?;
        let stream: &dyn Stream = &self.stream;
        stream.copy_tensor(&CopyTensor { src: x.clone(), dst: copy.clone() })?;
        self.count();
        Ok(copy)
    }

    /// Reshapes `[rows, width]` to heads of `dim` elements, `[rows, width / dim, dim]`, without a copy.
    ///
    /// # Errors
    /// Returns [`Error::NotMultiple`] if `width` is not a multiple of `dim`.
    pub fn split_heads(&self, x: &TensorView, dim: usize) -> Result<TensorView> {
        let (rows, width) = matrix_shape(x)?;
        if dim == 0 || !width.is_multiple_of(dim) {
            return Err(Error::NotMultiple { what: "width of a row", value: width, of: dim });
        }
        let strides = [x.strides()[0], dim, 1];
        reshaped(x, &[rows, width / dim, dim], &strides)
    }

    /// Reshapes `[rows, heads, dim]` to `[rows, heads · dim]`. Copies the rows only if their heads are not
    /// contiguous.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn join_heads(&self, x: &TensorView) -> Result<TensorView> {
        let &[rows, heads, dim] = x.shape() else { return Err(rank(3, x)) };
        if heads > 1 && x.strides()[1] != dim {
            return self.join_heads(&self.dense(x)?);
        }
        reshaped(x, &[rows, heads * dim], &[x.strides()[0], 1])
    }

    /// Waits for the enqueued work, then replaces the contents of `values` with all elements of `x` in
    /// row-major order.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn read(&self, x: &TensorView, values: &mut Vec<f32>) -> Result<()> {
        let x = self.dense(x)?;
        values.clear();
        values.resize(x.len(), 0.0);
        self.stream.read(&x, bytemuck::cast_slice_mut(values))
    }
}

/// Returns the number of rows and the width of a matrix `[rows, width]`.
fn matrix_shape(x: &TensorView) -> Result<(usize, usize)> {
    match *x.shape() {
        [rows, width] => Ok((rows, width)),
        _ => Err(rank(2, x)),
    }
}

fn rank(expected: usize, x: &TensorView) -> Error {
    Error::mismatch("rank of activations", expected, x.shape().len())
}

/// Returns a view of the same elements with the given shape and strides.
fn reshaped(x: &TensorView, shape: &[usize], strides: &[usize]) -> Result<TensorView> {
    TensorView::with_strides(
        Arc::clone(x.storage()),
        x.dtype(),
        Dims::new(shape)?,
        Dims::new(strides)?,
        x.offset(),
    )
}

/// Returns the address of the first element of an f32 view whose last axis is dense.
fn address(x: &TensorView) -> Result<u64> {
    if x.dtype() != DType::F32 {
        return Err(Error::mismatch("activations", DType::F32, x.dtype()));
    }
    match (x.shape().last(), x.strides().last()) {
        (Some(&n), Some(&stride)) if n > 1 && stride != 1 => Err(Error::InvalidStrides {
            what: "activations",
            reason: format!("the last axis has stride {stride}"),
        }),
        _ => Ok(x.storage().address() + (x.offset() * size_of::<f32>()) as u64),
    }
}

/// Converts a count to `u32`, which the kernels expect.
fn narrow(n: usize) -> Result<u32> {
    u32::try_from(n).map_err(|_| Error::Overflow { what: "extents of a dense step" })
}
