//! File descriptors: each connection takes one.

/// The number of descriptors for files, and for what the runtime opens.
const OTHERS: usize = 64;

/// Lets this process open as many connections as it may. Returns how many of the `wanted` ones have room.
#[cfg(unix)]
pub(crate) fn for_connections(wanted: usize) -> usize {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let needed = wanted.saturating_add(OTHERS) as u64;
    if limit.current.is_some_and(|current| current < needed) {
        let most = limit.maximum.map_or(needed, |maximum| maximum.min(needed));
        // A process that may not raise the limit keeps it.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(most), maximum: limit.maximum });
    }
    let current = getrlimit(Resource::Nofile).current.and_then(|current| usize::try_from(current).ok());
    let room = current.map_or(wanted, |current| current.saturating_sub(OTHERS).max(1));
    wanted.min(room)
}

/// Returns all connections that are wanted.
#[cfg(not(unix))]
pub(crate) fn for_connections(wanted: usize) -> usize {
    wanted
}
