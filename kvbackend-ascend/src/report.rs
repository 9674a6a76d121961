//! Reports for display: this machine's devices, and the operators that its CANN has.

use kvcore::Result;

use crate::device::{self, Npu};
use crate::library::{Serves, library};
use crate::options::AscendOptions;

/// A device found by ACL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NpuReport {
    /// Index of the device, for [`AscendOptions::device`].
    pub ordinal: usize,
    /// The name of the NPU's chip.
    pub name: String,
    /// Total device memory in bytes.
    pub total_memory: usize,
    /// True if memory can be reserved and mapped. Pools need this in order to sleep.
    pub virtual_memory: bool,
    /// True if steps can be captured as graphs.
    pub graphs: bool,
    /// Version of ACL's interface, for example `(1, 12, 0)`.
    pub interface: (i32, i32, i32),
    /// The reason why the backend cannot use the device, if there is one. Fields that only the device can
    /// report are then 0 or false.
    pub unfit: Option<String>,
}

/// An operator that the backend calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OperatorReport {
    /// CANN's name for the operator.
    pub name: &'static str,
    /// The part of the backend that calls the operator.
    pub serves: Serves,
    /// True if this machine's CANN has the operator.
    pub present: bool,
}

/// Returns this machine's devices.
///
/// # Errors
/// Returns [`kvcore::Error::NoDevice`] if there is no CANN, or if ACL does not start.
pub fn devices() -> Result<Vec<NpuReport>> {
    let library = library()?;
    let facts = |ordinal| -> Result<(usize, bool)> {
        let device = Npu::open(&AscendOptions { device: ordinal, plain: false })?;
        let _current = device.bind()?;
        Ok((device.memory()?.1, crate::memory::maps(&device)))
    };
    // A device that is broken or in use by another program must not hide the other devices.
    let report = |ordinal| {
        let known = facts(ordinal);
        let (total_memory, virtual_memory) = *known.as_ref().unwrap_or(&(0, false));
        NpuReport {
            ordinal,
            name: library.processor(),
            total_memory,
            virtual_memory,
            graphs: library.captures(),
            interface: library.version,
            unfit: known.err().map(|reason| reason.to_string()),
        }
    };
    Ok((0..device::count()?).map(report).collect())
}

/// Returns the operators that the backend calls, and whether this machine's CANN has each of them.
///
/// # Errors
/// Returns [`kvcore::Error::NoDevice`] if there is no CANN, or if ACL does not start.
pub fn operators() -> Result<Vec<OperatorReport>> {
    let operators = library()?.operators().into_iter();
    Ok(operators.map(|(name, serves, present)| OperatorReport { name, serves, present }).collect())
}
