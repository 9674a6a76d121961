//! Notes on standard error: progress, advice and errors.

use std::fmt::Arguments;
use std::io::Write;

/// Writes a line to standard error, formatted like the arguments of `println!`.
macro_rules! note {
    ($($text:tt)*) => {
        $crate::notes::write(format_args!($($text)*))
    };
}

/// Writes a line to standard error. If it is closed or full, the line is dropped, because notes are not worth an
/// answer.
pub(crate) fn write(line: Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
