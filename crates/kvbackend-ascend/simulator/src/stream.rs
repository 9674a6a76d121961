//! Streams: queues of tasks, and when they run.

use std::collections::VecDeque;
use std::ffi::c_void;

use crate::clock::{Clock, Moment};
use crate::state::{Outcome, State, call, invalid, refuse};
use crate::task::{Task, Work};
use crate::types as sys;

/// One stream.
#[derive(Default)]
pub(crate) struct Stream {
    pub(crate) device: usize,
    tasks: VecDeque<Task>,
    clock: Clock,
    ticks: u64,
    /// Whether its tasks are being run, so that waits that wait for each other end.
    runs: bool,
}

impl Stream {
    /// Returns whether a task records or waits for an event.
    pub(crate) fn uses_event(&self, event: u64) -> bool {
        self.tasks.iter().any(|task| match task.work {
            Work::Record(known, _) | Work::Wait(known, _) => known == event,
            Work::Run(_) => false,
        })
    }
}

impl State {
    /// Returns a stream of the device that this thread has set.
    pub(crate) fn stream_here(&self, stream: sys::aclrtStream) -> Outcome<u64> {
        let device = self.alive()?;
        match self.streams.get(&(stream as u64)) {
            Some(known) if known.device == device => Ok(stream as u64),
            Some(_) => refuse(sys::ACL_ERROR_RT_STREAM_CONTEXT as i32, "a stream of another device"),
            None => invalid(format!("{stream:p} is no stream, or was destroyed")),
        }
    }

    /// Returns what is before the next task of a stream.
    pub(crate) fn clock_of(&self, stream: u64) -> Clock {
        self.streams.get(&stream).map(|stream| stream.clock.clone()).unwrap_or_default()
    }

    /// Puts what a clock knows before the next tasks of a stream.
    pub(crate) fn join_clock(&mut self, stream: u64, clock: &Clock) {
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.clock.join(clock);
        }
    }

    /// Adds a task to a stream, and runs what can run at once.
    pub(crate) fn enqueue(&mut self, stream: u64, name: &str, work: Work) -> Outcome {
        let host = self.host.clone();
        let Some(known) = self.streams.get_mut(&stream) else { return invalid("no stream") };
        known.clock.join(&host);
        known.ticks += 1;
        let (device, tick) = (known.device, known.ticks);
        known.clock.set(stream, tick);
        let moment = Moment { stream, tick, before: known.clock.clone() };
        known.tasks.push_back(Task { moment, work });
        let device = &mut self.devices[device];
        device.trace.push(name.to_owned());
        if !device.lazy {
            self.run(stream, &|_| false);
        }
        Ok(())
    }

    /// Runs the tasks of a stream until `enough`, or as far as they can run.
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
                // Nothing runs on a lost device any more, and nobody waits for it.
                known.tasks.clear();
                break;
            }
            if let Work::Wait(event, number) = task.work
                && !self.is_reached(event, number)
            {
                break;
            }
            let Some(task) = self.streams.get_mut(&stream).and_then(|known| known.tasks.pop_front()) else {
                break;
            };
            match task.work {
                Work::Wait(..) => {}
                Work::Record(event, number) => {
                    if let Some(event) = self.events.get_mut(&event) {
                        event.reached = event.reached.max(number);
                    }
                }
                Work::Run(work) => {
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

    /// Returns whether a record of an event is reached, after its stream has run to it.
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

    /// Runs a stream until something holds.
    pub(crate) fn run_until(&mut self, stream: u64, enough: impl Fn(&Self) -> bool) -> Outcome {
        self.run(stream, &enough);
        let device = self.streams.get(&stream).map(|stream| stream.device);
        if let Some(device) = device {
            self.check_alive(device)?;
        }
        if enough(self) {
            return Ok(());
        }
        refuse(
            sys::ACL_ERROR_RT_INTERNAL_ERROR as i32,
            "a wait that nothing ends: streams wait for each other",
        )
    }

    /// Returns how many streams of a device live.
    pub(crate) fn streams_of(&self, device: usize) -> usize {
        self.streams.values().filter(|stream| stream.device == device).count()
    }

    fn synchronize(&mut self, stream: u64) -> Outcome {
        self.run_until(stream, |state| {
            state.streams.get(&stream).is_none_or(|known| known.tasks.is_empty())
        })?;
        let clock = self.clock_of(stream);
        self.host.join(&clock);
        self.alive().map(drop)
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
        state.streams.insert(handle, Stream { device, ..Stream::default() });
        *to = handle as *mut c_void;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtDestroyStream(stream: sys::aclrtStream) -> sys::aclError {
    call("aclrtDestroyStream", |state| {
        let device = State::current()?;
        match state.streams.get(&(stream as u64)) {
            Some(known) if known.device != device => {
                refuse(sys::ACL_ERROR_RT_STREAM_CONTEXT as i32, "a stream of another device")
            }
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

#[unsafe(no_mangle)]
pub extern "C" fn aclrtSynchronizeStream(stream: sys::aclrtStream) -> sys::aclError {
    call("aclrtSynchronizeStream", |state| {
        let stream = state.stream_here(stream)?;
        state.synchronize(stream)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtSynchronizeStreamWithTimeout(stream: sys::aclrtStream, _: i32) -> sys::aclError {
    call("aclrtSynchronizeStreamWithTimeout", |state| {
        let stream = state.stream_here(stream)?;
        state.synchronize(stream)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtStreamQuery(
    stream: sys::aclrtStream,
    status: *mut sys::aclrtStreamStatus,
) -> sys::aclError {
    call("aclrtStreamQuery", |state| {
        let stream = state.stream_here(stream)?;
        let empty = state.streams.get(&stream).is_none_or(|known| known.tasks.is_empty());
        *status = if empty { sys::ACL_STREAM_STATUS_COMPLETE } else { sys::ACL_STREAM_STATUS_NOT_READY };
        Ok(())
    })
}
