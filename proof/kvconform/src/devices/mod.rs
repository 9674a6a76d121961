//! Cases that need a second device, a driver fault, or the driver's count of what it holds.
//!
//! [`CASES`](crate::CASES) use a backend only through `kvcore`. These cases also need things that only a
//! backend's tests can supply: devices by index, and the controls of the double that stands in for its driver
//! ([`DeviceRig`]). [`run_devices`] runs the cases for devices, and [`run_groups`] runs the cases for
//! groups of devices.

use std::sync::Arc;

use kvcore::{Backend, CopyTensor, DType, Error, MemoryKind, Result, TensorView, allocate_tensor};

use crate::bench::{Failure, Outcome};
use crate::skip;

mod failure;
mod graphs;
pub(crate) mod groups;
mod memory;
mod peers;
mod refused;
mod silent;

pub use graphs::{DIM, OneRow, row_step};
pub use groups::{GroupRig, refused_group_calls, run_groups};
pub use refused::refused_calls;
pub use silent::silent_calls;

/// The index of the device that runs work as soon as it is enqueued.
pub const EAGER: usize = 0;

/// The index of the device that runs work only when something waits for it.
pub const LAZY: usize = 1;

/// The index of the device with 64 MiB of memory.
pub const SMALL: usize = 2;

/// A backend's devices, supplied by the backend's own tests.
///
/// A double's devices behave as described for [`EAGER`], [`LAZY`] and [`SMALL`]; real devices with these
/// indices need not.
pub trait DeviceRig: Sync {
    /// The backend under test.
    type Backend: Backend + 'static;

    /// Opens a device.
    ///
    /// # Errors
    /// Returns [`Error::NoDevice`] if the machine has no device with this index, which skips the case.
    fn open(&self, device: usize) -> Result<Arc<Self::Backend>>;

    /// Returns the controls of the driver's double, or `None` on real devices.
    fn double(&self) -> Option<&dyn DriverDouble>;

    /// Returns a copy that reads freed memory. When the copy runs, the device is lost.
    ///
    /// # Errors
    /// Returns the errors of the allocations.
    fn copy_of_freed_memory(&self, backend: &Arc<Self::Backend>) -> Result<CopyTensor>;
}

/// The controls of a driver's double.
pub trait DriverDouble {
    /// Returns the memory and handles that the driver holds for a device.
    fn live(&self, device: usize) -> Holdings;

    /// Returns the number of tasks of each kind enqueued on a device since the last call.
    fn queued(&self, device: usize) -> Queued;

    /// Makes a function fail once, on its `after`-th call from now, with a driver error code. If `after` is
    /// 0, cancels an earlier request.
    fn fail(&self, function: &str, after: usize, code: i32);

    /// Returns the driver function and the error code that report a fault.
    fn fault(&self, fault: DriverFault) -> (&'static str, i32);

    /// Makes a function do nothing and report success if `on` is true, or work again if `on` is false.
    fn ignore(&self, function: &str, on: bool);

    /// Sets a device's memory size in bytes; `None` sets the usual size.
    fn limit(&self, device: usize, bytes: Option<usize>);

    /// Makes every function work again. Memory limits stay.
    fn reset(&self);
}

/// The memory and handles that a driver holds for a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holdings {
    /// Device memory in bytes.
    pub bytes: usize,
    /// Pinned memory in bytes; 0 if the double counts such memory only as objects.
    pub pinned: usize,
    /// The number of driver objects: streams, events, allocations and everything else with a handle.
    pub objects: usize,
}

/// The number of tasks of each kind that were enqueued on a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Queued {
    /// Kernels or operators.
    pub kernels: usize,
    /// Launches of captured graphs.
    pub graphs: usize,
    /// Copies from the host to the device.
    pub uploads: usize,
    /// Copies between devices.
    pub peer_copies: usize,
}

/// A driver fault, independent of the driver's functions and codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriverFault {
    /// An allocation of device memory fails for lack of memory.
    DeviceMemory,
    /// An allocation of pinned memory fails for lack of memory.
    PinnedMemory,
    /// A wait on a stream finds that the device is lost.
    LostInWait,
}

/// The body of a case.
type Body<R> = fn(&R) -> Outcome;

/// The body of a case that needs the double.
type DoubleBody<R> = fn(&R, &dyn DriverDouble) -> Outcome;

