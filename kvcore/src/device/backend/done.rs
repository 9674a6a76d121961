//! Callbacks and futures that wait until an event is done.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::thread::{Builder, sleep};
use std::time::Duration;

use parking_lot::Mutex;

use super::Event;
use crate::base::Result;

/// A function that is called once when an event is done, with the result of [`Event::wait`].
pub type DoneCall = Box<dyn FnOnce(Result<()>) + Send>;

/// The events that a thread polls, each with its callback.
struct Watched {
    events: Vec<(Arc<dyn Event>, DoneCall)>,
    /// True while a thread is polling the events.
    running: bool,
}

static WATCHED: Mutex<Watched> = Mutex::new(Watched { events: Vec::new(), running: false });

/// The shortest and the longest pause between two checks of the watched events.
const PAUSES: [Duration; 2] = [Duration::from_micros(20), Duration::from_millis(1)];

// Decision: docs/decisions/device.md#one-thread-polls-pending-events
/// Calls `call` when `event` is done: immediately if the event is already done, otherwise on a thread that
/// polls all such events and exits after the last one. If the system cannot start that thread, waits for the
/// event instead. A backend whose [`Event::is_done`] becomes true without a wait may implement
/// [`Event::on_done`] with this function.
pub fn call_when_done(event: Arc<dyn Event>, call: DoneCall) {
    if event.is_done() {
        return call(event.wait());
    }
    let mut watched = WATCHED.lock();
    watched.events.push((event, call));
    if !watched.running {
        watched.running = Builder::new().name("kv-events".to_owned()).spawn(watch).is_ok();
    }
    if !watched.running {
        let all = std::mem::take(&mut watched.events);
        drop(watched);
        for (event, call) in all {
            call(event.wait());
        }
    }
}

fn watch() {
    let mut pause = PAUSES[0];
    loop {
        let mut watched = WATCHED.lock();
        if watched.events.is_empty() {
            watched.running = false;
            return;
        }
        let all = std::mem::take(&mut watched.events);
        drop(watched);
        // An event that panics is done: its callback is dropped, and the other events are still watched.
        let is_done = |event: &dyn Event| catch_unwind(AssertUnwindSafe(|| event.is_done())).unwrap_or(true);
        let (done, left): (Vec<_>, Vec<_>) = all.into_iter().partition(|(event, _)| is_done(&**event));
        WATCHED.lock().events.extend(left);
        if done.is_empty() {
            sleep(pause);
            pause = PAUSES[1].min(2 * pause);
            continue;
        }
        pause = PAUSES[0];
        for (event, call) in done {
            // A panic in one callback does not affect the other callbacks.
            let _ = catch_unwind(AssertUnwindSafe(|| call(event.wait())));
        }
    }
}

/// A future that completes when an event is done, with the result of [`Event::wait`]. The `done` method of an
/// event creates the future. Dropping it does not affect the event.
#[derive(Debug)]
pub struct EventDone(Arc<Mutex<Told>>);

#[derive(Debug, Default)]
struct Told {
    result: Option<Result<()>>,
    waker: Option<Waker>,
}

impl dyn Event {
    /// Returns a future that completes when the event is done. It works with any async runtime, or without
    /// one.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use std::task::{Context, Poll, Wake, Waker};
    /// # use kvbackend_cpu::CpuBackend;
    /// use kvcore::{Backend, DType, MemoryKind, allocate_tensor};
    ///
    /// /// Wakes a thread: the smallest executor.
    /// struct Unpark(std::thread::Thread);
    /// impl Wake for Unpark {
    ///     fn wake(self: Arc<Self>) {
    ///         self.0.unpark();
    ///     }
    /// }
    ///
    /// let backend = CpuBackend::new();
    /// let stream = backend.stream()?;
    /// let tensor = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::U8, &[3])?;
    /// stream.write(&tensor, &[1, 2, 3])?;
    /// let mut copied = std::pin::pin!(stream.record()?.done());
    /// let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    /// let result = loop {
    ///     match copied.as_mut().poll(&mut Context::from_waker(&waker)) {
    ///         Poll::Ready(result) => break result,
    ///         Poll::Pending => std::thread::park(),
    ///     }
    /// };
    /// assert_eq!(result, Ok(()));
    /// # Ok::<(), kvcore::Error>(())
    /// ```
    pub fn done(self: Arc<Self>) -> EventDone {
        let state = Arc::<Mutex<Told>>::default();
        let told = Arc::clone(&state);
        self.on_done(Box::new(move |result| {
            let mut state = told.lock();
            state.result = Some(result);
            let waker = state.waker.take();
            drop(state);
            waker.into_iter().for_each(Waker::wake);
        }));
        EventDone(state)
    }
}

impl Future for EventDone {
    type Output = Result<()>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        // A waker is cloned and dropped without the lock, because its code may poll.
        let mut waker = Some(context.waker().clone());
        let mut state = self.0.lock();
        std::mem::swap(&mut state.waker, &mut waker);
        state.result.clone().map_or(Poll::Pending, Poll::Ready)
    }
}
