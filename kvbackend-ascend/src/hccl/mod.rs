//! Collectives between devices through HCCL, which is loaded at run time.
//!
//! ```text
//!   caller's stream   … work ──► event                        work …
//!                                  │                           ▲
//!   rank's stream                wait ──► HCCL ──► host waits, until the time-out at most
//! ```
//!
//! HCCL has no call to abort a collective whose other ranks never arrive. A stream that waited for such a
//! collective would be stuck forever. Instead, the host waits, and drops the rank's stream if the group
//! fails.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvcore::{CheckedCollective, Collective, Communicator, Error, Event, Result, Stream};
use parking_lot::Mutex;

mod group;
mod handle;
mod id;
mod issue;
mod library;

use group::LocalRanks;
use handle::RankHandle;
pub use id::HcclId;
use issue::CollectiveLine;
use library::{HcclLibrary, loaded};

use crate::backend::AscendBackend;
use crate::bindings::types as sys;
use crate::device::Npu;
use crate::errors::{foreign, unsupported};
use crate::memory::AscendStorage;
use crate::queue::AscendEvent;

/// The interval between checks of the group's state while a collective runs.
const SLICE: Duration = Duration::from_millis(10);

/// ACL's error code for a wait that timed out.
const WAITED_TOO_LONG: i32 = 507_046;

/// A rank in a group of NPUs that communicate through HCCL. Each rank has its own device.
///
/// A call waits until the collective is done or the time-out expires. A time-out fails the group permanently.
/// Other ranks in this process see a failure within milliseconds; ranks in other processes see it when their
/// own time-out expires. The ranks MUST make the same calls in the same order, which is not checked:
/// otherwise a group may time out, or read and write the wrong bytes.
///
/// ```
/// use std::time::Duration;
/// use kvbackend_ascend::{AscendBackend, HcclCommunicator};
/// use kvcore::{Backend, Communicator, DType, MemoryKind, ReduceOp, allocate_tensor};
///
/// # if let Err(reason) = AscendBackend::new().and_then(|backend| HcclCommunicator::group(&[backend], Duration::from_secs(60))) {
/// #     return Ok(kvconform::skip(reason));
/// # }
/// let backend = AscendBackend::new()?;
/// let group = HcclCommunicator::group(&[backend.clone()], Duration::from_secs(60))?;
/// let stream = backend.stream()?;
/// let view = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::I8, &[2])?;
/// stream.write(&view, &[3, 4])?;
/// for rank in &group {
///     rank.all_reduce(stream.as_ref(), &view, ReduceOp::Sum)?; // on a group of more ranks, each in its thread
/// }
/// let mut sums = [0; 2];
/// stream.read(&view, &mut sums)?;
/// assert_eq!(sums, [3, 4]);
/// # Ok::<(), kvcore::Error>(())
/// ```
///
/// # Drop behaviour
/// The rank leaves the group. A collective that still needs this rank then fails the group.
pub struct HcclCommunicator {
    rank: usize,
    ranks: usize,
    limit: Duration,
    group: Arc<LocalRanks>,
    npu: Arc<Npu>,
    loaded: &'static HcclLibrary,
    /// The rank's handle, or `None` if the rank is the only one in its group.
    handle: Option<RankHandle>,
    /// The stream on which HCCL runs. It is locked during a collective, and `None` after the group has
    /// failed.
    stream: Mutex<Option<RankStream>>,
}

/// The rank's own stream. Dropping it also discards its unfinished work.
struct RankStream {
    raw: sys::aclrtStream,
    npu: Arc<Npu>,
    /// Memory that the current collective needs besides its views.
    staged: Option<AscendStorage>,
}

// SAFETY: ACL streams may be used from any thread on which the device's context is current.
unsafe impl Send for RankStream {}

impl RankStream {
    fn new(npu: &Arc<Npu>) -> Result<Self> {
        let _current = npu.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is valid for writes, and the device's context is current.
        npu.check(unsafe { npu.library.acl.aclrtCreateStreamWithConfig(&raw mut raw, 0, 0) })?;
        Ok(Self { raw, npu: Arc::clone(npu), staged: None })
    }
}

