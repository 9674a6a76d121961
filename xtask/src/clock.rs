//! Time that a program takes: wall-clock time and processor time.
//!
//! Processor time hardly depends on the machine's load, so it shows whether a program became slower or the
//! machine was just busy.

use std::fmt;
use std::fs;
use std::time::Instant;

/// The time that one program and its children took, in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Seconds {
    /// Wall-clock time in seconds.
    pub(crate) wall: f64,
    /// Processor time in seconds, if the system reports it.
    pub(crate) cpu: Option<f64>,
}

impl Seconds {
    /// Formats the processor time, or a dash if it is unknown.
    pub(crate) fn cpu_text(self) -> String {
        self.cpu.map_or_else(|| "–".to_owned(), |seconds| format!("{seconds:.0}"))
    }
}

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.0} s, {} s of CPU time", self.wall, self.cpu_text())
    }
}

/// Runs `work`. Returns its result, and the time taken by the programs that it started and waited for.
pub(crate) fn timed<T>(work: impl FnOnce() -> T) -> (T, Seconds) {
    let (start, before) = (Instant::now(), of_children());
    let result = work();
    let cpu = of_children().zip(before).map(|(after, before)| after - before);
    (result, Seconds { wall: start.elapsed().as_secs_f64(), cpu })
}

/// Returns the processor time of all child processes that have ended, and of their children, in seconds.
#[cfg(target_os = "linux")]
fn of_children() -> Option<f64> {
    let ticks = ticks_of_children(&fs::read_to_string("/proc/self/stat").ok()?)?;
    Some(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// Returns `None`, because this system has no `/proc`.
#[cfg(not(target_os = "linux"))]
fn of_children() -> Option<f64> {
    None
}

/// Returns the sum of `cutime` and `cstime` in a line of `/proc/PID/stat`.
#[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "only Linux has the file"))]
fn ticks_of_children(stat: &str) -> Option<u64> {
    // The second field is the program's name in parentheses. The name may hold any characters.
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut times = fields.split(' ').skip(13).map(str::parse::<u64>);
    let (user, system) = (times.next()?.ok()?, times.next()?.ok()?);
    Some(user + system)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_children_follow_a_name_with_any_characters() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194560 1 2 3 4 5 6 700 80 20 0 1 0 9";
        assert_eq!(ticks_of_children(stat), Some(780));
        assert_eq!(ticks_of_children("7 (a) S 1"), None);
    }

    #[test]
    fn seconds_that_are_not_known_are_a_dash() {
        let (known, unknown) = (Seconds { wall: 1.0, cpu: Some(2.0) }, Seconds { wall: 3.0, cpu: None });
        assert_eq!(known.to_string(), "1 s, 2 s of CPU time");
        assert_eq!(unknown.to_string(), "3 s, – s of CPU time");
    }
}
