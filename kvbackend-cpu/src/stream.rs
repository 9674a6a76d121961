//! Streams and events. A stream is a queue of closures, which run immediately or when something waits for
//! them.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use kvcore::{
    Checked, Counters, DoneCall, Error, Event, Graph, Result, StepInputs, Storage, Stream, TensorView,
};
use parking_lot::Mutex;

use crate::kernels::{KernelTable, QueuedWork};
use crate::memory::{Access, ByteSpan, cpu};
use crate::{Execution, NAME, writes};

/// A stream of the CPU backend.
pub struct CpuStream {
    id: u64,
    execution: Execution,
    counters: Arc<Counters>,
    kernels: KernelTable,
    queue: Arc<WorkQueue>,
}

/// The enqueued work of a stream, in order. `done` counts finished items: an event is done as soon as `done`
/// reaches the event's position.
#[derive(Default)]
struct WorkQueue {
    items: Mutex<VecDeque<QueuedWork>>,
    enqueued: AtomicU64,
    done: AtomicU64,
    /// A lock that is held while an item runs, so that two waiting threads never run items at the same time.
    running: Mutex<()>,
}

impl WorkQueue {
    /// Runs items until a total of `until` items have run, or until the first error.
    fn run(&self, until: u64) -> Result<()> {
        while self.done.load(Ordering::Acquire) < until {
            let _running = self.running.lock();
            if self.done.load(Ordering::Acquire) >= until {
                break;
            }
            let Some(work) = self.items.lock().pop_front() else { break };
            let result = work();
            self.done.fetch_add(1, Ordering::Release);
            result?;
        }
        Ok(())
    }
}

/// A position in the order of a [`CpuStream`]'s work.
pub struct CpuEvent {
    stream: u64,
    at: u64,
    queue: Weak<WorkQueue>,
}

impl fmt::Debug for CpuStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuStream({}, {:?})", self.id, self.execution)
    }
}

impl fmt::Debug for CpuEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuEvent(stream {}, after item {})", self.stream, self.at)
    }
}

impl Event for CpuEvent {
    fn wait(&self) -> Result<()> {
        self.queue.upgrade().map_or(Ok(()), |queue| queue.run(self.at))
    }

    fn is_done(&self) -> bool {
        self.queue.upgrade().is_none_or(|queue| queue.done.load(Ordering::Acquire) >= self.at)
    }

    /// Waits for the event before calling `call`, because deferred work runs only when something waits for
    /// it.
    fn on_done(self: Arc<Self>, call: DoneCall) {
        call(self.wait());
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl CpuStream {
    pub(crate) fn new(id: u64, execution: Execution, counters: Arc<Counters>, kernels: KernelTable) -> Self {
        Self { id, execution, counters, kernels, queue: Arc::default() }
    }

    fn enqueue(&self, work: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
        match self.execution {
            Execution::Immediate => {
                let _running = self.queue.running.lock();
                work()
            }
            Execution::Deferred => {
                let mut items = self.queue.items.lock();
                items.push_back(Box::new(work));
                self.queue.enqueued.fetch_add(1, Ordering::Release);
                Ok(())
            }
        }
    }
}

impl Drop for CpuStream {
    /// Runs all remaining work, even after failures, as a GPU would.
    fn drop(&mut self) {
        let enqueued = self.queue.enqueued.load(Ordering::Acquire);
        while self.queue.run(enqueued).is_err() {}
    }
}

impl Stream for CpuStream {
    fn launch(&self, operation: Checked<'_>) -> Result<()> {
        writes::check(operation.operation())?;
        match self.execution {
            Execution::Immediate => {
                let _running = self.queue.running.lock();
                self.kernels.run(operation.operation())
            }
            Execution::Deferred => self.enqueue(self.kernels.deferred(operation.operation())),
        }
    }

    fn owns(&self, storage: &Arc<dyn Storage>) -> Result<()> {
        cpu(storage).map(drop)
    }

    fn counters(&self) -> &Counters {
        &self.counters
    }

    fn record(&self) -> Result<Arc<dyn Event>> {
        let at = self.queue.enqueued.load(Ordering::Acquire);
        Ok(Arc::new(CpuEvent { stream: self.id, at, queue: Arc::downgrade(&self.queue) }))
    }

    fn wait_for(&self, event: &Arc<dyn Event>) -> Result<()> {
        let known = event.as_any().downcast_ref::<CpuEvent>();
        let known = known.ok_or(Error::ForeignHandle { what: "an event", backend: NAME })?;
        if std::ptr::eq(known.queue.as_ptr(), Arc::as_ptr(&self.queue)) {
            return Ok(()); // the stream's work runs in order anyway
        }
        let event = Arc::clone(event);
        self.enqueue(move || event.wait())
    }

    fn synchronize(&self) -> Result<()> {
        self.queue.run(self.queue.enqueued.load(Ordering::Acquire))
    }

    fn write(&self, dst: &TensorView, src: &[u8]) -> Result<()> {
        let range = dst.host_range(src.len())?;
        cpu(dst.storage())?.check_writable()?;
        Counters::add(&self.counters.host_write_bytes, src.len());
        let storage = Arc::clone(dst.storage());
        let copy = move |src: &[u8]| {
            let span = ByteSpan::new(&storage, range.clone());
            Access::new(&[], &[&span])?.parts().write(&span)?.values.copy_from_slice(src);
            Ok(())
        };
        match self.execution {
            Execution::Immediate => copy(src),
            Execution::Deferred => {
                let owned = src.to_vec();
                self.enqueue(move || copy(&owned))
            }
        }
    }

    fn read(&self, src: &TensorView, dst: &mut [u8]) -> Result<()> {
        let range = src.host_range(dst.len())?;
        cpu(src.storage())?;
        self.synchronize()?;
        Counters::add(&self.counters.host_read_bytes, dst.len());
        let span = ByteSpan::new(src.storage(), range);
        dst.copy_from_slice(Access::new(&[&span], &[])?.read(&span)?.values);
        Ok(())
    }

    fn capture(&self, _: &StepInputs, _: &mut dyn FnMut() -> Result<()>) -> Result<Arc<dyn Graph>> {
        Err(Error::Unsupported { backend: NAME, what: "captures of graphs".to_owned() })
    }
}
