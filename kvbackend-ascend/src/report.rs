//! The devices of a machine and the operators of its CANN, for display.

use kvcore::Result;

use crate::device::{self, Npu};
use crate::library::{Serves, library};
use crate::options::AscendOptions;

/// A device that ACL reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NpuReport {
    /// Number of the device, for [`AscendOptions::device`].
    pub ordinal: usize,
    /// Name of the processor.
    pub name: String,
    /// Bytes of the device's memory.
    pub total_memory: usize,
    /// Whether memory can be reserved and mapped, which pools need to sleep.
    pub virtual_memory: bool,
    /// Whether steps can be captured as graphs.
    pub graphs: bool,
    /// Version of ACL's interface, for example 1.12.0.
    pub interface: (i32, i32, i32),
    /// Why the backend cannot use the device. The fields that only the device can answer are then 0 or false.
    pub unfit: Option<String>,
}

/// An operator that operations call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OperatorReport {
    /// Name of the operator in CANN.
    pub name: &'static str,
    /// The part of the backend that calls it.
    pub serves: Serves,
    /// Whether this machine's CANN has it.
    pub present: bool,
}

/// Returns the devices of this machine.
///
/// # Errors
/// Returns [`kvcore::Error::NoDevice`] if there is no CANN, or if it does not start.
pub fn devices() -> Result<Vec<NpuReport>> {
    let library = library()?;
    let facts = |ordinal| -> Result<(usize, bool)> {
        let device = Npu::open(&AscendOptions { device: ordinal, plain: false })?;
        let _current = device.bind()?;
        Ok((device.memory()?.1, crate::memory::maps(&device)))
    };
    // A device that is broken, or that another program holds, does not hide the others.
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

/// Returns the operators that operations call, with whether this machine's CANN has them.
///
/// # Errors
/// Returns [`kvcore::Error::NoDevice`] if there is no CANN, or if it does not start.
pub fn operators() -> Result<Vec<OperatorReport>> {
    let operators = library()?.operators().into_iter();
    Ok(operators.map(|(name, serves, present)| OperatorReport { name, serves, present }).collect())
}
