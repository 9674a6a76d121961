//! A model's dense steps on the device: everything between token IDs and logits, except attention.
//!
//! Steps take and return views in f32. They run one after another on their own stream, which
//! [`AscendDenseSteps::order`] can synchronise with another stream. Weights are widened to f32 when they are
//! copied to the device, and products are computed in f32.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvcore::device::queue::{CapturedStream, Hold};
use kvcore::{CopyTensor, DType, Dims, Error, MemoryKind, Result, Storage, Stream, TensorView};

use crate::bindings::types as sys;
use crate::device::Npu;
use crate::errors::no_device;
use crate::library::Serves;
use crate::memory::{self, AscendStorage};
use crate::operators::Tensor;
use crate::queue::{AclStream, NpuActivations, Work};

mod steps;

/// Runs a model's dense steps on one device.
pub struct AscendDenseSteps {
    /// The queue of `stream`.
    queue: Arc<AclStream>,
    stream: Arc<dyn Stream>,
    memory: Arc<NpuActivations>,
    /// The number of steps enqueued so far.
    enqueued: AtomicU64,
}

/// A weight in f32 on the device: a matrix `[rows, width]`, or one matrix per head.
#[derive(Debug)]
pub struct AscendWeight {
    storage: Arc<dyn Storage>,
    rows: usize,
    width: usize,
}

impl AscendWeight {
    /// Returns the weight's size on the device in bytes.
    pub fn bytes(&self) -> usize {
        self.storage.len()
    }

    fn tensor(&self, dims: &[usize]) -> Tensor {
        Tensor::dense(self.storage.address(), sys::ACL_FLOAT, dims)
    }
}

impl fmt::Debug for AscendDenseSteps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AscendDenseSteps on {:?}", self.queue.npu)
    }
}

impl Drop for AscendDenseSteps {
    /// Waits for the enqueued work, because dropping the steps frees the activation memory that this work
    /// uses.
    fn drop(&mut self) {
        let _ = self.stream.synchronize();
    }
}

impl AscendDenseSteps {
    /// Checks that CANN has the operators that the steps need.
    ///
    /// # Errors
    /// Returns [`Error::NoDevice`] with the names of the missing operators, if there are any.
    pub(crate) fn check(npu: &Npu) -> Result<()> {
        let missing = npu.library.lacks_for(Serves::DenseSteps);
        if missing.is_empty() {
            return Ok(());
        }
        Err(no_device(format!("CANN lacks {}, which the steps of a model need", missing.join(", "))))
    }

    /// Creates the steps on an existing stream; `queue` must be that stream's queue.
    pub(crate) fn over(queue: &Arc<AclStream>, stream: Arc<dyn Stream>) -> Self {
        Self { queue: Arc::clone(queue), stream, memory: Arc::default(), enqueued: AtomicU64::new(0) }
    }

    /// Returns the number of steps enqueued so far.
    pub fn enqueued(&self) -> u64 {
        self.enqueued.load(Ordering::Acquire)
    }

    /// Returns the steps' stream.
    pub fn stream(&self) -> &dyn Stream {
        self.stream.as_ref()
    }

    /// Makes `after` wait for everything enqueued on `before` so far. One of the two must be the steps'
    /// stream.
    ///
    /// # Errors
    /// Returns [`Error::ForeignHandle`] if a stream belongs to another backend.
    pub fn order(before: &dyn Stream, after: &dyn Stream) -> Result<()> {
        after.wait_for(&before.record()?)
    }

    // Decision: docs/decisions/backend-ascend.md#weights-are-widened-to-f32
    /// Copies a weight of `rows` rows and `width` columns to the device.
    ///
    /// # Errors
    /// Returns [`Error::Mismatch`] if `numbers` does not hold `rows · width` values, or a device error.
    pub fn weight(&self, rows: usize, width: usize, numbers: &[f32]) -> Result<AscendWeight> {
        let expected = rows.checked_mul(width).ok_or(Error::Overflow { what: "numbers of a weight" })?;
        if expected != numbers.len() {
            return Err(Error::mismatch("numbers of a weight", expected, numbers.len()));
        }
        let bytes = size_of_val(numbers);
        let storage: Arc<dyn Storage> =
            Arc::new(AscendStorage::uninitialised(&self.queue.npu, MemoryKind::Device, bytes)?);
        let view = TensorView::new(Arc::clone(&storage), DType::F32, &[rows, width])?;
        self.stream.write(&view, bytemuck::cast_slice(numbers))?;
        Ok(AscendWeight { storage, rows, width })
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

    /// Allocates memory for a result. If the device is out of memory and this thread is not recording a
    /// capture, frees unused activation memory and tries again.
    fn take(&self, bytes: usize) -> Result<Arc<dyn Storage>> {
        let npu = &self.queue.npu;
        let allocate =
            |len| Ok(AscendStorage::uninitialised(npu, MemoryKind::Device, len)?.for_activations());
        let captured = self
            .queue
            .recorded(|recording| Ok(recording.map(|recording| recording.activations(&self.memory))))?;
        if let Some(of_graph) = captured {
            return of_graph.take(bytes, allocate);
        }
        match self.memory.take(bytes, allocate) {
            Err(Error::Allocation { .. }) => {
                self.stream.synchronize()?;
                self.memory.clear();
                self.memory.take(bytes, allocate)
            }
            taken => taken,
        }
    }

    /// Enqueues a step, and holds the storages in `uses` until the step is done.
    fn enqueue(
        &self,
        uses: &[&Arc<dyn Storage>],
        enqueue: impl FnOnce(&mut Work<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut of_activations = Vec::with_capacity(uses.len());
        for storage in uses {
            of_activations.push(memory::of(&self.queue.npu, storage)?.is_activation());
        }
        self.queue.enqueue(|work| {
            for (&storage, of_activations) in uses.iter().zip(of_activations) {
                // The graph already holds the activation memory that its steps use one after another.
                if !(of_activations && work.captured_step().is_some()) {
                    work.hold(Hold::Storage(Arc::clone(storage)));
                }
            }
            enqueue(work)
        })?;
        self.enqueued.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Returns `x` if it is dense, or a dense copy otherwise.
    fn dense(&self, x: &TensorView) -> Result<TensorView> {
        if x.is_contiguous() { Ok(x.clone()) } else { self.copy(x) }
    }

    /// Returns a dense copy of `x`.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn copy(&self, x: &TensorView) -> Result<TensorView> {
        let copy = self.rows(x.shape())?;
        self.stream.copy_tensor(&CopyTensor { src: x.clone(), dst: copy.clone() })?;
        self.enqueued.fetch_add(1, Ordering::Release);
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
        reshaped(x, &[rows, width / dim, dim], &[x.strides()[0], dim, 1])
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
    let (shape, strides) = (Dims::new(shape)?, Dims::new(strides)?);
    TensorView::with_strides(Arc::clone(x.storage()), x.dtype(), shape, strides, x.offset())
}