impl Drop for RankStream {
    fn drop(&mut self) {
        if let Ok(_current) = self.npu.bind_lost() {
            // SAFETY: the rank owns the stream, which is destroyed once, before its memory is freed.
            unsafe { self.npu.library.acl.aclrtDestroyStreamForce(self.raw) };
        }
    }
}

impl fmt::Debug for HcclCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HcclCommunicator(rank {} of {} on {:?})", self.rank, self.ranks, self.npu)
    }
}

impl HcclCommunicator {
    /// Joins a group of `ranks` ranks as rank `rank`, and waits for the other ranks. `limit` is the time-out
    /// for joining and for each collective.
    ///
    /// # Errors
    /// - Returns [`Error::NoDevice`] if HCCL is missing.
    /// - Returns [`Error::OutOfRange`] if `rank` is not below `ranks`.
    /// - Returns [`Error::RanksTimedOut`] if other ranks did not join in time, or [`Error::Device`] if HCCL
    ///   reports an error.
    pub fn new(
        backend: &AscendBackend,
        id: &HcclId,
        rank: usize,
        ranks: usize,
        limit: Duration,
    ) -> Result<Self> {
        if rank >= ranks {
            return Err(Error::OutOfRange { what: "rank", value: rank as i128, limit: ranks as i128 });
        }
        let handle = match ranks {
            1 => None,
            _ => Some(handle::join(&backend.npu, id, rank, ranks, limit)?),
        };
        Self::over(&Arc::default(), &backend.npu, handle, (rank, ranks), limit)
    }

    /// Creates a group in this process, with one rank per backend, in order. Collectives must be called on a
    /// separate thread for each rank.
    ///
    /// # Errors
    /// Returns the errors of [`new`](Self::new), [`Error::Zero`] if there are no backends, or
    /// [`Error::Unsupported`] if two backends use the same device.
    pub fn group(backends: &[Arc<AscendBackend>], limit: Duration) -> Result<Vec<Self>> {
        let devices: Vec<Arc<Npu>> = backends.iter().map(|backend| Arc::clone(&backend.npu)).collect();
        for (rank, npu) in devices.iter().enumerate() {
            if devices[..rank].iter().any(|other| other.ordinal == npu.ordinal) {
                let what =
                    format!("two ranks on device {}; use a separate device for each rank", npu.ordinal);
                return Err(unsupported(what));
            }
        }
        let handles: Vec<Option<RankHandle>> = match devices.len() {
            0 => return Err(Error::Zero { what: "number of ranks" }),
            1 => vec![None],
            _ => handle::join_all(&devices, limit)?.into_iter().map(Some).collect(),
        };
        let (group, ranks) = (Arc::default(), devices.len());
        let rank = |(rank, (npu, handle))| Self::over(&group, npu, handle, (rank, ranks), limit);
        devices.iter().zip(handles).enumerate().map(rank).collect()
    }

    fn over(
        group: &Arc<LocalRanks>,
        npu: &Arc<Npu>,
        handle: Option<RankHandle>,
        (rank, ranks): (usize, usize),
        limit: Duration,
    ) -> Result<Self> {
        let (loaded, stream) = (loaded()?, Mutex::new(Some(RankStream::new(npu)?)));
        group.enter(rank);
        let (group, npu) = (Arc::clone(group), Arc::clone(npu));
        Ok(Self { rank, ranks, limit, group, npu, loaded, handle, stream })
    }

    /// Records an event on the caller's stream. Fails the group if the device is lost.
    fn record(&self, stream: &dyn Stream) -> Result<Arc<dyn Event>> {
        stream.record().inspect_err(|error| {
            if matches!(error, Error::DeviceLost { .. }) {
                self.abort();
            }
        })
    }

