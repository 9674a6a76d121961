//! Questions about documents, and files of questions.

use serde::{Deserialize, Serialize};

use super::Grader;
use crate::error::{Error, Result};

/// The documents that an answer depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum QuestionKind {
    /// One document.
    Local,
    /// Two documents: a reference at the start of one document points into the one before it.
    CrossStart,
    /// Two documents, as in [`CrossStart`](Self::CrossStart), but the reference is in the middle of a
    /// document.
    CrossMiddle,
    /// Two documents that state what the question compares.
    Comparison,
    /// Two documents: one names the other, which has the answer.
    Reference,
}

impl QuestionKind {
    /// All kinds.
    pub const ALL: [Self; 5] =
        [Self::Local, Self::CrossStart, Self::CrossMiddle, Self::Comparison, Self::Reference];

    /// Returns the kind's name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::CrossStart => "cross, at start",
            Self::CrossMiddle => "cross, in middle",
            Self::Comparison => "comparison",
            Self::Reference => "reference",
        }
    }
}

/// A question about documents, with its answer.
///
/// ```
/// use kvlab::{Question, QuestionKind};
/// let line = r#"{"system": "be brief", "documents": ["a is b", "c is d"], "question": "c?", "answer": "d"}"#;
/// let [question] = &Question::read_all(line)?[..] else { panic!() };
/// assert_eq!(question.kind, QuestionKind::Local);
/// assert!(question.accepts(" D.") && !question.accepts("dd"));
/// # Ok::<(), kvlab::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Question {
    /// The system prompt.
    pub system: String,
    /// The documents, in order.
    pub documents: Vec<String>,
    /// The text of the question.
    pub question: String,
    /// The right answer.
    pub answer: String,
    /// The kind of the question.
    #[serde(default = "local")]
    pub kind: QuestionKind,
    /// The rule by which an answer is right.
    #[serde(default)]
    pub grader: Grader,
}

fn local() -> QuestionKind {
    QuestionKind::Local
}

impl Question {
    /// Reads a file of questions, with one JSON object per line.
    ///
    /// # Errors
    /// Returns [`Error::Dataset`], with the number of the line, if a line is no such object, has no document,
    /// or has an empty part. Returns it with line 0 if there is no question.
    pub fn read_all(text: &str) -> Result<Vec<Self>> {
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let questions: Result<Vec<Self>> = lines
            .map(|(i, line)| {
                let bad = |reason: String| Error::Dataset { line: i + 1, reason };
                let question: Self = serde_json::from_str(line).map_err(|e| bad(e.to_string()))?;
                let parts = [&question.system, &question.question, &question.answer];
                if question.documents.is_empty() {
                    return Err(bad("no documents".to_owned()));
                }
                for part in parts.into_iter().chain(&question.documents) {
                    if part.trim().is_empty() {
                        return Err(bad("a part is empty".to_owned()));
                    }
                }
                Ok(question)
            })
            .collect();
        match questions {
            Ok(questions) if questions.is_empty() => {
                Err(Error::Dataset { line: 0, reason: "no question".to_owned() })
            }
            other => other,
        }
    }

    /// Returns true if an answer is right.
    pub fn accepts(&self, answer: &str) -> bool {
        self.grader.accepts(answer, &self.answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_are_no_questions_are_named_by_their_number() {
        let good = r#"{"system":"s","documents":["d"],"question":"q","answer":"a","kind":"cross-start"}"#;
        assert_eq!(Question::read_all(good).unwrap()[0].kind, QuestionKind::CrossStart);
        for (bad, reason) in [
            ("{", "EOF"),
            (r#"{"system":"s","documents":[],"question":"q","answer":"a"}"#, "no documents"),
            (r#"{"system":" ","documents":["d"],"question":"q","answer":"a"}"#, "empty"),
            (r#"{"system":"s","documents":["d"],"question":"q","answer":"a","more":1}"#, "more"),
        ] {
            let error = Question::read_all(&format!("{good}\n\n{bad}")).unwrap_err().to_string();
            assert!(error.contains("line 3") && error.contains(reason), "{error}");
        }
        assert!(Question::read_all("\n").is_err());
    }
}
