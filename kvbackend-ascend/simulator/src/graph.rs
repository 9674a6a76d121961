//! Graphs: tasks that are captured instead of enqueued, and that run each time the graph is executed.
//!
//! A stream's tasks keep the order in which they were captured. Only events order tasks of different streams:
//! if unordered tasks access the same bytes, this is a fault, as on plain streams.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;
use std::thread::ThreadId;

use crate::clock::{TaskMoment, VectorClock};
use crate::state::{CallResult, SimState, call, invalid, lock, refuse};
use crate::task::{Action, StreamTask, TaskWork};
use crate::types as sys;

/// The code for a call that is not allowed during a capture.
pub(crate) const STREAM_CAPTURED: i32 = 107_027;
/// The code for a wait for an event outside of the stream's capture.
const CAPTURE_DEPENDENCY: i32 = 107_024;
/// The code for ending a capture that the stream did not begin, or in which another stream has not been
/// joined back.
const CAPTURE_UNMATCHED: i32 = 107_036;
/// The code for ending a capture on another thread.
const CAPTURE_WRONG_THREAD: i32 = 107_038;
/// The code for an invalidated capture.
const CAPTURE_INVALIDATED: i32 = 507_903;

/// A captured task, with its stream.
enum CapturedTask {
    Record(u64, u64),
    Wait(u64, u64),
    Run(u64, Action),
}

/// A capture in progress.
struct Capture {
    origin: u64,
    device: usize,
    mode: sys::aclmdlRICaptureMode,
    thread: ThreadId,
    tasks: Vec<CapturedTask>,
    /// The reason why the capture cannot become a graph, if there is one.
    broken: Option<String>,
}

/// A graph.
struct SimGraph {
    device: usize,
    origin: u64,
    tasks: Arc<Vec<CapturedTask>>,
    /// The number of times that the graph was executed.
    runs: u64,
}

/// All captures and graphs.
#[derive(Default)]
pub(crate) struct SimGraphs {
    captures: HashMap<u64, Capture>,
    graphs: HashMap<u64, SimGraph>,
}

impl SimGraphs {
    /// Returns the number of a device's live captures and graphs.
    pub(crate) fn live(&self, device: usize) -> usize {
        self.captures.values().filter(|capture| capture.device == device).count()
            + self.graphs.values().filter(|graph| graph.device == device).count()
    }
}

impl SimState {
    /// Returns the capture that a stream takes part in, if there is one.
    pub(crate) fn capture_of(&self, stream: u64) -> Option<u64> {
        self.streams.get(&stream).and_then(|stream| stream.capture)
    }

    fn break_capture(&mut self, capture: u64, reason: &str) {
        if let Some(capture) = self.graphs.captures.get_mut(&capture) {
            capture.broken.get_or_insert_with(|| reason.to_owned());
        }
    }

    /// If a stream is being captured, returns an error for the call, and invalidates the capture.
    pub(crate) fn outside_captures(&mut self, stream: u64, what: &str) -> CallResult {
        let Some(capture) = self.capture_of(stream) else { return Ok(()) };
        self.break_capture(capture, what);
        refuse(STREAM_CAPTURED, format!("{what} on a stream that is being captured"))
    }

    /// Returns an error for a call during a capture in any mode except the relaxed mode.
    pub(crate) fn outside_strict_captures(&mut self, device: usize, what: &str) -> CallResult {
        let (thread, relaxed) = (std::thread::current().id(), sys::ACL_MODEL_RI_CAPTURE_MODE_RELAXED);
        let strict = |capture: &Capture| {
            capture.device == device
                && capture.mode != relaxed
                && (capture.thread == thread || capture.mode == sys::ACL_MODEL_RI_CAPTURE_MODE_GLOBAL)
        };
        let found = self.graphs.captures.iter().find(|(_, capture)| strict(capture)).map(|(&id, _)| id);
        let Some(capture) = found else { return Ok(()) };
        self.break_capture(capture, what);
        refuse(STREAM_CAPTURED, format!("{what} during a capture"))
    }

