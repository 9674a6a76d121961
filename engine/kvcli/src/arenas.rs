//! Fewer arenas for glibc's allocator, so that the process gives memory back.
//!
//! Decision: docs/decisions/serve.md#the-program-allocates-from-two-arenas

/// The environment variable by which glibc lets users choose.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const CHOSEN: &str = "MALLOC_ARENA_MAX";

/// Limits the arenas to two, unless the user has chosen a number. Other threads must not have been started.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub(crate) fn limit() {
    if std::env::var_os(CHOSEN).is_none() {
        // SAFETY: `mallopt` accepts any two numbers, and only this thread runs, so that no other one allocates meanwhile.
        unsafe { libc::mallopt(libc::M_ARENA_MAX, 2) };
    }
}

/// Does nothing: other allocators have no arenas for each thread.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub(crate) fn limit() {}
