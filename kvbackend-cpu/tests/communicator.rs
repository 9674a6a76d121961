//! Failures that only thread groups have: every rank gets a typed error, and no rank waits forever.
//! `kvconform::run_groups` tests the failures that thread groups and devices have in common.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use kvbackend_cpu::{CpuBackend, Execution, ThreadCommunicator};
use kvcore::{
    Backend, Checked, Communicator, Counters, DType, Error, Event, MemoryKind, ReduceOp, Result, Storage,
    Stream, TensorView, allocate_tensor,
};

/// A time limit that no test reaches.
const LONG: Duration = Duration::from_secs(600);

/// A rank with a tensor of eight elements.
struct Rank {
    of: ThreadCommunicator,
    stream: Arc<dyn Stream>,
    view: TensorView,
}

impl Rank {
    fn sum(&self) -> Result<()> {
        self.of.all_reduce(self.stream.as_ref(), &self.view, ReduceOp::Sum)
    }
}

fn group(ranks: usize, limit: Duration) -> Vec<Rank> {
    let rank = |of| {
        let backend = CpuBackend::with_execution(Execution::Deferred);
        let view = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[8]).unwrap();
        Rank { of, stream: backend.stream().unwrap(), view }
    };
    ThreadCommunicator::group(ranks, limit).unwrap().into_iter().map(rank).collect()
}

