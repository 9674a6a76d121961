//! The order of tasks on different streams, as events and host waits define it, and the detection of
//! unordered accesses.

use std::collections::HashMap;
use std::ops::Range;

/// A set of tasks that come before some point: for each stream, the index of the last such task.
#[derive(Debug, Clone, Default)]
pub(crate) struct VectorClock(HashMap<u64, u64>);

impl VectorClock {
    /// Adds all tasks of another clock.
    pub(crate) fn join(&mut self, other: &Self) {
        for (&stream, &tick) in &other.0 {
            let known = self.0.entry(stream).or_default();
            *known = (*known).max(tick);
        }
    }

    /// Sets the index of a stream's last task.
    pub(crate) fn set(&mut self, stream: u64, tick: u64) {
        self.0.insert(stream, tick);
    }

    pub(crate) fn knows(&self, stream: u64, tick: u64) -> bool {
        self.0.get(&stream).is_some_and(|&known| known >= tick)
    }
}

/// A task's position in the order: its stream, its index there, and the tasks before it.
#[derive(Debug, Clone)]
pub(crate) struct TaskMoment {
    pub(crate) stream: u64,
    pub(crate) tick: u64,
    pub(crate) before: VectorClock,
}

#[derive(Debug)]
struct TaskAccess {
    bytes: Range<u64>,
    stream: u64,
    tick: u64,
    writes: bool,
}

/// The accesses to an allocation that later accesses may race with.
#[derive(Debug, Default)]
pub(crate) struct Accesses(Vec<TaskAccess>);

impl Accesses {
    /// Records an access. If an unordered access to the same bytes was recorded before, returns its stream.
    pub(crate) fn note(&mut self, bytes: &Range<u64>, moment: &TaskMoment, writes: bool) -> Option<u64> {
        let overlaps = |known: &TaskAccess| known.bytes.start < bytes.end && bytes.start < known.bytes.end;
        let race = self.0.iter().find(|known| {
            known.stream != moment.stream
                && (known.writes || writes)
                && overlaps(known)
                && !moment.before.knows(known.stream, known.tick)
        });
        if let Some(race) = race {
            return Some(race.stream);
        }
        // Forget earlier accesses within this one's range: every access ordered after this one is also
        // ordered after them.
        self.0.retain(|known| {
            let inside = bytes.start <= known.bytes.start && known.bytes.end <= bytes.end;
            let before = known.stream == moment.stream || moment.before.knows(known.stream, known.tick);
            !(inside && before && (writes || (!known.writes && known.stream == moment.stream)))
        });
        self.0.push(TaskAccess { bytes: bytes.clone(), stream: moment.stream, tick: moment.tick, writes });
        None
    }
}
