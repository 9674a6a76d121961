//! A model that answers prompts and reuses their documents wherever they appear.

use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvchunk::{LoadRule, MissReason, Recompute, Reuse, TierMetrics};
use kvcore::PolicyKind;
use kvengine::{
    Answer, AnswerConstraint, AnswerEvent, AnswerForm, AnswerGuide, BUILT_IN_DECOYS, DefaultReuse, Engine,
    EngineConfig, FinishReason, Generation, PromptTokens, Request,
};
use kvmodel::dense::WeightFormat;
use kvmodel::{Model, ModelDirectory, TextCodec, TextStream};
use kvtier::{Slab, SlabConfig};
use pyo3::exceptions::{PyFileNotFoundError, PyTypeError, PyUserWarning, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::PyDict;

use crate::chat::{conversations, with_variables};
use crate::chunks::PyChunkCacheConfig;
use crate::device::{ModelDevice, open_model};
use crate::error::{CallError, KvCacheError, Result};
use crate::metrics::PyChunkCacheMetrics;
use crate::names::{dtype, named};
use crate::prompt::PyChunkedPrompt;
use crate::sampling::SamplingParams;

/// The fraction of the KV memory for documents, unless the chunk cache's settings specify another one.
const DEFAULT_SHARE: f64 = 0.5;

/// The longest time that a prompt waits for the disk with `disk_loads="always"`.
const PATIENCE: Duration = Duration::from_secs(60);

/// A model on this machine that caches the documents of its prompts, and finds them again in any order.
#[pyclass(frozen, name = "LLM", module = "kvcache")]
pub(crate) struct Llm {
    engine: Mutex<Engine>,
    codec: TextCodec,
    separator: String,
    enabled: bool,
    way: Reuse,
    /// The decoys for prompts without decoys of their own.
    decoys: Arc<[Vec<u32>]>,
    /// Compiles the forms of answers, once one is asked for.
    guide: Mutex<Option<Arc<AnswerGuide>>>,
}

/// An answer, with its costs.
#[pyclass(frozen, get_all, module = "kvcache")]
pub(crate) struct RequestOutput {
    /// The text, without the stop string.
    text: String,
    token_ids: Vec<u32>,
    /// The reason why the answer ended: `"stop"` or `"length"`.
    finish_reason: &'static str,
    num_prompt_tokens: usize,
    /// The number of prompt tokens whose keys and values were found in the cache.
    num_cached_tokens: usize,
    /// The number of document tokens that were recomputed.
    num_recomputed_tokens: usize,
    /// For each document, the reason why it was not found, such as `"new"`, `"evicted"` or `"slower"`. `None` for
    /// a document that was found, and with full attention.
    missed: Vec<Option<&'static str>>,
    /// The reason why the start of the prompt was not found: the first missing block of an ordinary prompt, or of the
    /// system prompt of a chunked one. `None` if all of it was found.
    prefix_missed: Option<&'static str>,
    /// The time to the first token, in seconds.
    ttft: f64,
}

/// A prompt that is being answered.
struct Running<'a> {
    answer: Answer,
    text: TextStream<'a>,
    tokens: Vec<u32>,
    end: Option<Generation>,
}

impl Running<'_> {
    /// Reads the tokens that have arrived.
    fn read(&mut self) -> Result<()> {
        while let Some(event) = self.answer.try_next() {
            match event? {
                AnswerEvent::Token { token, .. } if !self.text.is_stopped() => {
                    self.tokens.push(token);
                    self.text.push(token)?;
                    if self.text.is_stopped() {
                        self.answer.complete(0);
                    }
                }
                AnswerEvent::Token { .. } => {}
                AnswerEvent::End { generation, .. } => self.end = Some(*generation),
            }
        }
        Ok(())
    }

    fn output(mut self) -> Result<RequestOutput> {
        let Some(end) = self.end.take() else { return Err(kvengine::Error::Cancelled.into()) };
        // A stop string may be in the text that was held back.
        self.text.rest()?;
        let length = end.finish == FinishReason::Length && !self.text.is_stopped();
        Ok(RequestOutput {
            text: self.text.finish()?,
            token_ids: self.tokens,
            finish_reason: if length { "length" } else { "stop" },
            num_prompt_tokens: end.prompt_tokens,
            num_cached_tokens: end.cached_tokens,
            num_recomputed_tokens: end.recomputed_tokens,
            missed: end.chunks.iter().map(|chunk| chunk.missed.map(MissReason::name)).collect(),
            prefix_missed: end.prefix_missed.map(MissReason::name),
            ttft: end.ttft.as_secs_f64(),
        })
    }
}

