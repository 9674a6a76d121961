//! Questions about natural-language texts that this crate writes.
//!
//! No model has read about the subjects of these texts, so every answer must come from them. The documents in
//! a prompt contain facts of the same kinds, so each document distracts from the rest.

use rand::SeedableRng;
use rand::rngs::StdRng;

use super::{Question, QuestionKind};

mod firms;
mod kinds;
mod mixed;
mod values;

/// A form of texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TextForm {
    /// Notes about invented firms, all with the same facts, in varied wording. The firm's name is in every
    /// fact.
    #[default]
    Firms,
    /// Documents of several kinds in one prompt: procedures, mails, product pages, settings of programs,
    /// minutes, recipes, travel notes and fault reports. Each names its subject only once or a few times.
    Mixed,
}

/// A source of questions about texts that this crate writes.
///
/// ```
/// use kvlab::{QuestionKind, TextForm, Texts};
/// let questions = Texts::new(4).questions(7, 10);
/// assert_eq!(questions.len(), 30);
/// assert!(questions.iter().all(|question| question.documents.len() == 4));
/// assert_eq!(questions, Texts::new(4).questions(7, 10));
/// assert_ne!(questions, Texts::new(4).of(TextForm::Mixed).questions(7, 10));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Texts {
    documents: usize,
    form: TextForm,
    /// The minimum number of words per document, if the documents are longer than usual.
    words: Option<usize>,
}

impl Texts {
    /// The kinds of questions about these texts.
    pub const KINDS: [QuestionKind; 3] =
        [QuestionKind::Local, QuestionKind::Comparison, QuestionKind::Reference];

    /// The maximum number of documents per question. It is limited because each document needs its own
    /// values.
    pub const MOST: usize = 20;

    /// Creates a source of questions about `documents` notes on firms each, clamped to the range from 2 to
    /// [`MOST`](Self::MOST).
    pub fn new(documents: usize) -> Self {
        Self { documents: documents.clamp(2, Self::MOST), form: TextForm::default(), words: None }
    }

    /// Sets the form of the texts.
    #[must_use]
    pub fn of(self, form: TextForm) -> Self {
        Self { form, ..self }
    }

    /// Sets the length of each document to about this number of tokens. Without this call, or with 100 tokens
    /// or less, documents have about 100 tokens. Longer documents contain more facts, about which nothing is
    /// asked.
    #[must_use]
    pub fn with_length(self, tokens: usize) -> Self {
        // Most tokenizers use about four tokens for three English words.
        Self { words: (tokens > 100).then_some(tokens * 3 / 4), ..self }
    }

    /// Draws `per_kind` questions of each kind. Equal seeds give equal questions.
    pub fn questions(&self, seed: u64, per_kind: usize) -> Vec<Question> {
        self.questions_of(&Self::KINDS, seed, per_kind)
    }

    /// Draws `per_kind` questions of each of these kinds. Kinds that are not in [`KINDS`](Self::KINDS) are
    /// ignored. Equal seeds and kinds give equal questions.
    pub fn questions_of(&self, kinds: &[QuestionKind], seed: u64, per_kind: usize) -> Vec<Question> {
        let mut rng = StdRng::seed_from_u64(seed);
        let kinds = Self::KINDS.into_iter().filter(|kind| kinds.contains(kind));
        let round = || kinds.clone();
        (0..per_kind).flat_map(|_| round()).map(|kind| self.question(kind, &mut rng)).collect()
    }

    /// Returns decoys: documents of the same form that do not contain the answer to any question. They have
    /// about 100 tokens each, whatever the documents' length.
    pub fn decoys(self) -> Vec<String> {
        let texts = Self { documents: Self::MOST, words: None, ..self };
        texts.question(QuestionKind::Local, &mut StdRng::seed_from_u64(u64::MAX)).documents
    }

