//! Collectives between threads, over streams of all backends, and between devices. Also groups of threads
//! that fail, and faulty ranks that the cases for groups must catch.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::sync::Arc;
use std::time::Duration;

use kvbackend_cpu::{CpuBackend, Execution, ThreadCommunicator};
use kvconform::{BACKENDS, DeviceRig, DriverDouble, GroupRig, RankUnderTest, run_collectives, run_groups};
use kvcore::{Backend, CheckedCollective, Communicator, CopyTensor, Error, Result, Stream};
use rstest::rstest;

/// Returns a group of threads. Each rank has its own backend.
fn group(ranks: usize, backend: impl Fn() -> Arc<dyn Backend>) -> Vec<RankUnderTest> {
    let threads = ThreadCommunicator::group(ranks, Duration::from_secs(120)).unwrap();
    threads.into_iter().map(|rank| (Arc::new(rank) as Arc<dyn Communicator>, backend())).collect()
}

#[rstest]
fn threads_exchange_what_plain_loops_say(
    #[values("reference", "deferred")] variant: &str,
    #[values(1, 2, 3, 5)] ranks: usize,
) {
    let named = BACKENDS.iter().find(|b| b.name == "cpu" && b.variant == variant).expect("a known backend");
    run_collectives(&group(ranks, || (named.make)().unwrap())).unwrap_or_else(|failure| panic!("{failure}"));
}

/// A rank's fault.
#[derive(Debug, Clone, Copy, PartialEq)]
enum RankFault {
    None,
    NoRankIsAGroup,
    FailuresAreForgotten,
    TimeOutsAreAborts,
    LeavesByAborting,
}

/// A rank that violates its contract.
#[derive(Debug)]
struct WrongRank {
    inner: ThreadCommunicator,
    fault: RankFault,
}

impl Communicator for WrongRank {
    fn rank(&self) -> usize {
        self.inner.rank()
    }
    fn ranks(&self) -> usize {
        self.inner.ranks()
    }
    fn launch(&self, stream: &dyn Stream, collective: CheckedCollective<'_>) -> Result<()> {
        self.inner.launch(stream, collective).map_err(|error| match error {
            Error::RanksTimedOut { rank, .. } if self.fault == RankFault::TimeOutsAreAborts => {
                Error::RankAborted(rank)
            }
            other => other,
        })
    }
    fn check(&self) -> Result<()> {
        if self.fault == RankFault::FailuresAreForgotten { Ok(()) } else { self.inner.check() }
    }
    fn wait(&self, stream: &dyn Stream) -> Result<()> {
        self.inner.wait(stream)
    }
    fn abort(&self) {
        self.inner.abort();
    }
}

impl Drop for WrongRank {
    fn drop(&mut self) {
        if self.fault == RankFault::LeavesByAborting {
            self.inner.abort();
        }
    }
}

/// Threads of this process, each with a host backend as its device.
struct Threads(RankFault);

impl DeviceRig for Threads {
    type Backend = CpuBackend;

    fn open(&self, _: usize) -> Result<Arc<CpuBackend>> {
        Ok(CpuBackend::with_execution(Execution::Deferred))
    }
    fn double(&self) -> Option<&dyn DriverDouble> {
        None
    }
    fn copy_of_freed_memory(&self, _: &Arc<CpuBackend>) -> Result<CopyTensor> {
        Err(Error::Unsupported { backend: "cpu", what: "a device that is lost".to_owned() })
    }
}

impl GroupRig for Threads {
    type Communicator = WrongRank;
    type Id = ();

