//! The simulator's controls, for tests in which it replaces CANN.

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;
use std::sync::{OnceLock, RwLock, RwLockReadGuard, RwLockWriteGuard};

use libloading::Library;

/// The simulator's device that runs work as soon as it is enqueued.
pub(crate) const EAGER: usize = 0;
/// The simulator's device that runs work only when something waits for it.
pub(crate) const LAZY: usize = 1;
/// The simulator's device with little memory.
pub(crate) const SMALL: usize = 2;

/// The library that the backend has loaded, if it is the simulator.
pub(crate) struct Simulator(Library);

fn simulator() -> Option<&'static Simulator> {
    static SIMULATOR: OnceLock<Option<Simulator>> = OnceLock::new();
    let find = || {
        let folder = std::env::var_os("KV_ASCEND_LIB_DIR")?;
        // SAFETY: the backend loads the same library, whose initialisers have no effect.
        let library = unsafe { Library::new(Path::new(&folder).join("libascendcl.so")) }.ok()?;
        // SAFETY: the symbol is only looked up, not called.
        let known = unsafe { library.get::<fn()>(b"kv_sim_trace\0") }.is_ok();
        known.then_some(Simulator(library))
    };
    SIMULATOR.get_or_init(find).as_ref()
}

/// A lock that tests hold for writing while they change the simulator's behaviour, so that no other test runs
/// at the same time.
static CHANGES: RwLock<()> = RwLock::new(());

/// Waits until no test changes the simulator, and returns a guard for running at the same time as other
/// tests.
pub(crate) fn with_others() -> RwLockReadGuard<'static, ()> {
    CHANGES.read().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Returns a guard that allows changing the simulator's behaviour until it is dropped. If the backend has
/// loaded CANN itself, prints why the test is skipped.
pub(crate) fn alone() -> Option<(&'static Simulator, Alone)> {
    let alone = Alone(CHANGES.write().unwrap_or_else(std::sync::PoisonError::into_inner));
    let Some(simulator) = simulator() else {
        kvconform::skip(
            "the test needs the simulator of CANN: cargo xtask ascend-simulator, KV_ASCEND_LIB_DIR",
        );
        return None;
    };
    Some((simulator, alone))
}

/// Guard that allows changes to the simulator. Dropping it undoes the changes.
pub(crate) struct Alone(#[expect(dead_code, reason = "held for its Drop")] RwLockWriteGuard<'static, ()>);

impl Drop for Alone {
    fn drop(&mut self) {
        if let Some(simulator) = simulator() {
            simulator.reset();
        }
    }
}

impl Simulator {
    pub(crate) fn entry<T>(&self, name: &str) -> libloading::Symbol<'_, T> {
        let name = CString::new(name).unwrap();
        // SAFETY: the callers name simulator functions with their correct types.
        unsafe { self.0.get(name.as_bytes_with_nul()) }.unwrap()
    }

    /// Makes all functions work again.
    pub(crate) fn reset(&self) {
        // SAFETY: the entry has this type.
        unsafe { self.entry::<unsafe extern "C" fn()>("kv_sim_reset")() }
    }

    /// Makes a function fail once, at the `after`-th call from now, with the given error code.
    pub(crate) fn fail(&self, name: &str, after: u64, code: i32) {
        let call = self.entry::<unsafe extern "C" fn(*const c_char, u64, i32)>("kv_sim_fail");
        let name = CString::new(name).unwrap();
        // SAFETY: the name lives as long as the call.
        unsafe { call(name.as_ptr(), after, code) }
    }

    /// Makes a function do nothing if `on` is true, or work again if it is false.
    pub(crate) fn ignore(&self, name: &str, on: bool) {
        let call = self.entry::<unsafe extern "C" fn(*const c_char, i32)>("kv_sim_ignore");
        let name = CString::new(name).unwrap();
        // SAFETY: the name lives as long as the call.
        unsafe { call(name.as_ptr(), i32::from(on)) }
    }

    /// Sets a device's memory size in bytes.
    pub(crate) fn limit(&self, device: usize, bytes: u64) {
        // SAFETY: the arguments are plain numbers.
        unsafe { self.entry::<unsafe extern "C" fn(i32, u64)>("kv_sim_limit")(device as i32, bytes) }
    }

    /// Returns the tasks that were enqueued on a device since the last call, each as its kind and name.
    pub(crate) fn trace(&self, device: usize) -> Vec<String> {
        let call = self.entry::<unsafe extern "C" fn(i32, *mut c_char, usize) -> usize>("kv_sim_trace");
        let mut buffer = vec![0u8; 1 << 22];
        // SAFETY: the buffer has the given size.
        let needed = unsafe { call(device as i32, buffer.as_mut_ptr().cast(), buffer.len()) };
        assert!(needed <= buffer.len());
        let text = CStr::from_bytes_until_nul(&buffer).unwrap().to_string_lossy();
        text.lines().map(str::to_owned).collect()
    }

    /// Sets the time that ranks wait for one another when they join a group, in milliseconds.
    pub(crate) fn patience(&self, milliseconds: u64) {
        // SAFETY: the argument is a plain number.
        unsafe { self.entry::<unsafe extern "C" fn(u64)>("kv_sim_patience")(milliseconds) }
    }

    /// Creates a stream on a device, as an engine does.
    pub(crate) fn stream(&self, device: usize) -> *mut c_void {
        let mut stream = std::ptr::null_mut();
        let set = self.entry::<unsafe extern "C" fn(i32) -> i32>("aclrtSetDevice");
        let create = self
            .entry::<unsafe extern "C" fn(*mut *mut c_void, u32, u32) -> i32>("aclrtCreateStreamWithConfig");
        // SAFETY: the entries have these types, and `stream` is valid for writes.
        unsafe { assert_eq!((set(device as i32), create(&raw mut stream, 0, 0)), (0, 0)) };
        stream
    }

    /// Returns this thread's device.
    pub(crate) fn current(&self) -> usize {
        let mut device = -1;
        // SAFETY: the entry has this type, and `device` is valid for writes.
        unsafe { self.entry::<unsafe extern "C" fn(*mut i32) -> i32>("aclrtGetDevice")(&raw mut device) };
        device as usize
    }

    /// Destroys a device's stream, as an engine does.
    pub(crate) fn end(&self, device: usize, stream: *mut c_void) {
        let destroy = self.entry::<unsafe extern "C" fn(*mut c_void) -> i32>("aclrtDestroyStream");
        let reset = self.entry::<unsafe extern "C" fn(i32) -> i32>("aclrtResetDevice");
        // SAFETY: the entries have these types, and the stream is no longer used.
        unsafe { assert_eq!((destroy(stream), reset(device as i32)), (0, 0)) };
    }

    /// Returns the live bytes of device memory, the live bytes of pinned memory, and the number of live
    /// objects on a device.
    pub(crate) fn live(&self, device: usize) -> [u64; 3] {
        let bytes = self.entry::<unsafe extern "C" fn(i32) -> u64>("kv_sim_live_bytes");
        let objects = self.entry::<unsafe extern "C" fn(i32) -> u64>("kv_sim_live_objects");
        // SAFETY: the arguments are plain numbers.
        unsafe { [bytes(device as i32), bytes(-1), objects(device as i32)] }
    }
}