impl Llm {
    /// Loads a model, and creates its engine. `way` returns the reuse settings for the model.
    fn load(
        path: &Path,
        config: EngineConfig,
        opened: ModelDevice,
        way: impl FnOnce(&Model) -> Reuse,
    ) -> Result<(Engine, TextCodec, Reuse, Vec<String>)> {
        let ModelDevice { backend, dense } = opened;
        let ModelDirectory { model, codec, notes } =
            ModelDirectory::load_with(path, WeightFormat::default(), dense, &mut |_, _| ())?;
        let way = way(&model);
        let (compute_mode, position_strategy) = (way.cell.mode, way.cell.strategy);
        let chunks = kvchunk::ChunkCacheConfig { compute_mode, position_strategy, ..config.chunks };
        let engine = Engine::new(model, backend, codec.digest(), &EngineConfig { chunks, ..config })?;
        Ok((engine, codec, way, notes))
    }

    /// Locks the engine. Waits without holding Python's lock. No Python code runs while the engine is locked, so
    /// that a signal handler can use the model during an answer.
    fn engine(&self, py: Python<'_>) -> MutexGuard<'_, Engine> {
        self.engine.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner)
    }

    /// Converts a string, a list of token IDs or a prompt in parts to tokens.
    fn prompt(&self, codec: &TextCodec, prompt: &Bound<'_, PyAny>, chat: bool) -> PyResult<PromptTokens> {
        if let Ok(parts) = prompt.cast::<PyChunkedPrompt>() {
            let parts = parts.get().0.clone();
            let own = if parts.decoys().is_empty() { &self.decoys } else { parts.decoys() };
            let own = Arc::clone(own);
            return Ok(PromptTokens::Chunked(parts.with_decoys(own).map_err(CallError::from)?));
        }
        if let Ok(text) = prompt.extract::<&str>() {
            let tokens = if chat {
                PromptTokens::split_chat(codec, text, &self.separator)
            } else {
                PromptTokens::split(codec, text, &self.separator, true)
            };
            let tokens = tokens.and_then(|tokens| tokens.with_decoys(Arc::clone(&self.decoys)));
            return Ok(tokens.map_err(CallError::from)?);
        }
        let tokens: PyResult<Vec<u32>> = prompt.extract();
        let wrong =
            |_| PyTypeError::new_err("a prompt must be a string, a list of token IDs, or a ChunkedPrompt");
        tokens.map(PromptTokens::Plain).map_err(wrong)
    }

    fn request(&self, engine: &Engine, prompt: PromptTokens, params: &SamplingParams) -> Request {
        Request {
            full_attention: !self.enabled,
            max_new_tokens: params.max_tokens,
            sampling: params.sampling(),
            ignore_end: params.ignore_eos,
            ..engine.request(prompt).reusing(&self.way)
        }
    }

    /// Compiles the form of an answer, without Python's lock.
    fn constraint(&self, py: Python<'_>, form: &AnswerForm) -> Result<Arc<dyn AnswerConstraint>> {
        let config = self.engine(py).model().config().clone();
        py.detach(|| {
            let mut guide = self.guide.lock().unwrap_or_else(PoisonError::into_inner);
            let guide = match &*guide {
                Some(guide) => Arc::clone(guide),
                None => Arc::clone(guide.insert(Arc::new(AnswerGuide::new(&self.codec, &config)?))),
            };
            Ok(guide.constraint(form)?)
        })
    }

