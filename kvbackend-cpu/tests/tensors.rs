//! Tensors that are moved between memories: checks the guarantees of `TensorView` and `OwnedStorage` on real
//! memory.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use kvbackend_cpu::{CpuBackend, Execution};
use kvcore::Compared::Number;
use kvcore::{Backend, DType, Error, MemoryKind, Stream, TensorView, allocate_tensor};

struct Memory {
    backend: Arc<CpuBackend>,
    stream: Arc<dyn Stream>,
}

impl Memory {
    fn new(execution: Execution) -> Self {
        let backend = CpuBackend::with_execution(execution);
        let stream = backend.stream().unwrap();
        Self { backend, stream }
    }

    fn bytes(&self, kind: MemoryKind, shape: &[usize]) -> TensorView {
        let view = allocate_tensor(self.backend.as_ref(), kind, DType::U8, shape).unwrap();
        let bytes: Vec<u8> = (1..=view.len() as u8).collect();
        self.stream.write(&view, &bytes).unwrap();
        view
    }

    fn read(&self, view: &TensorView) -> Vec<u8> {
        let mut bytes = vec![0; view.len()];
        self.stream.read(view, &mut bytes).unwrap();
        bytes
    }
}

#[test]
fn contiguous_copies_only_views_that_are_not() {
    let m = Memory::new(Execution::Immediate);
    let view = m.bytes(MemoryKind::Pinned, &[3, 4]);
    let before = m.backend.counters();
    let same = view.contiguous(m.backend.as_ref(), m.stream.as_ref()).unwrap();
    assert_eq!(same.storage().address(), view.storage().address());
    assert_eq!(m.backend.counters().since(&before).tensor_copy_bytes, 0);
    let columns = view.slice(1, 1, 3).unwrap();
    let copy = columns.contiguous(m.backend.as_ref(), m.stream.as_ref()).unwrap();
    assert!(copy.is_contiguous() && !columns.is_contiguous());
    assert_eq!((copy.shape(), copy.storage().kind()), (&[3, 2][..], MemoryKind::Pinned));
    assert_eq!(m.read(&copy), [2, 3, 6, 7, 10, 11]);
    assert_eq!(m.backend.counters().since(&before).tensor_copy_bytes, 6);
    let empty = columns.slice(0, 3, 3).unwrap();
    assert!(empty.contiguous(m.backend.as_ref(), m.stream.as_ref()).unwrap().is_empty());
}

#[test]
fn transfers_are_enqueued_and_not_seen_before_a_wait() {
    let m = Memory::new(Execution::Deferred);
    let host = m.bytes(MemoryKind::Pinned, &[4]);
    m.stream.synchronize().unwrap();
    let device = allocate_tensor(m.backend.as_ref(), MemoryKind::Device, DType::U8, &[4]).unwrap();
    host.h2d(&device, m.stream.as_ref()).unwrap();
    let other = m.backend.stream().unwrap();
    let mut seen = [9; 4];
    other.read(&device, &mut seen).unwrap();
    assert_eq!(seen, [0; 4], "nothing waited for the copy");
    other.wait_for(&m.stream.record().unwrap()).unwrap();
    other.read(&device, &mut seen).unwrap();
    assert_eq!(seen, [1, 2, 3, 4]);
}

#[test]
fn refused_transfers_change_nothing() {
    let m = Memory::new(Execution::Immediate);
    let host = m.bytes(MemoryKind::System, &[4]);
    let device = m.bytes(MemoryKind::Device, &[2, 4]);
    let row = device.select(0, 0).unwrap();
    let stream = m.stream.as_ref();
    let before = m.backend.counters();
    assert!(matches!(
        host.d2h(&host, stream),
        Err(Error::WrongMemory { expected: "device", got: MemoryKind::System, .. })
    ));
    assert!(matches!(row.h2d(&row, stream), Err(Error::WrongMemory { expected: "host", .. })));
    assert!(matches!(
        host.h2d(&host, stream),
        Err(Error::WrongMemory { what: "destination of a host-to-device copy", .. })
    ));
    assert!(matches!(
        host.h2d(&device, stream),
        Err(Error::Mismatch { expected: Number(2), got: Number(1), .. })
    ));
    assert!(matches!(
        host.slice(0, 0, 3).unwrap().h2d(&row, stream),
        Err(Error::Mismatch { got: Number(3), .. })
    ));
    let floats = allocate_tensor(m.backend.as_ref(), MemoryKind::System, DType::F32, &[4]).unwrap();
    assert!(matches!(
        floats.h2d(&row, stream),
        Err(Error::Mismatch { got: kvcore::Compared::DType(DType::F32), .. })
    ));
    assert!(matches!(row.copy_to(&row, stream), Err(Error::Aliased { .. })));
    assert_eq!(m.backend.counters(), before);
    assert_eq!(m.read(&device), [1, 2, 3, 4, 5, 6, 7, 8]);
}
