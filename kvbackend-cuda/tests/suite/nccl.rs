//! Groups of devices that fail: every rank gets a typed error, none waits for ever, and nothing is held.

use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kvbackend_cuda::{CudaBackend, NcclCommunicator, NcclId};
use kvcore::{
    AttendWork, Backend, Collective, Communicator, CopyTensor, DType, Error, MemoryKind, ReduceOp, Result,
    StepInputs, Stream, TensorView, WriteSlots, allocate_tensor,
};

use crate::common::{download, opened, upload};
use crate::double::{EAGER, LAZY, SMALL, alone, beside_others, double};
use crate::failure::copy_of_freed_memory;

/// Code of NCCL.
const SYSTEM_ERROR: i32 = 2;

/// Longer than any test takes.
const LONG: Duration = Duration::from_secs(600);

/// The time-out of groups in which nothing comes.
const SHORT: Duration = Duration::from_millis(100);

/// The first time-out of groups in which something comes, and later nothing does.
const MOMENT: Duration = Duration::from_secs(1);

/// A rank with a tensor of eight elements.
struct Rank {
    of: NcclCommunicator,
    backend: Arc<CudaBackend>,
    stream: Arc<dyn Stream>,
    view: TensorView,
}

impl Rank {
    fn new(of: NcclCommunicator, backend: &Arc<CudaBackend>) -> Result<Self> {
        let view = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[8])?;
        Ok(Self { of, backend: Arc::clone(backend), stream: backend.stream()?, view })
    }

    fn sum(&self) -> Result<()> {
        self.of.all_reduce(self.stream.as_ref(), &self.view, ReduceOp::Sum)
    }

    fn wait(&self) -> Result<()> {
        self.of.wait(self.stream.as_ref())
    }

    fn sum_and_wait(&self) -> Result<()> {
        self.sum().and_then(|()| self.wait())
    }
}

