//! The backend contract: memory, order and kernels.
//!
//! A backend allocates [`Storage`], makes [`Stream`]s, and runs the operations of
//! [`crate::device::operation`] on them. Operations are *enqueued*: they own handles to what they touch, and
//! nothing they write is visible to the host before [`Stream::read`], [`Stream::synchronize`] or
//! [`Event::wait`] returns. Streams are ordered among each other by events only. Two operations that
//! touch the same memory, one of them writing, must be on one stream or ordered by an event.
//!
//! All traits are object-safe: engines hold `Arc<dyn Backend>` and know no device.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::base::{DType, KvFormat, MemoryKind, Result};
use crate::device::{Checked, Operation, OwnedStorage, TensorView};

mod counters;
mod reserve;

pub use counters::{CounterSnapshot, Counters};
pub use reserve::{ReservedStorage, check_granules, whole_granules};

/// A piece of memory that a backend owns or was lent; freed when the last handle goes.
pub trait Storage: Send + Sync + fmt::Debug {
    /// Bytes.
    fn len(&self) -> usize;

    /// Whether it holds no byte; backends refuse to make such storages.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Address of the first byte: a host pointer, a device pointer, or an index where a device has
    /// no addresses.
    fn address(&self) -> u64;

    /// Which memory it lies in.
    fn kind(&self) -> MemoryKind;

    /// For the backend that made it, to find its own type again.
    fn as_any(&self) -> &dyn Any;
}

/// A point in a stream's order.
pub trait Event: Send + Sync + fmt::Debug {
    /// Blocks the host until everything enqueued before the event is done.
    fn wait(&self) -> Result<()>;

    /// Whether everything before the event is done; never blocks.
    fn is_done(&self) -> bool;

    /// For the backend that made it, to find its own type again.
    fn as_any(&self) -> &dyn Any;
}

/// An ordered queue of operations on one device.
///
/// # Behaviour
/// - [`run`](Self::run) is the one entry for work: it checks the operation, checks that its memory is the backend's,
///   launches it, and counts it. `stream.scatter(&op)` and its siblings are `run` under the operation's name.
/// - Operations run in the order in which they were enqueued; operations of other streams run in any order, unless
///   [`wait_for`](Self::wait_for) orders them.
/// - An operation that is refused enqueues nothing.
/// - Results are visible to the host after [`read`](Self::read), [`synchronize`](Self::synchronize) or
///   [`Event::wait`].
pub trait Stream: Send + Sync + fmt::Debug {
    /// Enqueues an operation that has passed its check and touches memory of this backend only. Called by
    /// [`run`](Self::run).
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) for an operation that the backend lists as missing; what the
    /// device refuses. Nothing is enqueued in that case.
    fn launch(&self, operation: Checked<'_>) -> Result<()>;

    /// Checks that a storage was made by this stream's backend, for this device.
    ///
    /// # Errors
    /// [`Error::ForeignHandle`](crate::Error::ForeignHandle).
    fn owns(&self, storage: &Arc<dyn Storage>) -> Result<()>;

    /// Returns the live counters of the backend.
    fn counters(&self) -> &Counters;

    /// Checks, launches and counts an operation.
    ///
    /// # Errors
    /// Those of [`Operation::check`], [`owns`](Self::owns) and [`launch`](Self::launch), in this order; nothing is
    /// enqueued or counted in that case.
    fn run(&self, operation: Operation<'_>) -> Result<()> {
        let checked = operation.checked()?;
        operation.storages().try_for_each(|storage| self.owns(storage))?;
        self.launch(checked)?;
        operation.count(self.counters());
        Ok(())
    }

    /// An event after everything enqueued so far.
    fn record(&self) -> Result<Arc<dyn Event>>;

    /// Later operations of this stream run after `event`.
    fn wait_for(&self, event: &Arc<dyn Event>) -> Result<()>;

    /// Blocks the host until everything enqueued so far is done.
    fn synchronize(&self) -> Result<()>;

    /// Copies host bytes into a contiguous view, in stream order. `src` may be reused on return.
    ///
    /// # Errors
    /// A mismatch of lengths, or a view that is not contiguous.
    fn write(&self, dst: &TensorView, src: &[u8]) -> Result<()>;

    /// Waits for the stream, then copies a contiguous view into host bytes.
    ///
    /// # Errors
    /// A mismatch of lengths, or a view that is not contiguous.
    fn read(&self, src: &TensorView, dst: &mut [u8]) -> Result<()>;
}

/// What a backend can do; a combination that is not listed is refused with a typed error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// Element types that every kernel accepts.
    pub dtypes: Vec<DType>,
    /// Quantised formats that every kernel accepts, by [`KvFormat::name`].
    pub formats: Vec<&'static str>,
    /// Memory that can be allocated.
    pub memory: Vec<MemoryKind>,
    /// Names of what is missing, out of [`OPTIONAL`](crate::device::OPTIONAL), e.g. `"attend_mla"`.
    pub missing: Vec<&'static str>,
}

impl Capabilities {
    /// Whether kernels accept caches of a format.
    pub fn accepts(&self, format: KvFormat) -> bool {
        match format {
            KvFormat::Dense(dtype) => self.dtypes.contains(&dtype),
            _ => self.formats.contains(&format.name()),
        }
    }
}

/// A device: its memory and its streams.
pub trait Backend: Send + Sync + fmt::Debug {
    /// Short name, as given to `--backend`.
    fn name(&self) -> &'static str;

    /// For people: the name, and which device it is where a machine may have several.
    fn description(&self) -> String {
        self.name().to_owned()
    }

    /// What this backend can do.
    fn capabilities(&self) -> Capabilities;

    /// Allocates zeroed memory.
    ///
    /// # Errors
    /// [`crate::Error::Zero`] for no bytes, [`crate::Error::Allocation`] when memory is refused,
    /// [`crate::Error::Unsupported`] for a kind that [`capabilities`](Self::capabilities) does not list.
    fn allocate(&self, kind: MemoryKind, bytes: usize) -> Result<Arc<dyn Storage>>;

    /// Reserves addresses for at least `bytes` bytes, with physical memory behind all of them until it is
    /// unmapped. A backend that cannot lists `"reserve"` as missing.
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
    /// As [`allocate`](Self::allocate); [`crate::Error::Unsupported`] where the device or the system cannot
    /// release memory and keep its addresses.
    fn reserve(&self, kind: MemoryKind, bytes: usize) -> Result<Arc<dyn ReservedStorage>> {
        let what = format!("reserving {bytes} bytes of {kind} memory");
        Err(crate::Error::Unsupported { backend: self.name(), what })
    }

    /// A new stream.
    fn stream(&self) -> Result<Arc<dyn Stream>>;

    /// Bytes moved by each kernel since the backend was made: what proves that a hit copies nothing.
    fn counters(&self) -> CounterSnapshot;
}

/// Allocates a dense tensor of `shape`, zeroed, in a storage of its own.
pub fn allocate_tensor(
    backend: &dyn Backend,
    kind: MemoryKind,
    dtype: DType,
    shape: &[usize],
) -> Result<TensorView> {
    let bytes = dtype.bytes_for(crate::base::product("elements of a tensor", shape)?)?;
    OwnedStorage::create(backend, kind, bytes)?.view(dtype, shape)
}
