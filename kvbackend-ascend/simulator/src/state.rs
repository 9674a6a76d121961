//! The state that all calls share, and the function through which all calls run.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::CString;
use std::sync::OnceLock;
use std::time::Instant;

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::clock::VectorClock;
use crate::control::Controls;
use crate::device::SimDevice;
use crate::event::SimEvent;
use crate::executor::Executor;
use crate::graph::SimGraphs;
use crate::hccl::Groups;
use crate::pinned::Pinned;
use crate::stream::SimStream;
use crate::tensor::{HostNumber, View};
use crate::types as sys;

/// The simulator's number of devices.
pub(crate) const DEVICES: usize = 4;

/// A failed call: its error code, and the rule that was broken.
#[derive(Debug, Clone)]
pub(crate) struct BrokenRule {
    pub(crate) code: i32,
    pub(crate) rule: String,
}

/// The result of a simulated call.
pub(crate) type CallResult<T = ()> = Result<T, BrokenRule>;

/// Returns the error for an invalid argument.
pub(crate) fn invalid<T>(rule: impl Into<String>) -> CallResult<T> {
    refuse(sys::ACL_ERROR_RT_PARAM_INVALID as i32, rule)
}

/// Returns an error with the given code.
pub(crate) fn refuse<T>(code: i32, rule: impl Into<String>) -> CallResult<T> {
    Err(BrokenRule { code, rule: rule.into() })
}

/// All of the simulator's state.
pub(crate) struct SimState {
    pub(crate) started: bool,
    pub(crate) devices: Vec<SimDevice>,
    pub(crate) streams: HashMap<u64, SimStream>,
    pub(crate) events: HashMap<u64, SimEvent>,
    pub(crate) tensors: HashMap<u64, View>,
    pub(crate) scalars: HashMap<u64, HostNumber>,
    pub(crate) arrays: HashMap<u64, Vec<i64>>,
    /// Lists of tensors, which own their tensors.
    pub(crate) lists: HashMap<u64, Vec<u64>>,
    pub(crate) executors: HashMap<u64, Executor>,
    pub(crate) pinned: Pinned,
    pub(crate) controls: Controls,
    pub(crate) hccl: Groups,
    pub(crate) graphs: SimGraphs,
    /// The tasks that come before everything that the host enqueues next.
    pub(crate) host: VectorClock,
    next: u64,
}

thread_local! {
    /// This thread's device.
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
    /// The rule that this thread broke last.
    static LAST_RULE: RefCell<Option<CString>> = const { RefCell::new(None) };
}

impl SimState {
    /// Returns a new handle, which differs from all earlier handles.
    pub(crate) fn handle(&mut self) -> u64 {
        self.next += 16;
        self.next
    }

    /// Returns this thread's device.
    pub(crate) fn current() -> CallResult<usize> {
        CURRENT.get().map_or_else(
            || refuse(sys::ACL_ERROR_RT_CONTEXT_NULL as i32, "no device is set on this thread"),
            Ok,
        )
    }

    /// Returns this thread's device, or an error if it is lost.
    pub(crate) fn alive(&self) -> CallResult<usize> {
        let device = Self::current()?;
        self.check_alive(device)?;
        Ok(device)
    }

    /// Returns an error if a device is lost.
    pub(crate) fn check_alive(&self, device: usize) -> CallResult {
        match &self.devices[device].lost {
            Some(reason) => refuse(sys::ACL_ERROR_RT_AICORE_EXCEPTION as i32, reason.clone()),
            None => Ok(()),
        }
    }
}

/// Sets this thread's device.
pub(crate) fn set_current(device: Option<usize>) {
    CURRENT.set(device);
}

pub(crate) fn lock() -> MutexGuard<'static, SimState> {
    static STATE: OnceLock<Mutex<SimState>> = OnceLock::new();
    let new = || {
        Mutex::new(SimState {
            started: false,
            devices: (0..DEVICES).map(SimDevice::new).collect(),
            streams: HashMap::new(),
            events: HashMap::new(),
            tensors: HashMap::new(),
            scalars: HashMap::new(),
            arrays: HashMap::new(),
            lists: HashMap::new(),
            executors: HashMap::new(),
            pinned: Pinned::default(),
            controls: Controls::default(),
            hccl: Groups::default(),
            graphs: SimGraphs::default(),
            host: VectorClock::default(),
            next: 0x5_1000,
        })
    };
    STATE.get_or_init(new).lock()
}

/// A condition that is notified when a rank has done something that other ranks may be waiting for.
static CHANGED: Condvar = Condvar::new();

/// Wakes the threads that wait for other ranks.
pub(crate) fn changed() {
    CHANGED.notify_all();
}

/// Releases the state until another thread calls [`changed`]. Returns whether that happened before `until`.
pub(crate) fn wait_for_change(state: &mut MutexGuard<'static, SimState>, until: Instant) -> bool {
    !CHANGED.wait_until(state, until).timed_out()
}

/// Runs a call, which requires that ACL has been started. A test may make the call fail or do nothing.
pub(crate) fn call(name: &str, run: impl FnOnce(&mut SimState) -> CallResult) -> i32 {
    call_that_waits(name, |state| run(state))
}

/// Runs a call that may wait for other threads.
pub(crate) fn call_that_waits(
    name: &str,
    run: impl FnOnce(&mut MutexGuard<'static, SimState>) -> CallResult,
) -> i32 {
    let mut state = lock();
    let outcome = match state.controls.verdict(name) {
        Some(0) => Ok(()),
        Some(code) => refuse(code, format!("{name} fails because a test asked for it")),
        None if !state.started => {
            refuse(sys::ACL_ERROR_UNINITIALIZE as i32, format!("{name} before aclInit"))
        }
        None => run(&mut state),
    };
    keep_rule(outcome)
}

/// Stores the rule that this thread's failed call broke. Returns the call's error code.
pub(crate) fn keep_rule(outcome: CallResult) -> i32 {
    match outcome {
        Ok(()) => 0,
        Err(BrokenRule { code, rule }) => {
            LAST_RULE.with(|last| *last.borrow_mut() = CString::new(rule).ok());
            code
        }
    }
}

/// Returns the rule that this thread broke last, or null if it broke none.
pub(crate) fn last_rule() -> *const std::ffi::c_char {
    LAST_RULE.with(|last| last.borrow().as_ref().map_or(std::ptr::null(), |text| text.as_ptr()))
}
