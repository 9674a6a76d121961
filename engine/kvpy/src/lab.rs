//! Questions about notes, and comparisons of answers, to check a model that runs inside vLLM.

use kvlab::{QuestionKind, Texts};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// A question about a fact in one of several notes about invented firms, which no model has heard of.
#[pyclass(frozen, eq, module = "kvcache")]
#[derive(PartialEq, Eq)]
pub(crate) struct NoteQuestion(kvlab::Question);

#[pymethods]
impl NoteQuestion {
    /// The system prompt.
    #[getter]
    fn system(&self) -> &str {
        &self.0.system
    }

    /// The notes, in order.
    #[getter]
    fn notes(&self) -> Vec<String> {
        self.0.documents.clone()
    }

    /// The text of the question.
    #[getter]
    fn text(&self) -> &str {
        &self.0.question
    }

    /// The right answer.
    #[getter]
    fn answer(&self) -> &str {
        &self.0.answer
    }

    /// Returns true if an answer is right.
    fn is_right(&self, said: &str) -> bool {
        self.0.accepts(said)
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}

/// Draws `count` questions with `notes` notes each. Equal seeds give equal questions.
#[pyfunction]
pub(crate) fn note_questions(seed: u64, count: usize, notes: usize) -> PyResult<Vec<NoteQuestion>> {
    if !(2..=Texts::MOST).contains(&notes) {
        return Err(PyValueError::new_err(format!(
            "{notes} notes; a question must have 2 to {} notes",
            Texts::MOST
        )));
    }
    let drawn = Texts::new(notes).questions_of(&[QuestionKind::Local], seed, count);
    Ok(drawn.into_iter().map(NoteQuestion).collect())
}

/// Returns decoys: notes of the same form that do not contain the answer to any question.
#[pyfunction]
pub(crate) fn note_decoys() -> Vec<String> {
    Texts::new(Texts::MOST).decoys()
}

/// Counts of right answers to questions that were answered twice: once with ordinary attention, once with
/// reuse.
#[pyclass(frozen, name = "Paired", eq, module = "kvcache")]
#[derive(PartialEq, Eq)]
pub(crate) struct PyPaired(kvlab::Paired);

#[pymethods]
impl PyPaired {
    /// Creates the counts: all questions, the questions that only ordinary attention answered correctly
    /// (`lost`), and the questions that only reuse answered correctly (`gained`).
    #[new]
    fn new(asked: usize, lost: usize, gained: usize) -> Self {
        Self(kvlab::Paired { asked, lost, gained })
    }

    /// Counts pairs of grades. Each list has one grade per question, which is true if the answer was right:
    /// `ordinary` for ordinary attention, `reused` for reuse.
    #[staticmethod]
    fn of(ordinary: Vec<bool>, reused: Vec<bool>) -> Self {
        Self(kvlab::Paired::of(ordinary.into_iter().zip(reused)))
    }

    /// The number of questions.
    #[getter]
    fn asked(&self) -> usize {
        self.0.asked
    }

    /// The number of questions that only ordinary attention answered correctly.
    #[getter]
    fn lost(&self) -> usize {
        self.0.lost
    }

    /// The number of questions that only reuse answered correctly.
    #[getter]
    fn gained(&self) -> usize {
        self.0.gained
    }

    /// The number of lost questions minus the number of gained questions, as a fraction of all questions. If
    /// negative, reuse is better.
    #[getter]
    fn loss(&self) -> f64 {
        self.0.loss()
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }

    /// Returns the largest loss that the answers do not rule out: the upper limit of a one-sided 95 %
    /// interval (Tango, 1998).
    fn at_most(&self) -> f64 {
        self.0.at_most()
    }
}
