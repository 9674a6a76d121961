//! Agreement between ranks, reached through a communicator.

use std::sync::Arc;

use kvcore::{Backend, Communicator, DType, MemoryKind, OwnedStorage, ReduceOp, Stream};
use parking_lot::Mutex;

use super::RankAgreement;
use crate::error::Result;

/// A rank that reaches agreement through a [`Communicator`]'s all-reduce operations: each flag is a byte, and
/// the result is the minimum over all ranks.
///
/// ```
/// use std::sync::Arc;
/// use std::time::Duration;
/// use kvbackend_cpu::{CpuBackend, ThreadCommunicator};
/// use kvchunk::{CollectiveRank, RankAgreement};
///
/// let mut group = ThreadCommunicator::group(2, Duration::from_secs(60))?.into_iter();
/// let mut rank = || CollectiveRank::new(Arc::new(group.next().unwrap()), CpuBackend::new());
/// let (a, b) = (rank()?, rank()?);
/// let other = std::thread::spawn(move || b.agree(&mut [true, false]));
/// let mut flags = [true, true];
/// a.agree(&mut flags)?;
/// assert_eq!(flags, [true, false]);
/// # other.join().unwrap()?;
/// # Ok::<(), kvchunk::Error>(())
/// ```
///
/// A rank that cannot take part in an agreement aborts the group, so that no other rank waits for it. When a
/// rank is dropped, it leaves the group, unless its communicator is still in use elsewhere.
#[derive(Debug)]
pub struct CollectiveRank {
    communicator: Arc<dyn Communicator>,
    backend: Arc<dyn Backend>,
    stream: Arc<dyn Stream>,
    /// Device memory for the largest number of flags so far. The lock is held during an agreement.
    flags: Mutex<Option<OwnedStorage>>,
}

impl CollectiveRank {
    /// Creates one rank's side of the agreement, with its own stream. `backend` MUST be the backend whose
    /// memory the communicator transfers. If the communicator is also used for other collectives, they MUST
    /// run in the same order on all ranks, and the host MUST wait between them and the agreements.
    ///
    /// # Errors
    /// Returns the errors of [`Backend::stream`].
    pub fn new(communicator: Arc<dyn Communicator>, backend: Arc<dyn Backend>) -> Result<Self> {
        let stream = backend.stream()?;
        Ok(Self { communicator, backend, stream, flags: Mutex::default() })
    }

    fn reduce(&self, bytes: &mut [u8]) -> kvcore::Result<()> {
        let (mut flags, stream) = (self.flags.lock(), self.stream.as_ref());
        let memory = match flags.take() {
            Some(memory) if memory.len() >= bytes.len() => memory,
            _ => {
                let room = bytes.len().next_power_of_two().max(256);
                OwnedStorage::create(self.backend.as_ref(), MemoryKind::Device, room)?
            }
        };
        let view = flags.insert(memory).view(DType::I8, &[bytes.len()])?;
        if !bytes.is_empty() {
            stream.write(&view, bytes)?;
        }
        // Reduce even if there are no flags, because the reduction detects ranks that ask for different
        // things.
        self.communicator.all_reduce(stream, &view, ReduceOp::Min)?;
        self.communicator.wait(stream)?;
        if bytes.is_empty() { Ok(()) } else { stream.read(&view, bytes) }
    }
}

