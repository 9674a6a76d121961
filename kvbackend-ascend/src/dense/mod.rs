//! The dense steps of a model on the device: everything between token ids and logits, except attention.
//!
//! Steps take and return views in f32. They run on a stream of their own, one after another; [`DenseSteps::order`] puts
//! them in order with another stream. Weights are widened to f32 when they go to the device, and products are those of f32.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvcore::{CopyTensor, DType, Dims, Error, MemoryKind, Result, Storage, Stream, TensorView};

use crate::AscendBackend;
use crate::device::Device;
use crate::library::{Serves, no_device};
use crate::memory::{self, AscendStorage};
use crate::operators::Tensor;
use crate::stream::{AscendStream, Held, Work, capture};

mod activations;
mod steps;

pub(crate) use activations::ActivationMemory;

/// The dense steps of a device.
pub struct DenseSteps {
    device: Arc<Device>,
    stream: AscendStream,
    memory: Arc<ActivationMemory>,
    /// Number of times that work was enqueued.
    enqueued: AtomicU64,
}

/// Numbers in f32 on the device: a matrix `[rows, width]`, or one for each head.
#[derive(Debug)]
pub struct DeviceWeight {
    storage: Arc<dyn Storage>,
    rows: usize,
    width: usize,
}

impl DeviceWeight {
    /// Returns the bytes that the weight takes on the device.
    pub fn bytes(&self) -> usize {
        self.storage.len()
    }

    fn tensor(&self, dims: &[usize]) -> Tensor {
        Tensor::dense(self.storage.address(), crate::bindings::types::ACL_FLOAT, dims)
    }
}

impl fmt::Debug for DenseSteps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DenseSteps on {:?}", self.device)
    }
}

impl Drop for DenseSteps {
    /// Waits for the enqueued work, because the memory of its activations goes.
    fn drop(&mut self) {
        let _ = self.stream.synchronize();
    }
}

impl DenseSteps {
    /// Creates the steps of a backend's device, with a stream of their own.
    ///
    /// # Errors
    /// Returns [`Error::NoDevice`] if CANN lacks an operator of the steps, and the errors of the device.
    pub fn new(backend: &AscendBackend) -> Result<Self> {
        let device = Arc::clone(&backend.device);
        let lacks = device.library.lacks_for(Serves::DenseSteps);
        if !lacks.is_empty() {
            return Err(no_device(format!(
                "CANN lacks {}, which the steps of a model need",
                lacks.join(", ")
            )));
        }
        let stream = AscendStream::new(&device)?;
        Ok(Self { device, stream, memory: Arc::default(), enqueued: AtomicU64::new(0) })
    }

    /// Returns a number that grows with each piece of work that is enqueued.
    pub fn enqueued(&self) -> u64 {
        self.enqueued.load(Ordering::Acquire)
    }

    /// Returns the stream of the steps.
    pub fn stream(&self) -> &AscendStream {
        &self.stream
    }

    /// Makes `after` wait for everything enqueued on `before` so far. One of them is the stream of the steps.
    ///
    /// # Errors
    /// Returns [`Error::ForeignHandle`] if a stream is of another backend.
    pub fn order(before: &dyn Stream, after: &dyn Stream) -> Result<()> {
        after.wait_for(&before.record()?)
    }

    /// Copies `rows` rows of `width` numbers to the device.
    ///
    /// # Errors
    /// Returns [`Error::Mismatch`] if there are more or fewer numbers, and the errors of the device.
    pub fn weight(&self, rows: usize, width: usize, numbers: &[f32]) -> Result<DeviceWeight> {
        let expected = rows.checked_mul(width).ok_or(Error::Overflow { what: "numbers of a weight" })?;
        if expected != numbers.len() {
            return Err(Error::Mismatch { what: "numbers of a weight", expected, got: numbers.len() });
        }
        let bytes = size_of_val(numbers);
        let storage: Arc<dyn Storage> =
            Arc::new(AscendStorage::uninitialised(&self.device, MemoryKind::Device, bytes)?);
        let view = TensorView::new(Arc::clone(&storage), DType::F32, &[rows, width])?;
        self.stream.write(&view, bytemuck::cast_slice(numbers))?;
        Ok(DeviceWeight { storage, rows, width })
    }

    /// Allocates rows for results, with any contents.
    ///
    /// # Errors
    /// Returns [`Error::Allocation`] if the device is out of memory.
    pub fn rows(&self, shape: &[usize]) -> Result<TensorView> {
        let elements = shape.iter().try_fold(1usize, |all, &n| all.checked_mul(n));
        let bytes = elements.and_then(|n| n.checked_mul(size_of::<f32>()));
        let bytes = bytes.ok_or(Error::Overflow { what: "elements of activations" })?;
        TensorView::new(self.take(bytes)?, DType::F32, shape)
    }