/// Opens devices as a group, or prints a line that says why there is none.
fn group(devices: &[usize], limit: Duration) -> Option<Vec<Rank>> {
    let backends = devices.iter().map(|&device| opened(device)).collect::<Option<Vec<_>>>()?;
    match NcclCommunicator::group(&backends, limit) {
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
    let (id, ranks) = (NcclId::from_bytes(*NcclId::new().unwrap().as_bytes()), devices.len());
    let rank = |(rank, &device): (usize, &usize)| {
        let backend = opened(device).unwrap();
        Rank::new(NcclCommunicator::new(&backend, &id, rank, ranks, limit)?, &backend)
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
fn a_rank_that_never_comes_ends_the_wait_at_the_time_out() {
    let _beside = beside_others();
    for devices in [[EAGER, LAZY], [LAZY, EAGER]] {
        let Some(ranks) = group(&devices, SHORT) else { return };
        assert_eq!(ranks[0].sum(), Ok(()), "a call does not wait");
        let error = ranks[0].wait().unwrap_err();
        let call = "an all-reduce (sum) of 8 elements of f32".to_owned();
        assert_eq!(error, Error::RanksTimedOut { rank: 0, call, limit: SHORT });
        // The other rank of this process has not called anything, and knows.
        for rank in &ranks {
            stays_failed(rank, &error);
        }
        // Sends in a circle wait for each other.
        let ranks = group(&devices, SHORT).unwrap();
        let circle = |r: &Rank| {
            r.of.send(r.stream.as_ref(), &r.view, 1 - r.of.rank())?;
            r.wait()
        };
        for result in on_all(&ranks, circle) {
            assert!(matches!(result, Err(Error::RanksTimedOut { .. })), "{result:?}");
        }
    }
}

#[test]
fn a_group_that_is_not_whole_in_time_does_not_start() {
    let _beside = beside_others();
    let Some(ranks) = group(&[EAGER], LONG) else { return };
    let (backend, id) = (&ranks[0].backend, NcclId::new().unwrap());
    let error = NcclCommunicator::new(backend, &id, 1, 2, SHORT).unwrap_err();
    let call = "the start of the group".to_owned();
    assert_eq!(error, Error::RanksTimedOut { rank: 1, call, limit: SHORT });
    let error = NcclCommunicator::new(backend, &id, 2, 2, SHORT).unwrap_err();
    assert_eq!(error, Error::OutOfRange { what: "rank", value: 2, limit: 2 });
    let error = NcclCommunicator::group(&[], SHORT).unwrap_err();
    assert_eq!(error, Error::Zero { what: "number of ranks" });
    let again = opened(EAGER).unwrap();
    let error = NcclCommunicator::group(&[Arc::clone(backend), again], SHORT).unwrap_err();
    assert!(matches!(&error, Error::Unsupported { what, .. } if what.contains("device 0")), "{error}");
    assert_eq!(ranks[0].sum_and_wait(), Ok(()), "another group of the device");
}

#[test]
fn an_abort_wakes_the_ranks_of_the_process() {
    let _beside = beside_others();
    let Some(ranks) = group(&[EAGER, LAZY, SMALL], LONG) else { return };
    let call = |rank: &Rank| match rank.of.rank() {
        0 => rank.sum_and_wait(),
        1 => rank.of.receive(rank.stream.as_ref(), &rank.view, 2).and_then(|()| rank.wait()),
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
    let sums = |ranks: &[Rank]| on_all(ranks, Rank::sum_and_wait).into_iter().collect::<Result<Vec<()>>>();
    let Some((ranks, _)) = strangers_after(&[LAZY, EAGER], sums) else { return };
    ranks[1].of.abort();
    let error = ranks[0].sum_and_wait().unwrap_err();
    assert!(matches!(error, Error::RanksTimedOut { rank: 0, .. }), "{error}");
    stays_failed(&ranks[0], &error);
    stays_failed(&ranks[1], &Error::RankAborted(1));
}

#[test]
fn calls_that_differ_fail_where_nccl_notices() {
    let _beside = beside_others();
    if double().is_none() {
        return kvconform::skip("the test needs the double, since NCCL notices nothing");
    }
    let cases: [fn(&Rank) -> Result<()>; 4] = [
        |r| r.of.broadcast(r.stream.as_ref(), &r.view, 0),
        |r| r.of.all_reduce(r.stream.as_ref(), &r.view, ReduceOp::Max),
        |r| r.of.all_reduce(r.stream.as_ref(), &r.view.slice(0, 0, 4)?, ReduceOp::Sum),
        |r| {
            let view = TensorView::new(Arc::clone(r.view.storage()), DType::F16, &[8])?;
            r.of.all_reduce(r.stream.as_ref(), &view, ReduceOp::Sum)
        },
    ];
    for case in cases {
        let ranks = strangers(&[EAGER, LAZY], LONG).unwrap().unwrap();
        let call = |r: &Rank| if r.of.rank() == 1 { case(r) } else { r.sum() }.and_then(|()| r.wait());
        for result in on_all(&ranks, call) {
            assert!(
                matches!(&result, Err(Error::Device { reason, .. }) if reason.contains("ranks differ")),
                "{result:?}"
            );
        }
    }
    let ranks = strangers(&[EAGER, LAZY], LONG).unwrap().unwrap();
    let call = |r: &Rank| {
        match r.of.rank() {
            0 => r.of.send(r.stream.as_ref(), &r.view, 1)?,
            _ => r.of.receive(r.stream.as_ref(), &r.view.slice(0, 0, 4)?, 0)?,
        }
        r.wait()
    };
    assert!(on_all(&ranks, call).iter().all(Result::is_err));
}

#[test]
fn a_lost_device_fails_its_group() {
    let Some((_, _alone)) = alone() else { return };
    let call = |rank: &Rank| {
        let stream = rank.stream.as_ref();
        if rank.of.rank() == 1 {
            stream.copy_tensor(&copy_of_freed_memory(&rank.backend))?;
        }
        rank.of.broadcast(stream, &rank.view, 0).and_then(|()| rank.wait())
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
fn enqueued_collectives_hold_their_memory() {
    let _beside = beside_others();
    for devices in [[EAGER, LAZY], [LAZY, EAGER]] {
        let Some(ranks) = group(&devices, LONG) else { return };
        let call = |rank: &Rank| {
            let stream = rank.stream.as_ref();
            // More than one batch of what a stream holds.
            let used = |turn| {
                let view = upload(rank.backend.as_ref(), DType::I8, &[64], &[1; 64]);
                if turn % 10 == 9 && rank.of.rank() == 1 {
                    thread::sleep(Duration::from_millis(2));
                }
                rank.of.all_reduce(stream, &view, ReduceOp::Sum).unwrap();
                Arc::downgrade(view.storage())
            };
            let held: Vec<_> = (0..100).map(used).collect();
            rank.wait().unwrap();
            assert!(held.iter().all(|memory| memory.strong_count() == 0), "a wait lets go");
        };
        on_all(&ranks, call);
    }
}

#[test]
fn collectives_keep_the_order_of_the_callers_stream() {
    let _beside = beside_others();
    for devices in [[EAGER, LAZY], [LAZY, EAGER]] {
        let Some(ranks) = group(&devices, LONG) else { return };
        let call = |rank: &Rank| {
            let (stream, backend) = (rank.stream.as_ref(), rank.backend.as_ref());
            let view = allocate_tensor(backend, MemoryKind::Device, DType::I8, &[1 << 16]).unwrap();
            let copy = allocate_tensor(backend, MemoryKind::Device, DType::I8, &[1 << 16]).unwrap();
            let src = upload(backend, DType::I8, &[1 << 16], &vec![rank.of.rank() as u8 + 1; 1 << 16]);
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
fn pinned_memory_travels_like_a_devices() {
    let _beside = beside_others();
    let Some(ranks) = group(&[EAGER, LAZY], LONG) else { return };
    let call = |rank: &Rank| {
        let stream = rank.stream.as_ref();
        let view = allocate_tensor(rank.backend.as_ref(), MemoryKind::Pinned, DType::U8, &[2, 5000]).unwrap();
        let own = view.select(0, rank.of.rank()).unwrap();
        stream.write(&own, &[rank.of.rank() as u8 + 7; 5000]).unwrap();
        rank.of.all_gather(stream, &own, &view).unwrap();
        rank.wait().unwrap();
        download(stream, &view)
    };
    let expected = [vec![7; 5000], vec![8; 5000]].concat();
    assert!(on_all(&ranks, call).iter().all(|bytes| *bytes == expected));
}

#[test]
fn what_is_not_of_the_device_is_refused_and_the_group_is_whole() {
    let _beside = beside_others();
    let Some(ranks) = group(&[EAGER, LAZY], LONG) else { return };
    let (one, other) = (&ranks[0], &ranks[1]);
    let foreign = |result: Result<()>| {
        assert!(matches!(result, Err(Error::ForeignHandle { backend: "cuda", .. })), "{result:?}");
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
    assert_eq!(on_all(&ranks, Rank::sum_and_wait), [Ok(()), Ok(())]);
}

#[test]
fn a_capture_refuses_collectives_by_name() {
    let _beside = beside_others();
    let Some(ranks) = group(&[EAGER], LONG) else { return };
    let rank = &ranks[0];
    let inputs = StepInputs {
        tokens: Arc::default(),
        positions: Arc::default(),
        slots: WriteSlots::default(),
        work: Arc::new(AttendWork::new([], [])),
    };
    for (name, call) in
        [("a collective", Rank::sum as fn(&Rank) -> Result<()>), ("a wait of the host", Rank::wait)]
    {
        let captured = rank.stream.capture(&inputs, &mut || call(rank));
        let Err(Error::Unsupported { what, .. }) = captured.map(drop) else { panic!("{name} was captured") };
        assert!(what.contains(name) && what.contains("captured graph"), "{what}");
    }
    assert_eq!(rank.sum_and_wait(), Ok(()), "the group is whole");
}

#[test]
fn a_rank_that_leaves_keeps_nobody_waiting_and_nothing_is_held() {
    let Some((double, _alone)) = alone() else { return };
    let left = || [EAGER, LAZY, SMALL].map(|device| (double.live_bytes(device), double.live_objects(device)));
    // With the devices goes all that is on them.
    let _open = [EAGER, LAZY, SMALL].map(opened);
    let before = left();
    // One after the other, by one thread.
    let ranks = group(&[EAGER, LAZY, SMALL], LONG).unwrap();
    assert_eq!(on_all(&ranks, Rank::sum_and_wait), [Ok(()), Ok(()), Ok(())]);
    let since = Instant::now();
    drop(ranks);
    assert_eq!(left(), before);
    // With a collective that other ranks have not called.
    for first in [0, 1] {
        let mut ranks = group(&[EAGER, LAZY], LONG).unwrap();
        assert_eq!(ranks[first].sum(), Ok(()));
        let gone = ranks.remove(first);
        drop(gone);
        stays_failed(&ranks[0], &Error::RankLeft(first));
        drop(ranks);
        assert_eq!(left(), before);
    }
    // As the only rank of its process: NCCL's end waits for the others, the rank does not.
    let mut ranks = strangers(&[EAGER, LAZY], LONG).unwrap().unwrap();
    assert_eq!(on_all(&ranks, Rank::sum_and_wait), [Ok(()), Ok(())]);
    drop(ranks.remove(0));
    assert_eq!(ranks[0].of.check(), Ok(()), "it took nothing from the others");
    drop(ranks);
    let end = Instant::now() + Duration::from_secs(10);
    while left() != before && Instant::now() < end {
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(left(), before);
    assert!(since.elapsed() < Duration::from_secs(30));
}

#[test]
fn every_call_of_nccl_that_is_refused_is_an_error_and_nothing_is_held() {
    let Some((double, _alone)) = alone() else { return };
    let entries = [
        "ncclGetUniqueId",
        "ncclCommInitRankConfig",
        "ncclCommGetAsyncError",
        "ncclGroupStart",
        "ncclGroupEnd",
        "ncclBroadcast",
        "ncclAllGather",
        "ncclAllReduce",
        "ncclSend",
        "ncclRecv",
        "ncclCommFinalize",
        "cuEventCreate",
        "cuEventRecord",
        "cuStreamWaitEvent",
    ];
    let everything = || -> Result<()> {
        let backends = [opened(EAGER), opened(LAZY)].map(Option::unwrap);
        let group = NcclCommunicator::group(&backends, LONG)?;
        let ranks = group.into_iter().zip(&backends).map(|(of, backend)| Rank::new(of, backend));
        let ranks = ranks.collect::<Result<Vec<_>>>()?;
        let calls = |r: &Rank| {
            let (stream, other) = (r.stream.as_ref(), 1 - r.of.rank());
            let all = allocate_tensor(r.backend.as_ref(), MemoryKind::Device, DType::F32, &[2, 8])?;
            r.of.broadcast(stream, &r.view, 1)?;
            r.of.all_gather(stream, &r.view, &all)?;
            r.of.exchange(stream, &[(&r.view, other)], &[(&all.select(0, 0)?, other)])?;
            r.sum_and_wait()
        };
        // For a refused call the others wait, until somebody says that it does not come again.
        let call = |r: &Rank| calls(r).inspect_err(|_| r.of.abort());
        on_all(&ranks, call).into_iter().collect()
    };
    let mut seen = 0;
    for entry in entries {
        for after in [1, 2, 4] {
            let left =
                || [EAGER, LAZY].map(|device| (double.live_bytes(device), double.live_objects(device)));
            let before = left();
            double.fail(entry, after, SYSTEM_ERROR);
            let result = everything();
            double.fail(entry, 0, 0);
            seen += usize::from(result.is_err());
            assert_eq!(left(), before, "call {after} of {entry} failed: {result:?}");
        }
        everything().unwrap_or_else(|error| panic!("after {entry} had failed: {error}"));
    }
    assert!(seen > 20, "only {seen} of the failures were seen");
}

/// Runs the test of this name, which looks at the variable, in a process of its own. Returns what it printed.
#[cfg(target_os = "linux")]
fn in_another_process(test: &str, change: impl FnOnce(&mut Command)) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads", "1"]).env("KV_TEST_CHILD", "1");
    change(&mut command);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

#[test]
#[cfg(target_os = "linux")]
fn without_nccl_or_with_an_old_one_it_says_what_to_install() {
    let _beside = beside_others();
    if std::env::var_os("KV_TEST_CHILD").is_some() {
        let result = NcclCommunicator::group(&[opened(EAGER).unwrap()], SHORT).map(drop);
        return println!("child: {result:?}; {:?}", NcclId::new().map(drop));
    }
    if double().is_none() {
        return kvconform::skip("the test needs the double of the driver");
    }
    let this = "nccl::without_nccl_or_with_an_old_one_it_says_what_to_install";
    let old = in_another_process(this, |command| {
        command.env("KV_DOUBLE_NCCL", "21700");
    });
    assert_eq!(old.matches("NoDevice").count(), 2, "{old}");
    assert!(old.contains("NCCL 2.17, which is too old; update NCCL to 2.18 or later"), "{old}");
    // A folder that has the driver and nothing else.
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let library = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    let library = library.into_iter().find(|path| path.contains("libcuda.so")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(library, folder.path().join("libcuda.so")).unwrap();
    let none = in_another_process(this, |command| {
        command.env("LD_LIBRARY_PATH", folder.path());
    });
    if none.contains("Ok(())") {
        return println!("this machine has NCCL");
    }
    assert_eq!(none.matches("NoDevice").count(), 2, "{none}");
    assert!(none.contains("libnccl.so.2") && none.contains("nvidia-nccl-cu13"), "{none}");
}
