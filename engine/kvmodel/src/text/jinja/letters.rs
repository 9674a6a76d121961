//! Operations on texts as Python defines them: white space, lines, words, cases and fields.

use std::collections::HashSet;

use super::characters::{decimal, is_cased, is_titlecase, push_folded, push_title};

/// Returns true if Python's `str.strip` removes the character.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// Strips the characters in `chars`, or white space, from the sides that are asked for.
pub(super) fn strip<'a>(text: &'a str, chars: Option<&str>, start: bool, end: bool) -> &'a str {
    // A set, because a template may give as many characters as it likes.
    let chars: Option<HashSet<char>> = chars.map(|chars| chars.chars().collect());
    let unwanted = |c: char| chars.as_ref().map_or_else(|| is_space(c), |chars| chars.contains(&c));
    let text = if start { text.trim_start_matches(unwanted) } else { text };
    if end { text.trim_end_matches(unwanted) } else { text }
}

/// Returns the lines of a text: Python's `str.splitlines(keep)`.
pub(super) fn lines(text: &str, keep: bool) -> Vec<&str> {
    let ends = |c: char| {
        matches!(c, '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}')
    };
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(ends) {
        let width = match &rest[at..] {
            end if end.starts_with("\r\n") => 2,
            end => end.chars().next().map_or(1, char::len_utf8),
        };
        lines.push(&rest[..if keep { at + width } else { at }]);
        rest = &rest[at + width..];
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
}

/// Splits a text at a separator, or at runs of white space: Python's `str.split(separator, most)`.
pub(super) fn split<'a>(text: &'a str, separator: Option<&str>, most: Option<usize>) -> Vec<&'a str> {
    let most = most.map_or(usize::MAX, |most| most.saturating_add(1));
    if let Some(separator) = separator {
        return text.splitn(most, separator).collect();
    }
    let mut fields = Vec::new();
    let mut rest = text.trim_start_matches(is_space);
    while !rest.is_empty() {
        if fields.len() + 1 == most {
            fields.push(rest);
            break;
        }
        let end = rest.find(is_space).unwrap_or(rest.len());
        fields.push(&rest[..end]);
        rest = rest[end..].trim_start_matches(is_space);
    }
    fields
}

/// Splits a text from its end: Python's `str.rsplit(separator, most)`.
pub(super) fn rsplit<'a>(text: &'a str, separator: Option<&str>, most: Option<usize>) -> Vec<&'a str> {
    let most = most.map_or(usize::MAX, |most| most.saturating_add(1));
    let mut fields = Vec::new();
    if let Some(separator) = separator {
        fields.extend(text.rsplitn(most, separator));
    } else {
        let mut rest = text.trim_end_matches(is_space);
        while !rest.is_empty() {
            if fields.len() + 1 == most {
                fields.push(rest);
                break;
            }
            let space = rest.char_indices().rev().find(|(_, c)| is_space(*c));
            let start = space.map_or(0, |(at, c)| at + c.len_utf8());
            fields.push(&rest[start..]);
            rest = rest[..start].trim_end_matches(is_space);
        }
    }
    fields.reverse();
    fields
}

/// Returns each character with its lower case, in which a sigma at the end of a word has its own form.
fn with_lower<'a>(text: &'a str, lower: &'a str) -> impl Iterator<Item = (char, &'a str)> {
    let mut at = 0;
    text.chars().map(move |c| {
        // Both forms of the sigma have the same length.
        let len: usize = c.to_lowercase().map(char::len_utf8).sum();
        at += len;
        (c, &lower[at - len..at])
    })
}

/// Returns Python's `str.title()`.
pub(super) fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut inside = false;
    for (c, lower) in with_lower(text, &text.to_lowercase()) {
        if inside {
            out.push_str(lower);
        } else {
            push_title(&mut out, c);
        }
        inside = is_cased(c);
    }
    out
}

/// Returns Python's `str.capitalize()`.
pub(super) fn capitalize(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for (i, (c, lower)) in with_lower(text, &text.to_lowercase()).enumerate() {
        if i == 0 { push_title(&mut out, c) } else { out.push_str(lower) }
    }
    out
}

/// Returns Python's `str.casefold()`.
pub(super) fn casefold(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    text.chars().for_each(|c| push_folded(&mut out, c));
    out
}

/// Returns Python's `str.swapcase()`.
pub(super) fn swapcase(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for (c, lower) in with_lower(text, &text.to_lowercase()) {
        if c.is_uppercase() {
            out.push_str(lower);
        } else if c.is_lowercase() {
            out.extend(c.to_uppercase());
        } else {
            out.push(c);
        }
    }
    out
}

/// Returns Python's `str.istitle()`.
pub(super) fn is_title(text: &str) -> bool {
    let (mut cased, mut inside) = (false, false);
    for c in text.chars() {
        if c.is_uppercase() || is_titlecase(c) {
            if inside {
                return false;
            }
            (cased, inside) = (true, true);
        } else if c.is_lowercase() {
            if !inside {
                return false;
            }
        } else {
            inside = false;
        }
    }
    cased
}

/// Returns Python's `str.islower()`: the text has letters with a case, and all of them are in lower case.
pub(super) fn is_lower(text: &str) -> bool {
    text.chars().any(char::is_lowercase) && !text.chars().any(|c| c.is_uppercase() || is_titlecase(c))
}

/// Returns Python's `str.isupper()`: the text has letters with a case, and all of them are in upper case.
pub(super) fn is_upper(text: &str) -> bool {
    text.chars().any(char::is_uppercase) && !text.chars().any(|c| c.is_lowercase() || is_titlecase(c))
}

/// Returns a text with ASCII's digits in place of the decimal digits of other scripts, as Python reads numbers.
pub(super) fn with_ascii_digits(text: &str) -> String {
    text.chars().map(|c| decimal(c).and_then(|digit| char::from_digit(digit, 10)).unwrap_or(c)).collect()
}

/// The side of a field on which a shorter text is filled up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fill {
    /// Left and right. If they differ, the left side gets more if `odd` is true and the width is odd, as in
    /// `str.center`, and the right side otherwise, as in formats.
    Both {
        odd: bool,
    },
    Left,
    Right,
}

/// Fills a text up to `width` characters.
pub(super) fn fill(text: &str, width: usize, with: char, side: Fill) -> String {
    let missing = width.saturating_sub(text.chars().count());
    let left = match side {
        Fill::Left => missing,
        Fill::Right => 0,
        Fill::Both { odd } => missing / 2 + usize::from(odd && missing % 2 == 1 && width % 2 == 1),
    };
    let pad = |count: usize| std::iter::repeat_n(with, count);
    pad(left).chain(text.chars()).chain(pad(missing - left)).collect()
}

/// Percent-encodes a text as Python's `urllib.parse.quote` does, with `/` unchanged unless `all`.
pub(super) fn quote(text: &str, all: bool) -> String {
    use std::fmt::Write as _;
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' => out.push(byte.into()),
            b'/' if !all => out.push('/'),
            b' ' if all => out.push('+'),
            byte => {
                let _ = write!(out, "%{byte:02X}");
            }
        }
    }
    out
}

/// Replaces the first `most` occurrences of `old`: Python's `str.replace`.
pub(super) fn replace(text: &str, old: &str, new: &str, most: Option<usize>) -> String {
    match most {
        None => text.replace(old, new),
        Some(most) => text.replacen(old, new, most),
    }
}

/// Escapes the characters that HTML gives a meaning.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}
