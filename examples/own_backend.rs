//! A backend of your own, on one page: `cargo run --release --example own_backend`.
//!
//! It adds a ledger of operations to the CPU backend. A backend for another device has the same four parts:
//! memory, a stream, a `match` over operations in `launch`, and a list of missing features.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use kvbackend_cpu::CpuBackend;
use kvcore::{
    Backend, Capabilities, Checked, CopyTensor, CounterSnapshot, Counters, DType, Event, MemoryKind, Result,
    Storage, Stream, TensorView, allocate_tensor,
};

/// The number of calls and the number of bytes, by operation.
type Ledger = Arc<Mutex<BTreeMap<&'static str, (usize, usize)>>>;

/// A backend that records every operation.
#[derive(Debug)]
struct Audited {
    inner: Arc<CpuBackend>,
    ledger: Ledger,
}

impl Backend for Audited {
    fn name(&self) -> &'static str {
        "audited"
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities { missing: vec!["reserve"], ..self.inner.capabilities() }
    }
    fn allocate(&self, kind: MemoryKind, bytes: usize) -> Result<Arc<dyn Storage>> {
        self.inner.allocate(kind, bytes)
    }
    fn stream(&self) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(AuditedStream { inner: self.inner.stream()?, ledger: Arc::clone(&self.ledger) }))
    }
    fn counters(&self) -> CounterSnapshot {
        self.inner.counters()
    }
}

#[derive(Debug)]
struct AuditedStream {
    inner: Arc<dyn Stream>,
    ledger: Ledger,
}

impl Stream for AuditedStream {
    /// Launches an operation that has passed its check, over memory that [`owns`](Stream::owns) accepted.
    fn launch(&self, operation: Checked<'_>) -> Result<()> {
        self.inner.launch(operation)?;
        let mut ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        let (calls, bytes) = ledger.entry(operation.operation().name()).or_default();
        *calls += 1;
        *bytes += operation.operation().bytes();
        Ok(())
    }
    fn owns(&self, storage: &Arc<dyn Storage>) -> Result<()> {
        self.inner.owns(storage)
    }
    fn counters(&self) -> &Counters {
        self.inner.counters()
    }
    fn record(&self) -> Result<Arc<dyn Event>> {
        self.inner.record()
    }
    fn wait_for(&self, event: &Arc<dyn Event>) -> Result<()> {
        self.inner.wait_for(event)
    }
    fn synchronize(&self) -> Result<()> {
        self.inner.synchronize()
    }
    fn write(&self, dst: &TensorView, src: &[u8]) -> Result<()> {
        self.inner.write(dst, src)
    }
    fn read(&self, src: &TensorView, dst: &mut [u8]) -> Result<()> {
        self.inner.read(src, dst)
    }
}

fn main() -> Result<()> {
    let backend = Audited { inner: CpuBackend::new(), ledger: Ledger::default() };
    let stream = backend.stream()?;
    let tensor = |shape: &[usize]| allocate_tensor(&backend, MemoryKind::Device, DType::F32, shape);
    let (src, dst) = (tensor(&[64, 32])?, tensor(&[32, 64])?);
    stream.copy_tensor(&CopyTensor { src: src.permute(&[1, 0])?, dst: dst.clone() })?;
    // Operations are checked before they reach a backend, so a copy between different shapes never reaches
    // `launch`.
    let refused = stream.copy_tensor(&CopyTensor { src, dst });
    println!(
        "rejected before the launch: {}",
        refused.err().map_or_else(String::new, |error| error.to_string())
    );
    stream.synchronize()?;
    for (name, (calls, bytes)) in backend.ledger.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        println!("{name}: {calls} call, {bytes} bytes");
    }
    Ok(())
}
