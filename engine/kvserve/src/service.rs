//! The state that handlers share: the engine's thread, the tokenizer, and the limits.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use kvengine::{AnswerGuide, Engine, PromptTokens, Request};
use kvmodel::{ModelConfig, TextCodec, TextStream};
use parking_lot::Mutex;
use tokio::sync::watch;
use tracing::{debug, info};

use crate::ask::{AnswerSettings, Ask, AskedPrompt, Documents, Owner};
use crate::config::{DocumentReuse, Limits};
use crate::engine_thread::EngineHandle;
use crate::library::Libraries;
use crate::metrics::ServerMetrics;
use crate::page::RecentRequests;
use crate::prompt::{self, BuiltPrompt};
use crate::refusal::{Kind, Refusal};
use crate::reply::{Reply, ReplyForm};
use crate::report::Described;
use crate::tenants::ApiKeys;

/// The state that all handlers share.
#[derive(Debug)]
pub(crate) struct Service {
    pub(crate) engine: EngineHandle,
    pub(crate) codec: TextCodec,
    pub(crate) names: Vec<String>,
    pub(crate) reuse: Option<DocumentReuse>,
    pub(crate) keys: Option<ApiKeys>,
    pub(crate) limits: Limits,
    pub(crate) metrics: Arc<ServerMetrics>,
    /// The last requests, for the page.
    pub(crate) recent: Arc<RecentRequests>,
    /// The registered documents.
    pub(crate) libraries: Libraries,
    pub(crate) block: BlockSize,
    /// The maximum number of positions of a request.
    pub(crate) context: usize,
    /// The number of tokens that the model knows.
    pub(crate) vocabulary: usize,
    /// Compiles the forms of answers, once one is asked for.
    pub(crate) guide: Guide,
    /// The number of requests that are answered or wait.
    pub(crate) seats: Arc<AtomicUsize>,
    /// True once the shutdown ends all answers.
    pub(crate) closing: watch::Receiver<bool>,
    /// The time at which the server started, in seconds since 1970.
    pub(crate) started: u64,
}

/// The size of a block of keys and values.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockSize {
    tokens: usize,
    bytes: usize,
}

impl BlockSize {
    /// Reads the size of an engine's blocks.
    pub(crate) fn of(engine: &Engine) -> Self {
        let report = engine.report();
        let blocks: usize = [report.main, report.chunks].into_iter().flatten().map(|pool| pool.total).sum();
        let tokens = engine.cache().as_paged().map_or(1, |paged| paged.kv_pool().block_size());
        Self { tokens, bytes: report.kv_bytes / blocks.max(1) }
    }
}

/// A compiler of the forms of answers, which is created when the first form is asked for.
#[derive(Debug, Clone)]
pub(crate) struct Guide {
    config: Arc<ModelConfig>,
    created: Arc<Mutex<Option<Arc<AnswerGuide>>>>,
}

impl Guide {
    pub(crate) fn new(config: ModelConfig) -> Self {
        Self { config: Arc::new(config), created: Arc::default() }
    }

    /// Returns the compiler. Creating it takes up to a second.
    ///
    /// # Errors
    /// Refuses if the tokenizer's tokens have no bytes of their own.
    fn get(&self, codec: &TextCodec) -> Result<Arc<AnswerGuide>, Refusal> {
        let mut created = self.created.lock();
        if let Some(guide) = &*created {
            return Ok(Arc::clone(guide));
        }
        let guide = AnswerGuide::new(codec, &self.config)?;
        Ok(Arc::clone(created.insert(Arc::new(guide))))
    }
}

