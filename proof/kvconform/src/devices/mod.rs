//! Cases that need a second device, a fault of the driver, or the driver's count of what it holds.
//!
//! [`CASES`](crate::CASES) see a backend through `kvcore` alone. These cases also need what only the tests of
//! a backend can supply: devices by number, and the controls of the double that stands in for its driver
//! ([`DeviceRig`]). [`run_devices`] runs the cases of devices, [`run_groups`] those of groups of devices.

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

/// Number of the device that runs work as soon as it is enqueued.
pub const EAGER: usize = 0;

/// Number of the device that runs work only when something waits for it.
pub const LAZY: usize = 1;

/// Number of the device with 64 MiB of memory.
pub const SMALL: usize = 2;

/// The devices of a backend, as the backend's own tests supply them.
///
/// Devices of a double behave as [`EAGER`], [`LAZY`] and [`SMALL`] say; real devices of these numbers need
/// not.
pub trait DeviceRig: Sync {
    /// The backend under test.
    type Backend: Backend + 'static;

    /// Opens a device.
    ///
    /// # Errors
    /// Returns [`Error::NoDevice`] if the machine has no device of this number, which skips the case.
    fn open(&self, device: usize) -> Result<Arc<Self::Backend>>;

    /// Returns the controls of the double of the driver; none on real devices.
    fn double(&self) -> Option<&dyn DriverDouble>;

    /// Returns a copy from freed memory, which loses the device when it runs.
    ///
    /// # Errors
    /// Returns the errors of the allocations.
    fn copy_of_freed_memory(&self, backend: &Arc<Self::Backend>) -> Result<CopyTensor>;
}

/// The controls of a double of a driver.
pub trait DriverDouble {
    /// Returns the memory and the handles that the driver holds for a device.
    fn live(&self, device: usize) -> Holdings;

    /// Returns the numbers of tasks enqueued on a device since the last call.
    fn queued(&self, device: usize) -> Queued;

    /// Makes the `after`-th next call of a function fail with a code of the driver, once. With 0,
    /// an earlier wish is canceled.
    fn fail(&self, function: &str, after: usize, code: i32);

    /// Returns the function of the driver and the code by which it reports a fault.
    fn fault(&self, fault: DriverFault) -> (&'static str, i32);

    /// Makes a function do nothing and report success.
    fn ignore(&self, function: &str, on: bool);

    /// Sets the bytes of memory that a device has; `None` for the usual number.
    fn limit(&self, device: usize, bytes: Option<usize>);

    /// Makes every function work again. Limits stay.
    fn reset(&self);
}

/// The memory and the handles that a driver holds for a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holdings {
    /// Bytes of memory of the device.
    pub bytes: usize,
    /// Bytes of pinned memory; 0 where the double counts such memory as objects only.
    pub pinned: usize,
    /// Streams, events, allocations and everything else with a handle.
    pub objects: usize,
}

/// Numbers of tasks that were enqueued on a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Queued {
    /// Kernels or operators.
    pub kernels: usize,
    /// Launches of captured graphs.
    pub graphs: usize,
    /// Copies from the host to the device.
    pub uploads: usize,
    /// Copies from one device to another.
    pub peer_copies: usize,
}

/// A fault of a driver, independent of the driver's functions and codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriverFault {
    /// An allocation on the device finds no memory.
    DeviceMemory,
    /// An allocation of pinned memory finds no memory.
    PinnedMemory,
    /// A wait for a stream finds that the device is lost.
    LostInWait,
}

/// The body of a case.
type Body<R> = fn(&R) -> Outcome;

/// The body of a case that needs the double.
type DoubleBody<R> = fn(&R, &dyn DriverDouble) -> Outcome;

/// A case of devices or of groups, by what it needs.
enum DeviceCase<R> {
    /// Runs on real devices as well.
    Any(&'static str, Body<R>),
    /// Runs where a double stands in for the driver.
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

/// Runs every case of devices, and prints a line for each. Skips cases that need a double on real devices,
/// and cases that need a device which is missing. The caller guarantees that no other test uses the double
/// meanwhile.
///
/// # Errors
/// Returns the failures of all cases as one.
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

/// Checks that a call failed as `expected` says.
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
