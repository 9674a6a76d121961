//! Events: points in a stream's order of work, which may be recorded again.

use std::ffi::c_void;

use crate::clock::VectorClock;
use crate::graph::STREAM_CAPTURED;
use crate::state::{CallResult, SimState, call, invalid, refuse};
use crate::task::TaskWork;
use crate::types as sys;

/// An event.
#[derive(Debug, Default)]
pub(crate) struct SimEvent {
    device: usize,
    /// The index of the event's last record.
    pub(crate) recorded: u64,
    /// The index of the last record that the stream has reached.
    pub(crate) reached: u64,
    /// The capture that the last record belongs to. A captured record is never reached outside of its graph.
    capture: Option<u64>,
    /// The stream of the last record.
    pub(crate) stream: u64,
    /// The tasks before the last record.
    pub(crate) clock: VectorClock,
}

impl SimState {
    fn event(&mut self, event: sys::aclrtEvent) -> CallResult<&mut SimEvent> {
        match self.events.get_mut(&(event as u64)) {
            Some(event) => Ok(event),
            None => invalid(format!("{event:p} is no event, or was destroyed")),
        }
    }

    /// Returns an error if the event belongs to a capture.
    fn check_outside(&mut self, event: sys::aclrtEvent) -> CallResult {
        match self.event(event)?.capture {
            None => Ok(()),
            Some(_) => refuse(STREAM_CAPTURED, "the host asks for an event of a capture"),
        }
    }

    /// Returns the number of a device's live events.
    pub(crate) fn events_of(&self, device: usize) -> usize {
        self.events.values().filter(|event| event.device == device).count()
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtCreateEventExWithFlag(to: *mut sys::aclrtEvent, flags: u32) -> sys::aclError {
    call("aclrtCreateEventExWithFlag", |state| {
        let device = state.alive()?;
        if flags & sys::ACL_EVENT_SYNC == 0 {
            return invalid("an event that no stream could wait for");
        }
        let handle = state.handle();
        state.events.insert(handle, SimEvent { device, ..SimEvent::default() });
        *to = handle as *mut c_void;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtDestroyEvent(event: sys::aclrtEvent) -> sys::aclError {
    call("aclrtDestroyEvent", |state| {
        SimState::current()?;
        state.event(event)?;
        let handle = event as u64;
        let in_use = state.streams.values().any(|stream| stream.uses_event(handle));
        if in_use {
            return invalid("an event that enqueued work records or waits for");
        }
        state.events.remove(&handle);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtRecordEvent(event: sys::aclrtEvent, stream: sys::aclrtStream) -> sys::aclError {
    call("aclrtRecordEvent", |state| {
        let stream = state.stream_here(stream)?;
        let clock = state.clock_of(stream);
        let capture = state.capture_of(stream);
        let known = state.event(event)?;
        known.capture = capture;
        if capture.is_some() {
            return state.enqueue(stream, "event", TaskWork::Record(event as u64, 0));
        }
        known.recorded += 1;
        known.stream = stream;
        known.clock = clock;
        let number = known.recorded;
        state.enqueue(stream, "event", TaskWork::Record(event as u64, number))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtStreamWaitEvent(stream: sys::aclrtStream, event: sys::aclrtEvent) -> sys::aclError {
    call("aclrtStreamWaitEvent", |state| {
        let stream = state.stream_here(stream)?;
        let capture = state.event(event)?.capture;
        if capture.is_some() || state.capture_of(stream).is_some() {
            state.join_capture(stream, capture)?;
            return state.enqueue(stream, "wait", TaskWork::Wait(event as u64, 0));
        }
        let known = state.event(event)?;
        let (number, clock) = (known.recorded, known.clock.clone());
        state.join_clock(stream, &clock);
        state.enqueue(stream, "wait", TaskWork::Wait(event as u64, number))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtQueryEventStatus(
    event: sys::aclrtEvent,
    status: *mut sys::aclrtEventRecordedStatus,
) -> sys::aclError {
    call("aclrtQueryEventStatus", |state| {
        state.alive()?;
        state.check_outside(event)?;
        let known = state.event(event)?;
        let done = known.reached >= known.recorded;
        let clock = known.clock.clone();
        *status = if done {
            state.host.join(&clock);
            sys::ACL_EVENT_RECORDED_STATUS_COMPLETE
        } else {
            sys::ACL_EVENT_RECORDED_STATUS_NOT_READY
        };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtSynchronizeEvent(event: sys::aclrtEvent) -> sys::aclError {
    call("aclrtSynchronizeEvent", |state| {
        state.alive()?;
        state.check_outside(event)?;
        let known = state.event(event)?;
        let (stream, number, clock) = (known.stream, known.recorded, known.clock.clone());
        if known.reached < number {
            state.run_until(stream, |state| {
                state.events.get(&(event as u64)).is_none_or(|event| event.reached >= number)
            })?;
        }
        state.alive()?;
        state.host.join(&clock);
        Ok(())
    })
}