    fn question(self, kind: QuestionKind, rng: &mut StdRng) -> Question {
        match self.form {
            TextForm::Firms => firms::question(self, kind, rng),
            TextForm::Mixed => mixed::question(self, kind, rng),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the words of a text, without the punctuation around them.
    fn words(text: &str) -> Vec<&str> {
        let split = |c: char| c.is_whitespace() || "=\"(),;?".contains(c);
        let trimmed = text.split(split).map(|word| word.trim_end_matches(['.', ':']));
        trimmed.filter(|word| !word.is_empty()).collect()
    }

    /// Returns the indices of the documents that contain a string, in whole words.
    fn with(question: &Question, text: &str) -> Vec<usize> {
        let wanted = words(text);
        let contains = |d: &String| words(d).windows(wanted.len()).any(|window| window == wanted);
        (0..question.documents.len()).filter(|&i| contains(&question.documents[i])).collect()
    }

    /// Checks that a question can be answered from the documents that its kind names, and from no other one.
    fn check(q: &Question) {
        let place = with(q, &q.answer);
        match q.kind {
            QuestionKind::Local => assert_eq!(place.len(), 1, "{q:?}"),
            QuestionKind::Comparison => {
                let names = q.question.split(", ").nth(1).unwrap().split("? ").next().unwrap();
                let (a, b) = names.split_once(" or ").unwrap();
                assert!([a, b].contains(&q.answer.as_str()), "{q:?}");
                assert!(with(q, a) != with(q, b) && with(q, a).len() == 1, "{q:?}");
            }
            _ => {
                // The document that contains the reference must not contain the answer.
                assert_eq!(place.len(), 1, "{q:?}");
                let mentioned = words(&q.documents[place[0]]);
                let refers = |name: &str| !mentioned.contains(&name) && with(q, name).len() == 1;
                let names =
                    words(&q.question).into_iter().skip(1).filter(|w| w.starts_with(char::is_uppercase));
                assert!(names.into_iter().any(refers), "{q:?}");
            }
        }
        assert!(q.accepts(&q.answer), "{q:?}");
    }

    #[test]
    fn every_answer_is_in_the_documents_that_its_kind_names() {
        for form in [TextForm::Firms, TextForm::Mixed] {
            for documents in [2, 4, 8, Texts::MOST] {
                let questions = Texts::new(documents).of(form).questions(3, 60);
                for q in &questions {
                    check(q);
                    assert_eq!(q.documents.len(), documents);
                    let lengths = || q.documents.iter().map(|d| d.split_whitespace().count());
                    assert!(lengths().all(|words| (50..141).contains(&words)), "{q:?}");
                }
                let first = |d: &str| d.split(' ').next().unwrap_or_default().to_owned();
                let openings: std::collections::HashSet<String> =
                    questions.iter().map(|q| first(&q.documents[0])).collect();
                assert!(openings.len() > 10, "the wording varies");
            }
            let texts = |seed| Texts::new(4).of(form).questions(seed, 3);
            assert!(texts(1) != texts(2) && texts(1) == texts(1));
            let kinds = [QuestionKind::Local, QuestionKind::CrossStart];
            let some = Texts::new(4).of(form).questions_of(&kinds, 1, 3);
            assert!(some.len() == 3 && some.iter().all(|q| q.kind == QuestionKind::Local));
        }
    }

    #[test]
    fn longer_documents_have_the_same_questions_and_no_second_answer() {
        for form in [TextForm::Firms, TextForm::Mixed] {
            assert_eq!(Texts::new(4).of(form).with_length(100), Texts::new(4).of(form));
            for tokens in [500, 2000] {
                for q in Texts::new(8).of(form).with_length(tokens).questions(5, 12) {
                    check(&q);
                    let most = tokens * 3 / 4 * 5 / 4;
                    for document in &q.documents {
                        let words = document.split_whitespace().count();
                        assert!((tokens * 3 / 4..most).contains(&words), "{words} words: {document}");
                    }
                }
            }
        }
    }
}
