//! The lines of a journal: a header with the version, and then one change of a tenant's documents in each line.
//!
//! ```text
//! {"format":"kvc documents","version":1}
//! {"check":"8c5f…","registered":{"tenant":"sales","id":"harbour","text":"…","expires":1790000000000,"ttl":60000}}
//! {"check":"0b1e…","removed":{"tenant":"sales","id":"harbour"}}
//! ```
//!
//! `check` is the beginning of the BLAKE3 digest of everything after it, so that a line with a changed byte is noticed.

use std::borrow::Cow;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::Error;

/// The version of the lines that this program writes and reads.
const VERSION: u64 = 1;

/// The word in the first line of every journal.
const FORMAT: &str = "kvc documents";

/// The hexadecimal digits of a check.
const DIGITS: usize = 16;

/// The bytes before the digits of a check, and those after them.
const AROUND: (&str, &str) = ("{\"check\":\"", "\",");

#[derive(Serialize, Deserialize)]
struct Header<'a> {
    format: Cow<'a, str>,
    version: u64,
}

/// A change of a tenant's documents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Change<'a> {
    /// A document is registered, or replaces the one with its ID.
    Registered(Registration<'a>),
    /// A document is removed.
    Removed {
        /// The tag of the tenant; `None` for the default tenant.
        #[serde(skip_serializing_if = "Option::is_none")]
        tenant: Option<Cow<'a, str>>,
        id: Cow<'a, str>,
    },
}

/// The reason why a line is not a change.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum LineFault {
    /// Its bytes are not those that were written.
    Damaged(String),
    /// It was written like this, by a program that knows other changes.
    Unknown(String),
}

impl LineFault {
    pub(super) fn reason(self) -> String {
        match self {
            Self::Damaged(reason) | Self::Unknown(reason) => reason,
        }
    }
}

/// A document as it was registered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Registration<'a> {
    /// The tag of the tenant; `None` for the default tenant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tenant: Option<Cow<'a, str>>,
    pub(crate) id: Cow<'a, str>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) title: Option<Cow<'a, str>>,
    pub(crate) text: Cow<'a, str>,
    /// The system prompt behind which the document is computed in advance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) system: Option<Cow<'a, str>>,
    /// The time when the document is forgotten, in milliseconds since 1970; `None` if it is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) expires: Option<u64>,
    /// The time that it was kept for, in milliseconds. A clock that goes back does not make it longer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ttl: Option<u64>,
}

/// The first line of a file.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum FirstLine {
    Ours,
    /// A journal of another version.
    Version(u64),
    /// No journal.
    Other,
}

impl FirstLine {
    pub(super) fn read(line: &[u8]) -> Self {
        match serde_json::from_slice(line) {
            Ok(Header { format, version }) if format == FORMAT => {
                if version == VERSION {
                    Self::Ours
                } else {
                    Self::Version(version)
                }
            }
            _ => Self::Other,
        }
    }

    /// Checks that a first line, or an empty file, is that of a journal of this version.
    ///
    /// # Errors
    /// Returns [`Error::DocumentsVersion`] or [`Error::NoDocuments`].
    pub(super) fn check(line: &[u8], path: &Path) -> Result<(), Error> {
        match Self::read(line) {
            Self::Version(version) => Err(Error::DocumentsVersion { path: path.to_owned(), version }),
            Self::Other if !line.is_empty() => Err(Error::NoDocuments { path: path.to_owned() }),
            Self::Ours | Self::Other => Ok(()),
        }
    }

    /// Returns the first line of a journal, with its end.
    pub(super) fn written() -> String {
        format!("{{\"format\":\"{FORMAT}\",\"version\":{VERSION}}}\n")
    }
}

impl Change<'_> {
    /// Returns the line of the change, with its end.
    pub(super) fn written(&self) -> serde_json::Result<String> {
        let json = serde_json::to_string(self)?;
        let rest = json.get(1..).unwrap_or_default();
        let (before, after) = AROUND;
        Ok(format!("{before}{}{after}{rest}\n", check(rest.as_bytes())))
    }

    /// Reads a line, with or without its end.
    ///
    /// # Errors
    /// Returns what is wrong with the line.
    pub(super) fn read(line: &[u8]) -> Result<Change<'static>, LineFault> {
        let unlike = || LineFault::Damaged("it does not have the form of a change".to_owned());
        let line = line.strip_suffix(b"\n").unwrap_or(line);
        let (digits, rest) = line
            .strip_prefix(AROUND.0.as_bytes())
            .and_then(|line| line.split_at_checked(DIGITS))
            .ok_or_else(unlike)?;
        let rest = rest.strip_prefix(AROUND.1.as_bytes()).ok_or_else(unlike)?;
        if check(rest).as_bytes() != digits {
            return Err(LineFault::Damaged("its bytes do not match its check".to_owned()));
        }
        serde_json::from_slice(&[b"{", rest].concat()).map_err(|error| LineFault::Unknown(error.to_string()))
    }
}

fn check(bytes: &[u8]) -> String {
    let mut digits = blake3::hash(bytes).to_hex().to_string();
    digits.truncate(DIGITS);
    digits
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changes() -> [Change<'static>; 3] {
        let plain = Registration {
            tenant: None,
            id: "a/b c".into(),
            title: None,
            text: "line\nbreaks \u{0} and \"quotes\" ä".into(),
            system: None,
            expires: None,
            ttl: None,
        };
        let full = Registration {
            tenant: Some("alice".into()),
            title: Some("A title".into()),
            system: Some("Answer.\n".into()),
            expires: Some(u64::MAX),
            ttl: Some(60_000),
            ..plain.clone()
        };
        let removed = Change::Removed { tenant: Some("alice".into()), id: "a".into() };
        [Change::Registered(plain), Change::Registered(full), removed]
    }

    #[test]
    fn a_change_is_one_line_of_json_that_is_read_again() {
        for change in changes() {
            let line = change.written().unwrap();
            assert_eq!(line.matches('\n').count(), 1, "{line}");
            serde_json::from_str::<serde_json::Value>(&line).unwrap();
            assert_eq!(Change::read(line.as_bytes()), Ok(change));
        }
    }

    #[test]
    fn every_changed_and_every_missing_byte_is_noticed() {
        for change in changes() {
            let line = change.written().unwrap().into_bytes();
            for at in 0..line.len() - 1 {
                let mut damaged = line.clone();
                damaged[at] ^= 1;
                assert!(Change::read(&damaged).is_err(), "byte {at}");
                assert!(Change::read(&line[..at]).is_err(), "cut at {at}");
            }
        }
    }

    #[test]
    fn a_change_of_another_program_is_not_damage() {
        let rest = "\"renamed\":{\"id\":\"a\"}}";
        let line = format!("{}{}{}{rest}\n", AROUND.0, check(rest.as_bytes()), AROUND.1);
        assert!(matches!(Change::read(line.as_bytes()), Err(LineFault::Unknown(_))));
    }

    #[test]
    fn the_first_line_has_the_version() {
        assert_eq!(FirstLine::read(FirstLine::written().as_bytes()), FirstLine::Ours);
        assert_eq!(FirstLine::read(b"{\"format\":\"kvc documents\",\"version\":7}"), FirstLine::Version(7));
        for other in [&b""[..], b"{}", b"{\"format\":\"x\",\"version\":1}", b"\xff"] {
            assert_eq!(FirstLine::read(other), FirstLine::Other);
        }
    }
}
