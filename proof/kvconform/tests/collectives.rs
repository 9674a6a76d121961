//! Collectives of threads, over the streams of backends, and of devices.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::sync::Arc;
use std::time::Duration;

use kvbackend_cpu::ThreadCommunicator;
use kvconform::{BACKENDS, RankUnderTest, run_collectives};
use kvcore::{Backend, Communicator};
use rstest::rstest;

/// Returns a group of threads. Each rank has a backend of its own.
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

/// Opens so many devices as a group.
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

/// Opens so many NPUs as a group.
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
