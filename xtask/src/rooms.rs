//! The layers ("rooms") of modules inside crates: a module may import from its own room and from lower ones.

use std::collections::BTreeMap;
use std::path::Path;

use xtask::run::{Result, none_of, read, root};

/// The source folders of crates, and their modules from the lowest room to the highest. Modules without `<`
/// between them may import each other.
const CRATES: [(&str, &str); 5] = [
    ("kvcore/src", "base < device < paging"),
    (
        "kvbackend-cuda/src",
        "options driver facts < compile < module < device < memory < tables < queue report < backend kernels < dense nccl stream",
    ),
    (
        "kvbackend-ascend/src",
        "bindings options errors < library < device < memory < queue report < operators operations dense < stream < \
         backend < hccl",
    ),
    ("kvbackend-wgpu/src", "options < pipeline < device < memory adapter < queue < kernels < stream"),
    (
        "engine/kvengine/src",
        "config error result_file < constraint < guided runner < request tuned < documents sampling < prompt < serve < engine",
    ),
];

// Decision: docs/decisions/crates.md#kvcore-has-a-size-limit
/// The maximum number of lines of code in `kvcore/src` outside of [`QUEUE`]. Comments, blank lines and the
/// tests at the end of files do not count.
const MOST_LINES: usize = 8_920;

/// The folder of the bookkeeping that backends share. Engines never call it.
const QUEUE: &str = "kvcore/src/device/queue/";

/// The maximum number of lines of code in [`QUEUE`], counted in the same way.
const MOST_LINES_OF_QUEUE: usize = 520;

/// The line that starts a file's tests.
const TESTS: &str = "#[cfg(test)]\nmod tests {";

// Decision: docs/decisions/crates.md#kvcore-has-three-rooms
/// Checks that no code imports from a higher room, that every module is in a room, and that every module in
/// the table exists. Comments may link anywhere.
pub(crate) fn check(tracked: &[String]) -> Result {
    let mut upward = Vec::new();
    for (src, rooms) in CRATES {
        let exported = exported(&read(&root().join(src).join("lib.rs"))?);
        let mut empty: Vec<&str> = rooms.split([' ', '<']).filter(|room| !room.is_empty()).collect();
        for file in tracked {
            let Some(path) = file.strip_prefix(src) else { continue };
            let module = module(path);
            let Some(level) = level(rooms, module) else {
                upward.extend((module != "lib").then(|| format!("{file}: in no room")));
                continue;
            };
            empty.retain(|room| *room != module);
            let text = read(&root().join(file))?;
            let higher =
                names(&text).into_iter().filter(|(_, name)| is_higher(name, rooms, level, &exported));
            upward.extend(higher.map(|(line, name)| format!("{file}:{line}: crate::{name}")));
        }
        upward.extend(empty.iter().map(|room| format!("{src}: no file in the room {room}")));
    }
    none_of("a room names a higher one", &upward)
}

/// Checks that kvcore is within its code size limits.
pub(crate) fn bounds(tracked: &[String]) -> Result {
    let (mut core, mut queue) = (0, 0);
    for file in tracked.iter().filter(|file| file.starts_with("kvcore/src/")) {
        let text = read(&root().join(file))?;
        let lines = text.split(TESTS).next().unwrap_or_default().lines().filter(|line| is_code(line)).count();
        *(if file.starts_with(QUEUE) { &mut queue } else { &mut core }) += lines;
    }
    let counts = [("kvcore", core, MOST_LINES), (QUEUE, queue, MOST_LINES_OF_QUEUE)];
    let over = counts.into_iter().filter(|(_, lines, most)| lines > most);
    let over: Vec<String> =
        over.map(|(place, lines, most)| format!("{place}: {lines}, at most {most}")).collect();
    none_of("more lines of code than the bound (docs/decisions/crates.md)", &over)
}

/// Returns a module's level, or `None` if the module is not in any room.
fn level(rooms: &str, module: &str) -> Option<usize> {
    rooms.split(" < ").position(|level| level.split(' ').any(|room| room == module))
}

/// Returns true if code at a level may not use `crate::NAME`. Modules that are not in any room are
/// allowed, unless the crate root re-exports whole rooms.
fn is_higher(name: &str, rooms: &str, of: usize, exported: &BTreeMap<String, String>) -> bool {
    let module = exported.get(name).map_or(name, String::as_str);
    level(rooms, module).map_or(exported.contains_key("*"), |other| other > of)
}

