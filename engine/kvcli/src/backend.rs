//! Opens backends by name, with the implementation of the dense steps that fits each.

use std::sync::Arc;

use kvcore::Backend;
use kvmodel::dense::Dense;

use crate::args::BackendName;
use crate::error::Result;

/// A backend, with the dense steps of a model that runs on it.
pub(crate) struct OpenedBackend {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) dense: Arc<dyn Dense>,
}

impl OpenedBackend {
    /// Returns a backend with dense steps on the host, on the given number of threads.
    #[cfg(any(feature = "ascend", feature = "cuda", feature = "wgpu"))]
    #[cfg_attr(
        not(feature = "cpu"),
        allow(clippy::unnecessary_wraps, reason = "threads of the CPU backend may be refused")
    )]
    fn with_host(backend: Arc<dyn Backend>, threads: Option<usize>) -> Result<Self> {
        #[cfg(feature = "cpu")]
        if threads.is_some() {
            let dense = kvmodel::dense::HostDense::on(cpu(threads)?.as_ref());
            return Ok(Self { backend, dense: Arc::new(dense) });
        }
        let _ = threads;
        Ok(Self { backend, dense: Arc::new(kvmodel::dense::HostDense::default()) })
    }
}

/// Opens the backend with the given name, like [`open_with`], with the default number of threads.
pub(crate) fn open(name: &BackendName) -> Result<OpenedBackend> {
    open_with(name, None)
}

/// Opens the backend with the given name. If `threads` is given, the CPU backend and dense steps on the host
/// use that number instead of one per processor.
///
/// # Errors
/// Returns an error if this program was built without the backend, or if the machine has no such device.
#[cfg_attr(
    not(any(feature = "ascend", feature = "cpu", feature = "cuda", feature = "wgpu")),
    allow(unused_variables, reason = "this build has no backend")
)]
pub(crate) fn open_with(name: &BackendName, threads: Option<usize>) -> Result<OpenedBackend> {
    match name {
        #[cfg(feature = "cpu")]
        BackendName::Cpu => {
            let backend = cpu(threads)?;
            Ok(OpenedBackend { dense: Arc::new(kvmodel::dense::HostDense::on(&backend)), backend })
        }
        #[cfg(not(feature = "cpu"))]
        BackendName::Cpu => Err(crate::error::Error::NoBackend("cpu")),
        #[cfg(feature = "cuda")]
        BackendName::Cuda(device) => cuda(*device, threads),
        #[cfg(not(feature = "cuda"))]
        BackendName::Cuda(_) => Err(crate::error::Error::NoBackend("cuda")),
        #[cfg(feature = "ascend")]
        BackendName::Ascend { device, plain } => {
            let options = kvbackend_ascend::AscendOptions { device: *device, plain: *plain };
            let backend =
                kvbackend_ascend::AscendBackend::with_options(&options).map_err(kvengine::Error::from)?;
            let dense = kvmodel::dense::AscendDense::new(&backend);
            with_dense(backend, dense.map(|dense| Arc::new(dense) as Arc<dyn Dense>), threads)
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
            OpenedBackend::with_host(backend, threads)
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
fn cuda(device: usize, threads: Option<usize>) -> Result<OpenedBackend> {
    let options = kvbackend_cuda::CudaOptions { device, ..kvbackend_cuda::CudaOptions::default() };
    let backend = kvbackend_cuda::CudaBackend::with_options(&options).map_err(kvengine::Error::from)?;
    let dense = kvmodel::dense::CudaDense::new(&backend);
    with_dense(backend, dense.map(|dense| Arc::new(dense) as Arc<dyn Dense>), threads)
}

/// Returns a backend with `dense`, its device's dense steps. If the device's libraries cannot run the steps,
/// the steps run on the host instead, and a note on standard error explains this.
#[cfg(any(feature = "ascend", feature = "cuda"))]
fn with_dense(
    backend: Arc<dyn Backend>,
    dense: kvmodel::Result<Arc<dyn Dense>>,
    threads: Option<usize>,
) -> Result<OpenedBackend> {
    match dense {
        Ok(dense) => Ok(OpenedBackend { backend, dense }),
        Err(kvmodel::Error::Core(kvcore::Error::NoDevice { reason, .. })) => {
            note!(
                "note: norms and matrix products run on the CPU, which is slow and prevents captured decode steps, \
                 because {reason}"
            );
            OpenedBackend::with_host(backend, threads)
        }
        Err(other) => Err(other.into()),
    }
}
