//! Tables that a task writes into a document. Each table is between two marker lines, and the rest of the
//! page is left unchanged.

use crate::run::{self, Result, root};

/// The marker line after every table.
const END: &str = "<!-- end of table -->";

/// Returns the marker line before a command's table.
fn begin(command: &str) -> String {
    format!("<!-- table: written by `{command}` -->")
}

/// Returns a command's table on a page, or `None` if the page lacks the markers.
pub fn table<'a>(page: &'a str, command: &str) -> Option<&'a str> {
    let (_, rest) = page.split_once(&begin(command))?;
    rest.split_once(END).map(|(table, _)| table.trim())
}

/// Returns the page with a command's table replaced, or `None` if the page lacks the markers.
pub fn replaced(page: &str, command: &str, table: &str) -> Option<String> {
    let begin = begin(command);
    let (before, rest) = page.split_once(&begin)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{begin}\n\n{table}\n{END}{after}"))
}

/// Writes a command's table into a document. The document's path is relative to the workspace root.
pub fn write(page: &str, command: &str, table: &str) -> Result {
    let path = root().join(page);
    let text = run::read(&path)?;
    let text =
        replaced(&text, command, table).ok_or_else(|| format!("{page} has no table of `{command}`"))?;
    run::write(&path, &text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_table_of_one_command_is_replaced_and_read() {
        let (a, b) = (begin("a"), begin("b --write"));
        let page = format!("x\n{a}\nold\n{END}\ny\n{b}\n{END}");
        assert_eq!(replaced(&page, "a", "new\n"), Some(format!("x\n{a}\n\nnew\n\n{END}\ny\n{b}\n{END}")));
        assert_eq!(
            replaced(&page, "b --write", "new\n"),
            Some(format!("x\n{a}\nold\n{END}\ny\n{b}\n\nnew\n\n{END}"))
        );
        assert_eq!((table(&page, "a"), table(&page, "b --write")), (Some("old"), Some("")));
        assert_eq!((replaced("no place", "a", "new"), table("no place", "a")), (None, None));
    }
}
