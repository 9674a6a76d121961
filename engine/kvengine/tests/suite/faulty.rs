//! A backend that refuses one operation, or panics in it: the n-th operation after it is armed.

use std::collections::BTreeSet;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use kvbackend_cpu::CpuBackend;
use kvcore::{
    Backend, Capabilities, Checked, CounterSnapshot, Counters, DType, Error, Event, MemoryKind, Result,
    Storage, Stream, TensorView,
};

/// The CPU backend, which refuses one operation.
#[derive(Debug)]
pub(crate) struct Faulty {
    cpu: Arc<CpuBackend>,
    fuse: Arc<Fuse>,
    is_far: bool,
}

/// The number of operations to accept before the next refusal, and the names of the refused operations.
#[derive(Debug, Default)]
struct Fuse {
    left: Mutex<Option<usize>>,
    /// The name of the only operation that counts, or `None` if all operations count.
    only: Mutex<Option<&'static str>>,
    refused: Mutex<BTreeSet<&'static str>>,
    /// True to panic instead of refusing an operation.
    panics: AtomicBool,
}

impl Fuse {
    fn check(&self, operation: &'static str) -> Result<()> {
        if self.only.lock().unwrap().is_some_and(|only| only != operation) {
            return Ok(());
        }
        let mut left = self.left.lock().unwrap();
        match &mut *left {
            Some(0) => {
                *left = None;
                self.refused.lock().unwrap().insert(operation);
                drop(left);
                assert!(!self.panics.load(Relaxed), "faulty: {operation}");
                Err(Error::Unsupported { backend: "faulty", what: operation.to_owned() })
            }
            Some(n) => {
                *n -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }
}

impl Faulty {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { cpu: CpuBackend::new(), fuse: Arc::default(), is_far: false })
    }

    /// Creates a backend that does not tell that its memory is host memory.
    pub(crate) fn far() -> Arc<Self> {
        Arc::new(Self { cpu: CpuBackend::new(), fuse: Arc::default(), is_far: true })
    }

    /// Accepts the next `passing` operations, refuses one operation, and accepts all later operations.
    pub(crate) fn refuse_after(&self, passing: usize) {
        *self.fuse.left.lock().unwrap() = Some(passing);
    }

    /// Accepts the next `passing` operations with this name, refuses one of them, and accepts all later
    /// operations.
    pub(crate) fn refuse_only(&self, operation: &'static str, passing: usize) {
        *self.fuse.only.lock().unwrap() = Some(operation);
        self.refuse_after(passing);
    }

    /// Accepts the next `passing` operations, panics in one operation, and accepts all later operations.
    pub(crate) fn panic_after(&self, passing: usize) {
        self.fuse.panics.store(true, Relaxed);
        self.refuse_after(passing);
    }

    /// Disarms the backend. Returns true if it had not refused an operation yet.
    pub(crate) fn disarm(&self) -> bool {
        self.fuse.left.lock().unwrap().take().is_some()
    }

    /// Returns the names of all operations refused so far.
    pub(crate) fn refused(&self) -> BTreeSet<&'static str> {
        self.fuse.refused.lock().unwrap().clone()
    }
}

impl Backend for Faulty {
    fn name(&self) -> &'static str {
        self.cpu.name()
    }
    fn capabilities(&self) -> Capabilities {
        self.cpu.capabilities()
    }
    fn shares_host_memory(&self) -> bool {
        !self.is_far && self.cpu.shares_host_memory()
    }

    fn allocate(&self, kind: MemoryKind, bytes: usize) -> Result<Arc<dyn Storage>> {
        let is_host = self.is_far && kind == MemoryKind::System;
        self.fuse.check(if is_host { "allocate_host" } else { "allocate" })?;
        self.cpu.allocate(kind, bytes)
    }
    fn stream(&self) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(FaultyStream { stream: self.cpu.stream()?, fuse: Arc::clone(&self.fuse) }))
    }
    fn counters(&self) -> CounterSnapshot {
        self.cpu.counters()
    }
}

#[derive(Debug)]
struct FaultyStream {
    stream: Arc<dyn Stream>,
    fuse: Arc<Fuse>,
}

impl Stream for FaultyStream {
    fn launch(&self, operation: Checked<'_>) -> Result<()> {
        self.fuse.check(operation.operation().name())?;
        self.stream.launch(operation)
    }
    fn owns(&self, storage: &Arc<dyn Storage>) -> Result<()> {
        self.stream.owns(storage)
    }
    fn counters(&self) -> &Counters {
        self.stream.counters()
    }
    fn record(&self) -> Result<Arc<dyn Event>> {
        self.fuse.check("record")?;
        self.stream.record()
    }
    fn wait_for(&self, event: &Arc<dyn Event>) -> Result<()> {
        self.fuse.check("wait_for")?;
        self.stream.wait_for(event)
    }
    fn synchronize(&self) -> Result<()> {
        self.fuse.check("synchronize")?;
        self.stream.synchronize()
    }
    fn write(&self, dst: &TensorView, src: &[u8]) -> Result<()> {
        self.fuse.check(if dst.dtype() == DType::U8 { "write_bytes" } else { "write" })?;
        self.stream.write(dst, src)
    }
    fn read(&self, src: &TensorView, dst: &mut [u8]) -> Result<()> {
        self.fuse.check(if src.dtype() == DType::U8 { "read_bytes" } else { "read" })?;
        self.stream.read(src, dst)
    }
}
