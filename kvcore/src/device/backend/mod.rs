//! The backend contract: memory, the order of work, and operations.
//!
//! A backend allocates [`Storage`], creates [`Stream`]s, and runs the operations of
//! [`crate::device::operation`] on the streams. Operations are *enqueued*. Until an operation is done, it
//! holds handles to the memory that it touches. The host sees the results of an operation only after
//! [`Stream::read`], [`Stream::synchronize`] or [`Event::wait`] returns. Different streams are ordered only
//! by events. If two operations touch the same memory and one of them writes, they MUST be on one stream or
//! ordered by an event.
//!
//! All traits are object-safe: engines hold an `Arc<dyn Backend>` and do not depend on the device.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::base::{DType, Error, KvFormat, MemoryKind, Result};
use crate::device::{Checked, Graph, Operation, OwnedStorage, StepInputs, TensorView};

mod counters;
mod done;
mod reserve;

pub use counters::{CounterSnapshot, Counters};
pub use done::{DoneCall, EventDone, call_when_done};
pub use reserve::{ReservedStorage, check_granules, whole_granules};

/// A piece of memory that a backend owns or borrows. Dropping the last handle frees owned memory, or returns
/// borrowed memory to its owner.
pub trait Storage: Send + Sync + fmt::Debug {
    /// Returns the size of the storage, in bytes.
    fn len(&self) -> usize;

    /// Returns whether the storage has no bytes. Backends refuse to allocate empty storages.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the address of the first byte: a host pointer, a device pointer, or an index if the device has
    /// no addresses. The address ranges of two storages of a backend overlap only if the storages share
    /// memory, even if addresses are indices.
    fn address(&self) -> u64;

    /// Returns the kind of memory that the storage is in.
    fn kind(&self) -> MemoryKind;

    /// Returns the storage as [`Any`], from which its backend recovers the concrete type.
    fn as_any(&self) -> &dyn Any;
}

impl dyn Storage + '_ {
    /// Returns whether two storages of one backend share at least one byte, because they are the same storage
    /// or overlap in memory.
    pub(crate) fn shares_memory(&self, other: &dyn Storage) -> bool {
        let end = |storage: &dyn Storage| storage.address().saturating_add(storage.len() as u64);
        self.address().max(other.address()) < end(self).min(end(other))
    }
}

/// A point in the order of a stream's work.
pub trait Event: Send + Sync + fmt::Debug {
    /// Blocks the host until everything enqueued before the event is done.
    fn wait(&self) -> Result<()>;

    /// Returns whether everything enqueued before the event is done. Never blocks.
    fn is_done(&self) -> bool;

    /// Calls `call` once, with the result of [`wait`](Self::wait), when everything enqueued before the event
    /// is done. This method does not block, unless the backend runs work only when something waits for it, or
    /// the system cannot start a thread. `event.done()` returns a future based on this method.
    ///
    /// `call` runs on the calling thread if the event is already done, and otherwise on a thread that also
    /// handles other events. It must therefore return quickly and must not block.
    fn on_done(self: Arc<Self>, call: DoneCall);

    /// Returns the event as [`Any`], from which its backend recovers the concrete type.
    fn as_any(&self) -> &dyn Any;
}