    /// Submits a prompt.
    fn submit(&self, py: Python<'_>, prompt: PromptTokens, params: &SamplingParams) -> Result<Running<'_>> {
        let text = TextStream::new(&self.codec, params.stop.iter().cloned())?;
        let constraint = match params.form()? {
            Some(form) => Some(self.constraint(py, &form)?),
            None => None,
        };
        let mut engine = self.engine(py);
        let request = Request { constraint, ..self.request(&engine, prompt, params) };
        let answer = engine.submit(request)?;
        Ok(Running { answer, text, tokens: Vec::new(), end: None })
    }

    /// Runs a step for the prompts of all threads.
    fn step(&self) -> Result<()> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner).step()?;
        Ok(())
    }

    /// Answers prompts together. A prompt that fails does not affect the others. Between two steps, other threads
    /// and Python's signal handlers may use the model.
    fn answer(&self, py: Python<'_>, running: &mut [PyResult<Running<'_>>]) -> PyResult<()> {
        let is_running = |one: &PyResult<Running<'_>>| one.as_ref().is_ok_and(|one| one.end.is_none());
        while running.iter().any(is_running) {
            py.detach(|| self.step())?;
            for one in running.iter_mut() {
                if let Some(error) = one.as_mut().ok().and_then(|one| one.read().err()) {
                    // Dropping the answer cancels the request.
                    *one = Err(error.into());
                }
            }
            py.check_signals()?;
        }
        Ok(())
    }

    /// Answers prompts in one batch. If the prompts are in a list, the error of a prompt takes its place;
    /// otherwise it is raised.
    fn answers<'py>(
        &self,
        py: Python<'py>,
        (prompts, in_list): (Vec<PyResult<PromptTokens>>, bool),
        sampling_params: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        // An error that is not about a prompt's contents is a wrong call.
        let wrong = |prompt: &PyResult<PromptTokens>| {
            let error = prompt.as_ref().err().filter(|error| !error.is_instance_of::<KvCacheError>(py));
            error.map_or(Ok(()), |error| Err(error.clone_ref(py)))
        };
        prompts.iter().try_for_each(wrong)?;
        let default = py.import("kvcache._native")?.getattr("SamplingParams")?;
        let params: Vec<PyRef<'_, SamplingParams>> = match sampling_params {
            None => vec![default.call0()?.extract()?],
            Some(one) if one.is_instance(&default)? => vec![one.extract()?],
            Some(several) => several.extract()?,
        };
        if params.len() != 1 && params.len() != prompts.len() {
            let text = format!(
                "{} sampling_params for {} prompts; pass one for all prompts, or one per prompt",
                params.len(),
                prompts.len()
            );
            return Err(PyValueError::new_err(text));
        }
        let params = params.iter().cycle().map(|params| &**params);
        let submit = |(prompt, params): (PyResult<PromptTokens>, &SamplingParams)| {
            prompt.and_then(|prompt| Ok(self.submit(py, prompt, params)?))
        };
        let mut running: Vec<PyResult<Running<'_>>> = prompts.into_iter().zip(params).map(submit).collect();
        let answered = self.answer(py, &mut running);
        if answered.is_err() {
            running.clear();
        }
        if answered.is_err() || running.iter().any(Result::is_err) {
            // One more step ends the requests that were cancelled, so nothing stays held. Its result is dropped,
            // because the first failure is the one to report.
            drop(py.detach(|| self.step()));
        }
        answered?;
        let output = |one: PyResult<Running<'_>>| {
            let output = one.and_then(|one| Ok(one.output()?));
            match output {
                Ok(output) => Ok(Bound::new(py, output)?.into_any()),
                Err(error) if in_list => Ok(error.into_value(py).into_bound(py).into_any()),
                Err(error) => Err(error),
            }
        };
        running.into_iter().map(output).collect()
    }
}

