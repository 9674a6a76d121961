//! Compiled kernels, cached by shader and pipeline constants.

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::sync::Arc;

use kvcore::Result;
use parking_lot::Mutex;
use smallvec::SmallVec;
use wgpu::{
    BindGroup, BindGroupDescriptor, BindGroupEntry, BindGroupLayout, BindGroupLayoutDescriptor,
    BindGroupLayoutEntry, BindingResource, BindingType, Buffer, BufferBinding, BufferBindingType,
    ComputePipeline, ComputePipelineDescriptor, PipelineCompilationOptions, PipelineLayoutDescriptor,
    ShaderModuleDescriptor, ShaderSource, ShaderStages,
};

const ARGS: &str = include_str!("shaders/args.wgsl");
const AXES: &str = include_str!("shaders/axes.wgsl");
const ROW: &str = include_str!("shaders/row.wgsl");
const WORDS: &str = include_str!("shaders/words.wgsl");
const ELEMENT: &str = include_str!("shaders/element.wgsl");
const ATTEND_TILE: &str = include_str!("shaders/attend_tile.wgsl");
const F16_NATIVE: &str = include_str!("shaders/f16_native.wgsl");
const F16_PACKED: &str = include_str!("shaders/f16_packed.wgsl");

// Decision: docs/decisions/backend-wgpu.md#kernels-that-move-rows-share-a-shader
/// The kernels. Each shader's file documents its bindings and constants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Shader {
    CopyUnits,
    CopyBytes,
    ConvertRows,
    Attend,
    Merge,
    Mass,
    Sums,
}

impl Shader {
    fn body(self) -> &'static str {
        match self {
            Self::CopyUnits => include_str!("shaders/copy_units.wgsl"),
            Self::CopyBytes => include_str!("shaders/copy_bytes.wgsl"),
            Self::ConvertRows => include_str!("shaders/convert_rows.wgsl"),
            Self::Attend => include_str!("shaders/attend.wgsl"),
            Self::Merge => include_str!("shaders/merge.wgsl"),
            Self::Mass => include_str!("shaders/mass.wgsl"),
            Self::Sums => include_str!("shaders/sums.wgsl"),
        }
    }

    /// Returns, for each binding, true if it is declared as writable. A binding must be writable if the
    /// kernel writes it, or if it may share its buffer with a binding that the kernel writes.
    fn written(self) -> &'static [bool] {
        match self {
            Self::CopyUnits | Self::CopyBytes | Self::Sums => &[false, true, true],
            Self::ConvertRows => &[false, true, true, true, true, false],
            Self::Attend | Self::Mass => {
                &[false, false, false, false, false, false, false, false, true, false]
            }
            Self::Merge => &[false, true, true, true, false],
        }
    }

    /// Returns the complete source code, which is assembled here because WGSL has no includes.
    pub(crate) fn text(self, native_f16: bool, texts: &str) -> String {
        let f16 = if native_f16 { F16_NATIVE } else { F16_PACKED };
        let parts: &[&str] = match self {
            Self::CopyUnits => &[ARGS, AXES],
            Self::CopyBytes => &[ARGS, AXES, WORDS],
            Self::ConvertRows | Self::Merge => &[ARGS, WORDS, f16, ELEMENT, ROW],
            Self::Attend | Self::Mass => &[ARGS, f16, ELEMENT, ATTEND_TILE],
            Self::Sums => &[ARGS],
        };
        let enable = if parts.contains(&F16_NATIVE) { "enable f16;\nenable wgpu_int16;\n" } else { "" };
        [enable, texts].iter().chain(parts).chain([&self.body()]).copied().collect()
    }
}

