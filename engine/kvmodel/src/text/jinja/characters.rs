//! The classes of characters of Python's `str`, and its mappings to title case and without case.
//!
//! Rust's own classes are those of the same Unicode properties, except that Rust counts marks as alphabetic
//! and knows neither decimal digits, title case nor case folding.

use std::sync::LazyLock;

use regex_syntax::hir::{Class, HirKind};

/// Ranges of characters, in ascending order.
type Ranges = Vec<(char, char)>;

static LETTERS: LazyLock<Ranges> = LazyLock::new(|| ranges(r"\p{L}"));
static DECIMALS: LazyLock<Ranges> = LazyLock::new(|| ranges(r"\p{Nd}"));
static TITLES: LazyLock<Ranges> = LazyLock::new(|| ranges(r"\p{Lt}"));

/// The digits that are no decimal digits, such as ² and ①.
const DIGITS: [(char, char); 20] = [
    ('\u{b2}', '\u{b3}'),
    ('\u{b9}', '\u{b9}'),
    ('\u{1369}', '\u{1371}'),
    ('\u{19da}', '\u{19da}'),
    ('\u{2070}', '\u{2070}'),
    ('\u{2074}', '\u{2079}'),
    ('\u{2080}', '\u{2089}'),
    ('\u{2460}', '\u{2468}'),
    ('\u{2474}', '\u{247c}'),
    ('\u{2488}', '\u{2490}'),
    ('\u{24ea}', '\u{24ea}'),
    ('\u{24f5}', '\u{24fd}'),
    ('\u{24ff}', '\u{24ff}'),
    ('\u{2776}', '\u{277e}'),
    ('\u{2780}', '\u{2788}'),
    ('\u{278a}', '\u{2792}'),
    ('\u{10a40}', '\u{10a43}'),
    ('\u{10e60}', '\u{10e68}'),
    ('\u{11052}', '\u{1105a}'),
    ('\u{1f100}', '\u{1f10a}'),
];

/// The ideographs that are numbers.
const IDEOGRAPHS: &str = "㐅㒃㠪㭍一七万三九二五亖亿什仟仨伍佰億兆兩八六十千卄卅卌叁参參叄四壱壹幺廾廿弌弍弎弐拾捌柒漆玖百肆萬貮貳贰阡陆陌陸零\
     \u{f96b}\u{f973}\u{f978}\u{f9b2}\u{f9d1}\u{f9d3}\u{f9fd}\u{2f890}𠀁𠁤𠃢𠄡𠤪𠦃𠦌𠦜𠫪𠫽𠬙𢎐𢦘𣬛𦉭";

/// Returns the ranges of a class in the syntax of regular expressions. The classes above are well-formed.
fn ranges(class: &str) -> Ranges {
    match regex_syntax::parse(class).map(regex_syntax::hir::Hir::into_kind) {
        Ok(HirKind::Class(Class::Unicode(class))) => {
            class.ranges().iter().map(|range| (range.start(), range.end())).collect()
        }
        _ => Ranges::new(),
    }
}

/// Returns the range that contains a character.
fn within(ranges: &[(char, char)], c: char) -> Option<(char, char)> {
    let after = ranges.partition_point(|(first, _)| *first <= c);
    ranges[..after].last().filter(|(_, last)| c <= *last).copied()
}

/// Returns true for the characters of `str.isalpha`.
pub(super) fn is_letter(c: char) -> bool {
    c.is_ascii_alphabetic() || (!c.is_ascii() && within(&LETTERS, c).is_some())
}

/// Returns the value of a decimal digit. Decimal digits of a script stand in order, ten by ten.
pub(super) fn decimal(c: char) -> Option<u32> {
    if c.is_ascii() {
        return c.to_digit(10);
    }
    within(&DECIMALS, c).map(|(zero, _)| (c as u32 - zero as u32) % 10)
}

/// Returns true for the characters of `str.isdecimal`.
pub(super) fn is_decimal(c: char) -> bool {
    decimal(c).is_some()
}

/// Returns true for the characters of `str.isdigit`.
pub(super) fn is_digit(c: char) -> bool {
    is_decimal(c) || within(&DIGITS, c).is_some()
}

/// Returns true for the characters of `str.isnumeric`.
pub(super) fn is_numeric(c: char) -> bool {
    c.is_numeric() || (!c.is_ascii() && IDEOGRAPHS.contains(c))
}

/// Returns true for the characters of `str.isalnum`.
pub(super) fn is_alphanumeric(c: char) -> bool {
    is_letter(c) || is_numeric(c)
}

/// Returns true for a character in title case, such as ǅ.
pub(super) fn is_titlecase(c: char) -> bool {
    !c.is_ascii() && within(&TITLES, c).is_some()
}

/// Returns true if a character has a case.
pub(super) fn is_cased(c: char) -> bool {
    c.is_lowercase() || c.is_uppercase() || is_titlecase(c)
}

/// Returns true if a character is printable. Behind a letter, `escape_debug` escapes only what is not.
pub(super) fn is_printable(c: char) -> bool {
    if matches!(c, '"' | '\'' | '\\') {
        return true;
    }
    let pair: String = ['a', c].iter().collect();
    pair.escape_debug().eq(pair.chars())
}

