//! Rows of another engine's memory as records on a disk.
//!
//! An engine that offloads blocks to host memory has a table of rows there, and a name for the contents of
//! each row. A row becomes one record. Calls that read or write the disk wait for it, without Python's lock and
//! for a limited time, so they belong on threads of their own.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvcore::{BlockKey, KeyScope};
use kvtier::io::PAGE;
use kvtier::{Record, RecordId, RecordNote, Slab, SlabConfig, Stored};
use parking_lot::Mutex;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::device::ArenaDevice;
use crate::error::CallError;
use crate::names::named;
use crate::slab_rows::{RowLoad, Rows};
use crate::slab_times::SlabTimes;
use crate::tensor::ForeignTensor;

/// The number of bytes that are queued before a store waits for the disk.
const PORTION: usize = 32 << 20;

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
    times: Arc<SlabTimes>,
}

/// The longest deadline.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Returns a deadline as a duration.
pub(crate) fn seconds(value: f64) -> PyResult<Duration> {
    let valid = Duration::try_from_secs_f64(value).ok().filter(|limit| !limit.is_zero() && *limit <= DAY);
    let text = || format!("deadline is {value}; it must be a number of seconds above 0, at most a day");
    valid.ok_or_else(|| PyValueError::new_err(text()))
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
        let times = Arc::<SlabTimes>::default();
        let observed = Arc::clone(&times);
        slab.observe(Arc::new(move |step, time| observed.add(step, time)));
        Ok(Self { own: Mutex::new(Some(Arc::new(slab))), scope, identity, row_bytes, times })
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
    /// used again when the call returns. `costs` are the seconds that computing each row took, if they are known.
    #[pyo3(signature = (names, rows, at, *, deadline, costs = None))]
    fn store(
        &self,
        py: Python<'_>,
        names: Vec<Vec<u8>>,
        rows: &Bound<'_, PyAny>,
        at: Vec<usize>,
        deadline: f64,
        costs: Option<Vec<f64>>,
    ) -> PyResult<Vec<bool>> {
        let (slab, limit) = (self.slab()?, seconds(deadline)?);
        let rows = Rows::of(&ForeignTensor::of(rows, &*ArenaDevice::open("cpu")?)?, self.row_bytes, &at)?;
        let costs = costs.unwrap_or_else(|| vec![0.0; at.len()]);
        if names.len() != at.len() || costs.len() != at.len() {
            let text = format!(
                "{} names, {} rows and {} costs; each row needs a name and a cost",
                names.len(),
                at.len(),
                costs.len()
            );
            return Err(PyValueError::new_err(text));
        }
        let records = names.iter().zip(at).zip(costs).map(|((name, at), cost)| {
            let cost = Duration::try_from_secs_f64(cost).unwrap_or_default();
            (self.id(name), RecordNote { cost, ..RecordNote::default() }, at)
        });
        let records: Vec<_> = records.collect();
        Ok(py.detach(|| self.store_all(&slab, &records, &rows, limit)))
    }

    /// Returns the number of bytes of the record with this name and the seconds that computing it took (0 if
    /// that is not known), or `None` if no record with this name is on the disk. Does not read the disk.
    fn peek(&self, name: &[u8]) -> PyResult<Option<(usize, f64)>> {
        let listing = self.slab()?.peek(&self.id(name).key);
        Ok(listing.map(|listing| (listing.bytes, listing.note.cost.as_secs_f64())))
    }

    /// Starts to load a row, without waiting for the disk.
    fn begin_load(this: Bound<'_, Self>, name: &[u8]) -> PyResult<Py<RowLoad>> {
        let own = this.get();
        let (slab, id) = (own.slab()?, own.id(name));
        let loading = slab.begin_load(&id);
        RowLoad::start(this.py(), loading, slab, own.row_bytes)
    }

    /// Returns the number of seconds in which the disk is expected to read this many bytes, or `None` if it has
    /// read nothing yet.
    fn expected(&self, bytes: usize) -> PyResult<Option<f64>> {
        Ok(self.slab()?.expected(bytes).map(|time| time.as_secs_f64()))
    }

    /// Counts loads that are skipped, because computing takes less time.
    fn count_skipped(&self, loads: usize) -> PyResult<()> {
        self.slab()?.count_skipped(loads);
        Ok(())
    }

    /// Returns what is stored, and what has been done since the folder was opened, by name.
    fn usage<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let failed = |error: serde_json::Error| PyRuntimeError::new_err(error.to_string());
        let mut usage = serde_json::to_value(self.slab()?.usage()).map_err(failed)?;
        // What uses these slabs has host memory of its own above them.
        if let Some(numbers) = usage.as_object_mut() {
            numbers.retain(|name, _| !name.starts_with("memory_"));
        }
        py.import("json")?.call_method1("loads", (usage.to_string(),))
    }

    /// Returns the seconds that each load of a record took since the last call (`load_seconds`), and each batch of records
    /// from its first write until the disk had synced it (`write_seconds`), also if it failed. The latest 10,000 of both are
    /// kept.
    fn take_times(&self) -> HashMap<&'static str, Vec<f64>> {
        self.times.take().into()
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

    fn store_all(
        &self,
        slab: &Slab,
        records: &[(RecordId, RecordNote, usize)],
        rows: &Rows,
        limit: Duration,
    ) -> Vec<bool> {
        let queue = |(id, note, at): &(RecordId, RecordNote, usize)| {
            let read = || Record { id: id.clone(), note: *note, buffers: rows.read(*at, slab) };
            slab.contains(&id.key) || slab.store(read()) != Stored::Dropped
        };
        let count = (PORTION / self.row_bytes.max(1)).max(1);
        'portions: for portion in records.chunks(count) {
            for record in portion {
                if !queue(record) {
                    // The queue may be full of records that an earlier call has given up.
                    if !slab.flush(limit) {
                        break 'portions;
                    }
                    queue(record);
                }
            }
            if !slab.flush(limit) {
                break;
            }
        }
        records.iter().map(|(id, ..)| slab.contains(&id.key)).collect()
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
