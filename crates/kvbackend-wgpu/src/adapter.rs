//! Adapters: what this machine has, and the choice among them.

use kvcore::{Error, Result};
use wgpu::{
    Adapter, Backends, DeviceDescriptor, DeviceType, Features, Instance, InstanceDescriptor, Limits,
    MemoryHints, Queue,
};

use crate::NAME;
use crate::device::NATIVE_F16;
use crate::options::WgpuOptions;

/// Storage buffers that the kernel of attention binds.
const STORAGE_BUFFERS: u32 = 9;

/// Threads of the largest workgroup.
const INVOCATIONS: u32 = 256;

/// An adapter of this machine: a GPU, or a program that acts as one.
#[derive(Debug, Clone)]
pub struct AdapterReport {
    /// Name, as the driver gives it.
    pub name: String,
    /// The interface: `vulkan`, `metal`, `dx12`.
    pub interface: String,
    /// `discrete`, `integrated`, `virtual`, `cpu` or `other`.
    pub kind: &'static str,
    /// Driver and its version.
    pub driver: String,
    /// Bytes of the largest buffer.
    pub max_buffer: u64,
    /// Bytes of a buffer that a kernel can bind at once; larger ones are bound in parts.
    pub max_binding: u64,
    /// Bytes of workgroup memory.
    pub workgroup_memory: u32,
    /// Whether kernels read f16 by the device's own 16-bit arithmetic; bit operations do it elsewhere.
    pub native_f16: bool,
    /// Whether host memory can be bound, which `pinned` and `system` memory need.
    pub host_memory: bool,
    /// Why the backend cannot use it, if so.
    pub unfit: Option<String>,
}

/// The adapters of this machine, in the order in which [`WgpuOptions::adapter`] counts them.
pub fn adapters() -> Vec<AdapterReport> {
    list().iter().map(report).collect()
}

fn list() -> Vec<Adapter> {
    let instance = Instance::new(InstanceDescriptor::new_without_display_handle_from_env());
    let mut adapters = pollster::block_on(instance.enumerate_adapters(Backends::PRIMARY));
    adapters.sort_by_key(|adapter| rank(adapter.get_info().device_type));
    adapters
}

fn rank(kind: DeviceType) -> u8 {
    match kind {
        DeviceType::DiscreteGpu => 0,
        DeviceType::IntegratedGpu => 1,
        DeviceType::VirtualGpu => 2,
        DeviceType::Other => 3,
        DeviceType::Cpu => 4,
    }
}

fn report(adapter: &Adapter) -> AdapterReport {
    let (info, limits, features) = (adapter.get_info(), adapter.limits(), adapter.features());
    AdapterReport {
        interface: info.backend.to_string(),
        kind: match info.device_type {
            DeviceType::DiscreteGpu => "discrete",
            DeviceType::IntegratedGpu => "integrated",
            DeviceType::VirtualGpu => "virtual",
            DeviceType::Cpu => "cpu",
            DeviceType::Other => "other",
        },
        driver: format!("{} {}", info.driver, info.driver_info).trim().to_owned(),
        name: info.name,
        max_buffer: limits.max_buffer_size,
        max_binding: limits.max_storage_buffer_binding_size,
        workgroup_memory: limits.max_compute_workgroup_storage_size,
        native_f16: features.contains(NATIVE_F16),
        host_memory: features.contains(Features::MAPPABLE_PRIMARY_BUFFERS),
        unfit: unfit(&limits),
    }
}

/// What a device lacks that no kernel can do without.
pub(crate) fn unfit(limits: &Limits) -> Option<String> {
    [
        ("storage buffers in a shader", limits.max_storage_buffers_per_shader_stage, STORAGE_BUFFERS),
        ("threads in a workgroup", limits.max_compute_invocations_per_workgroup, INVOCATIONS),
    ]
    .into_iter()
    .find(|(_, has, needs)| has < needs)
    .map(|(what, has, needs)| format!("it allows {has} {what}, the kernels need {needs}"))
}

/// Opens the adapter that the options name.
pub(crate) fn open(options: &WgpuOptions) -> Result<(wgpu::Device, Queue)> {
    let none = |reason: String| Error::NoDevice { backend: NAME, reason };
    let adapters = list();
    if adapters.is_empty() {
        return Err(none(NO_ADAPTER.to_owned()));
    }
    let adapter = match &options.adapter {
        Some(wanted) => chosen(&adapters, wanted).map_err(none)?,
        None => adapters.iter().find(|adapter| unfit(&adapter.limits()).is_none()).unwrap_or(&adapters[0]),
    };
    let name = adapter.get_info().name;
    if let Some(reason) = unfit(&adapter.limits()) {
        return Err(none(format!(
            "{name} cannot run the kernels: {reason}; choose another adapter, or the cpu backend"
        )));
    }
    let wanted = NATIVE_F16 | Features::MAPPABLE_PRIMARY_BUFFERS;
    let descriptor = DeviceDescriptor {
        label: Some("kvbackend-wgpu"),
        required_features: adapter.features() & wanted,
        required_limits: adapter.limits(),
        memory_hints: MemoryHints::MemoryUsage,
        ..DeviceDescriptor::default()
    };
    pollster::block_on(adapter.request_device(&descriptor))
        .map_err(|error| none(format!("{name} could not be opened: {error}")))
}

/// What to do about a machine without any adapter.
pub const NO_ADAPTER: &str = "no Vulkan, Metal or DirectX 12 adapter was found; install the driver of the GPU, or a \
                          software adapter (Debian, Ubuntu: apt-get install mesa-vulkan-drivers libvulkan1)";

fn chosen<'a>(adapters: &'a [Adapter], wanted: &str) -> std::result::Result<&'a Adapter, String> {
    let names: Vec<String> = adapters.iter().map(|adapter| adapter.get_info().name).collect();
    let by_number = wanted.parse::<usize>().ok().and_then(|i| adapters.get(i));
    let by_name = || {
        let wanted = wanted.to_lowercase();
        names.iter().position(|name| name.to_lowercase().contains(&wanted)).map(|i| &adapters[i])
    };
    by_number.or_else(by_name).ok_or_else(|| {
        let list: Vec<String> = names.iter().enumerate().map(|(i, name)| format!("{i} ({name})")).collect();
        format!("no adapter is {wanted:?}; take one of these: {}", list.join(", "))
    })
}
