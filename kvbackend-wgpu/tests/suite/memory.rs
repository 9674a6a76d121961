//! Buffers: host writes at any offset, lent buffers, and buffers that sleep.

use std::sync::Arc;

use kvbackend_wgpu::wgpu::{BufferDescriptor, BufferUsages};
use kvcore::{Backend, DType, Error, MemoryKind, Storage, TensorView};

use crate::common::{download, noise, shared};

#[test]
fn bytes_go_to_any_place_and_nowhere_else() {
    let Some(backend) = shared() else { return };
    let stream = backend.stream().unwrap();
    let storage = backend.allocate(MemoryKind::Device, 3 << 20).unwrap();
    let all = TensorView::new(storage, DType::U8, &[3 << 20]).unwrap();
    let mut expected = vec![0; 3 << 20];
    for (seed, start, len) in [
        (1, 0, 0),
        (2, 0, 1),
        (3, 5, 1),
        (4, 7, 9),
        (5, 1022, 77),
        (6, 4096, 4096),
        (7, 9, (2 << 20) + 3),
        (8, 1 << 20, 2 << 20),
    ] {
        let bytes = noise(seed, len);
        stream.write(&all.slice(0, start, start + len).unwrap(), &bytes).unwrap();
        expected[start..start + len].copy_from_slice(&bytes);
        let mut seen = vec![1; len];
        stream.read(&all.slice(0, start, start + len).unwrap(), &mut seen).unwrap();
        assert!(seen == bytes, "{len} bytes from {start}");
    }
    assert!(download(stream.as_ref(), &all) == expected);
}

#[test]
fn a_lent_buffer_is_used_in_place() {
    let Some(backend) = shared() else { return };
    let make = |size: u64, usage: BufferUsages| {
        backend.device().create_buffer(&BufferDescriptor {
            label: None,
            size,
            usage,
            mapped_at_creation: false,
        })
    };
    let usage = BufferUsages::STORAGE | BufferUsages::COPY_SRC | BufferUsages::COPY_DST;
    let buffer = make(64, usage);
    backend.queue().write_buffer(&buffer, 8, &[1, 2, 3, 4]);
    let storage: Arc<dyn Storage> = Arc::new(backend.storage(buffer, MemoryKind::Device).unwrap());
    assert_eq!((storage.len(), storage.kind()), (64, MemoryKind::Device));
    let view = TensorView::new(storage, DType::U8, &[64]).unwrap();
    let stream = backend.stream().unwrap();
    assert_eq!(download(stream.as_ref(), &view)[7..13], [0, 1, 2, 3, 4, 0]);
    let refused = backend.storage(make(64, BufferUsages::COPY_DST), MemoryKind::Device);
    assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
    let odd = backend.storage(make(66, usage), MemoryKind::Device);
    assert!(matches!(odd, Err(Error::Misaligned { align: 4, .. })), "{odd:?}");
}

#[test]
fn a_storage_that_sleeps_says_so_and_wakes_empty() {
    let Some(backend) = shared() else { return };
    let stream = backend.stream().unwrap();
    let storage = backend.reserve(MemoryKind::Device, 1 << 18).unwrap();
    let view = TensorView::new(Arc::clone(&storage) as _, DType::U8, &[1 << 18]).unwrap();
    stream.write(&view, &noise(3, 1 << 18)).unwrap();
    stream.synchronize().unwrap();
    let address = storage.address();
    storage.unmap(0..storage.len()).unwrap();
    assert_eq!((storage.mapped_bytes(), storage.address()), (0, address));
    let asleep = stream.read(&view, &mut vec![0; 1 << 18]);
    assert!(matches!(asleep, Err(Error::Device { .. })), "{asleep:?}");
    storage.map(0..storage.granularity()).unwrap();
    assert!(download(stream.as_ref(), &view).iter().all(|byte| *byte == 0));
}
