//! Documents of several kinds in one prompt.

use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use super::Texts;
use super::kinds::{DocumentKind, Fact, KINDS, Layout};
use super::values::{ENDINGS, STEMS, Values, pick};
use crate::eval::{Grader, Question, QuestionKind};

const SYSTEM: &str = "Answer the question from the documents below. Give only the answer, in a few words.";

/// A document that is not written yet.
struct Draft {
    kind: &'static DocumentKind,
    subject: String,
    /// The values of the kind's facts.
    values: Vec<String>,
}

/// Draws documents, and a question about them. Kinds of documents repeat, so that some facts in other
/// documents are like the fact that is asked for.
pub(super) fn question(texts: Texts, kind: QuestionKind, rng: &mut StdRng) -> Question {
    let (drafts, values) = drafts(texts.documents, kind != QuestionKind::Local, rng);
    let mut numbers: Vec<usize> = (0..drafts.len()).collect();
    numbers.shuffle(rng);
    let one = numbers[0];
    let other = numbers.iter().copied().find(|&i| i != one && drafts[i].kind.name == drafts[one].kind.name);
    // A question about two documents needs two of the same kind, which the first two always are.
    let (one, other) = match other {
        Some(other) => (one, other),
        None if kind == QuestionKind::Local => (one, one),
        None => (0, 1),
    };
    let refers = (kind == QuestionKind::Reference).then_some((one, drafts[other].subject.as_str()));
    let documents = drafts.iter().enumerate().map(|(number, draft)| {
        let refers = refers.filter(|(of, _)| *of == number).map(|(_, subject)| subject);
        draft.write(refers, texts.words, &values, rng)
    });
    let documents = documents.collect();
    let (a, b) = (&drafts[one], &drafts[other]);
    let at = rng.random_range(0..a.kind.facts.len());
    let fact = &a.kind.facts[at];
    let (question, answer, grader) = match kind {
        QuestionKind::Comparison => compared(a, b, rng),
        QuestionKind::Reference => {
            let phrase = a.kind.related.1.replace("{subject}", &a.subject);
            (fact.question.replace("{subject}", &phrase), b.values[at].clone(), fact.value.grader())
        }
        _ => (fact.question.replace("{subject}", &a.subject), a.values[at].clone(), fact.value.grader()),
    };
    Question { system: SYSTEM.to_owned(), documents, question, answer, kind, grader }
}

/// Draws subjects and facts, none of which are equal. Returns the values of all facts, too. If `pair` is
/// true, the first two documents are of the same kind.
fn drafts(count: usize, pair: bool, rng: &mut StdRng) -> (Vec<Draft>, Values) {
    let mut kinds: Vec<&DocumentKind> = KINDS.to_vec();
    kinds.shuffle(rng);
    // About two documents of each kind.
    kinds.truncate(count.div_ceil(2) + rng.random_range(0..2));
    for at in kinds.len()..count {
        kinds.push(kinds[rng.random_range(0..at)]);
    }
    kinds.truncate(count);
    kinds.shuffle(rng);
    if pair {
        kinds[1] = kinds[0];
    }
    let mut stems = STEMS;
    stems.shuffle(rng);
    let mut values = Values::default();
    let draft = |(kind, stem): (&'static DocumentKind, &str)| Draft {
        kind,
        subject: format!("{stem}{} {}", pick(&ENDINGS, rng), pick(&kind.nouns, rng)),
        values: kind.facts.iter().map(|fact| values.draw(fact.value, rng)).collect(),
    };
    let drafts = kinds.into_iter().zip(stems).map(draft).collect();
    (drafts, values)
}

impl Draft {
    /// Writes the document: an opening, its facts in random order and wording among filler sentences, and an
    /// end. The document refers to another subject if there is one.
    fn write(&self, refers: Option<&str>, words: Option<usize>, values: &Values, rng: &mut StdRng) -> String {
        let named = |text: &str| text.replace("{subject}", &self.subject);
        let opening = named(pick(&self.kind.openings, rng));
        let end = pick(&self.kind.ends, rng);
        let facts = self.kind.facts.iter().zip(&self.values);
        let sentence =
            |(fact, value): (&Fact, &String)| named(pick(&fact.wordings, rng)).replace("{value}", value);
        let mut sentences: Vec<String> = facts.map(sentence).collect();
        sentences.extend(refers.map(|subject| self.kind.related.0.replace("{other}", subject)));
        let words = words.unwrap_or_else(|| rng.random_range(70..105));
        let around = opening.split_whitespace().count() + end.split_whitespace().count();
        let more = (&self.kind.fillers[..], &self.kind.more[..]);
        values.lengthen(&mut sentences, words.saturating_sub(around), more, rng);
        sentences.shuffle(rng);
        let body = match self.kind.layout {
            Layout::Prose => sentences.join(" "),
            Layout::Lines => sentences.join("\n"),
            Layout::List => sentences.iter().map(|text| format!("- {text}")).collect::<Vec<_>>().join("\n"),
        };
        let text = format!("{opening}\n{body}");
        if end.is_empty() { text } else { format!("{text}\n{end}") }
    }
}

/// Returns a question about which of two documents of the same kind has the larger or the smaller number,
/// with its answer and its grader.
fn compared(a: &Draft, b: &Draft, rng: &mut StdRng) -> (String, String, Grader) {
    let comparable = a.kind.facts.iter().enumerate().filter_map(|(at, fact)| Some((at, fact.compared?)));
    let comparable: Vec<(usize, [&str; 2])> = comparable.collect();
    let (at, [larger, smaller]) = comparable[rng.random_range(0..comparable.len())];
    let number = |draft: &Draft| draft.values[at].parse::<u32>().unwrap_or_default();
    let up = rng.random_bool(0.5);
    let answer = if (number(a) > number(b)) == up { a } else { b };
    let what = if up { larger } else { smaller };
    let question = format!("Which {what}, {} or {}? Answer with its name.", a.subject, b.subject);
    (question, answer.subject.clone(), Grader::Begins)
}
