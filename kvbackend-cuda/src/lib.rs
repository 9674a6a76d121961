//! The CUDA backend: NVIDIA GPUs from compute capability 8.0 (Ampere) on.
//!
//! Nothing of CUDA is needed to build: the driver library is loaded at run time, and the kernels are compiled to PTX
//! that is part of this crate. Without a driver or a device, [`CudaBackend::new`] returns
//! [`kvcore::Error::NoDevice`], which says what was tried.
//!
//! ```
//! use kvbackend_cuda::CudaBackend;
//! use kvcore::{Backend, DType, MemoryKind, allocate_tensor};
//!
//! # if let Err(reason) = CudaBackend::new() {
//! #     return Ok(kvconform::skip(reason));
//! # }
//! let backend = CudaBackend::new()?;
//! let stream = backend.stream()?;
//! let tensor = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[2])?;
//! stream.write(&tensor, &[0, 0, 128, 63, 0, 0, 0, 64])?; // 1.0, 2.0
//! let mut bytes = [0; 8];
//! stream.read(&tensor, &mut bytes)?;
//! assert_eq!(bytes, [0, 0, 128, 63, 0, 0, 0, 64]);
//! # Ok::<(), kvcore::Error>(())
//! ```

mod backend;
mod compile;
pub mod dense;
mod device;
mod driver;
mod facts;
mod kernels;
mod memory;
mod module;
mod nccl;
mod options;
mod queue;
mod report;
mod stream;
mod tables;

pub use backend::CudaBackend;
pub use cudarc;
pub use memory::{CudaReserved, CudaStorage};
pub use nccl::{NcclCommunicator, NcclId};
pub use options::{CudaOptions, KernelCode};
pub use queue::{CudaEvent, CudaStream};
pub use report::{DeviceReport, devices};
