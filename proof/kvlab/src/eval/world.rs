//! The world of `models/tiny-rag`: documents with freshly drawn facts, and questions that need one or two of
//! the documents.

use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{RngExt, SeedableRng};
use serde::Deserialize;

use super::{Grader, Question, QuestionKind};
use crate::error::{Error, Result};

/// The names and values in facts such as "alba is red .". The value "same" refers to the last value stated
/// before it, in the same document or an earlier one.
#[derive(Debug, Clone, Deserialize)]
pub struct World {
    names: Vec<String>,
    values: Vec<String>,
}

const SYSTEM: &str = "you answer questions from short documents .";
/// The kinds of questions about this world.
const KINDS: [QuestionKind; 3] = [QuestionKind::Local, QuestionKind::CrossStart, QuestionKind::CrossMiddle];
/// The number of references at the start of a document if the question is about its middle.
const REFERENCES: usize = 3;
/// The reciprocal of the probability that a fact in a local question's documents refers to an earlier fact in
/// the same document. The first fact of a document never does.
const INSIDE: u32 = 6;

impl World {
    /// Parses a `world.json`.
    ///
    /// # Errors
    /// Returns [`Error::Dataset`] if the string is invalid, or has fewer than 64 names or fewer than two
    /// values.
    pub fn from_json(text: &str) -> Result<Self> {
        let bad = |reason: String| Error::Dataset { line: 0, reason };
        let world: Self = serde_json::from_str(text).map_err(|e| bad(e.to_string()))?;
        if world.names.len() < 64 || world.values.len() < 2 {
            return Err(bad(format!(
                "{} names and {} values; at least 64 names and 2 values are needed",
                world.names.len(),
                world.values.len()
            )));
        }
        Ok(world)
    }

    /// Draws `per_kind` questions of each kind. Equal seeds give equal questions. Every question has its own
    /// three to six documents, with three to six facts each. Some facts of local questions refer to facts
    /// before them in their own document, and a question may be about such a fact.
    pub fn questions(&self, seed: u64, per_kind: usize) -> Vec<Question> {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut inside = StdRng::seed_from_u64(!seed);
        let mut questions = Vec::new();
        for _ in 0..per_kind {
            questions.extend(KINDS.map(|kind| self.question(kind, &mut rng, &mut inside)));
        }
        questions
    }

    /// Draws a question. `inside` decides which facts are references within their document.
    fn question(&self, kind: QuestionKind, rng: &mut StdRng, inside: &mut StdRng) -> Question {
        let mut names = self.names.clone();
        names.shuffle(rng);
        let count = rng.random_range(3..=6);
        // A reference needs an earlier document than the one that the question is about.
        let asked_document = match kind {
            QuestionKind::Local => rng.random_range(0..count),
            _ => rng.random_range(1..count),
        };
        let references = match kind {
            QuestionKind::Local => 0,
            QuestionKind::CrossStart => 1,
            _ => REFERENCES,
        };
        let (mut documents, mut question, mut last) =
            (Vec::new(), (String::new(), String::new()), String::new());
        for document in 0..count {
            let mut facts = Vec::new();
            let references = if document == asked_document { references } else { 0 };
            let stated = rng.random_range(3..=6usize).saturating_sub(references).max(1);
            let asked = rng.random_range(0..stated);
            for fact in 0..references + stated {
                let name = names.pop().unwrap_or_default();
                let mut is_reference = fact < references;
                if !is_reference {
                    let value = self.values.choose(rng).cloned().unwrap_or_default();
                    is_reference = kind == QuestionKind::Local && fact > 0 && inside.random_ratio(1, INSIDE);
                    if !is_reference {
                        last = value;
                    }
                }
                let about_this = document == asked_document
                    && match kind {
                        QuestionKind::Local => fact == asked,
                        _ => fact + 1 == references,
                    };
                if about_this {
                    question = (format!("{name} ?"), last.clone());
                }
                facts.push(format!("{name} is {} .", if is_reference { "same" } else { &last }));
            }
            documents.push(facts.join(" "));
        }
        let (question, answer) = question;
        Question { system: SYSTEM.to_owned(), documents, question, answer, kind, grader: Grader::Begins }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn world() -> World {
        let list = |prefix: &str, n: usize| (0..n).map(|i| format!("{prefix}{i}")).collect();
        World { names: list("n", 100), values: list("v", 8) }
    }

    #[test]
    fn answers_are_in_the_documents_that_their_kind_names() {
        let questions = world().questions(7, 20);
        assert_eq!(questions.len(), 60);
        let mut inside = 0;
        for q in &questions {
            let name = q.question.trim_end_matches(" ?");
            let (at, document) =
                q.documents.iter().enumerate().find(|(_, d)| d.contains(&format!("{name} is"))).unwrap();
            if q.kind == QuestionKind::Local {
                // The last value stated in the document, up to and including the fact.
                let facts = document.split(" . ").map(|fact| fact.trim_end_matches(" ."));
                let mut stated = String::new();
                for (about, value) in facts.map(|fact| fact.split_once(" is ").unwrap()) {
                    if value == "same" {
                        inside += 1;
                    } else {
                        value.clone_into(&mut stated);
                    }
                    if about == name {
                        assert_eq!(stated, q.answer, "{q:?}");
                    }
                }
            } else {
                assert!(!document.contains(&format!("{name} is {} .", q.answer)), "{q:?}");
                let before = q.documents[at - 1].split_whitespace().rev().nth(1).unwrap();
                assert_eq!(before, q.answer, "the value stated last before it");
                let place =
                    document.split(" . ").position(|fact| fact.starts_with(&format!("{name} "))).unwrap();
                assert_eq!(place, if q.kind == QuestionKind::CrossStart { 0 } else { 2 });
            }
        }
        assert!((5..25).contains(&inside), "{inside} references inside the documents that are asked about");
        assert_eq!(questions, world().questions(7, 20));
        assert_ne!(questions, world().questions(8, 20));
    }

    #[test]
    fn a_world_too_small_is_an_error() {
        assert!(World::from_json(r#"{"names":["a"],"values":["b","c"]}"#).is_err());
        assert!(World::from_json("[").is_err());
    }
}
