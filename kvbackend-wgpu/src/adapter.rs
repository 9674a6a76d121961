//! Adapters: listing this machine's adapters, and choosing one.

use kvcore::{Error, Result};
use wgpu::{
    Adapter, Backends, DeviceDescriptor, DeviceType, Features, Instance, InstanceDescriptor, Limits,
    MemoryHints, Queue,
};

use crate::device::{NAME, NATIVE_F16};
use crate::options::WgpuOptions;

/// The number of storage buffers that the attention kernel binds. No other kernel binds more.
const STORAGE_BUFFERS: u32 = 10;

/// The number of threads in the largest workgroup.
const INVOCATIONS: u32 = 256;

/// An adapter of this machine: a GPU, or software that acts as one.
#[derive(Debug, Clone)]
pub struct AdapterReport {
    /// The name that the driver reports.
    pub name: String,
    /// The graphics interface: `vulkan`, `metal` or `dx12`.
    pub interface: String,
    /// The type of device: `discrete`, `integrated`, `virtual`, `cpu` or `other`.
    pub kind: &'static str,
    /// The driver's name and version.
    pub driver: String,
    /// The size of the largest buffer that the device can create, in bytes.
    pub max_buffer: u64,
    /// The maximum number of a buffer's bytes that a kernel can bind at once. Larger buffers are bound in
    /// parts.
    pub max_binding: u64,
    /// The maximum memory per workgroup, in bytes.
    pub workgroup_memory: u32,
    /// True if kernels read f16 with the device's own 16-bit arithmetic. If false, they use bit operations.
    pub native_f16: bool,
    /// True if the device can bind host memory, which `pinned` and `system` memory need.
    pub host_memory: bool,
    /// The reason why the backend cannot use the adapter, or `None` if it can.
    pub unfit: Option<String>,
}

/// Returns this machine's adapters, in the order of the indices for [`WgpuOptions::adapter`].
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

/// Returns a sentence about the first limit that is too low for the kernels, or `None` if all limits are high
/// enough.
pub(crate) fn unfit(limits: &Limits) -> Option<String> {
    [
        ("storage buffers in a shader", limits.max_storage_buffers_per_shader_stage, STORAGE_BUFFERS),
        ("threads in a workgroup", limits.max_compute_invocations_per_workgroup, INVOCATIONS),
    ]
    .into_iter()
    .find(|(_, has, needs)| has < needs)
    .map(|(what, has, needs)| format!("it allows {has} {what}, but the kernels need {needs}"))
}

/// Opens the adapter that the options select.
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

/// The message for a machine without any adapter.
pub const NO_ADAPTER: &str = "no Vulkan, Metal or DirectX 12 adapter was found; install the GPU's driver, or a software \
                          adapter (Debian, Ubuntu: apt-get install mesa-vulkan-drivers libvulkan1)";

fn chosen<'a>(adapters: &'a [Adapter], wanted: &str) -> std::result::Result<&'a Adapter, String> {
    let names: Vec<String> = adapters.iter().map(|adapter| adapter.get_info().name).collect();
    let by_number = wanted.parse::<usize>().ok().and_then(|i| adapters.get(i));
    let by_name = || {
        let wanted = wanted.to_lowercase();
        names.iter().position(|name| name.to_lowercase().contains(&wanted)).map(|i| &adapters[i])
    };
    by_number.or_else(by_name).ok_or_else(|| {
        let list: Vec<String> = names.iter().enumerate().map(|(i, name)| format!("{i} ({name})")).collect();
        format!("no adapter matches {wanted:?}; use one of these: {}", list.join(", "))
    })
}
