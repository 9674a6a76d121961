//! Settings of an answer.

use kvmodel::TextStream;
use pyo3::prelude::*;

use crate::error::Result;

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
}

#[pymethods]
impl SamplingParams {
    /// Creates settings, named as in vLLM. An answer ends before the first occurrence of a string in `stop`.
    /// Raises `KvCacheError` if a setting is out of range.
    #[new]
    #[pyo3(signature = (
        *, temperature = 0.0, top_k = 0, top_p = 1.0, min_p = 0.0, repetition_penalty = 1.0, presence_penalty = 0.0,
        frequency_penalty = 0.0, seed = 0, max_tokens = 64, stop = Vec::new(), ignore_eos = false
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
    ) -> Result<Self> {
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
        };
        params.sampling().check()?;
        TextStream::check_stop(&params.stop)?;
        Ok(params)
    }
}

impl SamplingParams {
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
