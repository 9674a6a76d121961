//! Streams: queues of tasks, and the rules by which the tasks run.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use crate::clock::{TaskMoment, VectorClock};
use crate::state::{CallResult, SimState, call, call_that_waits, invalid, refuse, wait_for_change};
use crate::task::{StreamTask, TaskWork};
use crate::types as sys;

/// The maximum number of tasks in a device's trace.
const TRACED: usize = 1 << 16;

/// The code for a wait that can never end.
const STUCK: i32 = sys::ACL_ERROR_RT_INTERNAL_ERROR as i32;

/// The code for a wait that timed out.
const STREAM_SYNC_TIMEOUT: i32 = 507_046;
/// The maximum time that a call without a time-out waits for other ranks.
const LONG: Duration = Duration::from_secs(60);

/// A stream.
#[derive(Default)]
pub(crate) struct SimStream {
    pub(crate) device: usize,
    tasks: VecDeque<StreamTask>,
    pub(crate) clock: VectorClock,
    ticks: u64,
    /// The capture that records the enqueued tasks, if there is one.
    pub(crate) capture: Option<u64>,
    /// True while the stream's tasks are being run, so that circular waits end.
    runs: bool,
}

impl SimStream {
    /// Returns whether a task records or waits for an event.
    pub(crate) fn uses_event(&self, event: u64) -> bool {
        self.tasks.iter().any(|task| match task.work {
            TaskWork::Record(known, _) | TaskWork::Wait(known, _) => known == event,
            TaskWork::Run(_) | TaskWork::Meet(_) => false,
        })
    }
}

impl SimState {
    /// Returns the ID of a stream, which must belong to this thread's device.
    pub(crate) fn stream_here(&self, stream: sys::aclrtStream) -> CallResult<u64> {
        let device = self.alive()?;
        match self.streams.get(&(stream as u64)) {
            Some(known) if known.device == device => Ok(stream as u64),
            Some(_) => refuse(sys::ACL_ERROR_RT_STREAM_CONTEXT as i32, "a stream of another device"),
            None => invalid(format!("{stream:p} is no stream, or was destroyed")),
        }
    }

    /// Returns the clock of all tasks that come before a stream's next task.
    pub(crate) fn clock_of(&self, stream: u64) -> VectorClock {
        self.streams.get(&stream).map(|stream| stream.clock.clone()).unwrap_or_default()
    }

    /// Orders the tasks in a clock before a stream's next tasks.
    pub(crate) fn join_clock(&mut self, stream: u64, clock: &VectorClock) {
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.clock.join(clock);
        }
    }

    /// Adds a task to a stream, and runs all tasks that can run now.
    pub(crate) fn enqueue(&mut self, stream: u64, name: &str, work: TaskWork) -> CallResult {
        if let Some(capture) = self.streams.get(&stream).and_then(|stream| stream.capture) {
            return self.capture_task(capture, stream, work);
        }
        let host = self.host.clone();
        let Some(known) = self.streams.get_mut(&stream) else { return invalid("no stream") };
        known.clock.join(&host);
        known.ticks += 1;
        let (device, tick) = (known.device, known.ticks);
        known.clock.set(stream, tick);
        let moment = TaskMoment { stream, tick, before: known.clock.clone() };
        known.tasks.push_back(StreamTask { moment, work });
        self.note(device, name);
        if !self.devices[device].lazy {
            self.run(stream, &|_| false);
        }
        Ok(())
    }

    /// Adds a graph's tasks to a stream. Their positions in the order must be assigned already. The stream's
    /// next task comes after the tasks in `end`.
    pub(crate) fn enqueue_graph(&mut self, stream: u64, tasks: Vec<StreamTask>, end: &VectorClock) {
        let Some(known) = self.streams.get_mut(&stream) else { return };
        known.tasks.extend(tasks);
        known.clock.join(end);
        let device = known.device;
        self.note(device, "graph");
        if !self.devices[device].lazy {
            self.run(stream, &|_| false);
        }
    }

    /// Adds an enqueued task's name to its device's trace.
    fn note(&mut self, device: usize, name: &str) {
        let device = &mut self.devices[device];
        if device.trace.len() == TRACED {
            device.trace.pop_front();
        }
        device.trace.push_back(name.to_owned());
    }

    // Decision: docs/decisions/backend-ascend.md#the-simulator-has-no-threads-of-its-own
    /// Runs a stream's tasks until `enough` returns true or no task can run.
    fn run(&mut self, stream: u64, enough: &dyn Fn(&Self) -> bool) {
        match self.streams.get_mut(&stream) {
            Some(known) if !known.runs => known.runs = true,
            _ => return,
        }
        while !enough(self) {
            let Some(known) = self.streams.get_mut(&stream) else { return };
            let device = known.device;
            let Some(task) = known.tasks.front() else { break };
            if self.devices[device].lost.is_some() {
                // Nothing more runs on a lost device, and nothing waits for it.
                known.tasks.clear();
                break;
            }
            if let TaskWork::Wait(event, number) = task.work
                && !self.is_reached(event, number)
            {
                break;
            }
            let Some(mut task) = self.streams.get_mut(&stream).and_then(|known| known.tasks.pop_front())
            else {
                break;
            };
            match task.work {
                TaskWork::Meet(ref mut part) => {
                    let met = self.meet(part, &task.moment);
                    if !met && let Some(known) = self.streams.get_mut(&stream) {
                        known.tasks.push_front(task);
                        break;
                    }
                }
                TaskWork::Wait(..) => {}
                TaskWork::Record(event, number) => {
                    if let Some(event) = self.events.get_mut(&event) {
                        event.reached = event.reached.max(number);
                    }
                }
                TaskWork::Run(work) => {
                    if let Err(fault) = work(self, &task.moment) {
                        self.devices[device].lost.get_or_insert(fault);
                    }
                }
            }
        }
        if let Some(known) = self.streams.get_mut(&stream) {
            known.runs = false;
        }
    }

    /// Runs an event's stream up to the given record of the event. Returns whether the record was reached.
    fn is_reached(&mut self, event: u64, number: u64) -> bool {
        let reached =
            move |state: &Self| state.events.get(&event).is_none_or(|known| known.reached >= number);
        if !reached(self)
            && let Some(stream) = self.events.get(&event).map(|known| known.stream)
        {
            self.run(stream, &reached);
        }
        reached(self)
    }

    /// Runs a stream until `enough` returns true.
    pub(crate) fn run_until(&mut self, stream: u64, enough: impl Fn(&Self) -> bool) -> CallResult {
        self.run(stream, &enough);
        let device = self.streams.get(&stream).map(|stream| stream.device);
        if let Some(device) = device {
            self.check_alive(device)?;
        }
        if enough(self) {
            return Ok(());
        }
        refuse(STUCK, "a wait that nothing ends: streams wait for each other")
    }

    /// Returns whether a task on any stream waits for other ranks.
    fn waits_for_ranks(&self) -> bool {
        let front = |stream: &SimStream| {
            matches!(stream.tasks.front(), Some(StreamTask { work: TaskWork::Meet(_), .. }))
        };
        self.streams.values().any(front)
    }

    /// Returns the number of a device's live streams.
    pub(crate) fn streams_of(&self, device: usize) -> usize {
        self.streams.values().filter(|stream| stream.device == device).count()
    }

    fn synchronize(&mut self, stream: u64) -> CallResult {
        self.run_until(stream, |state| {
            state.streams.get(&stream).is_none_or(|known| known.tasks.is_empty())
        })?;
        let clock = self.clock_of(stream);
        self.host.join(&clock);
        self.alive().map(drop)
    }
}

