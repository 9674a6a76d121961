//! Collectives through NCCL: their memory, and NCCL's peculiarities. The conformance suite tests groups that
//! fail (`rig`).

use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kvbackend_cuda::{CudaBackend, NcclCommunicator, NcclId};
use kvcore::{
    Backend, Communicator, DType, Error, MemoryKind, ReduceOp, Result, Stream, TensorView, allocate_tensor,
};

use crate::common::{download, opened, upload};
use crate::double::{EAGER, LAZY, alone, among_others, double};

/// A time-out that is longer than any test takes.
const LONG: Duration = Duration::from_secs(600);

/// The time-out of groups in which some ranks never arrive.
const SHORT: Duration = Duration::from_millis(100);

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

/// Opens devices as a group, or prints why it cannot.
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

/// Opens devices as ranks that are connected only through the network, like ranks in different processes.
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

/// Runs a call on every rank, each on its own thread. Returns the results in rank order.
fn on_all<T: Send>(ranks: &[Rank], call: impl Fn(&Rank) -> T + Sync) -> Vec<T> {
    let call = &call;
    thread::scope(|scope| {
        let threads: Vec<_> = ranks.iter().map(|rank| scope.spawn(move || call(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn calls_that_differ_fail_where_nccl_notices() {
    let _shared = among_others();
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
fn enqueued_collectives_hold_their_memory() {
    let _shared = among_others();
    for devices in [[EAGER, LAZY], [LAZY, EAGER]] {
        let Some(ranks) = group(&devices, LONG) else { return };
        let call = |rank: &Rank| {
            let stream = rank.stream.as_ref();
            // Enough turns for more than one batch of a stream's holds.
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
            assert!(held.iter().all(|memory| memory.strong_count() == 0), "a wait drops the holds");
        };
        on_all(&ranks, call);
    }
}

#[test]
fn pinned_memory_travels_like_a_devices() {
    let _shared = among_others();
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
fn a_rank_that_leaves_in_the_middle_fails_its_group_and_no_other() {
    let Some((double, _alone)) = alone() else { return };
    let left = || [EAGER, LAZY].map(|device| (double.live_bytes(device), double.live_objects(device)));
    // Dropping a device also frees everything on it, so the devices stay open.
    let _open = [EAGER, LAZY].map(opened);
    let before = left();
    let since = Instant::now();
    // A rank leaves after a collective that the other rank has not called.
    for first in [0, 1] {
        let mut ranks = group(&[EAGER, LAZY], LONG).unwrap();
        assert_eq!(ranks[first].sum(), Ok(()));
        let gone = ranks.remove(first);
        drop(gone);
        assert_eq!(ranks[0].sum_and_wait(), Err(Error::RankLeft(first)));
        drop(ranks);
        assert_eq!(left(), before);
    }
    // A rank leaves that is the only one in its process: NCCL's finalisation waits for the other ranks, but
    // the rank does not.
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

/// Runs the test `test` again in its own process, with `KV_TEST_CHILD` set. Returns its output.
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
    let _shared = among_others();
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
    // This folder will contain only the driver.
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