    /// Takes memory for results, and frees what waits for use if the device is out of memory.
    fn take(&self, bytes: usize) -> Result<Arc<dyn Storage>> {
        let captured = capture::with(self.stream.state(), |recording| {
            Ok(recording.map(|recording| recording.activations(&self.memory)))
        })?;
        if let Some(of_graph) = captured {
            return of_graph.take(&self.device, bytes);
        }
        match self.memory.take(&self.device, bytes) {
            Err(Error::Allocation { .. }) => {
                self.stream.synchronize()?;
                self.memory.clear();
                self.memory.take(&self.device, bytes)
            }
            taken => taken,
        }
    }

    /// Enqueues a step. `uses` is held until the work is done.
    fn enqueue(
        &self,
        uses: &[&Arc<dyn Storage>],
        enqueue: impl FnOnce(&mut Work<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut of_activations = Vec::with_capacity(uses.len());
        for storage in uses {
            of_activations.push(memory::of(&self.device, storage)?.is_activation());
        }
        self.stream.enqueue(|work| {
            for (&storage, of_activations) in uses.iter().zip(of_activations) {
                // A graph holds the memory of its activations, which its steps use one after another.
                if !(of_activations && work.captured_step().is_some()) {
                    work.hold(Held::Storage(Arc::clone(storage)));
                }
            }
            enqueue(work)
        })?;
        self.enqueued.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Returns the rows as a dense view; a copy if they are not.
    fn dense(&self, x: &TensorView) -> Result<TensorView> {
        if x.is_contiguous() { Ok(x.clone()) } else { self.copy(x) }
    }

    /// Returns a dense copy of rows.
    ///
    /// # Errors
    /// Returns the errors of the device.
    pub fn copy(&self, x: &TensorView) -> Result<TensorView> {
        let copy = self.rows(x.shape())?;
        let stream: &dyn Stream = &self.stream;
        stream.copy_tensor(&CopyTensor { src: x.clone(), dst: copy.clone() })?;
        self.enqueued.fetch_add(1, Ordering::Release);
        Ok(copy)
    }

    /// Returns `[rows, width]` as heads of `dim` elements, `[rows, width / dim, dim]`. Nothing moves.
    ///
    /// # Errors
    /// Returns [`Error::NotMultiple`] if heads do not divide the rows.
    pub fn split_heads(&self, x: &TensorView, dim: usize) -> Result<TensorView> {
        let (rows, width) = matrix_shape(x)?;
        if dim == 0 || !width.is_multiple_of(dim) {
            return Err(Error::NotMultiple { what: "width of a row", value: width, of: dim });
        }
        reshaped(x, &[rows, width / dim, dim], &[x.strides()[0], dim, 1])
    }

    /// Returns `[rows, heads, dim]` as `[rows, heads · dim]`. Copies only rows whose heads lie apart.
    ///
    /// # Errors
    /// Returns the errors of the device.
    pub fn join_heads(&self, x: &TensorView) -> Result<TensorView> {
        let &[rows, heads, dim] = x.shape() else { return Err(rank(3, x)) };
        if heads > 1 && x.strides()[1] != dim {
            return self.join_heads(&self.dense(x)?);
        }
        reshaped(x, &[rows, heads * dim], &[x.strides()[0], 1])
    }

    /// Waits, and replaces the contents of `values` by all elements in row-major order.
    ///
    /// # Errors
    /// Returns the errors of the device.
    pub fn read(&self, x: &TensorView, values: &mut Vec<f32>) -> Result<()> {
        let x = self.dense(x)?;
        values.clear();
        values.resize(x.len(), 0.0);
        self.stream.read(&x, bytemuck::cast_slice_mut(values))
    }
}

/// Returns the extents of a view `[rows, width]`.
fn matrix_shape(x: &TensorView) -> Result<(usize, usize)> {
    match *x.shape() {
        [rows, width] => Ok((rows, width)),
        _ => Err(rank(2, x)),
    }
}

fn rank(expected: usize, x: &TensorView) -> Error {
    Error::Mismatch { what: "rank of activations", expected, got: x.shape().len() }
}

/// Returns a view of the same elements with other extents.
fn reshaped(x: &TensorView, shape: &[usize], strides: &[usize]) -> Result<TensorView> {
    let (shape, strides) = (Dims::new(shape)?, Dims::new(strides)?);
    TensorView::with_strides(Arc::clone(x.storage()), x.dtype(), shape, strides, x.offset())
}
