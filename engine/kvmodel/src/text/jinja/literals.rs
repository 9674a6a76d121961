//! Strings in the expressions of templates, whose escapes Python reads in other ways than minijinja.
//!
//! Jinja2 decodes a string with Python's codec `unicode-escape`, after it has written every character outside
//! ASCII as an escape. The strings are therefore rewritten in the source, with the escapes that both know.

use super::fault::{Fault, Run, fail};
use super::print;

/// Appends a tag or an expression of a template to `out`, with every string in the form of minijinja. Line
/// breaks that the strings lose follow behind them, so that line numbers stay the same.
pub(super) fn push_tag(out: &mut String, tag: &str) -> Run<()> {
    let mut rest = tag;
    while let Some(at) = rest.find(['"', '\'']) {
        let (before, quoted) = rest.split_at(at);
        out.push_str(before);
        let quote = &quoted[..1];
        let Some(len) = closing(&quoted[1..], quote) else {
            rest = quoted;
            break;
        };
        let inner = &quoted[1..=len];
        out.push_str(quote);
        if inner.contains('\\') {
            let text = decoded(inner)?;
            push_encoded(out, &text, quote);
            out.push_str(quote);
            let lost = inner.matches('\n').count();
            out.extend(std::iter::repeat_n('\n', lost));
        } else {
            out.push_str(inner);
            out.push_str(quote);
        }
        rest = &quoted[len + 2..];
    }
    out.push_str(rest);
    Ok(())
}

/// Returns the length of a string up to its closing quote, if it has one.
fn closing(text: &str, quote: &str) -> Option<usize> {
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' => {
                chars.next();
            }
            c if quote.starts_with(c) => return Some(at),
            _ => {}
        }
    }
    None
}

/// Returns the text that Python's codec `unicode-escape` reads in the inside of a string.
fn decoded(inner: &str) -> Run<String> {
    let mut out = String::with_capacity(inner.len());
    let mut chars = inner.chars();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        let Some(kind) = chars.next() else { return fail("a string ends with a backslash") };
        match kind {
            '\n' => {}
            '\\' | '\'' | '"' => out.push(kind),
            'a' => out.push('\x07'),
            'b' => out.push('\x08'),
            'f' => out.push('\x0c'),
            'n' => out.push('\n'),
            'r' => out.push('\r'),
            't' => out.push('\t'),
            'v' => out.push('\x0b'),
            'x' | 'u' | 'U' => {
                let digits = match kind {
                    'x' => 2,
                    'u' => 4,
                    _ => 8,
                };
                let code: String = chars.as_str().chars().take(digits).collect();
                let whole = code.len() == digits && code.bytes().all(|b| b.is_ascii_hexdigit());
                let number = whole.then(|| u32::from_str_radix(&code, 16).ok()).flatten();
                let Some(number) = number else {
                    return fail(format!("the escape '\\{kind}{code}' lacks some of its {digits} digits"));
                };
                out.push(character(number, kind, &code)?);
                chars = chars.as_str()[digits..].chars();
            }
            '0'..='7' => {
                let more = chars.as_str().bytes().take(2).take_while(|b| (b'0'..=b'7').contains(b)).count();
                let digits = format!("{kind}{}", &chars.as_str()[..more]);
                out.extend(u32::from_str_radix(&digits, 8).ok().and_then(char::from_u32));
                chars = chars.as_str()[more..].chars();
            }
            'N' => {
                return fail(
                    "names of characters ('\\N{...}') are not supported in chat templates; write the character",
                );
            }
            kind if kind.is_ascii() => out.extend(['\\', kind]),
            // The backslash escapes the one of the character's own escape.
            kind => print::escaped(&mut out, kind),
        }
    }
    Ok(out)
}

/// Returns the character with a number.
fn character(number: u32, kind: char, code: &str) -> Run<char> {
    char::from_u32(number).ok_or_else(|| {
        Fault::failed(if (0xD800..0xE000).contains(&number) {
            format!("the escape '\\{kind}{code}' is half of a character; write the whole one as '\\U...'")
        } else {
            format!("the escape '\\{kind}{code}' is beyond the last character")
        })
    })
}

/// Writes a text with the escapes that minijinja reads.
fn push_encoded(out: &mut String, text: &str, quote: &str) {
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\\' => out.push_str("\\\\"),
            c if quote.starts_with(c) => out.extend(['\\', c]),
            c => out.push(c),
        }
    }
}
