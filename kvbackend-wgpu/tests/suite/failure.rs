//! Errors explain what to do, and the process survives them.

use kvbackend_wgpu::{WgpuBackend, WgpuOptions};
use kvcore::{
    Backend, BlockOrder, CopyTensor, DType, Error, KvShape, MemoryKind, Scatter, TensorView, WriteSlots,
    allocate_tensor,
};

use crate::common::{arena, download, noise, opened, shared, upload};

#[test]
fn an_unknown_adapter_is_named_with_the_known_ones() {
    let Some(_) = shared() else { return };
    let options = WgpuOptions { adapter: Some("no such card".to_owned()), ..WgpuOptions::default() };
    let Err(Error::NoDevice { backend: "wgpu", reason }) = WgpuBackend::with_options(&options) else {
        panic!("an unknown adapter was opened")
    };
    let first = &kvbackend_wgpu::adapters()[0];
    let known = format!("0 ({})", first.name);
    assert!(reason.contains("no such card") && reason.contains(&known), "{reason}");
    for name in ["0".to_owned(), first.name.to_uppercase()] {
        let options = WgpuOptions { adapter: Some(name), ..WgpuOptions::default() };
        assert!(WgpuBackend::with_options(&options).is_ok());
    }
}

#[test]
fn a_device_without_what_kernels_need_is_refused_before_anything_runs() {
    let Some(backend) = shared() else { return };
    // The caller opens another device of the same adapter, with the lowest limits.
    let instance = kvbackend_wgpu::wgpu::Instance::new(
        kvbackend_wgpu::wgpu::InstanceDescriptor::new_without_display_handle(),
    );
    let adapters = pollster::block_on(instance.enumerate_adapters(kvbackend_wgpu::wgpu::Backends::PRIMARY));
    let descriptor = kvbackend_wgpu::wgpu::DeviceDescriptor {
        required_limits: kvbackend_wgpu::wgpu::Limits::downlevel_defaults(),
        ..Default::default()
    };
    let (device, queue) = pollster::block_on(adapters[0].request_device(&descriptor)).unwrap();
    let refused = WgpuBackend::from_device(device, queue, &WgpuOptions::default());
    let Err(Error::NoDevice { reason, .. }) = refused else { panic!("{refused:?}") };
    assert!(reason.contains("storage buffers"), "{reason}");
    drop(backend);
}

#[test]
fn a_pool_larger_than_a_buffer_is_refused_with_the_limit() {
    let Some(backend) = shared() else { return };
    let limit = backend.device().limits().max_buffer_size;
    let Err(Error::Allocation { bytes, reason, .. }) =
        backend.allocate(MemoryKind::Device, limit as usize + 1)
    else {
        panic!("more than the largest buffer was allocated")
    };
    assert!(bytes as u64 == limit + 1 && reason.contains(&limit.to_string()), "{reason}");
    assert!(backend.allocate(MemoryKind::Device, 64).is_ok(), "the device goes on");
}

#[test]
fn a_lost_device_is_an_error_of_every_wait_and_of_no_other_device() {
    let Some(backend) = opened(&WgpuOptions::default()) else { return };
    let Some(other) = opened(&WgpuOptions::default()) else { return };
    let stream = backend.stream().unwrap();
    let view = upload(backend.as_ref(), DType::U8, &[64], &noise(1, 64));
    let copy = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::U8, &[64]).unwrap();
    stream.copy_tensor(&CopyTensor { src: view.clone(), dst: copy.clone() }).unwrap();
    let event = stream.record().unwrap();
    backend.device().destroy();
    let lost = |what: &str, result: kvcore::Result<()>| {
        assert!(matches!(result, Err(Error::DeviceLost { backend: "wgpu", .. })), "{what} gave {result:?}");
    };
    // Whether the copy is recorded or refused, no wait may return as if it had run.
    let _ = stream.copy_tensor(&CopyTensor { src: view.clone(), dst: copy });
    lost("an event", event.wait());
    lost("a read", stream.read(&view, &mut [0; 64]));
    lost("a wait", stream.synchronize());
    lost("a write", stream.write(&view, &[0; 64]));
    assert!(event.is_done(), "what never comes is not waited for");
    lost("an allocation", backend.allocate(MemoryKind::Device, 64).map(drop));
    lost("a stream", backend.stream().map(drop));
    drop((stream, event, view));

    let bytes = noise(2, 64);
    let view = upload(other.as_ref(), DType::U8, &[64], &bytes);
    assert_eq!(download(other.stream().unwrap().as_ref(), &view), bytes);
}

#[test]
fn memory_of_another_device_is_foreign() {
    let (Some(one), Some(other)) = (shared(), opened(&WgpuOptions::default())) else { return };
    let view = upload(other.as_ref(), DType::U8, &[64], &noise(1, 64));
    let here = allocate_tensor(one.as_ref(), MemoryKind::Device, DType::U8, &[64]).unwrap();
    let stream = one.stream().unwrap();
    let foreign = |result: kvcore::Result<()>| {
        assert!(matches!(result, Err(Error::ForeignHandle { backend: "wgpu", .. })), "{result:?}");
    };
    foreign(stream.copy_tensor(&CopyTensor { src: view.clone(), dst: here }));
    foreign(stream.read(&view, &mut [0; 64]));
    foreign(stream.wait_for(&other.stream().unwrap().record().unwrap()));
}

#[test]
fn more_rows_than_a_grid_has_in_one_dimension_are_moved() {
    let Some(backend) = shared() else { return };
    let limit = backend.device().limits().max_compute_workgroups_per_dimension as usize;
    let rows = limit / 8 + 100; // of eight heads, each a workgroup
    let stream = backend.stream().unwrap();
    let shape = KvShape {
        num_layers: 1,
        num_blocks: rows.div_ceil(16),
        block_size: 16,
        k_heads: 8,
        v_heads: 8,
        k_dim: 2,
        v_dim: 2,
        format: DType::BF16.into(),
        order: BlockOrder::TokenMajor,
    };
    let arena = arena(backend.as_ref(), shape);
    let values: Vec<u8> = (0..rows * 16).flat_map(|i| ((i % 251) as f32).to_ne_bytes()).collect();
    let view = upload(backend.as_ref(), DType::F32, &[rows, 8, 2], &values);
    let slots = (0..rows as i64).collect::<Vec<_>>();
    stream
        .scatter(&Scatter {
            arena: arena.clone(),
            layer: 0,
            k: view.clone(),
            v: view,
            slots: WriteSlots::unchecked(slots),
            rotation: None,
        })
        .unwrap();
    let stored = TensorView::new(std::sync::Arc::clone(arena.v()), DType::BF16, &[rows * 16]).unwrap();
    let stored = download(stream.as_ref(), &stored);
    for (i, bytes) in stored.chunks_exact(2).enumerate() {
        let got = half::bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
        assert!(got == (i % 251) as f32, "element {i} is {got}");
    }
}
