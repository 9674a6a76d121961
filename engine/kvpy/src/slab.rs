//! Rows of another engine's memory as records on a disk.
//!
//! An engine that offloads blocks to host memory has a table of rows there, and a name for the contents of
//! each row. A row becomes one record. Calls that read or write the disk wait for it, without Python's lock and
//! for a limited time, so they belong on threads of their own.

use std::collections::HashSet;
use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kvcore::{BlockKey, DType, KeyScope, Storage};
use kvtier::io::PAGE;
use kvtier::{Missed, Record, RecordBuffer, RecordId, Slab, SlabConfig, Stored};
use parking_lot::Mutex;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::device::ArenaDevice;
use crate::error::CallError;
use crate::names::named;
use crate::tensor::ForeignTensor;

/// The number of records that are loaded at once.
const DEPTH: usize = 8;

/// The number of bytes that are queued before a store waits for the disk.
const PORTION: usize = 32 << 20;

/// The number of bytes of a row that are copied and then digested.
const RUN: usize = 64 << 10;

/// The largest row that gets a cell of its own. Larger rows use several cells of the default size.
const WHOLE: usize = 1 << 20;

/// Records in a folder, for the rows of another engine's memory.
#[pyclass(frozen, name = "Slab", module = "kvcache._native")]
pub(crate) struct PySlab {
    own: Mutex<Option<Arc<Slab>>>,
    pub(crate) scope: BlockKey,
    /// Everything that a row's bytes depend on apart from its name.
    pub(crate) identity: Arc<str>,
    row_bytes: usize,
}

/// Another engine's rows, in host memory that lives as long as `storage`.
struct Rows {
    storage: Arc<dyn Storage>,
    count: usize,
    stride: usize,
    bytes: usize,
}

