//! Collectives between ranks that are threads of this process.
//!
//! ```text
//!   rank 0   stream.read ──► bytes ─┐                          ┌─► reduce, join ──► stream.write
//!   rank 1   stream.read ──► bytes ─┼─► ThreadGroup::meet ─────┼─► reduce, join ──► stream.write
//!   rank 2   stream.read ──► bytes ─┘                          └─► reduce, join ──► stream.write
//! ```
//!
//! Broadcasts, all-gathers and all-reduces wait until all ranks have contributed their bytes. An exchange
//! posts and receives messages instead ([`group`]).

use std::sync::Arc;
use std::time::Duration;

use kvcore::{CheckedCollective, Collective, Communicator, Error, Result, Stream, TensorView, Transfer};
use parking_lot::Mutex;

mod call;
mod group;
mod reduce;

use call::{CollectiveCall, Payload};
use group::{SentBytes, ThreadGroup};
use reduce::reduced;

// Decision: docs/decisions/device.md#threads-exchange-through-host-memory
/// A rank that is a thread of this process. Its streams can belong to any backend.
///
/// Tensors are exchanged through host memory: a collective waits for all earlier work on the stream, reads
/// this rank's tensor, waits for the other ranks, and enqueues a write of the result. The call therefore
/// blocks until the other ranks arrive, and [`wait`](Communicator::wait) only waits for the stream.
/// All-reduces combine values in f32, in rank order, and round once. A send waits for the matching receive,
/// as on devices.
///
/// ```
/// use std::time::Duration;
/// use kvbackend_cpu::{CpuBackend, ThreadCommunicator};
/// use kvcore::{Backend, Communicator, DType, MemoryKind, ReduceOp, allocate_tensor};
///
/// fn sum(rank: &ThreadCommunicator) -> kvcore::Result<[u8; 2]> {
///     let backend = CpuBackend::new();
///     let stream = backend.stream()?;
///     let view = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::I8, &[2])?;
///     stream.write(&view, &[rank.rank() as u8, 7])?;
///     rank.all_reduce(stream.as_ref(), &view, ReduceOp::Sum)?;
///     rank.wait(stream.as_ref())?;
///     let mut sums = [0; 2];
///     stream.read(&view, &mut sums)?;
///     Ok(sums)
/// }
///
/// let group = ThreadCommunicator::group(3, Duration::from_secs(60))?;
/// let results = std::thread::scope(|scope| {
///     let threads: Vec<_> = group.iter().map(|rank| scope.spawn(|| sum(rank))).collect();
///     threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
/// });
/// assert_eq!(results, [Ok([3, 21]), Ok([3, 21]), Ok([3, 21])]);
/// # Ok::<(), kvcore::Error>(())
/// ```
///
/// # Drop behaviour
/// The rank leaves its group. A collective that needs this rank fails with [`Error::RankLeft`], and so does
/// the whole group.
#[derive(Debug)]
pub struct ThreadCommunicator {
    rank: usize,
    ranks: usize,
    group: Arc<ThreadGroup>,
    /// A lock that is held during a collective, because a rank takes part in only one collective at a time.
    turn: Mutex<()>,
}

impl ThreadCommunicator {
    /// Creates a group of `ranks` ranks and returns them in order, one for each thread. A collective waits at
    /// most `limit` for the other ranks.
    ///
    /// # Errors
    /// Returns [`Error::Zero`] if `ranks` is 0.
    pub fn group(ranks: usize, limit: Duration) -> Result<Vec<Self>> {
        if ranks == 0 {
            return Err(Error::Zero { what: "number of ranks" });
        }
        let group = Arc::new(ThreadGroup::new(ranks, limit));
        let rank = |rank| Self { rank, ranks, group: Arc::clone(&group), turn: Mutex::default() };
        Ok((0..ranks).map(rank).collect())
    }

    /// Exchanges this rank's bytes with the other ranks, and enqueues a write of the result.
    fn take_part(&self, stream: &dyn Stream, collective: Collective<'_>) -> Result<()> {
        match collective {
            Collective::Broadcast { view, root } => {
                let call = CollectiveCall::Broadcast { root, tensor: Payload::of(view) };
                let own = if self.rank == root { read(stream, view)? } else { Vec::new() };
                let parts = self.group.meet(self.rank, call, own)?;
                if self.rank == root { Ok(()) } else { write(stream, view, &parts[root]) }
            }
            Collective::AllGather { src, dst } => {
                let call = CollectiveCall::AllGather { tensor: Payload::of(src) };
                let parts = self.group.meet(self.rank, call, read(stream, src)?)?;
                write(stream, dst, &parts.concat())
            }
            Collective::AllReduce { view, op } => {
                let call = CollectiveCall::AllReduce { op, tensor: Payload::of(view) };
                let parts = self.group.meet(self.rank, call, read(stream, view)?)?;
                write(stream, view, &reduced(view.dtype(), op, &parts)?)
            }
            Collective::Exchange { sends, receives } => self.swap(stream, sends, receives),
        }
    }

    fn swap(&self, stream: &dyn Stream, sends: &[Transfer<'_>], receives: &[Transfer<'_>]) -> Result<()> {
        let message = |&(view, to): &Transfer<'_>| {
            Ok((to, SentBytes { tensor: Payload::of(view), bytes: read(stream, view)? }))
        };
        let sends = sends.iter().map(message).collect::<Result<Vec<_>>>()?;
        let expected: Vec<_> = receives.iter().map(|&(view, from)| (from, Payload::of(view))).collect();
        let came = self.group.exchange(self.rank, sends, &expected)?;
        receives.iter().zip(came).try_for_each(|((view, _), bytes)| write(stream, view, &bytes))
    }
}

impl Communicator for ThreadCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn launch(&self, stream: &dyn Stream, collective: CheckedCollective<'_>) -> Result<()> {
        let _turn = self.turn.lock();
        self.check()?;
        // If the stream fails, the other ranks must see that this rank aborted. An earlier failure of the
        // group takes precedence.
        self.take_part(stream, collective.collective()).inspect_err(|_| self.abort())
    }

    fn check(&self) -> Result<()> {
        self.group.check()
    }

    /// Waits for the stream. No time-out is needed: collective calls have already waited for the other ranks,
    /// so no work on the stream waits for another rank.
    fn wait(&self, stream: &dyn Stream) -> Result<()> {
        stream.synchronize()
    }

    fn abort(&self) {
        self.group.fail(Error::RankAborted(self.rank));
    }
}

impl Drop for ThreadCommunicator {
    fn drop(&mut self) {
        self.group.leave(self.rank);
    }
}

/// Waits for all work on the stream, and returns the view's bytes.
fn read(stream: &dyn Stream, view: &TensorView) -> Result<Vec<u8>> {
    let mut bytes = vec![0; view.dtype().bytes_for(view.len())?];
    if !bytes.is_empty() {
        stream.read(view, &mut bytes)?;
    }
    Ok(bytes)
}

/// Enqueues a write of `bytes` to the view, unless `bytes` is empty.
fn write(stream: &dyn Stream, view: &TensorView, bytes: &[u8]) -> Result<()> {
    if bytes.is_empty() { Ok(()) } else { stream.write(view, bytes) }
}
