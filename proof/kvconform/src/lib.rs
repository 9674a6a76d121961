//! The conformance suite, which defines a correct backend.
//!
//! Every case compares a backend with arithmetic written out in f64 ([`oracle`]); no case compares it with
//! another backend. All backends share the same cases, inputs and tolerances. A backend is complete when
//! [`CASES`] pass for every element type.
//!
//! ```
//! use kvconform::{Bench, CASES};
//! use kvcore::DType;
//!
//! let bench = Bench::new(kvbackend_cpu::CpuBackend::new(), DType::BF16)?;
//! for case in CASES {
//!     case.run(&bench).unwrap_or_else(|failure| panic!("{}: {failure}", case.name));
//! }
//! # Ok::<(), kvcore::Error>(())
//! ```
//!
//! ```text
//! cases        CASES: what every backend must do, seen only through kvcore
//! collectives  the collectives of a group of ranks, each against plain loops
//! devices      cases for several devices, faults and failing groups; a backend's tests supply the devices
//! oracle       the operations' arithmetic in f64
//! bench        the workbench of a case: a backend, a stream, an element type, comparisons
//! raw          bytes on devices, for tests that compare bytes
//! backends     the backends of this build, by the name given to `conform --backend`
//! skip         tests that cannot run on a machine
//! ```

#![forbid(unsafe_code)]

mod bench;
pub mod cases;
mod collectives;
pub mod devices;
pub mod oracle;
pub mod raw;

mod backends;
mod skip;

pub use backends::{BACKENDS, NamedBackend};
pub use bench::{Bench, Failure, Outcome};
pub use cases::{CASES, Case};
pub use collectives::{RankUnderTest, run_collectives};
pub use devices::{
    DeviceRig, DriverDouble, GroupRig, refused_calls, refused_group_calls, run_devices, run_groups,
    silent_calls,
};
pub use skip::{STRICT, is_strict, skip};
