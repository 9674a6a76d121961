//! Collectives between devices through NCCL, which is loaded at run time.
//!
//! ```text
//!   caller's stream   … work ──► event            wait ──► work …      and the memory is held until here
//!                                  │                ▲
//!   group's stream               wait ──► NCCL ──► event
//! ```
//!
//! No host call waits for other ranks inside NCCL. NCCL works in the background, and the rank polls its state
//! until the time-out expires ([`member`], [`group`]).

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvcore::device::queue::CapturedStream;
use kvcore::{CheckedCollective, Collective, Communicator, Error, Event, Result, Stream};
use parking_lot::Mutex;

mod group;
mod id;
mod issue;
mod library;
mod member;

use group::NcclGroup;
pub use id::NcclId;
use library::library;
use member::NcclMember;

use crate::backend::CudaBackend;
use crate::device::CudaDevice;
use crate::driver::NAME;
use crate::queue::{CudaEvent, CudaStream, CudaStreamState};

/// A rank in a group of NVIDIA GPUs that communicate through NCCL. Each rank has its own device.
///
/// A call enqueues the collective and returns. The first collective between two ranks may wait for the other
/// rank. A wait that exceeds the time-out fails the group permanently. Other ranks in this process see a
/// failure at once; ranks in other processes see it when their own time-out expires. If the ranks make
/// different calls, this is not detected: the group may time out, or read and write the wrong bytes.
///
/// If a rank never arrives, a later read, wait or drop of the stream blocks forever. Call
/// [`wait`](Communicator::wait) before any of these. Collectives in a captured graph are refused.
///
/// ```
/// use std::time::Duration;
/// use kvbackend_cuda::{CudaBackend, NcclCommunicator};
/// use kvcore::{Backend, Communicator, DType, MemoryKind, ReduceOp, allocate_tensor};
///
/// # if let Err(reason) = CudaBackend::new().and_then(|backend| NcclCommunicator::group(&[backend], Duration::from_secs(60))) {
/// #     return Ok(kvconform::skip(reason));
/// # }
/// let backend = CudaBackend::new()?;
/// let group = NcclCommunicator::group(&[backend.clone()], Duration::from_secs(60))?;
/// let stream = backend.stream()?;
/// let view = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::I8, &[2])?;
/// stream.write(&view, &[3, 4])?;
/// for rank in &group {
///     rank.all_reduce(stream.as_ref(), &view, ReduceOp::Sum)?; // on a group of more ranks, each in its thread
///     rank.wait(stream.as_ref())?;
/// }
/// let mut sums = [0; 2];
/// stream.read(&view, &mut sums)?;
/// assert_eq!(sums, [3, 4]);
/// # Ok::<(), kvcore::Error>(())
/// ```
///
/// # Drop behaviour
/// The rank leaves the group. If one of its collectives is not done, the group fails. The last of this
/// process's ranks to leave waits up to a second for NCCL to finish.
pub struct NcclCommunicator {
    rank: usize,
    ranks: usize,
    group: Arc<NcclGroup>,
    /// The rank's index among the group's members in this process.
    place: usize,
    device: Arc<CudaDevice>,
    /// The stream on which NCCL runs.
    stream: CudaStream,
    /// The name of the newest collective, with an event that marks its end. The lock is held while a
    /// collective is issued, because a rank takes part in only one collective at a time.
    newest: Mutex<Option<(String, Arc<dyn Event>)>>,
}

impl fmt::Debug for NcclCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NcclCommunicator(rank {} of {} on {:?})", self.rank, self.ranks, self.device)
    }
}

impl NcclCommunicator {
    /// Joins a group of `ranks` ranks as rank `rank`, and waits for the other ranks. `limit` is the time-out
    /// for joining and for each collective.
    ///
    /// # Errors
    /// - Returns [`Error::NoDevice`] if NCCL is missing or too old; the error explains what to install.
    /// - Returns [`Error::OutOfRange`] if `rank` is not below `ranks`.
    /// - Returns [`Error::RanksTimedOut`] if other ranks did not join in time, or [`Error::Device`] if NCCL
    ///   reports an error, for example for two ranks on one device.
    pub fn new(
        backend: &CudaBackend,
        id: &NcclId,
        rank: usize,
        ranks: usize,
        limit: Duration,
    ) -> Result<Self> {
        let nccl = library()?;
        if rank >= ranks {
            return Err(Error::OutOfRange { what: "rank", value: rank as i128, limit: ranks as i128 });
        }
        let stream = CudaStream::new(&backend.device, &backend.tables)?;
        let member = NcclMember::join(nccl, &backend.device, id, rank, ranks)?;
        let group = NcclGroup::new(vec![(rank, member)], limit)?;
        Ok(Self::over(group, 0, rank, ranks, &backend.device, stream))
    }

