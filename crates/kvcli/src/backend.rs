//! Backends by name.

use std::sync::Arc;

use kvcore::Backend;

use crate::args::BackendName;
use crate::error::Result;

/// The backend of that name.
///
/// # Errors
/// If this program was built without it.
#[cfg_attr(feature = "cpu", allow(clippy::unnecessary_wraps, reason = "other builds lack a backend"))]
pub(crate) fn open(name: BackendName) -> Result<Arc<dyn Backend>> {
    match name {
        #[cfg(feature = "cpu")]
        BackendName::Cpu => Ok(kvbackend_cpu::CpuBackend::new()),
        #[cfg(not(feature = "cpu"))]
        BackendName::Cpu => Err(crate::error::Error::NoBackend("cpu".to_owned())),
    }
}
