//! Questions about documents, and a parser for question files.

use serde::{Deserialize, Serialize};

use super::Grader;
use crate::error::{Error, Result};

/// The documents that an answer depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum QuestionKind {
    /// One document.
    Local,
    /// Two documents: a reference at the start of the second document refers to the first.
    CrossStart,
    /// Two documents, as in [`CrossStart`](Self::CrossStart), but the reference is in the middle of the
    /// second document.
    CrossMiddle,
    /// Two documents, which state the facts that the question compares.
    Comparison,
    /// Two documents: one names the other, which contains the answer.
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
/// let [question] = &Question::read_all(line, None)?[..] else { panic!() };
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
    /// The rule that decides whether an answer is right.
    #[serde(default)]
    pub grader: Grader,
}

fn local() -> QuestionKind {
    QuestionKind::Local
}

impl Question {
    /// Reads questions from a string with one JSON object per line. If `grader` is given, it replaces every
    /// line's grader.
    ///
    /// # Errors
    /// Returns [`Error::Dataset`] with the line number if a line is not such an object, has no document or an
    /// empty part, or can never be answered correctly under its grader. The line number is 0 if there are no
    /// questions.
    pub fn read_all(text: &str, grader: Option<Grader>) -> Result<Vec<Self>> {
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let questions: Result<Vec<Self>> = lines
            .map(|(i, line)| {
                let bad = |reason: String| Error::Dataset { line: i + 1, reason };
                let mut question: Self = serde_json::from_str(line).map_err(|e| bad(of_one_line(&e)))?;
                question.grader = grader.unwrap_or(question.grader);
                question.objection().map_or(Ok(question), |reason| Err(bad(reason)))
            })
            .collect();
        match questions {
            Ok(questions) if questions.is_empty() => {
                Err(Error::Dataset { line: 0, reason: "no question".to_owned() })
            }
            other => other,
        }
    }

    /// Returns the problem with a question that was parsed successfully, or `None` if it has none.
    fn objection(&self) -> Option<String> {
        if self.documents.is_empty() {
            return Some("documents: the list is empty".to_owned());
        }
        let documents = self.documents.iter().enumerate().map(|(i, text)| (format!("documents[{i}]"), text));
        let parts = [("system", &self.system), ("question", &self.question), ("answer", &self.answer)];
        let parts = parts.into_iter().map(|(name, text)| (name.to_owned(), text)).chain(documents);
        let empty = parts.into_iter().find(|(_, text)| text.trim().is_empty());
        if let Some((name, _)) = empty {
            return Some(format!("{name} is empty"));
        }
        let objection = self.grader.objection(&self.answer)?;
        Some(format!("answer {:?}: {objection}, so this grader would reject every answer", self.answer))
    }

    /// Returns true if an answer is right.
    pub fn accepts(&self, answer: &str) -> bool {
        self.grader.accepts(answer, &self.answer)
    }
}

/// Formats a JSON error for a single line: with the column, but without the line.
fn of_one_line(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rsplit_once(" at line ") {
        Some((reason, _)) => format!("{reason} at column {}", error.column()),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_lines_are_named_by_their_number() {
        let good = r#"{"system":"s","documents":["d"],"question":"q","answer":"a","kind":"cross-start"}"#;
        assert_eq!(Question::read_all(good, None).unwrap()[0].kind, QuestionKind::CrossStart);
        for (bad, reason) in [
            ("{", "EOF while parsing an object at column 1"),
            (r#"{"system":"s","documents":["d"],"question":"q"}"#, "missing field `answer` at column"),
            (r#"{"system":"s","documents":[],"question":"q","answer":"a"}"#, "documents"),
            (r#"{"system":" ","documents":["d"],"question":"q","answer":"a"}"#, "system is empty"),
            (r#"{"system":"s","documents":["d"," "],"question":"q","answer":"a"}"#, "documents[1] is empty"),
            (
                r#"{"system":"s","documents":["d"],"question":"q","answer":"four","grader":"numbers"}"#,
                "answer \"four\": it has no numbers",
            ),
            (r#"{"system":"s","documents":["d"],"question":"q","answer":"a","more":1}"#, "more"),
        ] {
            let error = Question::read_all(&format!("{good}\n\n{bad}"), None).unwrap_err().to_string();
            assert!(error.contains("line 3") && error.contains(reason), "{error}");
        }
        assert!(Question::read_all("\n", None).is_err());
        assert!(
            Question::read_all(good, Some(Grader::Numbers)).is_err(),
            "no answer has the number of \"a\""
        );
    }
}
