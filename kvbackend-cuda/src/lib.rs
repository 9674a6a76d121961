//! The CUDA backend: NVIDIA GPUs of compute capability 8.0 (Ampere) or later.
//!
//! The build does not need CUDA: the driver library is loaded at run time, and the kernels are included in
//! this crate as PTX. Without a driver or a device, [`CudaBackend::new`] returns
//! [`kvcore::Error::NoDevice`], whose message explains what to do.
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
//!
//! # Modules
//! A module only uses the modules to its left. `stream` is the only caller of `kernels::lower`.
//!
//! ```text
//! driver ◂ facts ◂ compile ◂ module ◂ device ◂ memory ◂ tables ◂ queue ◂ kernels ◂ stream
//!                                                                  ▲
//!                                                               backend ◂ dense, nccl
//! ```
//!
//! | module | holds |
//! |---|---|
//! | `backend` | [`CudaBackend`]: opens a device, creates storages and streams |
//! | `compile` | kernels that NVRTC compiles on this machine, cached in a folder |
//! | [`dense`] | a model's steps other than attention; cuBLAS |
//! | `device` | an open device: context, setup stream, memory pool, health |
//! | `driver` | the driver library, its errors, making a context current on a thread |
//! | `facts` | properties of a device, as reported by the driver |
//! | `kernels` | operations lowered to launches: copies, conversions, attention |
//! | `memory` | storages: allocated, lent and reserved; copies from other devices |
//! | `module` | kernels by name, and the PTX that holds them |
//! | `nccl` | collectives through NCCL |
//! | `options` | [`CudaOptions`] |
//! | `queue` | streams with their enqueued work, events, captures, graphs |
//! | `report` | the machine's devices, for display |
//! | `stream` | `impl Stream for CudaStream` |
//! | `tables` | RoPE tables on the device |

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
pub use report::{CudaReport, devices};