/// An ordered queue of operations on one device.
///
/// # Behaviour
/// - [`run`](Self::run) is the only entry point for operations: it checks the operation, checks that the
///   operation's memory belongs to the backend, launches the operation, and counts it. `stream.scatter(&op)`
///   and the methods for the other operations are shorthands for `run`.
/// - Operations run in the order in which they were enqueued. The order between operations of different
///   streams is undefined unless [`wait_for`](Self::wait_for) defines it.
/// - A rejected operation enqueues nothing.
/// - The host sees results after [`read`](Self::read), [`synchronize`](Self::synchronize) or
///   [`Event::wait`].
pub trait Stream: Send + Sync + fmt::Debug {
    /// Enqueues a checked operation, whose memory must belong to this backend. [`run`](Self::run) calls this
    /// method.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] if the backend lists the operation as missing, and the device's errors.
    /// Nothing is enqueued in these cases.
    fn launch(&self, operation: Checked<'_>) -> Result<()>;

    /// Checks that a storage belongs to this stream's backend and device.
    ///
    /// # Errors
    /// Returns [`Error::ForeignHandle`] for any other storage.
    fn owns(&self, storage: &Arc<dyn Storage>) -> Result<()>;

    // Decision: docs/decisions/device.md#the-receiving-device-runs-the-copy
    /// Checks that this stream can copy tensors from a storage. The storage must be one that the stream
    /// [owns](Self::owns), or be on another device of the same backend. A copy from another device requires
    /// contiguous views, and the caller must order the streams of both devices by events.
    ///
    /// # Errors
    /// Returns [`Error::ForeignHandle`] for any other storage.
    fn reaches(&self, storage: &Arc<dyn Storage>) -> Result<()> {
        self.owns(storage)
    }

    /// Returns the live counters of the backend.
    fn counters(&self) -> &Counters;

    // Decision: docs/decisions/device.md#operations-are-counted-after-the-launch
    /// Checks, launches and counts an operation.
    ///
    /// # Errors
    /// Returns the errors of [`Operation::check`], [`owns`](Self::owns) ([`reaches`](Self::reaches) for the
    /// source of a tensor copy) and [`launch`](Self::launch), in this order. Nothing is enqueued or counted
    /// if there is an error.
    fn run(&self, operation: Operation<'_>) -> Result<()> {
        let checked = operation.checked()?;
        match operation {
            Operation::CopyTensor(copy) => {
                self.owns(copy.dst.storage()).and_then(|()| self.reaches(copy.src.storage()))
            }
            _ => operation.storages().try_for_each(|storage| self.owns(storage)),
        }?;
        self.launch(checked)?;
        operation.count(self.counters());
        Ok(())
    }

    /// Records an event after everything enqueued so far.
    fn record(&self) -> Result<Arc<dyn Event>>;

    /// Makes later operations of this stream wait for `event`.
    fn wait_for(&self, event: &Arc<dyn Event>) -> Result<()>;

    /// Blocks the host until everything enqueued so far is done.
    fn synchronize(&self) -> Result<()>;

    /// Copies host bytes into a contiguous view, in stream order. The caller may reuse `src` after this call
    /// returns.
    ///
    /// # Errors
    /// Returns an error if the lengths differ, or if the view is not contiguous.
    fn write(&self, dst: &TensorView, src: &[u8]) -> Result<()>;

    /// Waits for the stream, and then copies a contiguous view into host bytes.
    ///
    /// # Errors
    /// Returns an error if the lengths differ, or if the view is not contiguous.
    fn read(&self, src: &TensorView, dst: &mut [u8]) -> Result<()>;

    /// Captures the operations that `record` enqueues on this stream as a graph, without running them. A
    /// backend without this feature lists `"graphs"` as missing.
    ///
    /// The capture belongs to the calling thread. Other streams of the backend join the capture when they
    /// [wait for](Self::wait_for) one of its events, and this stream MUST wait for those streams before the
    /// capture ends.
    ///
    /// # Errors
    /// Returns the errors of `record`. Returns [`Error::Unsupported`], with the name of the operation, for
    /// anything that cannot be captured: a wait, a copy from or to the host, or an operation that uses lists
    /// other than `inputs`. The capture is discarded, and the stream remains usable.
    fn capture(&self, inputs: &StepInputs, record: &mut dyn FnMut() -> Result<()>) -> Result<Arc<dyn Graph>> {
        let _ = (inputs, record);
        Err(Error::Unsupported { backend: "the stream's backend", what: "captures of graphs".to_owned() })
    }
}

/// The capabilities of a backend. Combinations that are not listed are rejected with a typed error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// Element types that every kernel accepts.
    pub dtypes: Vec<DType>,
    /// Quantised formats that every kernel accepts, by [`KvFormat::name`].
    pub formats: Vec<&'static str>,
    /// Kinds of memory that the backend can allocate.
    pub memory: Vec<MemoryKind>,
    /// Names of the features in [`OPTIONAL`](crate::device::OPTIONAL) that are missing, for example
    /// `"attend_mla"`.
    pub missing: Vec<&'static str>,
}

