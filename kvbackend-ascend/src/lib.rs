//! The Ascend backend: Huawei NPUs, through CANN 8.0 or later.
//!
//! The build does not need CANN: its libraries are loaded at run time, and every function is looked up by
//! name. Without the libraries or a device, [`AscendBackend::new`] returns [`kvcore::Error::NoDevice`], which
//! names the files that were tried. Operations are composed of CANN's operators; nothing is compiled for the
//! device.
//!
//! ```text
//!                       ┌ operations ┐
//!   queue ◂ operators ◂ ┤            ├ ◂ stream ◂ backend        a ◂ b: b uses a
//!                       └ dense ─────┴──────────┘
//! ```
//!
//! | module | |
//! |---|---|
//! | `backend` | memory and streams of one NPU |
//! | `stream` | the contract's streams; the only caller of `operations::run` |
//! | `operations` | the contract's operations, as sequences of operators |
//! | `dense` | a model's steps other than attention |
//! | `operators` | two-phase calls of CANN's operators, and their tensors |
//! | `queue` | a stream's enqueued work: scratch memory, lists, events, captures |
//! | `hccl` | collectives between NPUs |
//! | `memory` | device, pinned, lent and reserved memory |
//! | `device` | an NPU: making its context current on a thread, and its errors |
//! | `library` | CANN's libraries, loaded at run time |
//! | `bindings` | declarations, made from `ffi/ascend.h` by `cargo xtask bindgen` |
//! | `options`, `report`, `errors` | options, the list of devices, errors that modules share |
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
