//! The ways of I/O: each reads back what it wrote, and one that is refused leaves the next.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::path::Path;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{load, record, scope, ways};
use kvtier::io::{DEPTH, Direction, IoEnd, IoRequest, OnEnd, PAGE, Pages};
use kvtier::{DiskIo, FileIo, IoWay, Slab, SlabConfig};

const PATIENCE: Duration = Duration::from_secs(20);

/// A callback that sends the ends of requests.
fn ends() -> (OnEnd, Receiver<IoEnd>) {
    let (sender, receiver) = channel();
    let sender = Mutex::new(sender);
    (Arc::new(move |end| sender.lock().unwrap().send(end).unwrap()), receiver)
}

/// Numbers of pages: single ones, some that come from a pool, and some that do not fit one.
fn sizes() -> Vec<usize> {
    (0..10 * DEPTH).map(|number| [1, 2, 63, 64, 65, 130][number % 6]).collect()
}

/// Writes and reads many requests of several sizes, by several threads at once.
fn read_back(io: &FileIo, turn: u8) {
    let sizes = sizes();
    let offsets = sizes.iter().scan(0, |sum, size| {
        let offset = *sum;
        *sum += (size * PAGE) as u64;
        Some(offset)
    });
    let places: Vec<(u64, usize)> = offsets.zip(sizes.iter().copied()).collect();
    io.resize(places.iter().map(|(_, size)| (size * PAGE) as u64).sum()).unwrap();
    let byte = |offset: u64, at: usize| (offset as usize / PAGE + at / 512) as u8 ^ turn;
    std::thread::scope(|scope| {
        for part in places.chunks(places.len() / 4) {
            scope.spawn(move || {
                let (on_end, ended) = ends();
                let write = |&(offset, size): &(u64, usize)| {
                    let mut pages = io.pages(size);
                    for (at, slot) in pages.bytes_mut().iter_mut().enumerate() {
                        *slot = byte(offset, at);
                    }
                    IoRequest { direction: Direction::Write, offset, pages }
                };
                io.start(part.iter().map(write).collect(), Arc::clone(&on_end));
                for _ in part {
                    ended.recv_timeout(PATIENCE).unwrap().result.unwrap();
                }
                let read = |&(offset, size): &(u64, usize)| IoRequest {
                    direction: Direction::Read,
                    offset,
                    pages: if size % 2 == 0 { io.pages(size) } else { Pages::new(size) },
                };
                io.start(part.iter().map(read).collect(), on_end);
                let mut indices = Vec::new();
                for _ in part {
                    let IoEnd { index, pages, result } = ended.recv_timeout(PATIENCE).unwrap();
                    result.unwrap();
                    let (offset, size) = part[index];
                    assert_eq!(pages.bytes().len(), size * PAGE);
                    let right = |(at, &found): (usize, &u8)| found == byte(offset, at);
                    assert!(pages.bytes().iter().enumerate().all(right), "request {index}");
                    indices.push(index);
                }
                indices.sort_unstable();
                assert_eq!(indices, (0..part.len()).collect::<Vec<_>>(), "each request ends once");
            });
        }
    });
}

#[test]
fn every_way_reads_back_what_it_wrote() {
    for way in ways() {
        let folder = tempfile::tempdir().unwrap();
        let io = FileIo::open(&folder.path().join("file"), Some(way)).unwrap();
        assert_eq!(io.choice().unwrap().way, way);
        for turn in 0..4 {
            read_back(&io, turn);
        }
    }
}

#[test]
fn what_one_way_wrote_the_others_read() {
    let ways = ways();
    for writing in &ways {
        for reading in &ways {
            let folder = tempfile::tempdir().unwrap();
            let slab = open(folder.path(), Some(*writing)).unwrap();
            round_trip(&slab);
            drop(slab);
            let slab = open(folder.path(), Some(*reading)).unwrap();
            assert!((0..20).all(|number| {
                let record = record(number, 300_000);
                load(&slab, &record.id).unwrap() == record.buffers
            }));
        }
    }
}

