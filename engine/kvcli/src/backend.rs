//! Opens backends by name, with the implementation of the dense steps that fits each.

use std::sync::Arc;

use kvcore::Backend;
#[cfg(any(feature = "ascend", feature = "cpu", feature = "cuda", feature = "wgpu"))]
use kvmodel::dense::HostDense;
use kvmodel::dense::{ComputeType, Dense};

use crate::args::BackendName;
use crate::error::Result;

/// The way in which dense steps on the host compute.
#[derive(Debug, Clone, Copy, Default)]
#[cfg_attr(
    not(feature = "cpu"),
    allow(dead_code, reason = "the number of threads is that of the CPU backend")
)]
pub(crate) struct HostSteps {
    /// The number of threads, which the CPU backend uses, too. Default: one per processor.
    pub(crate) threads: Option<usize>,
    /// The precision of projections.
    pub(crate) compute: ComputeType,
}

/// A backend, with the dense steps of a model that runs on it.
pub(crate) struct OpenedBackend {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) dense: Arc<dyn Dense>,
}

impl OpenedBackend {
    /// Returns a backend with dense steps on the host.
    #[cfg(any(feature = "ascend", feature = "cuda", feature = "wgpu"))]
    #[cfg_attr(
        not(feature = "cpu"),
        allow(clippy::unnecessary_wraps, reason = "threads of the CPU backend may be refused")
    )]
    fn with_host(backend: Arc<dyn Backend>, host: HostSteps) -> Result<Self> {
        #[cfg(feature = "cpu")]
        if host.threads.is_some() {
            let dense = HostDense::on(cpu(host.threads)?.as_ref()).with_compute(host.compute);
            return Ok(Self { backend, dense: Arc::new(dense) });
        }
        Ok(Self { backend, dense: Arc::new(HostDense::default().with_compute(host.compute)) })
    }
}

/// Opens the backend with the given name, and dense steps on its device or, if it has none, on the host.
///
/// # Errors
/// Returns an error if this program was built without the backend, if the machine has no such device, or if the device
/// has dense steps that cannot compute as `host` says.
#[cfg_attr(
    not(any(feature = "ascend", feature = "cpu", feature = "cuda", feature = "wgpu")),
    allow(unused_variables, reason = "this build has no backend")
)]
pub(crate) fn open(name: &BackendName, host: HostSteps) -> Result<OpenedBackend> {
    match name {
        #[cfg(feature = "cpu")]
        BackendName::Cpu => {
            let backend = cpu(host.threads)?;
            let dense = HostDense::on(&backend).with_compute(host.compute);
            Ok(OpenedBackend { dense: Arc::new(dense), backend })
        }
        #[cfg(not(feature = "cpu"))]
        BackendName::Cpu => Err(crate::error::Error::NoBackend("cpu")),
        #[cfg(feature = "cuda")]
        BackendName::Cuda(device) => cuda(*device, host),
        #[cfg(not(feature = "cuda"))]
        BackendName::Cuda(_) => Err(crate::error::Error::NoBackend("cuda")),
        #[cfg(feature = "ascend")]
        BackendName::Ascend { device, plain } => {
            let options = kvbackend_ascend::AscendOptions { device: *device, plain: *plain };
            let backend =
                kvbackend_ascend::AscendBackend::with_options(&options).map_err(kvengine::Error::from)?;
            let dense = kvmodel::dense::AscendDense::new(&backend);
            with_dense(backend, dense.map(|dense| Arc::new(dense) as Arc<dyn Dense>), host)
        }
        #[cfg(not(feature = "ascend"))]
        BackendName::Ascend { .. } => Err(crate::error::Error::NoBackend("ascend")),
        #[cfg(feature = "wgpu")]
        BackendName::Wgpu(adapter) => {
            let options = kvbackend_wgpu::WgpuOptions {
                adapter: adapter.clone(),
                ..kvbackend_wgpu::WgpuOptions::default()
            };
            let backend =
                kvbackend_wgpu::WgpuBackend::with_options(&options).map_err(kvengine::Error::from)?;
            OpenedBackend::with_host(backend, host)
        }
        #[cfg(not(feature = "wgpu"))]
        BackendName::Wgpu(_) => Err(crate::error::Error::NoBackend("wgpu")),
    }
}

/// Opens the CPU backend.
#[cfg(feature = "cpu")]
fn cpu(threads: Option<usize>) -> Result<Arc<kvbackend_cpu::CpuBackend>> {
    let options = kvbackend_cpu::CpuOptions { threads, ..kvbackend_cpu::CpuOptions::default() };
    Ok(kvbackend_cpu::CpuBackend::with_options(&options).map_err(kvengine::Error::from)?)
}

/// Opens a CUDA device.
#[cfg(feature = "cuda")]
fn cuda(device: usize, host: HostSteps) -> Result<OpenedBackend> {
    let options = kvbackend_cuda::CudaOptions { device, ..kvbackend_cuda::CudaOptions::default() };
    let backend = kvbackend_cuda::CudaBackend::with_options(&options).map_err(kvengine::Error::from)?;
    let dense = kvmodel::dense::CudaDense::new(&backend);
    with_dense(backend, dense.map(|dense| Arc::new(dense) as Arc<dyn Dense>), host)
}

/// Returns a backend with `dense`, its device's dense steps, which are exact. If the device's libraries cannot run the steps,
/// the steps run on the host instead, and a note on standard error explains this.
#[cfg(any(feature = "ascend", feature = "cuda"))]
fn with_dense(
    backend: Arc<dyn Backend>,
    dense: kvmodel::Result<Arc<dyn Dense>>,
    host: HostSteps,
) -> Result<OpenedBackend> {
    match dense {
        Ok(_) if host.compute != ComputeType::Exact => Err(crate::error::Error::ExactOnly(host.compute)),
        Ok(dense) => Ok(OpenedBackend { backend, dense }),
        Err(kvmodel::Error::Core(kvcore::Error::NoDevice { reason, .. })) => {
            note!(
                "note: norms and matrix products run on the CPU, which is slow and prevents captured decode steps, \
                 because {reason}"
            );
            OpenedBackend::with_host(backend, host)
        }
        Err(other) => Err(other.into()),
    }
}
