//! Rows of another engine's host memory, and their loads from a disk.

use std::convert::Infallible;
use std::sync::Arc;

use kvcore::{DType, Storage};
use kvtier::{Loading, Missed, RecordBuffer, Slab};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::device::ArenaDevice;
use crate::slab_load::{SlabLoad, copy};
use crate::tensor::ForeignTensor;

/// The number of bytes of a row that are copied and then digested.
const RUN: usize = 64 << 10;

/// Another engine's rows, in host memory that lives as long as `storage`.
pub(crate) struct Rows {
    storage: Arc<dyn Storage>,
    count: usize,
    stride: usize,
    bytes: usize,
}

impl Rows {
    /// Imports a table of rows, and checks that the rows `at` exist.
    pub(crate) fn of(tensor: &ForeignTensor, bytes: usize, at: &[usize]) -> PyResult<Self> {
        let (&[count, len], &[stride, 1]) = (&*tensor.shape, &*tensor.strides) else {
            let text = format!("rows must be contiguous bytes; the shape is {:?}", tensor.shape);
            return Err(PyValueError::new_err(text));
        };
        if tensor.dtype != DType::U8 || len != bytes {
            let text = format!("rows must be {bytes} bytes, not {len} of {:?}", tensor.dtype);
            return Err(PyValueError::new_err(text));
        }
        if let Some(row) = at.iter().find(|&&row| row >= count) {
            return Err(PyValueError::new_err(format!("row {row} does not exist; there are {count}")));
        }
        Ok(Self { storage: Arc::clone(&tensor.storage), count, stride, bytes })
    }

    /// Returns the address of a row, which `of` has checked.
    fn row(&self, at: usize) -> *mut u8 {
        assert!(at < self.count, "row {at} of {}", self.count);
        (self.storage.address() as usize + at * self.stride) as *mut u8
    }

    /// Returns a row in memory of the slab.
    pub(crate) fn read(&self, at: usize, slab: &Slab) -> Vec<RecordBuffer> {
        // SAFETY: the tensor holds `bytes` initialised bytes at this address while `self` lives. The Python
        // caller guarantees that nothing writes the row during the call.
        let row = unsafe { std::slice::from_raw_parts(self.row(at), self.bytes) };
        let mut buffers = slab.buffers(&[self.bytes]);
        for buffer in &mut buffers {
            let Ok(()) = buffer.fill_runs(RUN, |number, run| {
                run.copy_from_slice(&row[number * RUN..][..run.len()]);
                Ok::<(), Infallible>(())
            });
        }
        buffers
    }

    /// Fills a row. Returns false and changes nothing if the contents have another length.
    fn write(&self, at: usize, contents: &[u8]) -> bool {
        if contents.len() != self.bytes {
            return false;
        }
        // SAFETY: the tensor holds `bytes` bytes at this address while `self` lives, and was imported for
        // writing. The Python caller guarantees that nothing else uses the row during the call, and each row
        // is written by one thread.
        unsafe { std::ptr::copy_nonoverlapping(contents.as_ptr(), self.row(at), self.bytes) };
        true
    }
}

/// A row that is being loaded.
#[pyclass(frozen, extends = SlabLoad, module = "kvcache._native")]
pub(crate) struct RowLoad {
    row_bytes: usize,
}

impl RowLoad {
    pub(crate) fn start(
        py: Python<'_>,
        loading: Loading,
        slab: Arc<Slab>,
        row_bytes: usize,
    ) -> PyResult<Py<Self>> {
        Py::new(py, (Self { row_bytes }, SlabLoad::new(loading, slab)))
    }
}

#[pymethods]
impl RowLoad {
    /// Ends the load, and fills the row `at` of a table with the record. Returns `None`, or the reason why the row was
    /// not filled: `absent`, `differs`, `damaged`, `late` if the load has not ended, or `failed` with the system's
    /// error. Nothing else may use the row during the call.
    fn end(this: &Bound<'_, Self>, rows: &Bound<'_, PyAny>, at: usize) -> PyResult<Option<String>> {
        let (bytes, base) = (this.get().row_bytes, this.as_super().get());
        let rows = Rows::of(&ForeignTensor::of_written(rows, &*ArenaDevice::open("cpu")?)?, bytes, &[at])?;
        let loading = base.take()?;
        Ok(copy(this.py(), loading.bytes(), || match loading.end() {
            Ok(buffers) => {
                let fits = buffers.len() == 1 && rows.write(at, &buffers[0]);
                base.slab.recycle(buffers);
                (!fits).then(|| reason(&Missed::Differs))
            }
            Err(missed) => Some(reason(&missed)),
        }))
    }
}

/// Returns the word for a reason in Python.
fn reason(missed: &Missed) -> String {
    match missed {
        Missed::Absent | Missed::Evicted | Missed::OtherModel | Missed::OtherContext => "absent".to_owned(),
        Missed::Differs => "differs".to_owned(),
        Missed::Damaged => "damaged".to_owned(),
        Missed::Late => "late".to_owned(),
        Missed::Failed(error) => format!("failed: {error}"),
    }
}