#[test]
fn a_request_beyond_the_end_fails_in_every_way() {
    for way in ways() {
        let folder = tempfile::tempdir().unwrap();
        let io = FileIo::open(&folder.path().join("file"), Some(way)).unwrap();
        io.resize(3 * PAGE as u64).unwrap();
        let (on_end, ended) = ends();
        for (offset, count, works) in [(0, 3, true), (1, 3, false), (3, 1, false), (2, 70, false)] {
            let request = IoRequest {
                direction: Direction::Read,
                offset: offset * PAGE as u64,
                pages: io.pages(count),
            };
            io.start(vec![request], Arc::clone(&on_end));
            let end = ended.recv_timeout(PATIENCE).unwrap();
            assert_eq!(end.result.is_ok(), works, "{way}: {count} pages at {offset}");
            if let Err(error) = end.result {
                assert_eq!(error.kind(), std::io::ErrorKind::UnexpectedEof, "{way}");
            }
        }
    }
}

#[test]
fn requests_that_are_waiting_are_served_before_a_file_closes() {
    for way in ways() {
        let folder = tempfile::tempdir().unwrap();
        let io = FileIo::open(&folder.path().join("file"), Some(way)).unwrap();
        io.resize((200 * PAGE) as u64).unwrap();
        let (on_end, ended) = ends();
        let request = |number: u64| IoRequest {
            direction: Direction::Write,
            offset: number * PAGE as u64,
            pages: Pages::new(1),
        };
        io.start((0..200).map(request).collect(), on_end);
        drop(io);
        assert_eq!(ended.iter().filter(|end| end.result.is_ok()).count(), 200, "{way}");
    }
}

fn open(folder: &Path, io: Option<IoWay>) -> kvtier::Result<Slab> {
    Slab::open(folder, scope(), SlabConfig { limit: 16 << 20, io, ..SlabConfig::default() })
}

fn round_trip(slab: &Slab) {
    for number in 0..20 {
        slab.store(record(number, 300_000));
    }
    assert!(slab.flush(PATIENCE));
    for number in 0..20 {
        let record = record(number, 300_000);
        assert_eq!(load(slab, &record.id).unwrap(), record.buffers);
    }
}

#[test]
fn the_choice_and_its_reasons_are_text() {
    let works = ways();
    let folder = tempfile::tempdir().unwrap();
    let slab = open(folder.path(), None).unwrap();
    let choice = slab.io_choice().unwrap();
    assert_eq!(choice.way, works[0]);
    assert_eq!(choice.refused.len(), IoWay::ALL.iter().position(|way| *way == works[0]).unwrap());
    assert!(choice.to_string().starts_with(&works[0].to_string()), "{choice}");
    drop(slab);
    let forced = open(folder.path(), Some(IoWay::Threads)).unwrap();
    assert_eq!(forced.io_choice().unwrap().to_string(), "threads");
}

#[cfg(target_os = "linux")]
mod refusals {
    use std::collections::BTreeMap;
    use std::process::Command;
    use std::time::Instant;

    use kvtier::Missed;
    use rustix::process::{Resource, Rlimit, setrlimit};
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
    use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

    use super::*;