/// A case for devices or groups, by what it requires.
enum DeviceCase<R> {
    /// A case that also runs on real devices.
    Any(&'static str, Body<R>),
    /// A case that runs only if a double replaces the driver.
    OnDouble(&'static str, DoubleBody<R>),
}

macro_rules! any {
    ($module:ident::$name:ident) => {
        DeviceCase::Any(concat!(stringify!($module), "::", stringify!($name)), $module::$name)
    };
}
macro_rules! on_double {
    ($module:ident::$name:ident) => {
        DeviceCase::OnDouble(concat!(stringify!($module), "::", stringify!($name)), $module::$name)
    };
}
pub(crate) use {any, on_double};

/// Runs every case for devices, and prints a line for each. Skips cases that need a double if the devices are
/// real, and cases that need a missing device. The caller guarantees that no other test uses the double at
/// the same time.
///
/// # Errors
/// Returns the failures of all cases as a single one.
pub fn run_devices<R: DeviceRig>(rig: &R) -> Outcome {
    let cases = [
        any!(failure::a_device_that_is_not_there_is_named_with_the_ones_that_are),
        on_double!(failure::memory_that_is_full_is_an_error_with_the_free_bytes_and_nothing_is_held),
        on_double!(failure::another_program_that_fills_the_device_is_an_allocation_error),
        on_double!(failure::pinned_memory_that_the_system_refuses_is_an_allocation_error),
        on_double!(failure::a_fault_loses_the_device_and_no_other),
        any!(failure::memory_of_another_device_is_foreign),
        on_double!(memory::everything_that_a_backend_took_goes_with_it),
        on_double!(memory::a_pool_sleeps_granule_by_granule),
        on_double!(peers::tensors_go_from_device_to_device_in_the_order_of_events),
        on_double!(peers::a_lost_device_that_gives_does_not_take_the_receiver_with_it),
        on_double!(peers::only_whole_tensors_of_devices_cross),
        on_double!(graphs::a_replay_is_one_copy_and_one_launch),
        on_double!(graphs::a_graph_keeps_its_memory_and_gives_it_back),
        on_double!(graphs::a_dropped_graph_leaves_nothing_of_the_driver),
        on_double!(graphs::a_step_whose_capture_finds_no_memory_runs_as_before),
    ];
    run_all(rig, rig.double(), &cases)
}

fn run_all<R>(rig: &R, double: Option<&dyn DriverDouble>, cases: &[DeviceCase<R>]) -> Outcome {
    let mut failures = Vec::new();
    for case in cases {
        let (name, outcome) = match (case, double) {
            (DeviceCase::Any(name, body), _) => (name, body(rig)),
            (DeviceCase::OnDouble(name, body), Some(double)) => (name, body(rig, double)),
            (DeviceCase::OnDouble(name, _), None) => {
                skip(format!("{name} needs the double of the driver"));
                continue;
            }
        };
        if let Some(double) = double {
            double.reset();
            for device in [EAGER, LAZY, SMALL] {
                double.limit(device, None);
            }
        }
        match outcome {
            Ok(()) => println!("{name}"),
            Err(Failure { error: Some(reason @ Error::NoDevice { .. }), .. }) => {
                skip(format!("{name}: {reason}"));
            }
            Err(failure) => failures.push(format!("{name}: {failure}")),
        }
    }
    if failures.is_empty() { Ok(()) } else { Err(Failure::new(failures.join("\n"))) }
}

/// Allocates `n` zeroed bytes on the device.
fn bytes_on(backend: &dyn Backend, n: usize) -> Result<TensorView> {
    allocate_tensor(backend, MemoryKind::Device, DType::U8, &[n])
}

/// Checks that a call failed with an error that `expected` accepts.
fn fails<T: std::fmt::Debug>(what: &str, result: Result<T>, expected: fn(&Error) -> bool) -> Outcome {
    match result {
        Err(error) if expected(&error) => Ok(()),
        other => Err(Failure::new(format!("{what}: {other:?}"))),
    }
}

/// Checks that two values are equal.
#[expect(clippy::needless_pass_by_value, reason = "callers give literals and results of calls")]
fn same<T: PartialEq + std::fmt::Debug>(what: &str, actual: T, expected: T) -> Outcome {
    if actual == expected {
        return Ok(());
    }
    Err(Failure::new(format!("{what}: {actual:?}, expected {expected:?}")))
}

/// Checks that bytes are equal, without printing them.
fn same_bytes(what: &str, actual: &[u8], expected: &[u8]) -> Outcome {
    let at = actual.iter().zip(expected).position(|(a, b)| a != b);
    same(what, (at, actual.len()), (None, expected.len()))
}