    /// Adds a stream to the capture of the event that it waits for.
    pub(crate) fn join_capture(&mut self, stream: u64, of_event: Option<u64>) -> CallResult {
        let own = self.capture_of(stream);
        let Some(wanted) = of_event.filter(|wanted| self.graphs.captures.contains_key(wanted)) else {
            if let Some(own) = own {
                self.break_capture(own, "a wait for an event from outside");
            }
            return refuse(CAPTURE_DEPENDENCY, "a capture and an event from outside of it");
        };
        match own {
            Some(own) if own != wanted => {
                refuse(CAPTURE_DEPENDENCY, "a stream of one capture and an event of another")
            }
            _ => {
                if let Some(stream) = self.streams.get_mut(&stream) {
                    stream.capture = Some(wanted);
                }
                Ok(())
            }
        }
    }

    /// Adds a task to a capture.
    pub(crate) fn capture_task(&mut self, capture: u64, stream: u64, work: TaskWork) -> CallResult {
        let task = match work {
            TaskWork::Record(event, _) => CapturedTask::Record(stream, event),
            TaskWork::Wait(event, _) => CapturedTask::Wait(stream, event),
            TaskWork::Run(action) => CapturedTask::Run(stream, action),
            TaskWork::Meet(_) => return refuse(STREAM_CAPTURED, "a collective in a capture"),
        };
        match self.graphs.captures.get_mut(&capture) {
            Some(capture) => {
                capture.tasks.push(task);
                Ok(())
            }
            None => invalid("a capture that has ended"),
        }
    }

    fn end_capture(&mut self, stream: u64) -> CallResult<u64> {
        let Some(number) = self.capture_of(stream) else {
            return refuse(CAPTURE_UNMATCHED, "the end of a capture that did not begin");
        };
        match self.graphs.captures.get(&number) {
            Some(capture) if capture.origin != stream => {
                return refuse(CAPTURE_UNMATCHED, "the end of a capture on another stream");
            }
            Some(capture)
                if capture.thread != std::thread::current().id()
                    && capture.mode != sys::ACL_MODEL_RI_CAPTURE_MODE_RELAXED =>
            {
                return refuse(CAPTURE_WRONG_THREAD, "the end of a capture on another thread");
            }
            _ => {}
        }
        let streams: Vec<u64> =
            self.streams.iter().filter(|(_, s)| s.capture == Some(number)).map(|(&s, _)| s).collect();
        for stream in &streams {
            if let Some(stream) = self.streams.get_mut(stream) {
                stream.capture = None;
            }
        }
        let Some(capture) = self.graphs.captures.remove(&number) else { return invalid("no capture") };
        if let Some(reason) = capture.broken {
            return refuse(CAPTURE_INVALIDATED, format!("a capture that {reason} has ended"));
        }
        // Events must order each stream's last task before the end of the capture.
        let ordered = moments(&capture.tasks, &VectorClock::default(), (0, 0));
        let end = ordered.ends.get(&capture.origin).cloned().unwrap_or_default();
        for (stream, last) in ordered.last {
            if !end.knows(ordered.streams[&stream], last) {
                return refuse(CAPTURE_UNMATCHED, format!("stream {stream:#x} is not joined at the end"));
            }
        }
        let graph = self.handle();
        let (device, origin) = (capture.device, capture.origin);
        self.graphs
            .graphs
            .insert(graph, SimGraph { device, origin, tasks: Arc::new(capture.tasks), runs: 0 });
        Ok(graph)
    }
}

/// The order of a graph's tasks.
#[derive(Default)]
struct Ordered {
    tasks: Vec<StreamTask>,
    /// The ID that each stream has in this run.
    streams: HashMap<u64, u64>,
    ends: HashMap<u64, VectorClock>,
    last: HashMap<u64, u64>,
}