    /// Runs a test on a thread on which system calls fail with an error.
    fn without(calls: &[i64], error: i32, test: impl FnOnce() + Send) {
        let rules: BTreeMap<_, _> = calls.iter().map(|&call| (call, Vec::new())).collect();
        let here = std::env::consts::ARCH.try_into().unwrap();
        let refuse = SeccompAction::Errno(error as u32);
        let filter = SeccompFilter::new(rules, SeccompAction::Allow, refuse, here).unwrap();
        let program: BpfProgram = filter.try_into().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                seccompiler::apply_filter(&program).unwrap();
                test();
            });
        });
    }

    #[test]
    fn where_io_uring_is_refused_threads_serve() {
        let [setup, enter, register] =
            [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register];
        let refusals = [
            (&[setup, enter, register][..], libc::EPERM, "Operation not permitted"),
            (&[setup, enter, register], libc::ENOSYS, "Function not implemented"),
            (&[setup], libc::EACCES, "Permission denied"),
            (&[enter], libc::EPERM, "Operation not permitted"),
            (&[register], libc::EPERM, "Operation not permitted"),
        ];
        let permitted = ways().contains(&IoWay::Uring);
        for (calls, error, text) in refusals {
            without(calls, error, || {
                let folder = tempfile::tempdir().unwrap();
                let slab = open(folder.path(), None).unwrap();
                let choice = slab.io_choice().unwrap();
                assert_eq!(choice.way, IoWay::Threads, "{choice}");
                let refused: Vec<IoWay> = choice.refused.iter().map(|(way, _)| *way).collect();
                assert_eq!(refused, [IoWay::RegisteredUring, IoWay::Uring]);
                // Where io_uring is refused anyway, the reason is that of the system.
                let text = if permitted { text } else { "" };
                assert!(choice.refused.iter().all(|(_, reason)| reason.contains(text)), "{choice}");
                assert!(choice.to_string().starts_with("threads; not io_uring with"), "{choice}");
                round_trip(&slab);
                drop(slab);
                let forced = open(folder.path(), Some(IoWay::Uring)).unwrap_err().to_string();
                let named = forced.contains(text) && forced.contains("choose another way");
                assert!(named && forced.contains("records.kvslab"), "{forced}");
            });
        }
    }

    /// As in a program that restricts its threads after it has opened a slab.
    #[test]
    fn a_thread_that_may_not_submit_is_late_and_holds_nobody_up() {
        for way in ways() {
            let folder = tempfile::tempdir().unwrap();
            let slab = open(folder.path(), Some(way)).unwrap();
            round_trip(&slab);
            let wanted = record(3, 300_000);
            without(&[libc::SYS_io_uring_enter], libc::EPERM, || {
                // A load that waited for the thread's own requests would never return.
                let found = slab.load(&wanted.id, Instant::now() + Duration::from_millis(30));
                let is_right = match found {
                    Ok(buffers) => buffers == wanted.buffers,
                    Err(missed) => way != IoWay::Threads && matches!(missed, Missed::Late),
                };
                assert!(is_right, "{way}");
            });
            round_trip(&slab);
            assert_eq!((slab.usage().read_errors, slab.usage().damaged), (0, 0), "{way}");
        }
    }

    /// The variable that makes this test the process with little locked memory.
    const LIMITED: &str = "KVTIER_TEST_LIMITED";

    #[test]
    fn where_memory_cannot_be_locked_io_uring_serves_without_registered_buffers() {
        if !ways().contains(&IoWay::Uring) {
            return;
        }
        if std::env::var_os(LIMITED).is_none() {
            let name = "refusals::where_memory_cannot_be_locked_io_uring_serves_without_registered_buffers";
            let mut limited = Command::new(std::env::current_exe().unwrap());
            let out = limited.args([name, "--exact"]).env(LIMITED, "1").output().unwrap();
            let text = String::from_utf8_lossy(&out.stdout);
            assert!(out.status.success() && text.contains("1 passed"), "{text}");
            return;
        }
        let few = Some(64 << 10);
        setrlimit(Resource::Memlock, Rlimit { current: few, maximum: few }).unwrap();
        // The superuser may lock as much memory as it wants.
        let mut sets = capabilities(None).unwrap();
        sets.effective.remove(CapabilitySet::IPC_LOCK);
        sets.permitted.remove(CapabilitySet::IPC_LOCK);
        set_capabilities(None, sets).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let slab = open(folder.path(), None).unwrap();
        let choice = slab.io_choice().unwrap();
        assert_eq!(choice.way, IoWay::Uring, "{choice}");
        let (way, reason) = &choice.refused[0];
        assert_eq!((*way, choice.refused.len()), (IoWay::RegisteredUring, 1));
        assert!(reason.contains("KiB of memory must be locked, see `ulimit -l`"), "{reason}");
        round_trip(&slab);
        drop(slab);
        let forced = open(folder.path(), Some(IoWay::RegisteredUring)).unwrap_err().to_string();
        assert!(forced.contains("ulimit -l"), "{forced}");
    }
}

#[test]
fn a_slab_that_is_closed_during_loads_ends_in_every_way() {
    for way in ways() {
        let folder = tempfile::tempdir().unwrap();
        let slab = open(folder.path(), Some(way)).unwrap();
        let stored = record(1, 300_000);
        slab.store(stored.clone());
        drop(slab);
        for turn in 0..60 {
            let slab = open(folder.path(), Some(way)).unwrap();
            let loads: Vec<_> = (0..4).map(|_| slab.begin_load(&stored.id)).collect();
            if turn % 3 == 0 {
                // The disk's own thread may be the last one that holds the file.
                drop(loads);
                drop(slab);
                continue;
            }
            drop(slab);
            for loading in loads {
                assert!(loading.wait_until(std::time::Instant::now() + PATIENCE));
                assert_eq!(loading.end().unwrap(), stored.buffers, "{way}");
            }
        }
    }
}
