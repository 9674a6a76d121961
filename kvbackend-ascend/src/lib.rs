//! The Ascend backend: NPUs of Huawei through CANN 8.0 or later.
//!
//! Nothing of CANN is needed to build: its libraries are loaded at run time, and every function is looked up by itself.
//! Without them, or without a device, [`AscendBackend::new`] returns [`kvcore::Error::NoDevice`], which says what was
//! tried. Operations are composed of CANN's operators; nothing is compiled for the device.
//!
//! ```
//! use kvbackend_ascend::AscendBackend;
//! use kvcore::{Backend, DType, MemoryKind, allocate_tensor};
//!
//! # if let Err(reason) = AscendBackend::new() {
//! #     return Ok(kvconform::skip(reason));
//! # }
//! let backend = AscendBackend::new()?;
//! let stream = backend.stream()?;
//! let tensor = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[2])?;
//! stream.write(&tensor, &[0, 0, 128, 63, 0, 0, 0, 64])?; // 1.0, 2.0
//! let mut bytes = [0; 8];
//! stream.read(&tensor, &mut bytes)?;
//! assert_eq!(bytes, [0, 0, 128, 63, 0, 0, 0, 64]);
//! # Ok::<(), kvcore::Error>(())
//! ```

mod backend;
mod bindings;
pub mod dense;
mod device;
mod errors;
mod hccl;
mod library;
mod memory;
mod operations;
mod operators;
mod options;
mod queue;
mod report;
mod stream;

pub use backend::AscendBackend;
pub use hccl::{HcclCommunicator, HcclId};
pub use library::Serves;
pub use memory::{AscendReserved, AscendStorage};
pub use options::AscendOptions;
pub use queue::AscendEvent;
pub use report::{NpuReport, OperatorReport, devices, operators};
pub use stream::AscendStream;