/// Waits for a stream as long as tasks of other ranks may still unblock it.
fn synchronize_until(
    state: &mut MutexGuard<'static, SimState>,
    stream: sys::aclrtStream,
    until: Instant,
) -> CallResult {
    let stream = state.stream_here(stream)?;
    state.outside_captures(stream, "a wait of the host")?;
    loop {
        match state.synchronize(stream) {
            Err(refusal) if refusal.code == STUCK && state.waits_for_ranks() => {
                if !wait_for_change(state, until) {
                    return refuse(STREAM_SYNC_TIMEOUT, "a stream that waits for other ranks");
                }
            }
            done => return done,
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtCreateStreamWithConfig(
    to: *mut sys::aclrtStream,
    priority: u32,
    _: u32,
) -> sys::aclError {
    call("aclrtCreateStreamWithConfig", |state| {
        let device = state.alive()?;
        if priority > 7 {
            return invalid(format!("priority {priority}"));
        }
        let handle = state.handle();
        state.streams.insert(handle, SimStream { device, ..SimStream::default() });
        *to = handle as *mut c_void;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtDestroyStream(stream: sys::aclrtStream) -> sys::aclError {
    call("aclrtDestroyStream", |state| {
        let device = SimState::current()?;
        match state.streams.get(&(stream as u64)) {
            Some(known) if known.device != device => {
                refuse(sys::ACL_ERROR_RT_STREAM_CONTEXT as i32, "a stream of another device")
            }
            Some(known) if known.capture.is_some() => invalid("a stream that is being captured"),
            Some(known) if !known.tasks.is_empty() && state.devices[device].lost.is_none() => {
                invalid("a stream with work that is not done; wait for it first")
            }
            Some(_) => {
                state.streams.remove(&(stream as u64));
                Ok(())
            }
            None => invalid(format!("{stream:p} is no stream, or was destroyed")),
        }
    })
}

/// Destroys a stream, and drops its unfinished work.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtDestroyStreamForce(stream: sys::aclrtStream) -> sys::aclError {
    call("aclrtDestroyStreamForce", |state| {
        let device = SimState::current()?;
        let handle = stream as u64;
        if state.streams.get(&handle).is_none_or(|known| known.device != device) {
            return invalid(format!("{stream:p} is no stream of device {device}"));
        }
        state.streams.remove(&handle);
        state.hccl.withdraw(handle);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtSynchronizeStream(stream: sys::aclrtStream) -> sys::aclError {
    call_that_waits("aclrtSynchronizeStream", |state| synchronize_until(state, stream, Instant::now() + LONG))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtSynchronizeStreamWithTimeout(
    stream: sys::aclrtStream,
    milliseconds: i32,
) -> sys::aclError {
    call_that_waits("aclrtSynchronizeStreamWithTimeout", |state| {
        let limit = u64::try_from(milliseconds).map_or(LONG, Duration::from_millis);
        synchronize_until(state, stream, Instant::now() + limit)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtStreamQuery(
    stream: sys::aclrtStream,
    status: *mut sys::aclrtStreamStatus,
) -> sys::aclError {
    call("aclrtStreamQuery", |state| {
        let stream = state.stream_here(stream)?;
        state.outside_captures(stream, "a question for the state")?;
        let empty = state.streams.get(&stream).is_none_or(|known| known.tasks.is_empty());
        *status = if empty { sys::ACL_STREAM_STATUS_COMPLETE } else { sys::ACL_STREAM_STATUS_NOT_READY };
        Ok(())
    })
}