/// Orders a graph's tasks after the tasks in `before`. The streams' IDs start at `first`, and their task
/// indices continue after those of the earlier runs.
fn moments(tasks: &[CapturedTask], before: &VectorClock, (first, runs): (u64, u64)) -> Ordered {
    let (mut ordered, mut events) = (Ordered::default(), HashMap::<u64, VectorClock>::new());
    for task in tasks {
        let (CapturedTask::Record(stream, _) | CapturedTask::Wait(stream, _) | CapturedTask::Run(stream, _)) =
            task;
        let next = first + ordered.streams.len() as u64;
        let number = *ordered.streams.entry(*stream).or_insert(next);
        let clock = ordered.ends.entry(*stream).or_insert_with(|| before.clone());
        match task {
            CapturedTask::Record(_, event) => {
                events.insert(*event, clock.clone());
            }
            CapturedTask::Wait(_, event) => {
                if let Some(known) = events.get(event) {
                    clock.join(known);
                }
            }
            CapturedTask::Run(_, action) => {
                let tick = ordered.last.entry(*stream).or_insert(runs * tasks.len() as u64);
                *tick += 1;
                clock.set(number, *tick);
                let moment = TaskMoment { stream: number, tick: *tick, before: clock.clone() };
                ordered.tasks.push(StreamTask { moment, work: TaskWork::Run(Arc::clone(action)) });
            }
        }
    }
    ordered
}

#[unsafe(no_mangle)]
pub extern "C" fn aclmdlRICaptureBegin(
    stream: sys::aclrtStream,
    mode: sys::aclmdlRICaptureMode,
) -> sys::aclError {
    call("aclmdlRICaptureBegin", |state| {
        let (stream, device) = (state.stream_here(stream)?, state.alive()?);
        state.outside_captures(stream, "a second capture")?;
        let number = state.handle();
        let thread = std::thread::current().id();
        let capture = Capture { origin: stream, device, mode, thread, tasks: Vec::new(), broken: None };
        state.graphs.captures.insert(number, capture);
        if let Some(stream) = state.streams.get_mut(&stream) {
            stream.capture = Some(number);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclmdlRICaptureEnd(
    stream: sys::aclrtStream,
    to: *mut sys::aclmdlRI,
) -> sys::aclError {
    // The capture ends, even if it produces no graph.
    let mut asked = lock().controls.verdict("aclmdlRICaptureEnd");
    call("the end of a capture", |state| {
        let stream = state.stream_here(stream)?;
        let graph = state.end_capture(stream)?;
        if let Some(code) = asked.take().filter(|&code| code != 0) {
            state.graphs.graphs.remove(&graph);
            return refuse(code, "aclmdlRICaptureEnd fails because a test asked for it");
        }
        *to = graph as *mut c_void;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclmdlRIExecuteAsync(graph: sys::aclmdlRI, stream: sys::aclrtStream) -> sys::aclError {
    call("aclmdlRIExecuteAsync", |state| {
        let stream = state.stream_here(stream)?;
        state.outside_captures(stream, "the execution of a graph")?;
        let device = state.alive()?;
        let number = graph as u64;
        let Some(graph) = state.graphs.graphs.get_mut(&number).filter(|graph| graph.device == device) else {
            return invalid("no graph of the device, or one that was destroyed");
        };
        let (tasks, origin, runs) = (Arc::clone(&graph.tasks), graph.origin, graph.runs);
        graph.runs += 1;
        let mut before = state.host.clone();
        before.join(&state.clock_of(stream));
        let ordered = moments(&tasks, &before, (number << 32, runs));
        let end = ordered.ends.get(&origin).cloned().unwrap_or(before);
        // Each task holds the graph until it has run.
        let held = |task: StreamTask| {
            let TaskWork::Run(action) = task.work else { return task };
            let graph = Arc::clone(&tasks);
            let action = move |state: &mut SimState, moment: &TaskMoment| {
                let _graph = &graph;
                action(state, moment)
            };
            StreamTask { moment: task.moment, work: TaskWork::Run(Arc::new(action)) }
        };
        state.enqueue_graph(stream, ordered.tasks.into_iter().map(held).collect(), &end);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclmdlRIDestroy(graph: sys::aclmdlRI) -> sys::aclError {
    call("aclmdlRIDestroy", |state| {
        let device = SimState::current()?;
        let lost = state.devices[device].lost.is_some();
        match state.graphs.graphs.get(&(graph as u64)) {
            Some(known) if Arc::strong_count(&known.tasks) > 1 && !lost => {
                invalid("a graph whose work is not done")
            }
            Some(_) => {
                state.graphs.graphs.remove(&(graph as u64));
                Ok(())
            }
            None => invalid(format!("{graph:p} is no graph, or was destroyed")),
        }
    })
}