/// Returns the top-level module of a file, given its path below `src`.
fn module(path: &str) -> &str {
    let first = path.trim_start_matches('/').split('/').next().unwrap_or_default();
    Path::new(first).file_stem().and_then(|stem| stem.to_str()).unwrap_or(first)
}

fn is_code(line: &str) -> bool {
    !line.trim().is_empty() && !line.trim_start().starts_with("//")
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Returns the names after `crate::`, including the ones in braces, each with its line.
fn names(text: &str) -> Vec<(usize, &str)> {
    let mut names = Vec::new();
    for (at, _) in text.match_indices("crate::") {
        let before = text[..at].rsplit('\n').next().unwrap_or_default();
        if before.contains("//") || before.ends_with(is_name) {
            continue;
        }
        let (line, rest) = (text[..at].lines().count().max(1), &text[at + "crate::".len()..]);
        match rest.strip_prefix('{') {
            Some(list) => names.extend(heads(list).into_iter().map(|name| (line, name))),
            None => names.push((line, rest.split(|c| !is_name(c)).next().unwrap_or_default())),
        }
    }
    names
}

/// Returns the first name of each path in a list, up to the closing brace.
fn heads(list: &str) -> Vec<&str> {
    let (mut depth, mut start, mut heads) = (0, 0, Vec::new());
    for (at, c) in list.char_indices() {
        let ends = depth == 0 && matches!(c, ',' | '}');
        if ends {
            heads.push(list[start..at].trim().split(|c| !is_name(c)).next().unwrap_or_default());
            start = at + 1;
        }
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            _ => {}
        }
    }
    heads.retain(|name| !name.is_empty());
    heads
}

/// Returns the names that `lib.rs` re-exports, each with its module. `*` stands for all of a module's names.
fn exported(library: &str) -> BTreeMap<String, String> {
    let code: Vec<&str> = library.lines().filter(|line| is_code(line)).collect();
    let mut exported = BTreeMap::new();
    for statement in code.join(" ").split("use ").skip(1) {
        let statement = statement.split(';').next().unwrap_or_default();
        let Some((module, names)) = statement.split_once("::") else { continue };
        let names = names.split(|c| !is_name(c) && c != '*').filter(|name| !name.is_empty());
        exported.extend(names.map(|name| (name.to_owned(), module.to_owned())));
    }
    exported
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLOSED: &str = "pub use base::*;\npub use stream::*;\n";
    const OPEN: &str = "mod stream;\npub use stream::{Cuda,\n    Graph};\npub use base::Error;\n";

    fn higher(library: &str, level: usize, code: &str) -> bool {
        let exported = exported(library);
        names(code).iter().any(|(_, name)| is_higher(name, "base < queue dense < stream", level, &exported))
    }

    #[test]
    fn paths_to_the_room_itself_and_to_lower_rooms_are_fine() {
        assert!(!higher(CLOSED, 0, "use crate::base::{Error, Result};"));
        assert!(!higher(CLOSED, 1, "    fn f(x: &crate::dense::View) -> crate::base::DType {"));
        assert!(higher(CLOSED, 1, "use crate::stream::Graph;"));
        assert!(higher(CLOSED, 2, "use crate::Anything;"), "the root re-exports every room");
        assert!(!higher(CLOSED, 0, "let x = 1; // see crate::stream"));
    }

    #[test]
    fn lists_and_names_that_the_root_re_exports_belong_to_their_rooms() {
        assert!(!higher(OPEN, 1, "use crate::{base::{A, stream}, device, Error};"));
        assert!(higher(OPEN, 1, "use crate::{\n    base::A,\n    stream::B,\n};"));
        assert!(higher(OPEN, 1, "use crate::Graph;") && !higher(OPEN, 2, "use crate::Graph;"));
        assert_eq!(names("a\nuse crate::{x, y::{z, w}, v};\n"), [(2, "x"), (2, "y"), (2, "v")]);
    }

    #[test]
    fn comments_and_blank_lines_are_no_code_and_files_have_their_module() {
        assert!(is_code("let x;") && !["//! a", "", "  // b"].into_iter().any(is_code));
        assert_eq!([module("/queue/mod.rs"), module("/stream.rs")], ["queue", "stream"]);
    }
}