impl Capabilities {
    /// Returns whether the kernels accept caches in this format.
    pub fn accepts(&self, format: KvFormat) -> bool {
        match format {
            KvFormat::Dense(dtype) => self.dtypes.contains(&dtype),
            _ => self.formats.contains(&format.name()),
        }
    }

    /// Returns the kind of host memory that operations can access: ordinary memory, or pinned memory if the
    /// device cannot access ordinary memory.
    pub fn host_memory(&self) -> MemoryKind {
        if self.memory.contains(&MemoryKind::System) { MemoryKind::System } else { MemoryKind::Pinned }
    }
}

/// A device: its memory and its streams.
pub trait Backend: Send + Sync + fmt::Debug {
    /// Returns the backend's short name, as used for `--backend`.
    fn name(&self) -> &'static str;

    /// Returns a description for display: the backend's name, and the device if a machine may have several.
    fn description(&self) -> String {
        self.name().to_owned()
    }

    /// Returns the capabilities of this backend.
    fn capabilities(&self) -> Capabilities;

    /// Returns whether this backend's device memory is host memory. If so, its operations can use memory from
    /// other code in the process.
    fn shares_host_memory(&self) -> bool {
        false
    }

    /// Allocates zeroed memory.
    ///
    /// # Errors
    /// Returns [`crate::Error::Zero`] if `bytes` is 0, [`crate::Error::Allocation`] if there is not enough
    /// memory, and [`crate::Error::Unsupported`] if [`capabilities`](Self::capabilities) does not list the
    /// kind.
    fn allocate(&self, kind: MemoryKind, bytes: usize) -> Result<Arc<dyn Storage>>;

    /// Reserves addresses for at least `bytes` bytes, which are backed by physical memory until they are
    /// unmapped. A backend without this feature lists `"reserve"` as missing.
    ///
    /// ```
    /// # use kvbackend_cpu::CpuBackend;
    /// use kvcore::{Backend, MemoryKind};
    ///
    /// let backend = CpuBackend::new();
    /// # if backend.capabilities().missing.contains(&"reserve") { return Ok(()) }
    /// let pool = backend.reserve(MemoryKind::Device, 1 << 20)?;
    /// let (address, len) = (pool.address(), pool.len());
    /// pool.unmap(0..len)?;                                       // asleep: addresses without memory
    /// assert_eq!((pool.mapped_bytes(), pool.address()), (0, address));
    /// pool.map(0..len)?;                                         // awake, and zero
    /// assert_eq!((pool.mapped_bytes(), pool.address()), (len, address));
    /// # Ok::<(), kvcore::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`allocate`](Self::allocate). Returns [`crate::Error::Unsupported`] if the
    /// device or the system cannot release memory while keeping its addresses.
    fn reserve(&self, kind: MemoryKind, bytes: usize) -> Result<Arc<dyn ReservedStorage>> {
        let what = format!("reserving {bytes} bytes of {kind} memory");
        Err(Error::Unsupported { backend: self.name(), what })
    }

    /// Creates a stream.
    fn stream(&self) -> Result<Arc<dyn Stream>>;

    /// Returns the counts since the backend was created, such as the number of bytes that each kernel has
    /// moved. The counters can prove that a cache hit copies nothing.
    fn counters(&self) -> CounterSnapshot;
}

/// Allocates a dense, zeroed tensor with shape `shape` in its own storage.
///
/// # Errors
/// Returns the errors of [`OwnedStorage::create`] and [`OwnedStorage::view`], and [`Error::Overflow`] if the
/// size does not fit in the address space.
pub fn allocate_tensor(
    backend: &dyn Backend,
    kind: MemoryKind,
    dtype: DType,
    shape: &[usize],
) -> Result<TensorView> {
    let bytes = dtype.bytes_for(crate::base::product("elements of a tensor", shape)?)?;
    OwnedStorage::create(backend, kind, bytes)?.view(dtype, shape)
}
