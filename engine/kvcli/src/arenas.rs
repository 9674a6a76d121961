//! Fewer arenas for glibc's allocator, so that the process gives memory back.
//!
//! Decision: docs/decisions/serve.md#the-program-allocates-from-two-arenas

/// Limits the arenas to two, unless the user has chosen a number. Other threads must not have been started.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub(crate) fn limit() {
    if !glibc::is_chosen(|name| std::env::var_os(name)) {
        // SAFETY: `mallopt` accepts any two numbers, and only this thread runs, so that no other one allocates meanwhile.
        unsafe { libc::mallopt(libc::M_ARENA_MAX, 2) };
    }
}

/// Does nothing: other allocators have no arenas for each thread.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub(crate) fn limit() {}

/// The ways by which glibc lets users choose.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod glibc {
    use std::ffi::OsString;

    /// Returns true if the environment sets the number of arenas: by a variable of its own, or among the tunables, which
    /// are separated by colons.
    pub(super) fn is_chosen(variable: impl Fn(&str) -> Option<OsString>) -> bool {
        let tunables = variable("GLIBC_TUNABLES").unwrap_or_default();
        let tunables = tunables.to_string_lossy();
        variable("MALLOC_ARENA_MAX").is_some()
            || tunables.split(':').any(|one| one.starts_with("glibc.malloc.arena_max="))
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn both_ways_of_choosing_a_number_count() {
            let chosen = |set: &str, to: &str| is_chosen(|name| (name == set).then(|| to.into()));
            assert!(chosen("MALLOC_ARENA_MAX", "8"));
            assert!(chosen("GLIBC_TUNABLES", "glibc.malloc.arena_max=8"));
            assert!(chosen("GLIBC_TUNABLES", "glibc.malloc.check=1:glibc.malloc.arena_max=8"));
            assert!(!chosen("GLIBC_TUNABLES", "glibc.malloc.arena_test=8:glibc.malloc.check=1"));
            assert!(!chosen("GLIBC_TUNABLES", ""));
            assert!(!chosen("HOME", "glibc.malloc.arena_max=8"));
        }
    }
}
