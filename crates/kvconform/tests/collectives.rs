//! Collectives of threads, over the streams of backends.
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
