//! The state behind all calls, and the entry of each call.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::CString;
use std::sync::OnceLock;
use std::time::Instant;

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::clock::Clock;
use crate::control::Controls;
use crate::device::Device;
use crate::event::Event;
use crate::executor::Executor;
use crate::graph::Graphs;
use crate::hccl::Groups;
use crate::pinned::Pinned;
use crate::stream::Stream;
use crate::tensor::{Scalar, View};
use crate::types as sys;

/// Devices of the simulator.
pub(crate) const DEVICES: usize = 4;

/// The error of a call: its code, and the rule that was broken.
#[derive(Debug, Clone)]
pub(crate) struct Refusal {
    pub(crate) code: i32,
    pub(crate) rule: String,
}

/// The result of a call.
pub(crate) type Outcome<T = ()> = Result<T, Refusal>;

/// Returns the refusal of an argument.
pub(crate) fn invalid<T>(rule: impl Into<String>) -> Outcome<T> {
    refuse(sys::ACL_ERROR_RT_PARAM_INVALID as i32, rule)
}

/// Returns a refusal.
pub(crate) fn refuse<T>(code: i32, rule: impl Into<String>) -> Outcome<T> {
    Err(Refusal { code, rule: rule.into() })
}

/// Everything that lives.
pub(crate) struct State {
    pub(crate) started: bool,
    pub(crate) devices: Vec<Device>,
    pub(crate) streams: HashMap<u64, Stream>,
    pub(crate) events: HashMap<u64, Event>,
    pub(crate) tensors: HashMap<u64, View>,
    pub(crate) scalars: HashMap<u64, Scalar>,
    pub(crate) arrays: HashMap<u64, Vec<i64>>,
    /// Lists of tensors, which own them.
    pub(crate) lists: HashMap<u64, Vec<u64>>,
    pub(crate) executors: HashMap<u64, Executor>,
    pub(crate) pinned: Pinned,
    pub(crate) controls: Controls,
    pub(crate) hccl: Groups,
    pub(crate) graphs: Graphs,
    /// What the host has waited for.
    pub(crate) host: Clock,
    next: u64,
}

thread_local! {
    /// The device of this thread.
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
    /// The rule that this thread's last call broke.
    static SAID: RefCell<Option<CString>> = const { RefCell::new(None) };
}

impl State {
    /// Returns a number that no other handle has.
    pub(crate) fn handle(&mut self) -> u64 {
        self.next += 16;
        self.next
    }

    /// Returns the device of this thread.
    pub(crate) fn current() -> Outcome<usize> {
        CURRENT.get().map_or_else(
            || refuse(sys::ACL_ERROR_RT_CONTEXT_NULL as i32, "no device is set on this thread"),
            Ok,
        )
    }

    /// Returns the device of this thread if it is not lost.
    pub(crate) fn alive(&self) -> Outcome<usize> {
        let device = Self::current()?;
        self.check_alive(device)?;
        Ok(device)
    }

    /// Refuses a lost device.
    pub(crate) fn check_alive(&self, device: usize) -> Outcome {
        match &self.devices[device].lost {
            Some(reason) => refuse(sys::ACL_ERROR_RT_AICORE_EXCEPTION as i32, reason.clone()),
            None => Ok(()),
        }
    }
}

/// Sets the device of this thread.
pub(crate) fn set_current(device: Option<usize>) {
    CURRENT.set(device);
}

pub(crate) fn lock() -> MutexGuard<'static, State> {
    static STATE: OnceLock<Mutex<State>> = OnceLock::new();
    let new = || {
        Mutex::new(State {
            started: false,
            devices: (0..DEVICES).map(Device::new).collect(),
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
            graphs: Graphs::default(),
            host: Clock::default(),
            next: 0x5_1000,
        })
    };
    STATE.get_or_init(new).lock()
}

/// Notified when a rank has done what others may wait for.
static CHANGED: Condvar = Condvar::new();

/// Wakes the threads that wait for other ranks.
pub(crate) fn changed() {
    CHANGED.notify_all();
}

/// Lets other threads go on until something changes. Returns whether that was before `until`.
pub(crate) fn wait_for_change(state: &mut MutexGuard<'static, State>, until: Instant) -> bool {
    !CHANGED.wait_until(state, until).timed_out()
}

/// Runs a call: unless a test makes it fail or do nothing, and only after the start.
pub(crate) fn call(name: &str, run: impl FnOnce(&mut State) -> Outcome) -> i32 {
    call_that_waits(name, |state| run(state))
}

/// Runs a call that may wait for other threads.
pub(crate) fn call_that_waits(
    name: &str,
    run: impl FnOnce(&mut MutexGuard<'static, State>) -> Outcome,
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
    told(outcome)
}

/// Keeps what a refusal says for this thread, and returns its code.
pub(crate) fn told(outcome: Outcome) -> i32 {
    match outcome {
        Ok(()) => 0,
        Err(Refusal { code, rule }) => {
            SAID.with(|said| *said.borrow_mut() = CString::new(rule).ok());
            code
        }
    }
}

/// Returns what the last refusal of this thread said.
pub(crate) fn said() -> *const std::ffi::c_char {
    SAID.with(|said| said.borrow().as_ref().map_or(std::ptr::null(), |text| text.as_ptr()))
}