/// A request's place among the requests that are answered at the same time.
///
/// # Drop behaviour
/// Gives the place back.
#[derive(Debug)]
pub(crate) struct Seat(Arc<AtomicUsize>);

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Service {
    /// Submits a request. Its reply arrives while the engine computes it.
    ///
    /// # Errors
    /// Refuses the request if there are too many, if its prompt or its settings are not possible, or if the engine
    /// refuses it.
    pub(crate) async fn answer(&self, ask: Ask) -> Result<Reply, Refusal> {
        let arrived = Instant::now();
        let seat = self.seat()?;
        TextStream::check_stop(&ask.settings.stop)?;
        let (codec, guide) = (self.codec.clone(), self.guide.clone());
        let Ask { prompt, documents, settings, shape, owner, priority, label } = ask;
        // With full attention, nothing is gained by cutting a text.
        let has_library = self.reuse.is_some() && !documents.ignore_registered;
        let library = has_library.then(|| self.libraries.of(owner.tenant.as_ref()));
        // A request that is given up keeps its place until its text is tokenised.
        let built = self.tokenised(seat, move || {
            let shape = shape.compile(&codec, || guide.get(&codec))?;
            Ok((prompt::build(&codec, prompt, documents, library.as_ref())?, shape))
        });
        let ((built, shape), seat) = built.await?;
        let tenant = owner.tenant.clone();
        let (mut request, described) = self.request(built, &settings, owner, priority)?;
        request.constraint = shape.constraint;
        debug!(
            prompt_tokens = request.prompt.len(),
            documents = described.documents.len(),
            tenant = request.tenant.as_deref(),
            label,
            "submitting"
        );
        let prompt_tokens = request.prompt.len();
        let answer = self.engine.call(move |engine| engine.submit(request)).await??;
        let form = ReplyForm {
            samples: settings.samples,
            stop: settings.stop,
            logprobs: settings.logprobs.is_some(),
            calls: shape.calls,
            describe: described,
            metrics: Arc::clone(&self.metrics),
            recent: Arc::clone(&self.recent),
            tenant,
            arrived,
            waited: arrived.elapsed(),
        };
        Ok(Reply::start((answer, prompt_tokens), self.codec.clone(), form, self.closing.clone(), seat))
    }

    /// Runs work that takes processor time on a thread for such work.
    async fn tokenised<R: Send + 'static>(
        &self,
        seat: Seat,
        work: impl FnOnce() -> Result<R, Refusal> + Send + 'static,
    ) -> Result<(R, Seat), Refusal> {
        let done = tokio::task::spawn_blocking(move || (work(), seat)).await;
        let (result, seat) =
            done.map_err(|_| Refusal::new(Kind::Internal, "the text could not be tokenised"))?;
        Ok((result?, seat))
    }

    /// Tokenises a prompt that is not answered.
    pub(crate) async fn count(&self, prompt: AskedPrompt, documents: Documents) -> Result<Vec<u32>, Refusal> {
        let (seat, codec) = (self.seat()?, self.codec.clone());
        let built = self.tokenised(seat, move || prompt::build(&codec, prompt, documents, None));
        Ok(built.await?.0.tokens.iter().collect())
    }

    /// Runs a short piece of text work.
    pub(crate) async fn with_codec<R: Send + 'static>(
        &self,
        work: impl FnOnce(&TextCodec) -> kvmodel::Result<R> + Send + 'static,
    ) -> Result<R, Refusal> {
        let (seat, codec) = (self.seat()?, self.codec.clone());
        Ok(self.tokenised(seat, move || Ok(work(&codec)?)).await?.0)
    }

    /// Returns the number of bytes of keys and values that a document with so many tokens takes.
    pub(crate) fn kv_bytes(&self, tokens: usize) -> u64 {
        (tokens.div_ceil(self.block.tokens.max(1)) * self.block.bytes) as u64
    }

    /// Takes a place.
    ///
    /// # Errors
    /// Refuses if there is none.
    fn seat(&self) -> Result<Seat, Refusal> {
        let seat = Seat(Arc::clone(&self.seats));
        if self.seats.fetch_add(1, Ordering::Relaxed) >= self.limits.requests {
            let reason =
                format!("the server answers {} requests already; try again later", self.limits.requests);
            return Err(Refusal {
                code: Some("rate_limit_exceeded"),
                ..Refusal::new(Kind::Overloaded, reason)
            });
        }
        Ok(seat)
    }

    /// Returns the engine's request for a prompt, and what its report needs to know.
    fn request(
        &self,
        built: BuiltPrompt,
        settings: &AnswerSettings,
        owner: Owner,
        priority: i32,
    ) -> Result<(Request, Described), Refusal> {
        if settings.samples > self.limits.samples {
            let most = self.limits.samples;
            return Err(Refusal::field(
                "n",
                format!("{} answers are more than the limit of {most}", settings.samples),
            ));
        }
        let BuiltPrompt { tokens, parts, not_reusable } = built;
        let length = tokens.len();
        if length >= self.context {
            let most = self.context;
            let reason = format!(
                "the prompt has {length} tokens, but the context of this model has {most}, with the answer; shorten the prompt"
            );
            return Err(Refusal {
                code: Some("context_length_exceeded"),
                ..Refusal::new(Kind::TooLong, reason)
            });
        }
        let mut described = Described { not_reused: not_reusable, ..Described::default() };
        if let PromptTokens::Chunked(prompt) = &tokens {
            described.documents = parts.into_iter().zip(prompt.chunks().iter().map(Vec::len)).collect();
            described.before = prompt.system().len();
        }
        described.full_attention = self.reuse.is_none() || matches!(tokens, PromptTokens::Plain(_));
        let room = self.context - length;
        let most = [settings.max_tokens, self.limits.answer_tokens].into_iter().flatten().min();
        let mut request = match &self.reuse {
            Some(reuse) => {
                Request::new(tokens.with_decoys(Arc::clone(&reuse.decoys))?).reusing(&reuse.settings)
            }
            None => Request::new(tokens),
        };
        request.full_attention = self.reuse.is_none();
        request.tenant = owner.tenant.as_deref().map(str::to_owned);
        request.cache_salt = owner.salt;
        request.samples = settings.samples;
        request.priority = priority;
        request.time_limit = self.limits.answer_time;
        request.max_new_tokens = most.unwrap_or(room).min(room);
        request.sampling = settings.sampling;
        request.ignore_end = settings.ignore_end;
        request.logit_bias = Arc::clone(&settings.logit_bias);
        request.logprobs = settings.logprobs;
        Ok((request, described))
    }

    /// Checks the name of the model in a request. A request without a name means the only model.
    ///
    /// # Errors
    /// Refuses the name of another model.
    pub(crate) fn check_model(&self, name: Option<&str>) -> Result<String, Refusal> {
        let own = self.names.first().cloned().unwrap_or_default();
        match name {
            None => Ok(own),
            Some(name) if self.names.iter().any(|known| known == name) => Ok(name.to_owned()),
            Some(name) => {
                let reason = format!("the model {name:?} does not exist here; this server has {own:?}");
                Err(Refusal {
                    code: Some("model_not_found"),
                    param: Some("model".to_owned()),
                    ..Refusal::new(Kind::NotFound, reason)
                })
            }
        }
    }

    /// Returns how documents are answered, in a few words.
    pub(crate) fn way(&self) -> String {
        match &self.reuse {
            Some(reuse) => format!(
                "documents are reused at any position ({}, recomputed: {})",
                reuse.settings.cell.mode, reuse.settings.recompute
            ),
            None => "full attention: only the beginning of a prompt is reused".to_owned(),
        }
    }

    /// Says once how prompts are answered.
    pub(crate) fn log_way(&self) {
        let Some(reuse) = &self.reuse else {
            info!(
                "documents are answered by full attention, where only the beginning of a prompt is reused; find settings \
                 for this model with `kvc tune`, and give the file as --reuse, or give --reuse-anyway"
            );
            return;
        };
        let (cell, recompute) = (reuse.settings.cell, reuse.settings.recompute);
        info!(chunks = %cell.mode, positions = ?cell.strategy, %recompute, "documents are reused at any position");
    }
}

/// Returns the seconds since 1970.
pub(crate) fn unix_time() -> u64 {
    unix_time_ms() / 1000
}

/// Returns the milliseconds since 1970.
pub(crate) fn unix_time_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64)
}
