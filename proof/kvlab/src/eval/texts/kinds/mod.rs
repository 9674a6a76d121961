//! Kinds of documents: their wordings, facts and fillers.
//!
//! In these texts, `{subject}` is the document's subject, `{value}` the value of a fact, and `{other}` the
//! subject of another document of the same kind. Questions put an article in front of the subject. Fillers
//! contain no numbers or names, so that no filler contains the value of a fact.

use super::values::Value;

mod home;
mod work;

use home::{PRODUCT, RECIPE, TRAVEL};
use work::{FAULT, MAIL, MINUTES, PROCEDURE, SETTINGS};

/// A fact that every document of a kind contains.
pub(super) struct Fact {
    pub(super) value: Value,
    pub(super) wordings: [&'static str; 3],
    pub(super) question: &'static str,
    /// For numbers that can be compared: what is true of the larger and of the smaller number.
    pub(super) compared: Option<[&'static str; 2]>,
}

/// The arrangement of sentences.
#[derive(Clone, Copy)]
pub(super) enum Layout {
    Prose,
    /// One sentence per line.
    Lines,
    /// One sentence per list item.
    List,
}

/// A kind of document.
pub(super) struct DocumentKind {
    pub(super) name: &'static str,
    /// The second part of a subject.
    pub(super) nouns: [&'static str; 8],
    pub(super) openings: [&'static str; 3],
    pub(super) ends: [&'static str; 2],
    pub(super) layout: Layout,
    pub(super) facts: [Fact; 5],
    pub(super) fillers: [&'static str; 8],
    /// Sentences in longer documents.
    pub(super) more: [&'static str; 6],
    /// A sentence that refers to another document, and the name of that document's subject in a question.
    pub(super) related: (&'static str, &'static str),
}

/// All kinds.
pub(super) const KINDS: [&DocumentKind; 8] =
    [&PROCEDURE, &MAIL, &PRODUCT, &SETTINGS, &MINUTES, &RECIPE, &TRAVEL, &FAULT];

const fn fact(value: Value, question: &'static str, wordings: [&'static str; 3]) -> Fact {
    Fact { value, wordings, question, compared: None }
}

const fn number(
    limits: (u32, u32),
    question: &'static str,
    wordings: [&'static str; 3],
    compared: [&'static str; 2],
) -> Fact {
    Fact { value: Value::Count(limits.0, limits.1), wordings, question, compared: Some(compared) }
}