#[pymethods]
impl Llm {
    /// Loads a Hugging Face folder or a GGUF file on `device`: `"cpu"`, `"cuda"`, `"cuda:N"`, `"ascend"` or
    /// `"ascend:N"`.
    ///
    /// `chunk_cache_config` determines the separator at which a string is cut and the tokens that the
    /// resulting chunks see. `recompute` (`"none"`, `"link:K"`, `"question:R"`, …) is the strategy that
    /// chooses the document tokens to recompute. If neither is given, `decoys` decide. With three
    /// decoys or more, documents are computed behind them and nothing is recomputed. Otherwise, the half of the
    /// document tokens to which the question attends most is recomputed. If only `chunk_cache_config` is given, nothing is
    /// recomputed. Without `enable_chunk_cache`, prompts are answered with ordinary attention.
    ///
    /// With `compute="int8"`, activations are rounded to eight bits for weights in ggml blocks, as in llama.cpp.
    ///
    /// With `disk`, documents and prompts outlive the program in a file of `disk_limit` bytes in that folder. By default,
    /// it keeps the size that it has, or gets 10 GiB if it is new. They are
    /// loaded if that is expected to be faster than computing them, or always with `disk_loads="always"`. When the file is
    /// full, `disk_policy` determines which of them leave first: `"lru"`, `"s3-fifo"` or `"tiny-lfu"` (`"priority"` is
    /// the same as `"lru"`). What was saved or loaded last also stays in `disk_memory` bytes of host memory.
    #[new]
    #[pyo3(signature = (
        model, *, enable_chunk_cache = true, chunk_cache_config = None, recompute = None, decoys = None, dtype_name = "float32",
        block_size = 16, kv_cache_memory_bytes = None, device = "cpu", threads = None, compute = "exact",
        disk = None, disk_limit = None, disk_loads = "faster", disk_policy = "lru",
        disk_memory = 0
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments in Python")]
    fn new(
        py: Python<'_>,
        model: PathBuf,
        enable_chunk_cache: bool,
        chunk_cache_config: Option<&PyChunkCacheConfig>,
        recompute: Option<&str>,
        decoys: Option<Vec<String>>,
        dtype_name: &str,
        block_size: usize,
        kv_cache_memory_bytes: Option<usize>,
        device: &str,
        threads: Option<usize>,
        compute: &str,
        disk: Option<PathBuf>,
        disk_limit: Option<u64>,
        disk_loads: &str,
        disk_policy: &str,
        disk_memory: usize,
    ) -> PyResult<Self> {
        let policy: PolicyKind = named("disk_policy", disk_policy)?;
        let rule = match disk_loads {
            "faster" => LoadRule::IfFaster,
            "always" => LoadRule::Always(PATIENCE),
            _ => {
                let text = format!("disk_loads is {disk_loads:?}; use \"faster\" or \"always\"");
                return Err(PyValueError::new_err(text));
            }
        };
        if !model.exists() && !model.is_symlink() {
            return Err(PyFileNotFoundError::new_err(format!("{}: no such model", model.display())));
        }
        let recompute = recompute.map(str::parse::<Recompute>).transpose().map_err(CallError::from)?;
        let cell = chunk_cache_config.map(|config| config.0.cell());
        let given = decoys.as_ref().map_or(0, Vec::len);
        let way = move |model: &Model| {
            let usual = || match recompute {
                Some(_) => Reuse::default(),
                None => DefaultReuse::of(model.config(), given).reuse,
            };
            let way = cell.map_or_else(usual, Reuse::plain);
            Reuse { recompute: recompute.unwrap_or(way.recompute), ..way }
        };
        let chunks = chunk_cache_config.map_or_else(
            || kvchunk::ChunkCacheConfig {
                memory_share: DEFAULT_SHARE,
                ..kvchunk::ChunkCacheConfig::default()
            },
            |config| config.0.clone(),
        );
        let enabled = enable_chunk_cache && chunks.enabled;
        let opened = open_model(py, device, threads, compute.parse().map_err(CallError::from)?)?;
        let separator = chunks.separator.clone();
        let config = EngineConfig {
            kv_format: dtype(dtype_name)?.into(),
            block_size,
            kv_memory: kv_cache_memory_bytes,
            chunks,
            ..EngineConfig::default()
        };
        let (mut engine, codec, way, notes) = py.detach(|| Self::load(&model, config, opened, way))?;
        if let Some(folder) = disk {
            let default = SlabConfig::default();
            let limit = disk_limit.or_else(|| Slab::size_in(&folder)).unwrap_or(default.limit);
            let config = SlabConfig { limit, policy, memory_bytes: disk_memory, ..default };
            py.detach(|| engine.open_disk(&folder, config)).map_err(CallError::from)?;
            engine.load_from_disk(rule);
        }
        for note in notes {
            PyErr::warn(py, &py.get_type::<PyUserWarning>(), &CString::new(note).unwrap_or_default(), 1)?;
        }
        let texts = decoys.unwrap_or_else(|| BUILT_IN_DECOYS.map(str::to_owned).to_vec());
        let decoys: kvmodel::Result<_> = texts.iter().map(|text| codec.encode(text, false)).collect();
        let decoys = decoys.map_err(CallError::from)?;
        let guide = Mutex::new(None);
        Ok(Self { engine: Mutex::new(engine), codec, separator, enabled, way, decoys, guide })
    }