impl RankAgreement for CollectiveRank {
    fn agree(&self, flags: &mut [bool]) -> Result<()> {
        let mut bytes: Vec<u8> = flags.iter().map(|&flag| u8::from(flag)).collect();
        self.reduce(&mut bytes).inspect_err(|_| self.communicator.abort())?;
        flags.iter_mut().zip(bytes).for_each(|(flag, byte)| *flag = byte != 0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::shortest;
    use super::*;
    use crate::error::Error;
    use kvbackend_cpu::{CpuBackend, Execution, ThreadCommunicator};
    use kvcore::Error as CoreError;
    use std::time::Duration;

    fn group(ranks: usize, limit: Duration) -> Vec<CollectiveRank> {
        let rank = |thread| {
            CollectiveRank::new(Arc::new(thread), CpuBackend::with_execution(Execution::Deferred)).unwrap()
        };
        ThreadCommunicator::group(ranks, limit).unwrap().into_iter().map(rank).collect()
    }

    #[test]
    fn flags_are_kept_that_are_set_on_all_round_after_round() {
        let ranks = group(3, Duration::from_secs(60));
        std::thread::scope(|scope| {
            for (i, rank) in (0..).zip(&ranks) {
                scope.spawn(move || {
                    for round in 0..500u64 {
                        let of = |rank: u64| (0..5).map(move |at| (round * 7 + at * 3 + rank * 5) % 4 > 1);
                        let mut flags: Vec<bool> = of(i).collect();
                        rank.agree(&mut flags).unwrap();
                        let all = of(0).zip(of(1)).zip(of(2)).map(|((a, b), c)| a && b && c);
                        assert_eq!(flags, all.collect::<Vec<_>>(), "rank {i}, round {round}");
                        assert_eq!(shortest(rank, 3 + round as usize % 2, 9), Ok(3 + round as usize % 2));
                        let length = 3 + usize::from(i == round % 3);
                        assert_eq!(shortest(rank, length, 9), Ok(3));
                        assert_eq!(shortest(rank, i as usize, 9), Ok(0));
                        assert_eq!(shortest(rank, 0, 0), Ok(0));
                        let most = 200 + round as usize * 3;
                        assert_eq!(shortest(rank, most - i as usize, most), Ok(most - 2));
                    }
                });
            }
        });
    }

    #[test]
    fn a_rank_that_leaves_or_asks_something_else_ends_the_request_on_all() {
        let ranks = group(3, Duration::from_millis(20));
        let late = ranks[0].agree(&mut [true]);
        assert!(matches!(late, Err(Error::Core(CoreError::RanksTimedOut { rank: 0, .. }))), "{late:?}");
        assert_eq!(ranks[1].agree(&mut [true]), late, "and it stays so");
        let mut ranks = group(2, Duration::from_secs(60));
        let (a, b) = (ranks.remove(0), ranks.remove(0));
        let waiting = std::thread::spawn(move || a.agree(&mut [true]));
        drop(b);
        assert_eq!(waiting.join().unwrap(), Err(Error::Core(CoreError::RankLeft(1))));
        let ranks = group(2, Duration::from_secs(60));
        let results = std::thread::scope(|scope| {
            let a = scope.spawn(|| ranks[0].agree(&mut [true]));
            let b = scope.spawn(|| ranks[1].agree(&mut [true, true]));
            [a.join().unwrap(), b.join().unwrap()]
        });
        let differ = |result: &Result<()>| matches!(result, Err(Error::Core(CoreError::RanksDiffer { .. })));
        assert!(results.iter().all(differ), "{results:?}");
    }

    /// A backend without any free memory.
    #[derive(Debug)]
    struct NoRoom(Arc<CpuBackend>);

    impl Backend for NoRoom {
        fn name(&self) -> &'static str {
            "full"
        }
        fn capabilities(&self) -> kvcore::Capabilities {
            self.0.capabilities()
        }
        fn allocate(&self, kind: MemoryKind, bytes: usize) -> kvcore::Result<Arc<dyn kvcore::Storage>> {
            Err(CoreError::Allocation { bytes, kind, reason: "full".to_owned() })
        }
        fn stream(&self) -> kvcore::Result<Arc<dyn Stream>> {
            self.0.stream()
        }
        fn counters(&self) -> kvcore::CounterSnapshot {
            self.0.counters()
        }
    }

    #[test]
    fn a_rank_that_cannot_take_part_makes_no_other_wait() {
        let mut threads = ThreadCommunicator::group(2, Duration::from_secs(600)).unwrap().into_iter();
        let full = Arc::new(NoRoom(CpuBackend::new()));
        let a = CollectiveRank::new(Arc::new(threads.next().unwrap()), full).unwrap();
        let b = CollectiveRank::new(Arc::new(threads.next().unwrap()), CpuBackend::new()).unwrap();
        let waiting = std::thread::spawn(move || b.agree(&mut [true]));
        assert!(matches!(a.agree(&mut [true]), Err(Error::Core(CoreError::Allocation { .. }))));
        assert_eq!(waiting.join().unwrap(), Err(Error::Core(CoreError::RankAborted(0))));
    }
}
