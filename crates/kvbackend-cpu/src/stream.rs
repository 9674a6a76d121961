//! Streams and events: a queue of closures that runs at once, or when something waits for it.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use kvcore::{
    ApplyRope, Attend, AttendMla, CopyBlocks, CopyTensor, Counters, Dequantize, Error, Event, Gather,
    Kernels, KvArena, Quantize, Result, RotateKeys, Scatter, Storage, Stream, SwapBlocks, TensorView,
};
use parking_lot::Mutex;

use crate::kernels::KernelTable;
use crate::memory::{Access, cpu};
use crate::{Execution, NAME};

type Work = Box<dyn FnOnce() -> Result<()> + Send>;

/// A stream of the CPU backend.
pub struct CpuStream {
    id: u64,
    execution: Execution,
    counters: Arc<Counters>,
    kernels: KernelTable,
    queue: Arc<Queue>,
}

/// Work in order. `done` counts finished items, so that an event is "done ≥ its number".
#[derive(Default)]
struct Queue {
    items: Mutex<VecDeque<Work>>,
    enqueued: AtomicU64,
    done: AtomicU64,
    /// Held while an item runs: two waiting threads must not run items side by side.
    running: Mutex<()>,
}

impl Queue {
    /// Runs work until `until` items have run; stops at the first error.
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

/// A point in a [`CpuStream`].
pub struct CpuEvent {
    stream: u64,
    at: u64,
    queue: Weak<Queue>,
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

    /// Runs a kernel now, on the operation itself, or later on a copy of it.
    fn launch<O: Clone + Send + 'static>(
        &self,
        op: &O,
        kernel: fn(&KernelTable, &O) -> Result<()>,
    ) -> Result<()> {
        match self.execution {
            Execution::Immediate => {
                let _running = self.queue.running.lock();
                kernel(&self.kernels, op)
            }
            Execution::Deferred => {
                let (op, kernels) = (op.clone(), self.kernels.clone());
                self.enqueue(move || kernel(&kernels, &op))
            }
        }
    }
}

impl Drop for CpuStream {
    /// Enqueued work still runs, past failures too: a GPU would run it.
    fn drop(&mut self) {
        let enqueued = self.queue.enqueued.load(Ordering::Acquire);
        while self.queue.run(enqueued).is_err() {}
    }
}

impl Stream for CpuStream {
    fn record(&self) -> Result<Arc<dyn Event>> {
        let at = self.queue.enqueued.load(Ordering::Acquire);
        Ok(Arc::new(CpuEvent { stream: self.id, at, queue: Arc::downgrade(&self.queue) }))
    }

    fn wait_for(&self, event: &Arc<dyn Event>) -> Result<()> {
        let known = event.as_any().downcast_ref::<CpuEvent>();
        let known = known.ok_or(Error::ForeignHandle { what: "an event", backend: NAME })?;
        if std::ptr::eq(known.queue.as_ptr(), Arc::as_ptr(&self.queue)) {
            return Ok(()); // the stream keeps its own order
        }
        let event = Arc::clone(event);
        self.enqueue(move || event.wait())
    }

    fn synchronize(&self) -> Result<()> {
        self.queue.run(self.queue.enqueued.load(Ordering::Acquire))
    }

    fn write(&self, dst: &TensorView, src: &[u8]) -> Result<()> {
        let range = dst.host_range(src.len())?;
        cpu(dst.storage())?;
        Counters::add(&self.counters.host_write_bytes, src.len());
        let storage = Arc::clone(dst.storage());
        let copy = move |src: &[u8]| {
            Access::new(&[], &[&storage])?.write(&storage)?[range.clone()].copy_from_slice(src);
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
        let access = Access::new(&[src.storage()], &[])?;
        dst.copy_from_slice(&access.read(src.storage())?[range]);
        Ok(())
    }
}

/// Refuses storages of other backends before anything is enqueued.
fn ours(arenas: &[&KvArena], views: &[&TensorView]) -> Result<()> {
    let check = |storage: &Arc<dyn Storage>| cpu(storage).map(drop);
    arenas.iter().flat_map(|arena| arena.storages()).try_for_each(check)?;
    views.iter().try_for_each(|view| check(view.storage()))
}

fn ours_in_attend(op: &Attend) -> Result<()> {
    ours(&[&op.arena], &[&op.q, &op.out])?;
    op.lse.as_ref().map_or(Ok(()), |lse| ours(&[], &[lse]))
}

impl Kernels for CpuStream {
    fn scatter(&self, op: &Scatter) -> Result<()> {
        op.check()?;
        ours(&[&op.arena], &[&op.k, &op.v])?;
        Counters::add(&self.counters.scatter_bytes, op.bytes());
        self.launch(op, KernelTable::scatter)
    }

    fn gather(&self, op: &Gather) -> Result<()> {
        op.check()?;
        ours(&[&op.arena], &[&op.k, &op.v])?;
        Counters::add(&self.counters.gather_bytes, op.bytes());
        self.launch(op, KernelTable::gather)
    }

    fn copy_blocks(&self, op: &CopyBlocks) -> Result<()> {
        op.check()?;
        ours(&[&op.arena], &[])?;
        Counters::add(&self.counters.block_copy_bytes, op.bytes());
        self.launch(op, KernelTable::copy_blocks)
    }

    fn swap_blocks(&self, op: &SwapBlocks) -> Result<()> {
        op.check()?;
        ours(&[&op.src, &op.dst], &[])?;
        Counters::add(&self.counters.block_copy_bytes, op.bytes());
        self.launch(op, KernelTable::swap_blocks)
    }

    fn copy_tensor(&self, op: &CopyTensor) -> Result<()> {
        op.check()?;
        ours(&[], &[&op.src, &op.dst])?;
        Counters::add(&self.counters.tensor_copy_bytes, op.bytes());
        self.launch(op, KernelTable::copy_tensor)
    }

    fn rope(&self, op: &ApplyRope) -> Result<()> {
        op.check()?;
        ours(&[], &[&op.rows])?;
        self.launch(op, KernelTable::rope)
    }

    fn rotate_keys(&self, op: &RotateKeys) -> Result<()> {
        op.check()?;
        ours(&[&op.src, &op.dst], &[])?;
        Counters::add(&self.counters.block_copy_bytes, op.bytes());
        self.launch(op, KernelTable::rotate_keys)
    }

    fn attend(&self, op: &Attend) -> Result<()> {
        op.check()?;
        ours_in_attend(op)?;
        Counters::add(&self.counters.attend_calls, 1);
        self.launch(op, KernelTable::attend)
    }

    fn attend_mla(&self, op: &AttendMla) -> Result<()> {
        op.check()?;
        ours_in_attend(&op.attend)?;
        ours(&[], &[&op.q_latent])?;
        Counters::add(&self.counters.attend_calls, 1);
        self.launch(op, KernelTable::attend_mla)
    }

    fn quantize(&self, op: &Quantize) -> Result<()> {
        op.check()?;
        ours(&[&op.src, &op.dst], &[])?;
        Counters::add(&self.counters.quantize_bytes, op.bytes());
        self.launch(op, KernelTable::quantize)
    }

    fn dequantize(&self, op: &Dequantize) -> Result<()> {
        op.check()?;
        ours(&[&op.src, &op.dst], &[])?;
        Counters::add(&self.counters.dequantize_bytes, op.bytes());
        self.launch(op, KernelTable::dequantize)
    }
}