/// Appends a character in title case.
pub(super) fn push_title(out: &mut String, c: char) {
    /// The mark that an iota below a Greek letter is in title case.
    const IOTA_BELOW: char = '\u{345}';
    let moved = |by: u32| char::from_u32(c as u32 + by).unwrap_or(c);
    match c {
        'Ǆ'..='ǆ' => out.push('ǅ'),
        'Ǉ'..='ǉ' => out.push('ǈ'),
        'Ǌ'..='ǌ' => out.push('ǋ'),
        'Ǳ'..='ǳ' => out.push('ǲ'),
        // The capital letters of Georgian are for texts in capitals alone.
        'ა'..='ჿ' => out.push(c),
        'ŉ' => out.extend(c.to_uppercase()),
        c if is_titlecase(c) => out.push(c),
        'ᾀ'..='ᾇ' | 'ᾐ'..='ᾗ' | 'ᾠ'..='ᾧ' => out.push(moved(8)),
        'ᾳ' | 'ῃ' | 'ῳ' => out.push(moved(9)),
        'ᾲ' | 'ᾴ' | 'ᾷ' | 'ῂ' | 'ῄ' | 'ῇ' | 'ῲ' | 'ῴ' | 'ῷ' => {
            out.extend(c.to_uppercase().map(|upper| if upper == 'Ι' { IOTA_BELOW } else { upper }));
        }
        c => {
            for (i, upper) in c.to_uppercase().enumerate() {
                if i == 0 { out.push(upper) } else { out.extend(upper.to_lowercase()) }
            }
        }
    }
}

/// Appends a character as `str.casefold` writes it.
pub(super) fn push_folded(out: &mut String, c: char) {
    match c {
        'ı' => out.push(c),
        'ẞ' => out.push_str("ss"),
        // The letters of Cherokee are folded to their capitals, which are the older ones.
        'Ꭰ'..='ᏽ' | 'ꭰ'..='ꮿ' => out.extend(c.to_uppercase()),
        c => out.extend(c.to_uppercase().flat_map(char::to_lowercase)),
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::super::{letters, print};
    use super::*;

    /// Python's classes and mappings: see `proof/goldens/templates/unicode.py`.
    #[derive(Deserialize)]
    struct Goldens {
        /// The ranges of the characters of each class, as their first and last characters.
        classes: std::collections::BTreeMap<String, Vec<String>>,
        /// The characters that a mapping changes, each followed by its text.
        mappings: std::collections::BTreeMap<String, Vec<String>>,
    }

    type Class = fn(char) -> bool;
    type Mapping = fn(&str) -> String;

    const CLASSES: [(&str, Class); 12] = [
        ("isalnum", is_alphanumeric),
        ("isalpha", is_letter),
        ("isdecimal", is_decimal),
        ("isdigit", is_digit),
        ("islower", char::is_lowercase),
        ("isnumeric", is_numeric),
        ("isprintable", |c| c == ' ' || is_printable(c)),
        ("isspace", letters::is_space),
        ("istitle", |c| letters::is_title(c.encode_utf8(&mut [0; 4]))),
        ("isupper", char::is_uppercase),
        ("lines", |c| letters::lines(&format!("a{c}b"), false).len() == 2),
        ("quoted", |c| {
            let mut out = String::new();
            print::quoted(&mut out, c.encode_utf8(&mut [0; 4]));
            out.chars().count() == 3
        }),
    ];

    const MAPPINGS: [(&str, Mapping); 4] = [
        ("casefold", letters::casefold),
        ("lower", str::to_lowercase),
        ("title", letters::title),
        ("upper", str::to_uppercase),
    ];

    /// The characters that are lower case in Unicode 14 and not in later versions, or the reverse.
    const CHANGED: &str = "ʕჼꟲꟳꟴꭩ";

    #[test]
    fn every_character_has_the_classes_and_the_mappings_of_python() {
        let goldens: Goldens =
            serde_json::from_str(include_str!("../../../tests/goldens/python_unicode.json")).unwrap();
        let known = |name: &str| -> Ranges {
            goldens.classes[name]
                .iter()
                .map(|pair| {
                    let mut chars = pair.chars();
                    let first = chars.next().unwrap();
                    (first, chars.next().unwrap_or(first))
                })
                .collect()
        };
        // Characters that newer versions of Unicode have added are left out.
        let assigned = known("assigned");
        let same = |c: &char| within(&assigned, *c).is_some() && !CHANGED.contains(*c);
        let all = || (0..=char::MAX as u32).filter_map(char::from_u32).filter(same);
        assert!(all().count() > 140_000);
        let mut wrong = Vec::new();
        for (name, class) in CLASSES {
            let ranges = known(name);
            wrong.extend(
                all().filter(|c| class(*c) != within(&ranges, *c).is_some()).map(|c| format!("{name} {c:?}")),
            );
        }
        for (name, mapping) in MAPPINGS {
            let mut changed = goldens.mappings[name]
                .iter()
                .map(|pair| {
                    let first = pair.chars().next().unwrap();
                    (first, &pair[first.len_utf8()..])
                })
                .peekable();
            for c in all() {
                let mut own = [0; 4];
                let own: &str = c.encode_utf8(&mut own);
                let wanted = changed.next_if(|(first, _)| *first == c).map_or(own, |(_, text)| text);
                let got = mapping(own);
                let newer = got.chars().any(|c| within(&assigned, c).is_none());
                if got != wanted && !newer {
                    wrong.push(format!("{name} {c:?}: {got:?} in place of {wanted:?}"));
                }
            }
            assert!(changed.next().is_none(), "{name} has characters that are not assigned");
        }
        assert!(wrong.is_empty(), "{} differ: {}", wrong.len(), wrong.join("\n"));
    }
}
