//! Tests deferred execution: a program does not see the results of work that it forgets to wait for.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use kvbackend_cpu::{CpuBackend, Execution};
use kvcore::{Backend, DType, Error, MemoryKind, Stream, allocate_tensor};

fn value(stream: &dyn Stream, view: &kvcore::TensorView) -> f32 {
    let mut bytes = [0; 4];
    stream.read(view, &mut bytes).unwrap();
    f32::from_le_bytes(bytes)
}

#[test]
fn a_forgotten_event_reads_the_old_contents() {
    let backend = CpuBackend::with_execution(Execution::Deferred);
    let (writer, reader) = (backend.stream().unwrap(), backend.stream().unwrap());
    let view = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[1]).unwrap();
    writer.write(&view, &7f32.to_le_bytes()).unwrap();
    let written = writer.record().unwrap();
    assert!(!written.is_done());
    assert_eq!(value(reader.as_ref(), &view), 0.0, "nothing ordered the streams");
    reader.wait_for(&written).unwrap();
    assert_eq!(value(reader.as_ref(), &view), 7.0);
    assert!(written.is_done());
}

#[test]
fn events_of_another_backend_are_waited_for_even_if_stream_numbers_agree() {
    let (a, b) =
        (CpuBackend::with_execution(Execution::Deferred), CpuBackend::with_execution(Execution::Deferred));
    let (writer, reader) = (a.stream().unwrap(), b.stream().unwrap());
    let view = allocate_tensor(a.as_ref(), MemoryKind::Device, DType::F32, &[1]).unwrap();
    writer.write(&view, &7f32.to_le_bytes()).unwrap();
    reader.wait_for(&writer.record().unwrap()).unwrap();
    assert_eq!(value(reader.as_ref(), &view), 7.0);
}

#[test]
fn a_dropped_stream_has_done_its_work() {
    let backend = CpuBackend::with_execution(Execution::Deferred);
    let view = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[1]).unwrap();
    let event = {
        let stream = backend.stream().unwrap();
        stream.write(&view, &3f32.to_le_bytes()).unwrap();
        stream.record().unwrap()
    };
    assert!(event.is_done());
    assert_eq!(value(backend.stream().unwrap().as_ref(), &view), 3.0);
}

#[derive(Debug)]
struct Elsewhere;

impl kvcore::Storage for Elsewhere {
    fn len(&self) -> usize {
        64
    }
    fn address(&self) -> u64 {
        1 << 40
    }
    fn kind(&self) -> MemoryKind {
        MemoryKind::Device
    }
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

#[test]
fn storages_of_other_backends_are_refused_before_anything_runs() {
    let stream = CpuBackend::new().stream().unwrap();
    let view = kvcore::TensorView::new(Arc::new(Elsewhere), DType::F32, &[4]).unwrap();
    assert!(matches!(stream.write(&view, &[0; 16]), Err(Error::ForeignHandle { .. })));
    assert!(matches!(stream.read(&view, &mut [0; 16]), Err(Error::ForeignHandle { .. })));
}