    /// Answers prompts in one batch, and returns the answers in the order of the prompts. A prompt is a
    /// string (which is cut at the separator), a list of token IDs, or a `ChunkedPrompt`. A list of
    /// `sampling_params` has one entry per prompt. With `chat`, a string becomes the user's message in the
    /// model's chat template, which sees `template_args` as variables.
    ///
    /// If a prompt in a list fails, the list of answers has the `KvCacheError` in its place. The error of a
    /// prompt that is not in a list is raised. An answer that outgrows the cache's memory is no error: it ends
    /// with the reason `"length"`.
    #[pyo3(signature = (prompts, sampling_params = None, *, chat = false, template_args = None))]
    fn generate<'py>(
        &self,
        py: Python<'py>,
        prompts: &Bound<'_, PyAny>,
        sampling_params: Option<&Bound<'_, PyAny>>,
        chat: bool,
        template_args: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        if template_args.is_some() && !chat {
            return Err(PyValueError::new_err("template_args apply only with chat=True"));
        }
        let codec = with_variables(&self.codec, template_args)?;
        let several = prompts.try_iter().ok().filter(|_| prompts.extract::<&str>().is_err());
        let ids = prompts.extract::<Vec<u32>>().is_ok_and(|ids| !ids.is_empty());
        let prompts = match several {
            Some(prompts) if !ids => {
                let prompts = prompts.map(|one| Ok(self.prompt(&codec, &one?, chat)));
                (prompts.collect::<PyResult<Vec<_>>>()?, true)
            }
            _ => (vec![self.prompt(&codec, prompts, chat)], false),
        };
        self.answers(py, prompts, sampling_params)
    }

    /// Answers a conversation, or several in one batch. A conversation is a list of dictionaries with `role`
    /// and `content`, as clients of `OpenAI`'s interface write them. If its last message is the assistant's,
    /// the model continues its text. `template_args` are variables of the chat template, such as `tools`,
    /// `documents` and `enable_thinking`. Errors are reported as by `generate`.
    #[pyo3(signature = (messages, sampling_params = None, *, template_args = None))]
    fn chat<'py>(
        &self,
        py: Python<'py>,
        messages: &Bound<'_, PyAny>,
        sampling_params: Option<&Bound<'_, PyAny>>,
        template_args: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let codec = with_variables(&self.codec, template_args)?;
        self.answers(py, conversations(&codec, messages)?, sampling_params)
    }

    /// Returns the chunk cache's counts and gauges.
    fn get_chunk_cache_stats(&self, py: Python<'_>) -> PyChunkCacheMetrics {
        let engine = self.engine(py);
        engine.chunks().map(kvchunk::ChunkCacheManager::metrics).unwrap_or_default().into()
    }

    /// Returns what the disk contains and has done, by name, or `None` without a disk.
    fn get_disk_stats(&self, py: Python<'_>) -> PyResult<Option<Py<PyDict>>> {
        let Some(metrics) = self.engine(py).disk_metrics() else { return Ok(None) };
        let stats = numbers(py, metrics.usage)?;
        stats.set_item("save_errors", metrics.save_errors)?;
        Ok(Some(stats.unbind()))
    }

    /// Returns the disk's metrics in the text format of Prometheus, or an empty string without a disk.
    fn disk_prometheus(&self, py: Python<'_>) -> String {
        let metrics = self.engine(py).disk_metrics();
        metrics.map_or_else(String::new, |metrics| TierMetrics::prometheus(&[("disk", &metrics)]))
    }

    /// Saves what the caches have of a prompt to a file: the whole blocks of an ordinary prompt, or the system prompt
    /// and the documents of a prompt in parts. Returns the number of `tokens` that were saved, of tokens that are
    /// `missing`, and of `bytes`. The prompt and `chat` are as for `generate`. For a model whose rotary embeddings
    /// depend on the length, `max_tokens` must be the same as there.
    #[pyo3(signature = (prompt, path, *, chat = false, max_tokens = 16))]
    fn save_prompt<'py>(
        &self,
        py: Python<'py>,
        prompt: &Bound<'py, PyAny>,
        path: PathBuf,
        chat: bool,
        max_tokens: usize,
    ) -> PyResult<Bound<'py, PyDict>> {
        let prompt = self.prompt(&self.codec, prompt, chat)?;
        let saved = py.detach(|| -> Result<_> {
            let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
            let request = Request {
                full_attention: !self.enabled,
                max_new_tokens: max_tokens,
                ..engine.request(prompt).reusing(&self.way)
            };
            Ok(engine.save_prompt(&request, &path)?)
        })?;
        numbers(py, saved)
    }

    /// Puts the contents of a file that `save_prompt` has written into the caches, where `generate` finds them.
    /// Returns the number of `tokens` that are in the caches now, of tokens for which there is `no_room`, and of tokens
    /// that have another layout (`differs`). Raises `KvCacheError` for a file of another model and for a damaged one.
    fn restore_prompt<'py>(&self, py: Python<'py>, path: PathBuf) -> PyResult<Bound<'py, PyDict>> {
        let restored = py.detach(|| -> Result<_> {
            let mut engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
            Ok(engine.restore_prompt(&path, None)?)
        })?;
        numbers(py, restored)
    }

    /// Waits until everything is on the disk, and stops using it, so that another program can.
    fn close_disk(&self, py: Python<'_>) {
        py.detach(|| self.engine.lock().unwrap_or_else(PoisonError::into_inner).close_disk());
    }
}

/// Returns a dictionary of numbers by name.
fn numbers(py: Python<'_>, fields: impl serde::Serialize) -> PyResult<Bound<'_, PyDict>> {
    let by_name = PyDict::new(py);
    let fields = serde_json::to_value(fields).unwrap_or_default();
    for (name, number) in fields.as_object().into_iter().flatten() {
        by_name.set_item(name, number.as_u64())?;
    }
    Ok(by_name)
}
