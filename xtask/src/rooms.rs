//! The rooms of kvcore: imports point from a room to itself and to the rooms below it.

use std::fs;

use crate::run::{Result, root};

/// The rooms, the lowest first. Each is a folder of `kvcore/src`.
const ROOMS: [&str; 3] = ["base", "device", "paging"];

// Decision: docs/decisions/crates.md#kvcore-has-a-bound
/// Most lines of code in `kvcore/src`. Comments, blank lines and the tests at the end of files do not count.
const MOST_LINES: usize = 8_600;

/// The line that begins the tests of a file.
const TESTS: &str = "#[cfg(test)]\nmod tests {";

/// Checks that no line of code in a room names a higher room or the crate's root, where all rooms are re-exported, and
/// that kvcore holds no more code than it should.
///
/// Comments may link anywhere.
pub(crate) fn check(tracked: &[String]) -> Result {
    let (mut upward, mut total) = (Vec::new(), 0);
    for file in tracked {
        let Some(path) = file.strip_prefix("kvcore/src/") else { continue };
        let text = fs::read_to_string(root().join(file)).map_err(|e| format!("{file}: {e}"))?;
        total += code(text.split(TESTS).next().unwrap_or_default()).count();
        let Some(room) = ROOMS.iter().position(|room| path.starts_with(&format!("{room}/"))) else {
            continue;
        };
        upward.extend(
            code(&text)
                .filter(|(_, line)| names_higher(line, room))
                .map(|(number, line)| format!("{file}:{number}: {}", line.trim())),
        );
    }
    if !upward.is_empty() {
        return Err(format!("a room of kvcore names a higher one:\n{}", upward.join("\n")));
    }
    if total > MOST_LINES {
        return Err(format!(
            "kvcore has {total} lines of code, more than {MOST_LINES}; see ARCHITECTURE.md for its bounds"
        ));
    }
    Ok(())
}

/// Returns the lines of code with their numbers.
fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let is_code = |line: &str| !line.trim().is_empty() && !line.trim_start().starts_with("//");
    text.lines().enumerate().map(|(i, line)| (i + 1, line)).filter(move |(_, line)| is_code(line))
}

/// Returns whether a line of a room has a path from the crate's root that leads anywhere but to the room and the rooms
/// below it.
fn names_higher(line: &str, room: usize) -> bool {
    let line = line.split(" // ").next().unwrap_or_default();
    line.split("crate::").skip(1).any(|path| {
        let name = path.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
        !ROOMS[..=room].contains(&name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_to_the_room_itself_and_to_lower_rooms_are_fine() {
        assert!(!names_higher("use crate::base::{Error, Result};", 0));
        assert!(!names_higher("    fn f(x: &crate::device::TensorView) -> crate::base::DType {", 1));
        assert!(names_higher("use crate::paging::BlockPool;", 1));
        assert!(names_higher("use crate::BlockPool;", 2), "the root re-exports every room");
        assert!(!names_higher("let x = 1; // see crate::paging", 0));
    }

    #[test]
    fn comments_and_blank_lines_are_no_code() {
        assert_eq!(code("//! a\n\nlet x;\n  // b\n").collect::<Vec<_>>(), [(3, "let x;")]);
    }
}
