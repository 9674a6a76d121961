//! Groups of ranks that fail: every rank gets a typed error, no rank waits forever, and nothing stays held.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kvcore::{
    AttendWork, Backend, Collective, Communicator, DType, Error, MemoryKind, ReduceOp, Result, StepInputs,
    Stream, TensorView, WriteSlots, allocate_tensor,
};

use super::refused::refused_in;
use super::{
    DeviceCase, DeviceRig, DriverDouble, EAGER, Holdings, LAZY, SMALL, any, fails, on_double, run_all,
};
use super::{groups, same, same_bytes};
use crate::bench::{Failure, Outcome, ensure};
use crate::raw::download;

/// A time-out that is longer than any case takes.
const LONG: Duration = Duration::from_secs(600);

/// The time-out of groups whose collectives never complete.
const SHORT: Duration = Duration::from_millis(100);

/// The first time-out of groups whose first collective completes and whose next one never does.
const MOMENT: Duration = Duration::from_secs(1);

/// Groups of a backend's devices, supplied by the backend's own tests.
pub trait GroupRig: DeviceRig {
    /// One rank of a group.
    type Communicator: Communicator;

    /// The ID by which ranks in several processes find each other.
    type Id: Sync;

    /// Creates a group with one rank per backend, all in this process.
    ///
    /// # Errors
    /// Returns [`Error::NoDevice`] if the library for collectives is missing, which skips the case, and the
    /// group's errors.
    fn group(&self, backends: &[Arc<Self::Backend>], limit: Duration) -> Result<Vec<Self::Communicator>>;

    /// Creates the ID of a group, where `first` is rank 0's backend. Converts the ID to the bytes that
    /// processes send, and back.
    ///
    /// # Errors
    /// Returns the errors of the library for collectives.
    fn id(&self, first: &Arc<Self::Backend>) -> Result<Self::Id>;

    /// Joins a group with only its ID, like a rank in a separate process.
    ///
    /// # Errors
    /// Returns the group's errors.
    fn join(
        &self,
        backend: &Arc<Self::Backend>,
        id: &Self::Id,
        rank: usize,
        ranks: usize,
        limit: Duration,
    ) -> Result<Self::Communicator>;

    /// Returns a backend of another kind, whose memory and streams every rank must refuse.
    fn foreign(&self) -> Arc<dyn Backend>;

    /// Makes the library for collectives give up the start of a group after at most a second, until the
    /// double is reset. Does nothing if the library does not wait for ranks.
    fn shorten_patience(&self) {}

    /// Returns whether ranks are threads that use host memory. In that case, all devices are the same,
    /// groups cannot span several processes, and a wait on a failed group's stream does not return an
    /// error.
    fn ranks_are_threads(&self) -> bool {
        false
    }
}

/// Runs every case for groups, and prints a line for each, as [`run_devices`](crate::run_devices) does.
///
/// # Errors
/// Returns the failures of all cases as a single one.
pub fn run_groups<R: GroupRig>(rig: &R) -> Outcome {
    run_all(
        rig,
        rig.double(),
        &[
            any!(groups::a_group_has_a_rank),
            any!(groups::a_rank_that_never_comes_ends_the_wait_at_the_time_out),
            any!(groups::an_abort_wakes_the_ranks_of_the_process),
            any!(groups::a_rank_that_leaves_is_not_waited_for_and_leaves_nothing),
        ],
    )?;
    if rig.ranks_are_threads() {
        return Ok(());
    }
    run_all(
        rig,
        rig.double(),
        &[
            any!(groups::a_group_that_is_not_whole_in_time_does_not_start),
            any!(groups::ranks_of_other_processes_learn_of_an_abort_by_their_time_out),
            any!(groups::operands_of_another_device_are_refused_and_the_group_is_whole),
            any!(groups::a_capture_refuses_collectives_by_name),
            on_double!(groups::a_lost_device_fails_its_group),
        ],
    )
}

