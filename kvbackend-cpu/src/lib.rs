//! The CPU backend: host memory, ordered streams, reference kernels and fast kernels.
//!
//! The reference kernels state the contract of [`kvcore::device::operation`] as plain loops, in f32
//! arithmetic for every element type. They are the oracle for every fast kernel, on the CPU and on other
//! devices. [`CpuOptions`] chooses between reference and fast kernels, and sets the instruction set and the
//! threads of the fast kernels.
//!
//! - `backend`, `options`, `stream`: the backend, its settings, and its work queues
//! - `memory`: owned, lent and reserved bytes, and their range locks
//! - `kernels`: the kernel of each operation, reference or fast
//! - `reference`: plain loops, the oracle
//! - `fast`: kernels that run at memory speed; `fast::attend` is attention
//! - `simd`: vectors for each instruction set, chosen at run time, and AMX tiles
//! - [`dense`]: products with stored matrices, and a model's steps between these products
//! - `element`, `plane`, `movement`: element types, and cache rows in any format
//! - `foreign`: copies to and from other engines' caches
//! - `communicator`: ranks that are threads of the process
//! - `workers`, `load`: threads, and an estimate of how busy other programs keep the cores
//! - `raw`, `writes`: bytes shared by threads, and the storages that an operation writes to
//!
//! All `unsafe` code is in `memory`, `raw`, `workers`, `load`, `simd`, `fast` and `dense`.
//!
//! ```
//! use kvbackend_cpu::CpuBackend;
//! use kvcore::{Backend, DType, MemoryKind, allocate_tensor};
//!
//! let backend = CpuBackend::new();
//! let stream = backend.stream()?;
//! let tensor = allocate_tensor(backend.as_ref(), MemoryKind::System, DType::F32, &[2])?;
//! stream.write(&tensor, &[0, 0, 128, 63, 0, 0, 0, 64])?; // 1.0, 2.0
//! let mut bytes = [0; 8];
//! stream.read(&tensor, &mut bytes)?;
//! assert_eq!(bytes, [0, 0, 128, 63, 0, 0, 0, 64]);
//! # Ok::<(), kvcore::Error>(())
//! ```

mod backend;
mod communicator;
#[allow(
    clippy::inline_always,
    clippy::cast_ptr_alignment,
    reason = "what is not inlined is not compiled for the instruction set; results are vectors of f32"
)]
pub mod dense;
mod element;
#[allow(
    clippy::inline_always,
    clippy::cast_ptr_alignment,
    reason = "what is not inlined is not compiled for the instruction set; views are aligned for their elements"
)]
mod fast;
mod foreign;
mod kernels;
mod load;
mod memory;
mod movement;
mod options;
mod plane;
mod raw;
mod reference;
#[allow(
    clippy::inline_always,
    clippy::cast_ptr_alignment,
    reason = "as for `fast`; vectors are loaded unaligned"
)]
mod simd;
mod stream;
mod workers;
mod writes;

pub use backend::CpuBackend;
pub use communicator::ThreadCommunicator;
pub use foreign::{ForeignCache, ForeignLoad, ForeignOrder, ForeignPlane, ForeignShape};
#[cfg(target_os = "linux")]
pub use memory::CpuReserved;
pub use memory::{CpuStorage, HostView, HostViewMut, LentBytes, LentMemory};
pub use options::{CpuOptions, Execution, KernelSet, Thresholds};
pub use simd::SimdLevel;
pub use stream::{CpuEvent, CpuStream};

/// Name of the backend in errors and on command lines.
pub(crate) const NAME: &str = "cpu";