    /// Creates a group in this process, with one rank per backend, in order. Collectives must be called on a
    /// separate thread for each rank.
    ///
    /// # Errors
    /// Returns the errors of [`new`](Self::new), [`Error::Zero`] if there are no backends, or
    /// [`Error::Unsupported`] if two backends use the same device.
    pub fn group(backends: &[Arc<CudaBackend>], limit: Duration) -> Result<Vec<Self>> {
        let (nccl, ranks) = (library()?, backends.len());
        if ranks == 0 {
            return Err(Error::Zero { what: "number of ranks" });
        }
        for (rank, backend) in backends.iter().enumerate() {
            let ordinal = backend.device.ordinal;
            if backends[..rank].iter().any(|other| other.device.ordinal == ordinal) {
                let what = format!("two ranks on device {ordinal}; use a separate device for each rank");
                return Err(Error::Unsupported { backend: NAME, what });
            }
        }
        let streams: Vec<CudaStream> = backends
            .iter()
            .map(|backend| CudaStream::new(&backend.device, &backend.tables))
            .collect::<Result<_>>()?;
        let id = NcclId::new()?;
        // Ranks on the same thread must join in one group call.
        // SAFETY: every `group_start` is followed by a `group_end`, even after a failed call.
        nccl.check("a start of calls", std::ptr::null_mut(), unsafe { (nccl.group_start)() })?;
        let joined: Vec<Result<NcclMember>> = backends
            .iter()
            .enumerate()
            .map(|(rank, backend)| NcclMember::join(nccl, &backend.device, &id, rank, ranks))
            .collect();
        // SAFETY: the group of calls was started above, on this thread.
        let ended = nccl.check("a start of a group", std::ptr::null_mut(), unsafe { (nccl.group_end)() });
        let members: Vec<NcclMember> = joined.into_iter().collect::<Result<_>>()?;
        ended?;
        let group = NcclGroup::new(members.into_iter().enumerate().collect(), limit)?;
        let rank = |(rank, (backend, stream)): (usize, (&Arc<CudaBackend>, CudaStream))| {
            Self::over(Arc::clone(&group), rank, rank, ranks, &backend.device, stream)
        };
        Ok(backends.iter().zip(streams).enumerate().map(rank).collect())
    }

    fn over(
        group: Arc<NcclGroup>,
        place: usize,
        rank: usize,
        ranks: usize,
        device: &Arc<CudaDevice>,
        stream: CudaStream,
    ) -> Self {
        let (device, newest) = (Arc::clone(device), Mutex::default());
        Self { rank, ranks, group, place, device, stream, newest }
    }

    /// Records an event on the caller's stream. Fails the group if the device is lost.
    fn record(&self, stream: &dyn Stream) -> Result<Arc<dyn Event>> {
        stream.record().inspect_err(|error| {
            if matches!(error, Error::DeviceLost { .. }) {
                self.abort();
            }
        })
    }

    /// Enqueues a collective that starts after the event `before`. Makes the caller's stream wait for the
    /// collective, and returns the event that marks its end.
    fn enqueue(
        &self,
        stream: &dyn Stream,
        before: &Arc<dyn Event>,
        caller: &CudaStreamState,
        collective: Collective<'_>,
    ) -> Result<Arc<dyn Event>> {
        self.stream.wait_for(before)?;
        // SAFETY: `Communicator::run` has checked that the stream owns the views. They are held below, or the
        // group's stream is waited for.
        let issued = unsafe { self.group.member(self.place).issue(collective, self.rank, self.stream.raw()) };
        issued.ok_or_else(|| self.group.gone(self.place))??;
        // The work is on the group's stream only once NCCL has finished the call.
        self.group.settle(self.place, &collective)?;
        let done = self.stream.record()?;
        stream.wait_for(&done)?;
        let views = collective.views();
        caller.hold(views.iter().map(|view| Arc::clone(view.storage())))?;
        Ok(done)
    }
}

impl Communicator for NcclCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn launch(&self, stream: &dyn Stream, collective: CheckedCollective<'_>) -> Result<()> {
        let mut newest = self.newest.lock();
        self.check()?;
        let collective = collective.collective();
        let before = self.record(stream)?;
        let event = cuda(&before)?;
        event.stream().outside("a collective")?;
        if !Arc::ptr_eq(&event.stream().on.device, &self.device) {
            return Err(Error::ForeignHandle { what: "a stream of another device", backend: NAME });
        }
        if issue::is_empty(collective) {
            return Ok(());
        }
        match self.enqueue(stream, &before, event.stream(), collective) {
            Ok(done) => {
                *newest = Some((collective.to_string(), done));
                Ok(())
            }
            Err(error) => {
                // The other ranks see that this rank aborted the work, unless the group has failed before.
                self.abort();
                // Wait for the end of the work that NCCL enqueued, because nothing holds its memory. NCCL has
                // no error code for a lost device.
                match self.stream.synchronize() {
                    Err(lost @ Error::DeviceLost { .. }) => Err(lost),
                    _ => Err(error),
                }
            }
        }
    }

    fn check(&self) -> Result<()> {
        self.group.check(self.place)
    }

    fn wait(&self, stream: &dyn Stream) -> Result<()> {
        self.check()?;
        let event = self.record(stream)?;
        cuda(&event)?.stream().outside("a wait of the host")?;
        let newest = self.newest.lock().clone().filter(|(_, done)| !done.is_done());
        let call = newest.map_or("a wait for the stream".to_owned(), |(call, _)| call);
        self.group.poll(self.place, &call, || {
            Ok(event.is_done() || self.group.check(self.place).map(|()| false)?)
        })?;
        // The work is done. This call returns an error of the work, and drops everything that the work held.
        stream.synchronize().inspect_err(|_| self.abort())?;
        self.check()
    }

    fn abort(&self) {
        self.group.fail(Error::RankAborted(self.rank));
    }
}

impl Drop for NcclCommunicator {
    fn drop(&mut self) {
        let newest = self.newest.get_mut().take();
        if newest.is_some_and(|(_, done)| !done.is_done()) {
            self.group.fail(Error::RankLeft(self.rank));
        }
        self.group.leave(self.place);
    }
}

/// Downcasts an event to this backend's type.
fn cuda(event: &Arc<dyn Event>) -> Result<&CudaEvent> {
    let known = event.as_any().downcast_ref::<CudaEvent>();
    known.ok_or(Error::ForeignHandle { what: "a stream", backend: NAME })
}