/// Like [`refused_calls`](crate::refused_calls), but for functions of the driver and of its library for
/// collectives, while two ranks use every collective once. Each function is made to fail on its first, second
/// and fourth call.
///
/// # Errors
/// Returns a failure that names a call after which something was left behind or groups did not work.
pub fn refused_group_calls<R: GroupRig>(rig: &R, functions: &[&str], code: i32, least: usize) -> Outcome {
    let Some(double) = rig.double() else {
        crate::skip("calls that are refused need the double of the driver");
        return Ok(());
    };
    let everything = || -> Result<()> {
        let ranks = group(rig, &[EAGER, LAZY], LONG)?;
        let calls = |r: &GroupRank<R>| {
            let (stream, other) = (r.stream.as_ref(), 1 - r.of.rank());
            let all = allocate_tensor(r.backend.as_ref(), MemoryKind::Device, DType::F32, &[2, 8])?;
            r.of.broadcast(stream, &r.view, 1)?;
            r.of.all_gather(stream, &all.select(0, r.of.rank())?, &all)?;
            r.of.exchange(stream, &[(&r.view, other)], &[(&all.select(0, 0)?, other)])?;
            r.sum()
        };
        // If one rank's call is refused, the other ranks wait for that rank until an abort.
        let call = |r: &GroupRank<R>| calls(r).inspect_err(|_| r.of.abort());
        on_all(&ranks, call).into_iter().collect()
    };
    refused_in(double, functions, &[1, 2, 4].map(|after| (after, code)), least, everything)
}

/// A rank with a tensor of eight elements.
struct GroupRank<R: GroupRig> {
    of: R::Communicator,
    backend: Arc<R::Backend>,
    stream: Arc<dyn Stream>,
    view: TensorView,
}

/// A call on a rank.
type RankCall<R> = fn(&GroupRank<R>) -> Result<()>;

impl<R: GroupRig> GroupRank<R> {
    fn new(of: R::Communicator, backend: &Arc<R::Backend>) -> Result<Self> {
        let view = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[8])?;
        Ok(Self { of, backend: Arc::clone(backend), stream: backend.stream()?, view })
    }

    /// Sums the tensors of all ranks, and waits for the result.
    fn sum(&self) -> Result<()> {
        self.of.all_reduce(self.stream.as_ref(), &self.view, ReduceOp::Sum)?;
        self.wait()
    }

    fn send(&self, to: usize) -> Result<()> {
        self.of.send(self.stream.as_ref(), &self.view, to)?;
        self.wait()
    }

    fn receive(&self, from: usize) -> Result<()> {
        self.of.receive(self.stream.as_ref(), &self.view, from)?;
        self.wait()
    }

    fn broadcast(&self, root: usize) -> Result<()> {
        self.of.broadcast(self.stream.as_ref(), &self.view, root)?;
        self.wait()
    }

    fn wait(&self) -> Result<()> {
        self.of.wait(self.stream.as_ref())
    }
}

/// Opens devices as a group.
fn group<R: GroupRig>(rig: &R, devices: &[usize], limit: Duration) -> Result<Vec<GroupRank<R>>> {
    let backends = devices.iter().map(|&device| rig.open(device)).collect::<Result<Vec<_>>>()?;
    let group = rig.group(&backends, limit)?;
    group.into_iter().zip(&backends).map(|(of, backend)| GroupRank::new(of, backend)).collect()
}

/// Opens devices as ranks that have only the group's ID in common, like ranks in several processes.
fn strangers<R: GroupRig>(rig: &R, devices: &[usize], limit: Duration) -> Result<Vec<GroupRank<R>>> {
    drop(group(rig, devices, LONG)?);
    let id = rig.id(&rig.open(devices[0])?)?;
    let rank = |rank: usize| {
        let backend = rig.open(devices[rank])?;
        GroupRank::new(rig.join(&backend, &id, rank, devices.len(), limit)?, &backend)
    };
    in_threads(devices.len(), rank).into_iter().collect()
}

