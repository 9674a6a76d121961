//! The conformance suite: the definition of a correct backend.
//!
//! Every case compares a backend with arithmetic written out in f64 ([`oracle`]); no case compares it with
//! another backend. Cases, inputs and tolerances are common to all backends. A backend is complete when
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

#![forbid(unsafe_code)]

mod bench;
pub mod cases;
mod collectives;
pub mod oracle;

mod backends;
mod skip;

pub use backends::{BACKENDS, NamedBackend};
pub use bench::{Bench, Failure, Outcome};
pub use cases::{CASES, Case};
pub use collectives::{RankUnderTest, run_collectives};
pub use skip::{STRICT, is_strict, skip};
