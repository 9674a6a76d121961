//! Groups of devices that fail: every rank gets a typed error, none waits for ever, and nothing is held.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kvbackend_ascend::{AscendBackend, HcclCommunicator, HcclId};
use kvcore::{
    AttendWork, Backend, Collective, Communicator, CopyTensor, DType, Error, MemoryKind, QueryRow, ReduceOp,
    Result, StepInputs, Storage, Stream, TensorView, WriteSlots, allocate_tensor,
};

use crate::common::{download, opened, upload};
use crate::simulator::{EAGER, LAZY, SMALL, alone, beside_others};

/// Longer than any test takes.
const LONG: Duration = Duration::from_secs(600);

/// The time-out of groups in which nothing comes.
const SHORT: Duration = Duration::from_millis(100);

/// The first time-out of groups in which something comes, and later nothing does.
const MOMENT: Duration = Duration::from_secs(1);

/// Code of HCCL for a failure inside.
const INTERNAL: i32 = 4;

/// A rank with a tensor of eight elements.
struct Rank {
    of: HcclCommunicator,
    backend: Arc<AscendBackend>,
    stream: Arc<dyn Stream>,
    view: TensorView,
}

impl Rank {
    fn new(of: HcclCommunicator, backend: &Arc<AscendBackend>) -> Result<Self> {
        let view = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[8])?;
        Ok(Self { of, backend: Arc::clone(backend), stream: backend.stream()?, view })
    }

    fn sum(&self) -> Result<()> {
        self.of.all_reduce(self.stream.as_ref(), &self.view, ReduceOp::Sum)
    }

    fn wait(&self) -> Result<()> {
        self.of.wait(self.stream.as_ref())
    }
}

