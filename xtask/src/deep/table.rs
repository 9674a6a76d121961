//! The table in docs/deep.md: when each slice last ran, on which commit, and how it ended.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use xtask::page;
use xtask::run::{Result, read, root};

use super::{SLICES, Slice};
use crate::clock::Seconds;
use crate::step::word;

const PAGE: &str = "docs/deep.md";

/// The command in the table's marker line.
const COMMAND: &str = "cargo xtask deep";

/// The last run of one slice.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Row {
    /// The end time of the run, in a format that sorts.
    pub(super) when: String,
    /// The commit that the slice ran on.
    pub(super) commit: String,
    pub(super) seconds: Seconds,
    pub(super) passed: bool,
}

/// The last run of each slice, by name.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Table(BTreeMap<String, Row>);

impl Table {
    /// Reads the table from the page.
    pub(super) fn read() -> Result<Self> {
        let page = read(&root().join(PAGE))?;
        Self::parsed(page::table(&page, COMMAND).ok_or_else(|| format!("{PAGE} lacks its table markers"))?)
    }

    /// Writes the table to the page.
    pub(super) fn write(&self) -> Result {
        page::write(PAGE, COMMAND, &self.text())
    }

    /// Returns the last run of a slice.
    pub(super) fn row(&self, slice: &Slice) -> Option<&Row> {
        self.0.get(slice.name)
    }

    /// Records a slice's run, replacing the previous run.
    pub(super) fn set(&mut self, slice: &Slice, row: Row) {
        self.0.insert(slice.name.to_owned(), row);
    }

    /// Returns the slice to run next: a slice that never ran, or else the slice that ran longest ago.
    pub(super) fn longest_unrun(&self) -> &'static Slice {
        // A failed slice does not get priority, because a slice that always fails would block all others.
        let turn = |slice: &&Slice| self.row(slice).map(|row| row.when.clone());
        // There is at least one slice. If several slices are equally old, the first one is chosen.
        SLICES.iter().min_by_key(turn).unwrap_or(&SLICES[0])
    }

    /// Formats the table as Markdown, one row per slice, in order.
    pub(super) fn text(&self) -> String {
        let mut text =
            "| slice | what it checks | last run (UTC) | commit | seconds | CPU seconds | result |\n\
                        |---|---|---|---|---|---|---|\n"
                .to_owned();
        for slice in SLICES {
            let run = self.row(slice).map_or_else(
                || "never | – | – | – | –".to_owned(),
                |Row { when, commit, seconds, passed }| {
                    let (wall, cpu) = (seconds.wall, seconds.cpu_text());
                    format!("{when} | {commit} | {wall:.0} | {cpu} | {}", word(*passed))
                },
            );
            // Writing to a string cannot fail.
            let _ = writeln!(text, "| `{}` | {} | {run} |", slice.name, slice.covers);
        }
        text
    }

    /// Parses a table that [`text`](Self::text) wrote. Rows of slices that no longer exist are dropped.
    fn parsed(table: &str) -> Result<Self> {
        let mut rows = BTreeMap::new();
        for line in table.lines().skip(2) {
            let columns: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
            let [name, _, when, commit, wall, cpu, result] = columns[..] else {
                return Err(format!("{PAGE}: a row has {} columns, not 7: {line}", columns.len()));
            };
            let name = name.trim_matches('`');
            if when == "never" || !SLICES.iter().any(|slice| slice.name == name) {
                continue;
            }
            let wall =
                wall.parse().map_err(|_| format!("{PAGE}: {wall:?} is not a number of seconds: {line}"))?;
            rows.insert(
                name.to_owned(),
                Row {
                    when: when.to_owned(),
                    commit: commit.to_owned(),
                    seconds: Seconds { wall, cpu: cpu.parse().ok() },
                    passed: result == word(true),
                },
            );
        }
        Ok(Self(rows))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(when: &str, passed: bool) -> Row {
        let seconds = Seconds { wall: 12.0, cpu: Some(20.0) };
        Row { when: when.to_owned(), commit: "abc+".to_owned(), seconds, passed }
    }

    #[test]
    fn a_table_is_read_as_it_was_written() {
        let mut table = Table::default();
        assert_eq!(Table::parsed(&table.text()), Ok(Table::default()));
        table.set(&SLICES[1], row("2026-01-02 03:04", true));
        table.set(
            &SLICES[2],
            Row { seconds: Seconds { wall: 1.0, cpu: None }, ..row("2026-01-02 03:05", false) },
        );
        assert_eq!(Table::parsed(&table.text()), Ok(table));
    }

    #[test]
    fn rows_of_another_form_are_refused_and_unknown_slices_left_out() {
        let head = "| a |\n|---|\n";
        assert!(Table::parsed(&format!("{head}| `loom` | x |")).is_err_and(|e| e.contains("2 columns")));
        let gone = format!("{head}| `no such slice` | x | 2026-01-01 00:00 | c | 1 | 2 | passed |");
        assert_eq!(Table::parsed(&gone), Ok(Table::default()));
    }

    #[test]
    fn the_turn_is_of_one_that_never_ran_then_of_the_oldest_passed_or_not() {
        let mut table = Table::default();
        assert_eq!(table.longest_unrun().name, SLICES[0].name);
        for (i, slice) in SLICES.iter().enumerate() {
            table.set(slice, row(&format!("2026-01-{:02} 00:00", 28 - i), true));
        }
        let last = &SLICES[SLICES.len() - 1];
        assert_eq!(table.longest_unrun().name, last.name);
        table.set(last, row("2026-02-01 00:00", false));
        assert_eq!(table.longest_unrun().name, SLICES[SLICES.len() - 2].name);
        table.0.remove(SLICES[0].name);
        assert_eq!(table.longest_unrun().name, SLICES[0].name);
    }

    #[test]
    fn the_committed_table_is_read_and_names_every_slice() {
        let page = include_str!("../../../docs/deep.md");
        let table = page::table(page, COMMAND).map(Table::parsed);
        assert!(table.is_some_and(|table| table.is_ok()));
        assert!(
            SLICES.iter().all(|slice| page.contains(&format!("| `{}` | {} |", slice.name, slice.covers)))
        );
    }
}