/// The name and value of a pipeline constant.
pub(crate) type Constant = (&'static str, f64);

/// The names of constants, and the bits of their values.
type Values = SmallVec<[(&'static str, u64); 18]>;

/// A kernel that is ready to run.
#[derive(Debug)]
pub(crate) struct Pipeline {
    pub(crate) handle: ComputePipeline,
    layout: BindGroupLayout,
}

/// A part of a buffer, in bytes.
#[derive(Debug, Clone)]
pub(crate) struct Binding {
    pub(crate) buffer: Buffer,
    pub(crate) offset: u64,
    pub(crate) size: u64,
}

impl Binding {
    pub(crate) fn whole(buffer: &Buffer) -> Self {
        Self { buffer: buffer.clone(), offset: 0, size: buffer.size() }
    }
}

impl Pipeline {
    /// Creates a bind group with the given parts of buffers as bindings 0, 1, 2 and so on.
    pub(crate) fn bind<'a>(
        &self,
        device: &wgpu::Device,
        bindings: impl Iterator<Item = &'a Binding>,
    ) -> BindGroup {
        let entries: SmallVec<[_; 10]> = (0..)
            .zip(bindings)
            .map(|(binding, part)| BindGroupEntry {
                binding,
                resource: BindingResource::Buffer(BufferBinding {
                    buffer: &part.buffer,
                    offset: part.offset,
                    size: NonZeroU64::new(part.size),
                }),
            })
            .collect();
        let descriptor = BindGroupDescriptor { label: None, layout: &self.layout, entries: &entries };
        device.create_bind_group(&descriptor)
    }

    /// Compiles a kernel from its source code.
    pub(crate) fn compile(
        device: &wgpu::Device,
        shader: Shader,
        text: String,
        constants: &[Constant],
    ) -> Self {
        let label = format!("{shader:?}");
        let module = device.create_shader_module(ShaderModuleDescriptor {
            label: Some(&label),
            source: ShaderSource::Wgsl(text.into()),
        });
        let entries: Vec<BindGroupLayoutEntry> = (0..)
            .zip(shader.written())
            .map(|(binding, &written)| BindGroupLayoutEntry {
                binding,
                visibility: ShaderStages::COMPUTE,
                ty: BindingType::Buffer {
                    ty: BufferBindingType::Storage { read_only: !written },
                    has_dynamic_offset: false,
                    min_binding_size: None,
                },
                count: None,
            })
            .collect();
        let layout = device
            .create_bind_group_layout(&BindGroupLayoutDescriptor { label: Some(&label), entries: &entries });
        let pipeline_layout = device.create_pipeline_layout(&PipelineLayoutDescriptor {
            label: Some(&label),
            bind_group_layouts: &[Some(&layout)],
            immediate_size: 0,
        });
        let handle = device.create_compute_pipeline(&ComputePipelineDescriptor {
            label: Some(&label),
            layout: Some(&pipeline_layout),
            module: &module,
            entry_point: Some("main"),
            // Every kernel writes the workgroup memory that it uses, and attention masks the tokens that it
            // reads past the end of a run.
            compilation_options: PipelineCompilationOptions {
                constants,
                zero_initialize_workgroup_memory: false,
            },
            cache: None,
        });
        Self { handle, layout }
    }
}

/// The kernels that have been compiled for a device so far.
pub(crate) struct Pipelines {
    native_f16: bool,
    made: Mutex<HashMap<(Shader, Values), Arc<Pipeline>>>,
}

impl Pipelines {
    pub(crate) fn new(native_f16: bool) -> Self {
        Self { native_f16, made: Mutex::default() }
    }

    /// Returns the kernel with the given constants. On first use, `make` compiles it; its argument is true if
    /// the kernel reads f16 with the device's own arithmetic.
    pub(crate) fn get(
        &self,
        shader: Shader,
        constants: &[Constant],
        make: impl FnOnce(bool) -> Result<Pipeline>,
    ) -> Result<Arc<Pipeline>> {
        let values: Values = constants.iter().map(|&(name, value)| (name, value.to_bits())).collect();
        let key = (shader, values);
        let mut made = self.made.lock();
        if let Some(pipeline) = made.get(&key) {
            return Ok(Arc::clone(pipeline));
        }
        let pipeline = Arc::new(make(self.native_f16)?);
        made.insert(key, Arc::clone(&pipeline));
        Ok(pipeline)
    }
}
