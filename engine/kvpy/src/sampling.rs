//! Settings of an answer.

use kvengine::AnswerForm;
use kvmodel::TextStream;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::chat::json_of;
use crate::error::{CallError, Result};

/// The settings of an answer. By default, an answer has up to 64 tokens, each of which is the most likely
/// one.
#[pyclass(frozen, get_all, module = "kvcache")]
pub(crate) struct SamplingParams {
    pub(crate) temperature: f32,
    pub(crate) top_k: usize,
    pub(crate) top_p: f32,
    pub(crate) min_p: f32,
    pub(crate) repetition_penalty: f32,
    pub(crate) presence_penalty: f32,
    pub(crate) frequency_penalty: f32,
    pub(crate) seed: u64,
    pub(crate) max_tokens: usize,
    pub(crate) stop: Vec<String>,
    pub(crate) ignore_eos: bool,
    /// The JSON schema of the answer, as text.
    pub(crate) json_schema: Option<String>,
    /// The regular expression that the answer matches.
    pub(crate) regex: Option<String>,
    /// The grammar of the answer.
    pub(crate) grammar: Option<String>,
}

#[pymethods]
impl SamplingParams {
    /// Creates settings, named as in vLLM. An answer ends before the first occurrence of a string in `stop`.
    /// At most one of `json_schema` (a dictionary or JSON text), `regex` and `grammar` (in Lark's syntax) determines
    /// the form of the answer. Raises `KvCacheError` if a setting is out of range.
    #[new]
    #[pyo3(signature = (
        *, temperature = 0.0, top_k = 0, top_p = 1.0, min_p = 0.0, repetition_penalty = 1.0, presence_penalty = 0.0,
        frequency_penalty = 0.0, seed = 0, max_tokens = 64, stop = Vec::new(), ignore_eos = false,
        json_schema = None, regex = None, grammar = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments in Python")]
    fn new(
        temperature: f32,
        top_k: usize,
        top_p: f32,
        min_p: f32,
        repetition_penalty: f32,
        presence_penalty: f32,
        frequency_penalty: f32,
        seed: u64,
        max_tokens: usize,
        stop: Vec<String>,
        ignore_eos: bool,
        json_schema: Option<&Bound<'_, PyAny>>,
        regex: Option<String>,
        grammar: Option<String>,
    ) -> PyResult<Self> {
        let forms = [json_schema.is_some(), regex.is_some(), grammar.is_some()];
        if forms.into_iter().filter(|given| *given).count() > 1 {
            return Err(PyValueError::new_err("pass only one of json_schema, regex and grammar"));
        }
        let text = |schema: &Bound<'_, PyAny>| match schema.extract::<String>() {
            Ok(text) => Ok(text),
            Err(_) => json_of(schema),
        };
        let params = Self {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            seed,
            max_tokens,
            stop,
            ignore_eos,
            json_schema: json_schema.map(text).transpose()?,
            regex,
            grammar,
        };
        params.sampling().check().map_err(CallError::from)?;
        TextStream::check_stop(&params.stop).map_err(CallError::from)?;
        Ok(params)
    }
}

impl SamplingParams {
    /// Returns the form that the answer must have.
    pub(crate) fn form(&self) -> Result<Option<AnswerForm>> {
        let schema = self.json_schema.as_deref().map(AnswerForm::json_schema).transpose()?;
        let regex = self.regex.clone().map(AnswerForm::Regex);
        Ok(schema.or(regex).or_else(|| self.grammar.clone().map(AnswerForm::Lark)))
    }

    /// Returns the settings for choosing a token.
    pub(crate) fn sampling(&self) -> kvengine::Sampling {
        kvengine::Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            seed: self.seed,
        }
    }
}