/// Runs a call on every rank, in one thread per rank. Returns the results in rank order.
fn on_all<T: Send>(ranks: &[Rank], call: impl Fn(&Rank) -> T + Sync) -> Vec<T> {
    let call = &call;
    thread::scope(|scope| {
        let threads: Vec<_> = ranks.iter().map(|rank| scope.spawn(move || call(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Checks that a call fails on all ranks with the same error, that `expected` accepts this error, and that
/// the group stays failed.
fn fails(ranks: &[Rank], call: impl Fn(&Rank) -> Result<()> + Sync, expected: impl Fn(&Error) -> bool) {
    let errors: Vec<Error> = on_all(ranks, call).into_iter().map(Result::unwrap_err).collect();
    assert!(errors.iter().all(|error| *error == errors[0] && expected(error)), "{errors:?}");
    for rank in ranks {
        assert_eq!(rank.of.check(), Err(errors[0].clone()));
        assert_eq!(rank.sum(), Err(errors[0].clone()), "it does not wait");
        rank.of.abort();
        assert_eq!(rank.of.check(), Err(errors[0].clone()), "the first failure stays");
        assert_eq!(rank.of.wait(rank.stream.as_ref()), Ok(()), "the stream goes on");
    }
}

#[test]
fn calls_that_differ_fail_on_all_ranks() {
    type Call = fn(&Rank) -> Result<()>;
    let half = |rank: &Rank| rank.view.slice(0, 0, 4).unwrap();
    let codes = |rank: &Rank| TensorView::new(Arc::clone(rank.view.storage()), DType::I8, &[8]).unwrap();
    let cases: [(&str, Call); 7] = [
        ("another operation", |r| r.of.broadcast(r.stream.as_ref(), &r.view, 0)),
        ("another operator", |r| r.of.all_reduce(r.stream.as_ref(), &r.view, ReduceOp::Max)),
        ("another size", |r| {
            r.of.all_reduce(r.stream.as_ref(), &r.view.slice(0, 0, 4).unwrap(), ReduceOp::Sum)
        }),
        ("another element type", |r| {
            let view = TensorView::new(Arc::clone(r.view.storage()), DType::I8, &[8]).unwrap();
            r.of.all_reduce(r.stream.as_ref(), &view, ReduceOp::Sum)
        }),
        ("a send", |r| r.of.send(r.stream.as_ref(), &r.view, 0)),
        ("a receive", |r| r.of.receive(r.stream.as_ref(), &r.view, 0)),
        ("a send and a receive", |r| {
            let (low, high) = (r.view.slice(0, 0, 4)?, r.view.slice(0, 4, 8)?);
            r.of.exchange(r.stream.as_ref(), &[(&low, 1)], &[(&high, 0)])
        }),
    ];
    for (what, other) in cases {
        let differs = |error: &Error| matches!(error, Error::RanksDiffer { .. });
        let call = |rank: &Rank| if rank.of.rank() == 2 { other(rank) } else { rank.sum() };
        println!("{what}");
        fails(&group(3, LONG), call, differs);
    }
    let root = |r: &Rank| r.of.broadcast(r.stream.as_ref(), &r.view, r.of.rank());
    fails(&group(2, LONG), root, |error| matches!(error, Error::RanksDiffer { .. }));
    for short in [half, codes] {
        let call = |r: &Rank| match r.of.rank() {
            0 => r.of.send(r.stream.as_ref(), &r.view, 1),
            _ => r.of.receive(r.stream.as_ref(), &short(r), 0),
        };
        fails(&group(2, LONG), call, |error| {
            let Error::RanksDiffer { rank: 1, call, other } = error else { return false };
            call.contains("a receive") && other == "a send of 8 elements of f32 to rank 1"
        });
    }
}

#[test]
fn a_rank_that_leaves_ends_the_wait_of_those_that_need_it() {
    for call in [
        Rank::sum as fn(&Rank) -> Result<()>,
        |r| r.of.send(r.stream.as_ref(), &r.view, 2),
        |r| r.of.receive(r.stream.as_ref(), &r.view, 2),
    ] {
        let mut ranks = group(3, LONG);
        let last = ranks.pop().unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| fails(&ranks, call, |error| *error == Error::RankLeft(2)));
            drop(last);
            waiting.join().unwrap();
        });
    }
    // The other ranks may continue to communicate with each other.
    let mut ranks = group(3, LONG);
    assert_eq!(on_all(&ranks, Rank::sum), [Ok(()), Ok(()), Ok(())]);
    drop(ranks.pop());
    let pair = |r: &Rank| match r.of.rank() {
        0 => r.of.send(r.stream.as_ref(), &r.view, 1),
        _ => r.of.receive(r.stream.as_ref(), &r.view, 0),
    };
    assert_eq!(on_all(&ranks, pair), [Ok(()), Ok(())]);
    assert_eq!(ranks[0].of.check(), Ok(()));
}

#[test]
fn a_rank_that_leaves_after_its_last_collective_takes_nothing_from_the_others() {
    for _ in 0..200 {
        thread::scope(|scope| {
            for rank in group(4, LONG) {
                scope.spawn(move || {
                    assert_eq!(rank.sum(), Ok(()));
                    assert_eq!(rank.of.wait(rank.stream.as_ref()), Ok(()));
                });
            }
        });
    }
}

#[test]
fn sends_in_a_circle_fail_on_all_ranks() {
    let circle = |r: &Rank| r.of.send(r.stream.as_ref(), &r.view, 1 - r.of.rank());
    fails(&group(2, Duration::from_millis(30)), circle, |error| matches!(error, Error::RanksTimedOut { .. }));
}

/// A stream whose device is lost as soon as something waits for it.
#[derive(Debug)]
struct Lost(Arc<dyn Stream>);

const LOST: Error = Error::DeviceLost { backend: "test", reason: String::new() };

impl Stream for Lost {
    fn launch(&self, operation: Checked<'_>) -> Result<()> {
        self.0.launch(operation)
    }
    fn owns(&self, storage: &Arc<dyn Storage>) -> Result<()> {
        self.0.owns(storage)
    }
    fn counters(&self) -> &Counters {
        self.0.counters()
    }
    fn record(&self) -> Result<Arc<dyn Event>> {
        self.0.record()
    }
    fn wait_for(&self, event: &Arc<dyn Event>) -> Result<()> {
        self.0.wait_for(event)
    }
    fn synchronize(&self) -> Result<()> {
        Err(LOST)
    }
    fn write(&self, dst: &TensorView, src: &[u8]) -> Result<()> {
        self.0.write(dst, src)
    }
    fn read(&self, _: &TensorView, _: &mut [u8]) -> Result<()> {
        Err(LOST)
    }
}

#[test]
fn a_device_that_is_lost_ends_the_collective_on_all_ranks() {
    let mut ranks = group(3, LONG);
    ranks[1].stream = Arc::new(Lost(Arc::clone(&ranks[1].stream)));
    let aborted = Err(Error::RankAborted(1));
    assert_eq!(on_all(&ranks, Rank::sum), [aborted.clone(), Err(LOST), aborted.clone()]);
    assert_eq!(ranks[1].sum(), aborted);
    assert_eq!(ranks[1].of.wait(ranks[1].stream.as_ref()), Err(LOST));
}