    // Decision: docs/decisions/backend-ascend.md#the-host-waits-for-collectives
    /// Passes a collective to HCCL that starts after the event `before`, and waits until the collective is
    /// done.
    fn perform(&self, own: &mut RankStream, before: &AscendEvent, collective: Collective<'_>) -> Result<()> {
        let _current = self.npu.bind()?;
        before.0.hold_back(&self.npu, own.raw)?;
        let (loaded, npu, handle) = (self.loaded, &self.npu, self.handle.as_ref());
        let mut line = CollectiveLine { loaded, npu, handle, stream: own.raw, staged: &mut own.staged };
        // SAFETY: `Communicator::run` has checked that the stream owns the views. The work is done when this
        // function returns, or its stream is dropped before the caller continues.
        unsafe { line.collective(self.rank, collective) }?;
        self.group.call(self.rank, collective);
        self.finish(own.raw, collective)?;
        own.staged = None;
        Ok(())
    }

    /// Waits until the work on the rank's stream is done, the group fails, or the time-out expires.
    fn finish(&self, stream: sys::aclrtStream, collective: Collective<'_>) -> Result<()> {
        let since = Instant::now();
        loop {
            let left = self.limit.saturating_sub(since.elapsed()).min(SLICE).as_millis().max(1) as i32;
            // SAFETY: the stream is alive, and the device's context is current.
            let code = unsafe { self.npu.library.acl.aclrtSynchronizeStreamWithTimeout(stream, left) };
            if code != WAITED_TOO_LONG {
                return self.npu.check(code);
            }
            self.check()?;
            self.group.check_presence(self.rank)?;
            if since.elapsed() >= self.limit {
                let (rank, call, limit) = (self.rank, collective.to_string(), self.limit);
                return Err(Error::RanksTimedOut { rank, call, limit });
            }
        }
    }
}

impl Communicator for HcclCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn launch(&self, stream: &dyn Stream, collective: CheckedCollective<'_>) -> Result<()> {
        let mut stream_of_rank = self.stream.lock();
        self.check()?;
        let collective = collective.collective();
        let before = self.record(stream)?;
        let event = ascend(&before)?;
        event.refuse_capture("a collective")?;
        if !Arc::ptr_eq(&event.0.npu, &self.npu) {
            return Err(foreign("a stream of another device"));
        }
        issue::reaches(collective)?;
        let Some(own) = stream_of_rank.as_mut().filter(|_| !issue::is_empty(collective)) else {
            return Ok(());
        };
        let Err(error) = self.perform(own, event, collective) else { return Ok(()) };
        *stream_of_rank = None;
        Err(match error {
            late @ (Error::RanksTimedOut { .. } | Error::RankLeft(_) | Error::RankAborted(_)) => {
                self.group.fail(late)
            }
            // The other ranks fail because this rank aborted the work, unless the group had already failed.
            own => {
                self.group.fail(Error::RankAborted(self.rank));
                own
            }
        })
    }

    fn check(&self) -> Result<()> {
        self.group.check()?;
        let Some(handle) = &self.handle else { return Ok(()) };
        handle.check().map_err(|error| self.group.fail(error))
    }

    fn wait(&self, stream: &dyn Stream) -> Result<()> {
        self.check()?;
        // A collective is done when its call returns, so only the caller's own work is left on the stream.
        ascend(&self.record(stream)?)?.refuse_capture("a wait of the host")?;
        stream.synchronize().inspect_err(|_| self.abort())?;
        self.check()
    }

    fn abort(&self) {
        self.group.fail(Error::RankAborted(self.rank));
    }
}

impl Drop for HcclCommunicator {
    fn drop(&mut self) {
        self.group.leave(self.rank);
        // Every call has waited for its work. HCCL requires that the handle is destroyed before the stream;
        // after a failure, the stream has already been dropped.
        let own = self.stream.get_mut().take();
        self.handle = None;
        drop(own);
    }
}

/// Downcasts an event to this backend's type.
fn ascend(event: &Arc<dyn Event>) -> Result<&AscendEvent> {
    let known = event.as_any().downcast_ref::<AscendEvent>();
    known.ok_or(foreign("a stream"))
}
