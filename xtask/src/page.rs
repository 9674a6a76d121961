//! Tables in the documents that a task writes: each stands between two lines, and nothing else of a page changes.

/// The line behind every table.
const END: &str = "<!-- end of table -->";

/// Returns the line before the table that a command writes.
pub(crate) fn begin(command: &str) -> String {
    format!("<!-- table: written by `{command}` -->")
}

/// Returns the table that a command has written to a page; none if the page has no place for it.
pub(crate) fn table<'a>(page: &'a str, command: &str) -> Option<&'a str> {
    let (_, rest) = page.split_once(&begin(command))?;
    rest.split_once(END).map(|(table, _)| table.trim())
}

/// Returns a page with another table of a command; none if the page has no place for it.
pub(crate) fn replaced(page: &str, command: &str, table: &str) -> Option<String> {
    let begin = begin(command);
    let (before, rest) = page.split_once(&begin)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{begin}\n\n{table}\n{END}{after}"))
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