/// Opens [`strangers`] and runs `first` on them. The time-out grows until `first` completes in time, because
/// everything takes longer on a busy machine.
fn strangers_after<R: GroupRig, T>(
    rig: &R,
    devices: &[usize],
    first: impl Fn(&[GroupRank<R>]) -> Result<T>,
) -> Result<(Vec<GroupRank<R>>, T)> {
    let mut limit = MOMENT;
    loop {
        let ranks = strangers(rig, devices, limit);
        match ranks.and_then(|ranks| first(&ranks).map(|first| (ranks, first))) {
            Err(Error::RanksTimedOut { .. }) if limit < LONG => limit *= 4,
            done => return done,
        }
    }
}

/// Runs a call for each index below `n`, each in a separate thread.
fn in_threads<T: Send>(n: usize, call: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let call = &call;
    thread::scope(|scope| {
        let threads: Vec<_> = (0..n).map(|number| scope.spawn(move || call(number))).collect();
        let joined = threads.into_iter().map(thread::ScopedJoinHandle::join);
        joined.map(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

/// Runs a call on every rank, each in a separate thread. Returns the results in rank order.
fn on_all<R: GroupRig, T: Send>(ranks: &[GroupRank<R>], call: impl Fn(&GroupRank<R>) -> T + Sync) -> Vec<T> {
    in_threads(ranks.len(), |rank| call(&ranks[rank]))
}

/// Checks that a rank stays failed with an error, and that its stream still works.
fn stays_failed<R: GroupRig>(rig: &R, rank: &GroupRank<R>, error: &Error) -> Outcome {
    let (since, failed) = (Instant::now(), Err(error.clone()));
    same("a failed rank", rank.of.check(), failed.clone())?;
    same("a call of a failed rank", rank.sum(), failed.clone())?;
    let waited = if rig.ranks_are_threads() { Ok(()) } else { failed.clone() };
    same("a wait of a failed rank", rank.wait(), waited)?;
    rank.of.abort();
    same("the first failure stays", rank.of.check(), failed)?;
    rank.stream.write(&rank.view, &[1; 32])?;
    same_bytes("the stream goes on", &download(rank.stream.as_ref(), &rank.view)?, &[1; 32])?;
    ensure(since.elapsed() < Duration::from_secs(60), || "a failed rank waits".to_owned())
}

/// Returns the error of a result, or a failure if there is none.
fn error_of(what: &str, result: Result<()>) -> Outcome<Error> {
    result.err().ok_or_else(|| Failure::new(format!("{what} ended well")))
}

pub(super) fn a_group_has_a_rank<R: GroupRig>(rig: &R) -> Outcome {
    let zero = Error::Zero { what: "number of ranks" };
    rig.open(EAGER)?;
    same("no rank", rig.group(&[], SHORT).map(drop), Err(zero))
}

pub(super) fn a_rank_that_never_comes_ends_the_wait_at_the_time_out<R: GroupRig>(rig: &R) -> Outcome {
    for devices in [[EAGER, LAZY], [LAZY, EAGER]] {
        let ranks = group(rig, &devices, SHORT)?;
        let error = error_of("a sum of one rank", ranks[0].sum())?;
        let call = "an all-reduce (sum) of 8 elements of f32".to_owned();
        same("the failure", &error, &Error::RanksTimedOut { rank: 0, call, limit: SHORT })?;
        // The other rank in this process also has the failure, although it has not called anything.
        ranks.iter().try_for_each(|rank| stays_failed(rig, rank, &error))?;
        // Sends in a circle wait for one another.
        let ranks = group(rig, &devices, SHORT)?;
        for result in on_all(&ranks, |rank| rank.send(1 - rank.of.rank())) {
            fails("a circle", result, |error| matches!(error, Error::RanksTimedOut { .. }))?;
        }
    }
    Ok(())
}

pub(super) fn a_group_that_is_not_whole_in_time_does_not_start<R: GroupRig>(rig: &R) -> Outcome {
    let ranks = group(rig, &[EAGER], LONG)?;
    let backend = &ranks[0].backend;
    // A rank keeps its newest collective's event.
    same("the first sum", ranks[0].sum(), Ok(()))?;
    let left = || rig.double().map(|double| double.live(EAGER));
    let before = left();
    rig.shorten_patience();
    let join = |rank| rig.join(backend, &rig.id(backend)?, rank, 2, SHORT).map(drop);
    let call = "the start of the group".to_owned();
    same("one of two ranks", join(1), Err(Error::RanksTimedOut { rank: 1, call, limit: SHORT }))?;
    let unknown = Error::OutOfRange { what: "rank", value: 2, limit: 2 };
    same("rank 2 of two", join(2), Err(unknown))?;
    let twice = rig.group(&[Arc::clone(backend), rig.open(EAGER)?], SHORT).map(drop);
    fails(
        "two ranks on a device",
        twice,
        |error| matches!(error, Error::Unsupported { what, .. } if what.contains("device 0")),
    )?;
    same("another group of the device", ranks[0].sum(), Ok(()))?;
    // A rank that has timed out leaves nothing behind once the library's call has returned.
    let end = Instant::now() + Duration::from_secs(10);
    while left() != before && Instant::now() < end {
        thread::sleep(Duration::from_millis(1));
    }
    same("left behind", left(), before)
}

pub(super) fn an_abort_wakes_the_ranks_of_the_process<R: GroupRig>(rig: &R) -> Outcome {
    let ranks = group(rig, &[EAGER, LAZY, SMALL], LONG)?;
    let call = |rank: &GroupRank<R>| match rank.of.rank() {
        0 => rank.sum(),
        1 => rank.receive(2),
        _ => {
            thread::sleep(Duration::from_millis(20));
            rank.of.abort();
            rank.of.check()
        }
    };
    // Ranks 0 and 1 wait for different collectives, but both wait for rank 2 only.
    let aborted = Error::RankAborted(2);
    same("ranks", on_all(&ranks, call), vec![Err(aborted.clone()); 3])?;
    ranks.iter().try_for_each(|rank| stays_failed(rig, rank, &aborted))
}

pub(super) fn ranks_of_other_processes_learn_of_an_abort_by_their_time_out<R: GroupRig>(rig: &R) -> Outcome {
    let sums =
        |ranks: &[GroupRank<R>]| on_all(ranks, GroupRank::sum).into_iter().collect::<Result<Vec<()>>>();
    let (ranks, _) = strangers_after(rig, &[LAZY, EAGER], sums)?;
    ranks[1].of.abort();
    let error = error_of("a sum with a rank that aborted", ranks[0].sum())?;
    ensure(matches!(error, Error::RanksTimedOut { rank: 0, .. }), || error.to_string())?;
    stays_failed(rig, &ranks[0], &error)?;
    stays_failed(rig, &ranks[1], &Error::RankAborted(1))
}

pub(super) fn a_lost_device_fails_its_group<R: GroupRig>(rig: &R, _: &dyn DriverDouble) -> Outcome {
    let call = |rank: &GroupRank<R>| {
        if rank.of.rank() == 1 {
            rank.stream.copy_tensor(&rig.copy_of_freed_memory(&rank.backend)?)?;
        }
        rank.broadcast(0)
    };
    let lost = |error: &Error| matches!(error, Error::DeviceLost { .. });
    for devices in [[EAGER, LAZY], [LAZY, EAGER]] {
        let [other, of_device]: [Result<()>; 2] = pair(on_all(&group(rig, &devices, LONG)?, call))?;
        fails("the rank of a lost device", of_device, lost)?;
        same("the other rank", other, Err(Error::RankAborted(1)))?;
        // Ranks in other processes are not notified.
        let lose = |ranks: &[GroupRank<R>]| {
            let results = on_all(ranks, call);
            match &results[1] {
                Err(late @ Error::RanksTimedOut { .. }) => Err(late.clone()),
                _ => Ok(results),
            }
        };
        let [other, of_device] = pair(strangers_after(rig, &devices, lose)?.1)?;
        fails("the rank of a lost device, among strangers", of_device, lost)?;
        fails("the other stranger", other, |error| matches!(error, Error::RanksTimedOut { rank: 0, .. }))?;
    }
    Ok(())
}

/// Returns the results of two ranks as an array, or a failure if there are not exactly two.
fn pair<T>(results: Vec<T>) -> Outcome<[T; 2]> {
    results.try_into().map_err(|results: Vec<T>| Failure::new(format!("{} results", results.len())))
}

pub(super) fn operands_of_another_device_are_refused_and_the_group_is_whole<R: GroupRig>(rig: &R) -> Outcome {
    let ranks = group(rig, &[EAGER, LAZY], LONG)?;
    let (one, other, name) = (&ranks[0], &ranks[1], ranks[0].backend.name());
    let foreign = |what: &str, result: Result<()>| match result {
        Err(Error::ForeignHandle { backend, .. }) if backend == name => Ok(()),
        other => Err(Failure::new(format!("{what}: {other:?}"))),
    };
    let broadcast = |stream: &Arc<dyn Stream>, view| one.of.broadcast(stream.as_ref(), view, 0);
    foreign("a tensor of the other device", broadcast(&one.stream, &other.view))?;
    foreign("both of the other device", broadcast(&other.stream, &other.view))?;
    foreign("a stream of the other device", broadcast(&other.stream, &one.view))?;
    let stranger = rig.foreign();
    let view = allocate_tensor(stranger.as_ref(), MemoryKind::Device, DType::F32, &[8])?;
    let stream = stranger.stream()?;
    foreign("both of another backend", broadcast(&stream, &view))?;
    foreign("a wait for a stream of another backend", one.of.wait(stream.as_ref()))?;
    let sends: &[_] = &[(&other.view, 1)];
    let exchange = one.of.run(one.stream.as_ref(), Collective::Exchange { sends, receives: &[] });
    foreign("a send of the other's tensor", exchange)?;
    same("the group", on_all(&ranks, GroupRank::sum), vec![Ok(()); 2])
}

pub(super) fn a_capture_refuses_collectives_by_name<R: GroupRig>(rig: &R) -> Outcome {
    let ranks = group(rig, &[EAGER], LONG)?;
    let rank = &ranks[0];
    let inputs = StepInputs {
        tokens: Arc::default(),
        positions: Arc::default(),
        slots: WriteSlots::default(),
        work: Arc::new(AttendWork::new([], [])),
    };
    let calls: [RankCall<R>; 2] = [GroupRank::sum, GroupRank::wait];
    for (name, call) in ["a collective", "a wait of the host"].into_iter().zip(calls) {
        // A caller that ignores the refusal does not get a graph either.
        for notices in [true, false] {
            let record = &mut || call(rank).or_else(|error| if notices { Err(error) } else { Ok(()) });
            let captured = rank.stream.capture(&inputs, record).map(drop);
            let Err(Error::Unsupported { what, .. }) = captured else {
                return Err(Failure::new(format!("{name} in a capture: {captured:?}")));
            };
            ensure(what.contains(name) && what.contains("captured graph"), || what)?;
            same("the group is whole", (rank.of.check(), rank.sum()), (Ok(()), Ok(())))?;
        }
    }
    Ok(())
}

pub(super) fn a_rank_that_leaves_is_not_waited_for_and_leaves_nothing<R: GroupRig>(rig: &R) -> Outcome {
    let devices = [EAGER, LAZY, SMALL];
    // The devices stay open, because closing them would free everything on them.
    let _open = devices.map(|device| rig.open(device));
    let left = || devices.map(|device| rig.double().map(|double| double.live(device)));
    let (before, since): ([Option<Holdings>; 3], _) = (left(), Instant::now());
    // One thread drops one rank after another.
    let ranks = group(rig, &devices, LONG)?;
    same("three ranks", on_all(&ranks, GroupRank::sum), vec![Ok(()); 3])?;
    drop(ranks);
    same("left behind", left(), before)?;
    for first in [0, 1] {
        let mut ranks = group(rig, &[EAGER, LAZY], LONG)?;
        same("two ranks", on_all(&ranks, GroupRank::sum), vec![Ok(()); 2])?;
        drop(ranks.remove(first));
        same("a rank that has done its part takes nothing from the other", ranks[0].of.check(), Ok(()))?;
        drop(ranks);
        same("left behind", left(), before)?;
    }
    ensure(since.elapsed() < Duration::from_secs(30), || "a rank that leaves keeps others waiting".to_owned())
}