/// Opens devices as a group, or prints a line that says why there is none.
fn group(devices: &[usize], limit: Duration) -> Option<Vec<Rank>> {
    let backends = devices.iter().map(|&device| opened(device)).collect::<Option<Vec<_>>>()?;
    match HcclCommunicator::group(&backends, limit) {
        Ok(group) => {
            Some(group.into_iter().zip(&backends).map(|(of, b)| Rank::new(of, b).unwrap()).collect())
        }
        Err(reason @ Error::NoDevice { .. }) => {
            kvconform::skip(reason);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Opens devices as ranks that know of each other only what the network says, as ranks of several processes do.
fn strangers(devices: &[usize], limit: Duration) -> Option<Result<Vec<Rank>>> {
    drop(group(devices, LONG)?);
    let first = opened(devices[0])?;
    let id = HcclId::from_bytes(*HcclId::new(&first).unwrap().as_bytes());
    let rank = |(rank, &device): (usize, &usize)| {
        let backend = opened(device).unwrap();
        Rank::new(HcclCommunicator::new(&backend, &id, rank, devices.len(), limit)?, &backend)
    };
    Some(thread::scope(|scope| {
        let threads: Vec<_> = devices.iter().enumerate().map(|of| scope.spawn(move || rank(of))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    }))
}

/// Opens [`strangers`] whose time-out is long enough for what comes before a test waits for it: on a machine with other work,
/// everything takes longer. `first` fails if it did not come in time.
fn strangers_after<T>(devices: &[usize], first: impl Fn(&[Rank]) -> Result<T>) -> Option<(Vec<Rank>, T)> {
    let mut limit = MOMENT;
    loop {
        let ranks = strangers(devices, limit)?;
        match ranks.and_then(|ranks| first(&ranks).map(|first| (ranks, first))) {
            Err(Error::RanksTimedOut { .. }) if limit < LONG => limit *= 4,
            done => return Some(done.unwrap()),
        }
    }
}

/// Runs a call on every rank, each in a thread of its own. Returns the results in the order of ranks.
fn on_all<T: Send>(ranks: &[Rank], call: impl Fn(&Rank) -> T + Sync) -> Vec<T> {
    let call = &call;
    thread::scope(|scope| {
        let threads: Vec<_> = ranks.iter().map(|rank| scope.spawn(move || call(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Checks that a rank stays failed with an error, and that its stream goes on.
fn stays_failed(rank: &Rank, error: &Error) {
    let since = Instant::now();
    assert_eq!(rank.of.check(), Err(error.clone()));
    assert_eq!(rank.sum(), Err(error.clone()), "it does not wait");
    assert_eq!(rank.wait(), Err(error.clone()), "it does not wait");
    rank.of.abort();
    assert_eq!(rank.of.check(), Err(error.clone()), "the first failure stays");
    rank.stream.write(&rank.view, &[1; 32]).unwrap();
    assert_eq!(download(rank.stream.as_ref(), &rank.view), [1; 32]);
    assert!(since.elapsed() < Duration::from_secs(60));
}

#[test]
fn collectives_are_refused_in_captures_and_the_group_goes_on() {
    let Some((_, _alone)) = alone() else { return };
    let Some(ranks) = group(&[EAGER], LONG) else { return };
    let rank = &ranks[0];
    let step = StepInputs {
        tokens: [0].into(),
        positions: [0].into(),
        slots: WriteSlots::unchecked(vec![0]),
        work: Arc::new(AttendWork::new([QueryRow { logical: 0, position: 0 }], [])),
    };
    for call in [Rank::sum, Rank::wait] {
        let refused = rank.stream.capture(&step, &mut || call(rank)).map(drop);
        assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
        assert_eq!((rank.of.check(), rank.sum(), rank.wait()), (Ok(()), Ok(()), Ok(())));
        // A caller that takes no notice gets no graph either.
        let ignored = rank.stream.capture(&step, &mut || call(rank).or(Ok(()))).map(drop);
        assert!(matches!(ignored, Err(Error::Unsupported { .. })), "{ignored:?}");
        assert_eq!((rank.of.check(), rank.sum(), rank.wait()), (Ok(()), Ok(()), Ok(())));
    }
}

#[test]
fn a_rank_that_never_comes_ends_the_wait_at_the_time_out() {
    let _beside = beside_others();
    for devices in [[EAGER, LAZY], [LAZY, EAGER]] {
        let Some(ranks) = group(&devices, SHORT) else { return };
        let error = ranks[0].sum().unwrap_err();
        let call = "an all-reduce (sum) of 8 elements of f32".to_owned();
        assert_eq!(error, Error::RanksTimedOut { rank: 0, call, limit: SHORT });
        // The other rank of this process has not called anything, and knows.
        for rank in &ranks {
            stays_failed(rank, &error);
        }
        // Sends in a circle wait for each other.
        let ranks = group(&devices, SHORT).unwrap();
        for result in on_all(&ranks, |r: &Rank| r.of.send(r.stream.as_ref(), &r.view, 1 - r.of.rank())) {
            assert!(matches!(result, Err(Error::RanksTimedOut { .. })), "{result:?}");
        }
    }
}

#[test]
fn a_group_that_is_not_whole_in_time_does_not_start() {
    let Some((simulator, _alone)) = alone() else { return };
    let Some(ranks) = group(&[EAGER], LONG) else { return };
    let backend = &ranks[0].backend;
    let before = simulator.live(EAGER);
    simulator.patience(300);
    let id = HcclId::new(backend).unwrap();
    let error = HcclCommunicator::new(backend, &id, 1, 2, SHORT).unwrap_err();
    let call = "the start of the group".to_owned();
    assert_eq!(error, Error::RanksTimedOut { rank: 1, call, limit: SHORT });
    // HCCL's own patience ends first.
    let id = HcclId::new(backend).unwrap();
    let error = HcclCommunicator::new(backend, &id, 0, 2, LONG).unwrap_err();
    assert!(matches!(&error, Error::Device { reason, .. } if reason.contains("never came")), "{error}");
    let error = HcclCommunicator::new(backend, &id, 2, 2, SHORT).unwrap_err();
    assert_eq!(error, Error::OutOfRange { what: "rank", value: 2, limit: 2 });
    let error = HcclCommunicator::group(&[], SHORT).unwrap_err();
    assert_eq!(error, Error::Zero { what: "number of ranks" });
    let again = opened(EAGER).unwrap();
    let error = HcclCommunicator::group(&[Arc::clone(backend), again], SHORT).unwrap_err();
    assert!(matches!(&error, Error::Unsupported { what, .. } if what.contains("device 0")), "{error}");
    assert_eq!(ranks[0].sum().and_then(|()| ranks[0].wait()), Ok(()), "another group of the device");
    // A rank whose time was up leaves nothing when HCCL comes back to it.
    let end = Instant::now() + Duration::from_secs(10);
    while simulator.live(EAGER) != before && Instant::now() < end {
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(simulator.live(EAGER), before);
}

#[test]
fn an_abort_wakes_the_ranks_of_the_process() {
    let _beside = beside_others();
    let Some(ranks) = group(&[EAGER, LAZY, SMALL], LONG) else { return };
    let call = |rank: &Rank| match rank.of.rank() {
        0 => rank.sum(),
        1 => rank.of.receive(rank.stream.as_ref(), &rank.view, 2),
        _ => {
            thread::sleep(Duration::from_millis(20));
            rank.of.abort();
            rank.of.check()
        }
    };
    // Ranks 0 and 1 wait for different things of rank 2 only.
    assert_eq!(on_all(&ranks, call), [(); 3].map(|()| Err(Error::RankAborted(2))));
    for rank in &ranks {
        stays_failed(rank, &Error::RankAborted(2));
    }
}

#[test]
fn ranks_of_other_processes_learn_of_an_abort_by_their_time_out() {
    let _beside = beside_others();
    let sums = |ranks: &[Rank]| on_all(ranks, Rank::sum).into_iter().collect::<Result<Vec<()>>>();
    let Some((ranks, _)) = strangers_after(&[LAZY, EAGER], sums) else { return };
    ranks[1].of.abort();
    let error = ranks[0].sum().unwrap_err();
    assert!(matches!(error, Error::RanksTimedOut { rank: 0, .. }), "{error}");
    stays_failed(&ranks[0], &error);
    stays_failed(&ranks[1], &Error::RankAborted(1));
}

#[test]
fn a_failure_that_hccl_knows_of_fails_the_group() {
    let Some((_, _alone)) = alone() else { return };
    for devices in [[EAGER, LAZY], [LAZY, EAGER]] {
        let ranks = strangers(&devices, LONG).unwrap().unwrap();
        let call = |rank: &Rank| match rank.of.rank() {
            0 => rank.sum(),
            _ => rank.of.broadcast(rank.stream.as_ref(), &rank.view, 0),
        };
        for (rank, result) in ranks.iter().zip(on_all(&ranks, call)) {
            let Err(error) = result else { panic!("different calls met") };
            assert!(matches!(&error, Error::Device { reason, .. } if reason.contains("HCCL")), "{error}");
            stays_failed(rank, &rank.of.check().unwrap_err());
        }
    }
}

/// Returns a copy of memory that was freed, which loses the device when it runs.
fn copy_of_freed_memory(backend: &AscendBackend) -> CopyTensor {
    let owned = backend.allocate(MemoryKind::Device, 4096).unwrap();
    // SAFETY: the memory is freed below, which is what the test is about: the device faults, the process does not.
    let lent = unsafe { backend.lent(owned.address(), 4096, Arc::new(())) }.unwrap();
    drop(owned);
    let lent: Arc<dyn Storage> = Arc::new(lent);
    let src = TensorView::new(lent, DType::U8, &[4096]).unwrap();
    CopyTensor { src, dst: allocate_tensor(backend, MemoryKind::Device, DType::U8, &[4096]).unwrap() }
}

#[test]
fn a_lost_device_fails_its_group() {
    let Some((_, _alone)) = alone() else { return };
    let call = |rank: &Rank| {
        let stream = rank.stream.as_ref();
        if rank.of.rank() == 1 {
            stream.copy_tensor(&copy_of_freed_memory(&rank.backend))?;
        }
        rank.of.broadcast(stream, &rank.view, 0)
    };
    for devices in [[EAGER, LAZY], [LAZY, EAGER]] {
        let results = on_all(&group(&devices, LONG).unwrap(), call);
        assert!(matches!(&results[1], Err(Error::DeviceLost { .. })), "{results:?}");
        assert_eq!(results[0], Err(Error::RankAborted(1)));
        // Ranks of other processes are not told.
        let lost = |ranks: &[Rank]| {
            let results = on_all(ranks, call);
            match &results[1] {
                Err(late @ Error::RanksTimedOut { .. }) => Err(late.clone()),
                _ => Ok(results),
            }
        };
        let (_, results) = strangers_after(&devices, lost).unwrap();
        assert!(matches!(&results[1], Err(Error::DeviceLost { .. })), "{results:?}");
        assert!(matches!(&results[0], Err(Error::RanksTimedOut { rank: 0, .. })), "{results:?}");
    }
}

#[test]
fn collectives_keep_the_order_of_the_callers_stream() {
    let _beside = beside_others();
    for devices in [[EAGER, LAZY], [LAZY, EAGER]] {
        let Some(ranks) = group(&devices, LONG) else { return };
        let call = |rank: &Rank| {
            let (stream, backend) = (rank.stream.as_ref(), rank.backend.as_ref());
            let view = allocate_tensor(backend, MemoryKind::Device, DType::I8, &[4096]).unwrap();
            let copy = allocate_tensor(backend, MemoryKind::Device, DType::I8, &[4096]).unwrap();
            let src = upload(backend, DType::I8, &[4096], &[rank.of.rank() as u8 + 1; 4096]);
            for _ in 0..5 {
                stream.copy_tensor(&CopyTensor { src: src.clone(), dst: view.clone() }).unwrap();
                rank.of.all_reduce(stream, &view, ReduceOp::Sum).unwrap();
                stream.copy_tensor(&CopyTensor { src: view.clone(), dst: copy.clone() }).unwrap();
                // The next round writes where the collective of this one reads.
            }
            rank.wait().unwrap();
            download(stream, &copy)
        };
        for bytes in on_all(&ranks, call) {
            assert!(bytes.iter().all(|&byte| byte == 3));
        }
    }
}

#[test]
fn what_is_not_of_the_device_is_refused_and_the_group_is_whole() {
    let _beside = beside_others();
    let Some(ranks) = group(&[EAGER, LAZY], LONG) else { return };
    let (one, other) = (&ranks[0], &ranks[1]);
    let foreign = |result: Result<()>| {
        assert!(matches!(result, Err(Error::ForeignHandle { backend: "ascend", .. })), "{result:?}");
    };
    foreign(one.of.broadcast(one.stream.as_ref(), &other.view, 0));
    foreign(one.of.broadcast(other.stream.as_ref(), &other.view, 0));
    foreign(one.of.broadcast(other.stream.as_ref(), &one.view, 0));
    let cpu = kvbackend_cpu::CpuBackend::new();
    let view = allocate_tensor(cpu.as_ref(), MemoryKind::Device, DType::F32, &[8]).unwrap();
    let stream = cpu.stream().unwrap();
    foreign(one.of.broadcast(stream.as_ref(), &view, 0));
    foreign(one.of.wait(stream.as_ref()));
    let transfers = [(&other.view, 1)];
    foreign(one.of.run(one.stream.as_ref(), Collective::Exchange { sends: &transfers, receives: &[] }));
    let pinned = allocate_tensor(one.backend.as_ref(), MemoryKind::Pinned, DType::F32, &[8]).unwrap();
    let refused = one.of.broadcast(one.stream.as_ref(), &pinned, 0);
    assert!(
        matches!(&refused, Err(Error::Unsupported { what, .. }) if what.contains("pinned")),
        "{refused:?}"
    );
    assert_eq!(on_all(&ranks, Rank::sum), [Ok(()), Ok(())]);
}

#[test]
fn a_rank_that_leaves_keeps_nobody_waiting_and_nothing_is_held() {
    let Some((simulator, _alone)) = alone() else { return };
    let left = || [EAGER, LAZY, SMALL].map(|device| simulator.live(device));
    // With the devices goes all that is on them.
    let _open = [EAGER, LAZY, SMALL].map(opened);
    let before = left();
    let ranks = group(&[EAGER, LAZY, SMALL], LONG).unwrap();
    assert_eq!(on_all(&ranks, Rank::sum), [Ok(()), Ok(()), Ok(())]);
    let since = Instant::now();
    drop(ranks);
    assert_eq!(left(), before);
    // Ranks that need one that has left learn of it: for a collective of all, a send and a receive.
    let calls: [fn(&Rank) -> Result<()>; 3] = [
        Rank::sum,
        |r| r.of.send(r.stream.as_ref(), &r.view, 1 - r.of.rank()),
        |r| r.of.receive(r.stream.as_ref(), &r.view, 1 - r.of.rank()),
    ];
    for first in [0, 1] {
        for call in calls {
            let mut ranks = group(&[EAGER, LAZY], LONG).unwrap();
            assert_eq!(on_all(&ranks, Rank::sum), [Ok(()), Ok(())]);
            drop(ranks.remove(first));
            assert_eq!(ranks[0].of.check(), Ok(()), "it took nothing from the others");
            assert_eq!(call(&ranks[0]), Err(Error::RankLeft(first)));
            stays_failed(&ranks[0], &Error::RankLeft(first));
            drop(ranks);
            assert_eq!(left(), before);
        }
    }
    assert!(since.elapsed() < Duration::from_secs(30));
}

#[test]
fn every_call_of_hccl_that_is_refused_is_an_error_and_nothing_is_held() {
    let Some((simulator, _alone)) = alone() else { return };
    let entries = [
        "HcclCommInitAll",
        "HcclGetCommAsyncError",
        "HcclBroadcast",
        "HcclAllGather",
        "HcclAllReduce",
        "HcclBatchSendRecv",
        "aclrtStreamWaitEvent",
        "aclrtRecordEvent",
        "aclrtSynchronizeStreamWithTimeout",
    ];
    let everything = || -> Result<()> {
        let backends = [opened(EAGER), opened(LAZY)].map(Option::unwrap);
        let group = HcclCommunicator::group(&backends, LONG)?;
        let ranks = group.into_iter().zip(&backends).map(|(of, backend)| Rank::new(of, backend));
        let ranks = ranks.collect::<Result<Vec<_>>>()?;
        let calls = |r: &Rank| {
            let (stream, other) = (r.stream.as_ref(), 1 - r.of.rank());
            let all = allocate_tensor(r.backend.as_ref(), MemoryKind::Device, DType::F32, &[2, 8])?;
            r.of.broadcast(stream, &r.view, 1)?;
            r.of.all_gather(stream, &all.select(0, r.of.rank())?, &all)?;
            r.of.exchange(stream, &[(&r.view, other)], &[(&all.select(0, 0)?, other)])?;
            r.sum()?;
            r.wait()
        };
        // For a refused call the others wait, until somebody says that it does not come again.
        let call = |r: &Rank| calls(r).inspect_err(|_| r.of.abort());
        on_all(&ranks, call).into_iter().collect()
    };
    everything().unwrap();
    let live = || [EAGER, LAZY].map(|device| simulator.live(device));
    let (before, mut seen) = (live(), 0);
    for entry in entries {
        for after in [1, 2, 4] {
            simulator.fail(entry, after, INTERNAL);
            let result = everything();
            simulator.fail(entry, 0, 0);
            seen += usize::from(result.is_err());
            assert_eq!(live(), before, "call {after} of {entry} failed: {result:?}");
        }
        everything().unwrap_or_else(|error| panic!("after {entry} had failed: {error}"));
    }
    assert!(seen > 15, "only {seen} of the failures were seen");
}