    fn group(&self, backends: &[Arc<CpuBackend>], limit: Duration) -> Result<Vec<WrongRank>> {
        if backends.is_empty() && self.0 == RankFault::NoRankIsAGroup {
            return Ok(Vec::new());
        }
        let group = ThreadCommunicator::group(backends.len(), limit)?;
        Ok(group.into_iter().map(|inner| WrongRank { inner, fault: self.0 }).collect())
    }
    fn id(&self, _: &Arc<CpuBackend>) -> Result<()> {
        Ok(())
    }
    fn join(&self, _: &Arc<CpuBackend>, (): &(), _: usize, _: usize, _: Duration) -> Result<WrongRank> {
        Err(Error::Unsupported { backend: "cpu", what: "ranks of several processes".to_owned() })
    }
    fn foreign(&self) -> Arc<dyn Backend> {
        CpuBackend::new()
    }
    fn ranks_are_threads(&self) -> bool {
        true
    }
}

#[test]
fn threads_that_fail_end_their_group() {
    run_groups(&Threads(RankFault::None)).unwrap_or_else(|failure| panic!("{failure}"));
}

#[rstest]
#[case(RankFault::NoRankIsAGroup, "a_group_has_a_rank")]
#[case(RankFault::FailuresAreForgotten, "a_rank_that_never_comes_ends_the_wait_at_the_time_out")]
#[case(RankFault::FailuresAreForgotten, "an_abort_wakes_the_ranks_of_the_process")]
#[case(RankFault::TimeOutsAreAborts, "a_rank_that_never_comes_ends_the_wait_at_the_time_out")]
#[case(RankFault::LeavesByAborting, "a_rank_that_leaves_is_not_waited_for_and_leaves_nothing")]
fn a_wrong_rank_fails_the_case_that_is_there_for_it(#[case] fault: RankFault, #[case] case: &str) {
    let failure = run_groups(&Threads(fault)).unwrap_err();
    assert!(failure.message.contains(case), "{fault:?} passes {case}: {failure}");
}

/// Opens `ranks` devices as a group.
#[cfg(feature = "cuda")]
fn devices(ranks: usize) -> kvcore::Result<Vec<RankUnderTest>> {
    use kvbackend_cuda::{CudaBackend, CudaOptions, NcclCommunicator};
    let open = |device| CudaBackend::with_options(&CudaOptions { device, ..CudaOptions::default() });
    let backends = (0..ranks).map(open).collect::<kvcore::Result<Vec<_>>>()?;
    let group = NcclCommunicator::group(&backends, Duration::from_secs(120))?;
    let rank = |(rank, backend)| (Arc::new(rank) as Arc<dyn Communicator>, backend as Arc<dyn Backend>);
    Ok(group.into_iter().zip(backends).map(rank).collect())
}

#[cfg(feature = "cuda")]
#[rstest]
fn devices_exchange_what_plain_loops_say(#[values(1, 2, 3, 4)] ranks: usize) {
    match devices(ranks) {
        Ok(group) => run_collectives(&group).unwrap_or_else(|failure| panic!("{failure}")),
        Err(reason @ kvcore::Error::NoDevice { .. }) => kvconform::skip(reason),
        Err(error) => panic!("{error}"),
    }
}

/// Opens `ranks` NPUs as a group.
#[cfg(feature = "ascend")]
fn npus(ranks: usize) -> kvcore::Result<Vec<RankUnderTest>> {
    use kvbackend_ascend::{AscendBackend, AscendOptions, HcclCommunicator};
    let open = |device| AscendBackend::with_options(&AscendOptions { device, plain: false });
    let backends = (0..ranks).map(open).collect::<kvcore::Result<Vec<_>>>()?;
    let group = HcclCommunicator::group(&backends, Duration::from_secs(120))?;
    let rank = |(rank, backend)| (Arc::new(rank) as Arc<dyn Communicator>, backend as Arc<dyn Backend>);
    Ok(group.into_iter().zip(backends).map(rank).collect())
}

#[cfg(feature = "ascend")]
#[rstest]
fn npus_exchange_what_plain_loops_say(#[values(1, 2, 3, 4)] ranks: usize) {
    match npus(ranks) {
        Ok(group) => run_collectives(&group).unwrap_or_else(|failure| panic!("{failure}")),
        Err(reason @ kvcore::Error::NoDevice { .. }) => kvconform::skip(reason),
        Err(error) => panic!("{error}"),
    }
}