impl Rows {
    /// Imports a table of rows, and checks that the rows `at` exist.
    fn of(tensor: &ForeignTensor, bytes: usize, at: &[usize]) -> PyResult<Self> {
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
    fn read(&self, at: usize, slab: &Slab) -> Vec<RecordBuffer> {
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

/// The longest deadline.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Returns a deadline as a duration.
pub(crate) fn seconds(value: f64) -> PyResult<Duration> {
    let valid = Duration::try_from_secs_f64(value).ok().filter(|limit| !limit.is_zero() && *limit <= DAY);
    let text = || format!("deadline is {value}; it must be a number of seconds above 0, at most a day");
    valid.ok_or_else(|| PyValueError::new_err(text()))
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

/// Returns a name as words. Different names have different words.
pub(crate) fn words_of(name: &[u8]) -> Vec<u32> {
    let words = name.chunks(4).map(|bytes| {
        let mut word = [0; 4];
        word[..bytes.len()].copy_from_slice(bytes);
        u32::from_le_bytes(word)
    });
    std::iter::once(name.len() as u32).chain(words).collect()
}

/// Returns one name per row, or a `ValueError` if the numbers differ.
fn pairs(names: Vec<Vec<u8>>, at: &[usize]) -> PyResult<Vec<(Vec<u8>, usize)>> {
    if names.len() != at.len() {
        let text = format!("{} names and {} rows; each row needs a name", names.len(), at.len());
        return Err(PyValueError::new_err(text));
    }
    Ok(names.into_iter().zip(at.iter().copied()).collect())
}

#[pymethods]
impl PySlab {
    /// Opens or creates the records in a folder. `identity` describes everything that a row's bytes depend on
    /// apart from its name; records with another identity are never found. `limit` is the largest size of the
    /// file in bytes, and `policy` determines which records leave first when it is full.
    #[new]
    #[pyo3(signature = (folder, identity, *, limit, row_bytes, policy = "lru"))]
    fn new(
        py: Python<'_>,
        folder: PathBuf,
        identity: String,
        limit: u64,
        row_bytes: usize,
        policy: &str,
    ) -> PyResult<Self> {
        let policy = named("policy", policy)?;
        let scope = KeyScope::new("kvcache.Slab", identity.as_bytes()).root();
        let identity: Arc<str> = identity.into();
        // A record is a header, the identity, the name, and the row.
        let whole = (PAGE + identity.len() + 1024).saturating_add(row_bytes);
        let default = SlabConfig { limit, policy, ..SlabConfig::default() };
        let fitting = SlabConfig { cell_bytes: whole, ..default };
        let config = if whole <= WHOLE { fitting } else { default };
        let open = || Slab::open(&folder, scope, config);
        let slab = py.detach(open).map_err(CallError::from)?;
        Ok(Self { own: Mutex::new(Some(Arc::new(slab))), scope, identity, row_bytes })
    }

    /// Returns whether a record with this name is on the disk. Does not read the disk.
    fn contains(&self, name: &[u8]) -> PyResult<bool> {
        Ok(self.slab()?.contains(&self.id(name).key))
    }

    /// Makes records the last ones to leave, in this order. Does not read the disk.
    fn touch(&self, py: Python<'_>, names: Vec<Vec<u8>>) -> PyResult<usize> {
        let slab = self.slab()?;
        let keys = || names.iter().map(|name| self.id(name).key).collect::<Vec<_>>();
        Ok(py.detach(|| slab.touch(&keys())))
    }

    /// Writes rows and waits until they are on the disk. Returns for each row whether it is. The call gives up if
    /// 32 MiB take longer than `deadline` seconds. The disk goes on with memory of its own, so the rows may be
    /// used again when the call returns.
    #[pyo3(signature = (names, rows, at, *, deadline))]
    fn store(
        &self,
        py: Python<'_>,
        names: Vec<Vec<u8>>,
        rows: &Bound<'_, PyAny>,
        at: Vec<usize>,
        deadline: f64,
    ) -> PyResult<Vec<bool>> {
        let (slab, limit) = (self.slab()?, seconds(deadline)?);
        let rows = Rows::of(&ForeignTensor::of(rows, &*ArenaDevice::open("cpu")?)?, self.row_bytes, &at)?;
        let pairs = pairs(names, &at)?;
        Ok(py.detach(|| self.store_all(&slab, &pairs, &rows, limit)))
    }

    /// Fills rows from the disk. Returns for each row `None`, or the reason why it was not filled: `absent`,
    /// `differs`, `damaged`, `late`, or `failed` with the system's error. The call gives up if a row takes longer than
    /// `deadline` seconds. The disk goes on with memory of its own, so the rows may be used again when the call returns.
    #[pyo3(signature = (names, rows, at, *, deadline))]
    fn load(
        &self,
        py: Python<'_>,
        names: Vec<Vec<u8>>,
        rows: &Bound<'_, PyAny>,
        at: Vec<usize>,
        deadline: f64,
    ) -> PyResult<Vec<Option<String>>> {
        let (slab, limit) = (self.slab()?, seconds(deadline)?);
        let rows =
            Rows::of(&ForeignTensor::of_written(rows, &*ArenaDevice::open("cpu")?)?, self.row_bytes, &at)?;
        if at.iter().collect::<HashSet<_>>().len() < at.len() {
            return Err(PyValueError::new_err(
                "a row is named twice; each row can be filled only once in a call",
            ));
        }
        let pairs = pairs(names, &at)?;
        Ok(py.detach(|| self.load_all(&slab, &pairs, &rows, limit)))
    }

    /// Returns what is stored, and what has been done since the folder was opened, by name.
    fn usage<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let usage = self.slab()?.usage();
        let text =
            serde_json::to_string(&usage).map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
        py.import("json")?.call_method1("loads", (text,))
    }

    /// Waits until everything that was stored is on the disk or was dropped. Returns false if that has taken more
    /// than `deadline` seconds.
    #[pyo3(signature = (*, deadline))]
    fn flush(&self, py: Python<'_>, deadline: f64) -> PyResult<bool> {
        let (slab, limit) = (self.slab()?, seconds(deadline)?);
        Ok(py.detach(|| slab.flush(limit)))
    }

    /// Writes what is waiting, and closes the folder. Returns false if that has taken more than `deadline`
    /// seconds; in that case, a thread goes on with it. Closing twice does nothing.
    #[pyo3(signature = (*, deadline))]
    fn close(&self, py: Python<'_>, deadline: f64) -> PyResult<bool> {
        let limit = seconds(deadline)?;
        Ok(py.detach(|| self.close_within(limit)))
    }
}

impl PySlab {
    pub(crate) fn slab(&self) -> PyResult<Arc<Slab>> {
        let closed = || PyRuntimeError::new_err("the records are closed; open the folder again");
        self.own.lock().clone().ok_or_else(closed)
    }

    /// Returns the identity of the record with this name. The name's bytes stand where a prompt's tokens do, so
    /// that a load compares them.
    fn id(&self, name: &[u8]) -> RecordId {
        let tokens: Arc<[u32]> = words_of(name).into();
        let key = self.scope.child(&tokens);
        RecordId { key, tokens, stored_start: 0, label: Arc::clone(&self.identity) }
    }

    fn store_all(&self, slab: &Slab, pairs: &[(Vec<u8>, usize)], rows: &Rows, limit: Duration) -> Vec<bool> {
        let ids: Vec<RecordId> = pairs.iter().map(|(name, _)| self.id(name)).collect();
        let queue = |id: &RecordId, at| {
            slab.contains(&id.key)
                || slab.store(Record::new(id.clone(), rows.read(at, slab))) != Stored::Dropped
        };
        let count = (PORTION / self.row_bytes.max(1)).max(1);
        'portions: for portion in ids.iter().zip(pairs).collect::<Vec<_>>().chunks(count) {
            for &(id, &(_, at)) in portion {
                if !queue(id, at) {
                    // The queue may be full of records that an earlier call has given up.
                    if !slab.flush(limit) {
                        break 'portions;
                    }
                    queue(id, at);
                }
            }
            if !slab.flush(limit) {
                break;
            }
        }
        ids.iter().map(|id| slab.contains(&id.key)).collect()
    }

    fn load_all(
        &self,
        slab: &Slab,
        pairs: &[(Vec<u8>, usize)],
        rows: &Rows,
        limit: Duration,
    ) -> Vec<Option<String>> {
        let late = AtomicBool::new(false);
        let next = AtomicUsize::new(0);
        let ends: Vec<Mutex<Option<String>>> = pairs.iter().map(|_| Mutex::new(None)).collect();
        let one = |(name, at): &(Vec<u8>, usize)| -> Option<String> {
            // A disk that has not answered one request would let the next ones wait as long.
            if late.load(Ordering::Relaxed) {
                return Some(reason(&Missed::Late));
            }
            let missed = match slab.load(&self.id(name), Instant::now() + limit) {
                Ok(buffers) => {
                    let fits = buffers.len() == 1 && rows.write(*at, &buffers[0]);
                    slab.recycle(buffers);
                    if fits {
                        return None;
                    }
                    Missed::Differs
                }
                Err(missed) => missed,
            };
            late.fetch_or(matches!(missed, Missed::Late), Ordering::Relaxed);
            Some(reason(&missed))
        };
        let work = || {
            while let Some((pair, end)) = {
                let index = next.fetch_add(1, Ordering::Relaxed);
                pairs.get(index).zip(ends.get(index))
            } {
                *end.lock() = one(pair);
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..DEPTH.min(pairs.len()) {
                // Without more threads, this one does all the work.
                drop(std::thread::Builder::new().spawn_scoped(scope, work));
            }
            work();
        });
        ends.into_iter().map(Mutex::into_inner).collect()
    }

    fn close_within(&self, limit: Duration) -> bool {
        let Some(slab) = self.own.lock().take() else { return true };
        let (done, closed) = std::sync::mpsc::channel();
        let close = move || {
            drop(slab);
            // Nobody listens after the deadline.
            let _ = done.send(());
        };
        // If no thread starts, the closure is dropped, and the records with it.
        let started = std::thread::Builder::new().name("kvcache-close".to_owned()).spawn(close);
        started.is_err() || closed.recv_timeout(limit).is_ok()
    }
}

impl Drop for PySlab {
    /// Closes the folder as [`close`](PySlab::close) does, within ten seconds.
    fn drop(&mut self) {
        self.close_within(Duration::from_secs(10));
    }
}
