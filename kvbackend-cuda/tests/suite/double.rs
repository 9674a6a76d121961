//! The controls of the driver's test double, for tests in which it replaces the driver.

use std::ffi::{CString, c_char, c_int};
use std::sync::{OnceLock, RwLock, RwLockReadGuard, RwLockWriteGuard};

use libloading::Library;

/// The double's device that runs work as soon as it is enqueued.
pub(crate) const EAGER: usize = 0;
/// The double's device that runs work only when something waits for it.
pub(crate) const LAZY: usize = 1;
/// The double's device with little memory.
pub(crate) const SMALL: usize = 2;

/// The library that the backend has loaded, if it is the double.
pub(crate) struct Double(Library);

/// Returns the double, or `None` if a real driver is loaded.
pub(crate) fn double() -> Option<&'static Double> {
    static DOUBLE: OnceLock<Option<Double>> = OnceLock::new();
    let find = || {
        // SAFETY: the backend loads the same library; its initialisers have already run or have no other
        // effect.
        let library = unsafe { Library::new("libcuda.so.1") }.ok()?;
        // SAFETY: the symbol is only looked up, not called.
        let known = unsafe { library.get::<fn()>(b"kv_double_trace\0") }.is_ok();
        known.then_some(Double(library))
    };
    DOUBLE.get_or_init(find).as_ref()
}

/// A lock that tests hold for writing while they change the double's behaviour, so that no other test runs at
/// the same time.
static CHANGES: RwLock<()> = RwLock::new(());

/// Waits until no test changes the double, and returns a guard for running at the same time as other tests.
pub(crate) fn among_others() -> RwLockReadGuard<'static, ()> {
    CHANGES.read().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Returns a guard that allows changing the double's behaviour until it is dropped. With a real driver,
/// prints why the test is skipped.
pub(crate) fn alone() -> Option<(&'static Double, Alone)> {
    let alone = Alone(CHANGES.write().unwrap_or_else(std::sync::PoisonError::into_inner));
    let Some(double) = double() else {
        kvconform::skip("the test needs the double of the driver");
        return None;
    };
    Some((double, alone))
}

/// Guard that allows changes to the double. Dropping it undoes the changes.
pub(crate) struct Alone(#[expect(dead_code, reason = "held for its Drop")] RwLockWriteGuard<'static, ()>);

impl Drop for Alone {
    fn drop(&mut self) {
        if let Some(double) = double() {
            double.reset();
        }
    }
}

impl Double {
    fn entry<T>(&self, name: &str) -> libloading::Symbol<'_, T> {
        let name = CString::new(name).unwrap();
        // SAFETY: the callers name the double's functions with their correct types.
        unsafe { self.0.get(name.as_bytes_with_nul()) }.unwrap()
    }

    /// Makes an entry point fail once, at the `after`-th call from now, with the given driver error code.
    pub(crate) fn fail(&self, entry: &str, after: c_int, code: c_int) {
        let call = self.entry::<unsafe extern "C" fn(*const c_char, c_int, c_int)>("kv_double_fail");
        let entry = CString::new(entry).unwrap();
        // SAFETY: the name lives as long as the call.
        unsafe { call(entry.as_ptr(), after, code) }
    }

    /// Makes every entry point work again.
    pub(crate) fn reset(&self) {
        let call = self.entry::<unsafe extern "C" fn(*const c_char, c_int, c_int)>("kv_double_fail");
        // SAFETY: null stands for all entries.
        unsafe { call(std::ptr::null(), 0, 0) }
    }

    /// Makes an entry point do nothing if `on` is true, or work again if it is false.
    pub(crate) fn ignore(&self, entry: &str, on: bool) {
        let call = self.entry::<unsafe extern "C" fn(*const c_char, c_int)>("kv_double_ignore");
        let entry = CString::new(entry).unwrap();
        // SAFETY: the name lives as long as the call.
        unsafe { call(entry.as_ptr(), c_int::from(on)) }
    }

    /// Sets a device's memory size in bytes.
    pub(crate) fn limit(&self, device: usize, bytes: usize) {
        // SAFETY: the arguments are plain numbers.
        unsafe { self.entry::<unsafe extern "C" fn(c_int, usize)>("kv_double_limit")(device as c_int, bytes) }
    }

    pub(crate) fn live_bytes(&self, device: usize) -> usize {
        // SAFETY: the argument is a plain number.
        unsafe { self.entry::<unsafe extern "C" fn(c_int) -> usize>("kv_double_live_bytes")(device as c_int) }
    }

    pub(crate) fn live_objects(&self, device: usize) -> i32 {
        // SAFETY: the argument is a plain number.
        unsafe {
            self.entry::<unsafe extern "C" fn(c_int) -> c_int>("kv_double_live_objects")(device as c_int)
        }
    }

    /// Returns the tasks that were enqueued on a device since the last call, each as a list of words: its
    /// kind, then its details.
    pub(crate) fn trace(&self, device: usize) -> Vec<Vec<String>> {
        let call = self.entry::<unsafe extern "C" fn(*mut c_char, usize) -> usize>("kv_double_trace");
        let mut buffer = vec![0u8; 1 << 16];
        loop {
            // SAFETY: the buffer has the given size.
            let needed = unsafe { call(buffer.as_mut_ptr().cast(), buffer.len()) };
            if needed <= buffer.len() {
                break;
            }
            buffer.resize(needed, 0);
        }
        let text = std::ffi::CStr::from_bytes_until_nul(&buffer).unwrap().to_string_lossy().into_owned();
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let of_device = |line: &Vec<String>| line[0] == device.to_string();
        text.lines().map(words).filter(of_device).map(|line| line[2..].to_vec()).collect()
    }
}
