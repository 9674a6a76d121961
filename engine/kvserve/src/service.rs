//! The state that handlers share: the engine's thread, the tokenizer, and the limits.

use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use kvengine::{AnswerGuide, DocumentLibrary, Engine, PromptTokens, Request};
use kvmodel::{ModelConfig, TextCodec, TextStream};
use parking_lot::Mutex;
use tokio::sync::watch;
use tracing::{debug, info};

use crate::ask::{AnswerSettings, Ask, AskedPrompt, Documents, Owner};
use crate::body_memory::BodyMemory;
use crate::config::{DocumentReuse, Limits};
use crate::engine_thread::EngineHandle;
use crate::leisure::Leisure;
use crate::library::{Libraries, SharedLibrary};
use crate::metrics::ServerMetrics;
use crate::origin::Origins;
use crate::page::RecentRequests;
use crate::pins::Pins;
use crate::prompt::{self, BuiltPrompt};
use crate::refusal::{Kind, Refusal};
use crate::registrar::RegistrarHandle;
use crate::reply::{Reply, ReplyForm};
use crate::report::Described;
use crate::seats::{Seat, Seats};
use crate::tenants::{self, ApiKeys};
use crate::text_work;
use crate::token_texts::TokenTexts;

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
    /// The thread that changes them.
    pub(crate) registrar: RegistrarHandle,
    pub(crate) block: BlockSize,
    /// The maximum number of positions of a request.
    pub(crate) context: usize,
    /// The maximum number of answers that the engine computes at the same time.
    pub(crate) running: usize,
    /// The number of tokens that the model knows.
    pub(crate) vocabulary: usize,
    /// The texts of single tokens.
    pub(crate) token_texts: TokenTexts,
    /// Compiles the forms of answers, once one is asked for.
    pub(crate) guide: Guide,
    /// The places of requests that are answered or wait.
    pub(crate) seats: Arc<Seats>,
    /// The memory for the bodies of requests.
    pub(crate) bodies: Arc<BodyMemory>,
    /// The registered documents that wait to be computed.
    pub(crate) leisure: Leisure,
    /// The registered documents that stay in memory.
    pub(crate) pins: Pins,
    /// True if only this machine reaches the server.
    pub(crate) is_local: bool,
    /// The web pages that may use the server.
    pub(crate) origins: Origins,
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

    /// Returns the number of blocks of so many tokens.
    pub(crate) fn of_tokens(self, tokens: usize) -> usize {
        tokens.div_ceil(self.tokens.max(1))
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

impl Service {
    /// Submits a request. Its reply arrives while the engine computes it.
    ///
    /// # Errors
    /// Refuses the request if there are too many, if its prompt or its settings are not possible, or if the engine
    /// refuses it.
    pub(crate) async fn answer(self: &Arc<Self>, ask: Ask) -> Result<Reply, Refusal> {
        let seat = self.seats.take(ask.owner.tenant.as_ref())?;
        Ok(self.answer_from(Some(seat), ask).await?.0)
    }

    /// Submits a request of the server itself, which takes no place from others and is in no metric. Returns the engine's
    /// request, too.
    ///
    /// # Errors
    /// Refuses the request like [`answer`](Self::answer).
    pub(crate) async fn answer_quietly(
        self: &Arc<Self>,
        ask: Ask,
    ) -> Result<(Reply, Option<Request>), Refusal> {
        self.answer_from(None, ask).await
    }

    async fn answer_from(
        self: &Arc<Self>,
        seat: Option<Seat>,
        ask: Ask,
    ) -> Result<(Reply, Option<Request>), Refusal> {
        let arrived = Instant::now();
        self.check_settings(&ask.settings)?;
        let (codec, guide, context) = (self.codec.clone(), self.guide.clone(), self.context);
        let Ask { prompt, documents, settings, shape, mut owner, priority, label } = ask;
        let library = self.library_for(&owner, &documents);
        let is_quiet = seat.is_none();
        let texts = settings.logprobs.map(|_| self.token_texts.clone());
        // A request that is given up keeps its place until its text is tokenised.
        let built = text_work::run(seat, move || {
            if let Some(texts) = texts {
                texts.prepare(&codec);
            }
            let shape = shape.compile(&codec, || guide.get(&codec))?;
            Ok((prompt::build(&codec, prompt, &documents, library.as_ref(), context)?, shape))
        });
        let ((built, shape), seat) = built.await?;
        // Tokens take far less memory than the body that they come from.
        drop(owner.body.take());
        let tenant = owner.tenant.clone();
        let (mut request, described) = self.request(built, &settings, owner, priority)?;
        request.constraint = shape.constraint;
        debug!(
            prompt_tokens = request.prompt.len(),
            documents = described.documents.len(),
            tenant = request.tenant.as_deref(),
            label = label.as_deref(),
            "submitting"
        );
        let prompt_tokens = request.prompt.len();
        // The engine may compute a first token before this task goes on.
        let own = is_quiet.then(|| request.clone());
        let pinning = if is_quiet { None } else { self.pin_used(&request, &described.documents) };
        let submit = move |engine: &mut Engine| (engine.submit(request), arrived.elapsed());
        let (answer, waited) = self.engine.call(submit).await?;
        let answer = answer?;
        let form = ReplyForm {
            samples: settings.samples,
            stop: settings.stop,
            logprobs: settings.logprobs.is_some(),
            texts: self.token_texts.clone(),
            calls: shape.calls,
            describe: described,
            metrics: Arc::clone(&self.metrics),
            recent: Arc::clone(&self.recent),
            is_quiet,
            computed: Mutex::new(pinning),
            tenant,
            label,
            arrived,
            waited,
            patience: self.limits.send_time,
        };
        let answer = (answer, prompt_tokens);
        Ok((Reply::start(answer, self.codec.clone(), form, self.closing.clone(), seat), own))
    }

    /// Returns the registered documents that are looked for in a request.
    fn library_for(&self, owner: &Owner, documents: &Documents) -> Option<SharedLibrary> {
        // With full attention, nothing is gained by cutting a text.
        let has_library = self.reuse.is_some() && self.limits.documents > 0 && !documents.ignore_registered;
        has_library.then(|| self.libraries.of(owner.tenant.as_ref()))
    }

    /// Checks what can be checked before a prompt is tokenised.
    fn check_settings(&self, settings: &AnswerSettings) -> Result<(), Refusal> {
        TextStream::check_stop(&settings.stop)?;
        let (asked, most) = (settings.samples, self.limits.samples.min(self.running));
        if asked > most {
            return Err(Refusal::field("n", format!("{asked} answers are more than the limit of {most}")));
        }
        Ok(())
    }

    /// Tokenises a prompt that is not answered.
    pub(crate) async fn count(
        &self,
        owner: &Owner,
        prompt: AskedPrompt,
        documents: Documents,
    ) -> Result<Vec<u32>, Refusal> {
        let (seat, codec) = (self.seats.take(owner.tenant.as_ref())?, self.codec.clone());
        let (library, context) = (self.library_for(owner, &documents), self.context);
        let built = text_work::run(seat, move || {
            prompt::build(&codec, prompt, &documents, library.as_ref(), context)
        });
        Ok(built.await?.0.tokens.iter().collect())
    }

    /// Runs a short piece of text work for a tenant.
    pub(crate) async fn with_codec<R: Send + 'static>(
        &self,
        tenant: Option<&Arc<str>>,
        work: impl FnOnce(&TextCodec) -> Result<R, Refusal> + Send + 'static,
    ) -> Result<R, Refusal> {
        let (seat, codec) = (self.seats.take(tenant)?, self.codec.clone());
        Ok(text_work::run(seat, move || work(&codec)).await?.0)
    }

    /// Uses the registered documents of a tenant, which may take long.
    pub(crate) async fn with_library<R: Send + 'static>(
        &self,
        tenant: Option<&Arc<str>>,
        work: impl FnOnce(&mut DocumentLibrary) -> Result<R, Refusal> + Send + 'static,
    ) -> Result<R, Refusal> {
        let library = self.libraries.of(tenant);
        Ok(text_work::run((), move || work(&mut library.lock())).await?.0)
    }

    /// Returns the number of bytes of keys and values that a document with so many tokens takes.
    pub(crate) fn kv_bytes(&self, tokens: usize) -> u64 {
        (self.block.of_tokens(tokens) * self.block.bytes) as u64
    }

    /// Returns the engine's request for a prompt, and what its report needs to know.
    fn request(
        &self,
        built: BuiltPrompt,
        settings: &AnswerSettings,
        owner: Owner,
        priority: i32,
    ) -> Result<(Request, Described), Refusal> {
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
        request.priority = allowed_priority(self.keys.as_ref(), request.tenant.as_deref(), priority);
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

/// Returns the priority of a tenant's request. Tenants may let others go first, but not go before them.
fn allowed_priority(keys: Option<&ApiKeys>, tenant: Option<&str>, asked: i32) -> i32 {
    let may_go_first = keys.is_none() || tenant == Some(tenants::OPERATOR);
    if may_go_first { asked } else { asked.min(0) }
}

/// Returns the seconds since 1970.
pub(crate) fn unix_time() -> u64 {
    unix_time_ms() / 1000
}

/// Returns the milliseconds since 1970.
pub(crate) fn unix_time_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenants_do_not_go_before_each_other() {
        let mut keys = ApiKeys::default();
        keys.add("key", "alice");
        let all =
            |keys, tenant| [i32::MIN, -5, 0, 5, i32::MAX].map(|asked| allowed_priority(keys, tenant, asked));
        let own = [i32::MIN, -5, 0, 5, i32::MAX];
        assert_eq!(all(None, None), own);
        assert_eq!(all(Some(&keys), Some(tenants::OPERATOR)), own);
        assert_eq!(all(Some(&keys), Some("alice")), [i32::MIN, -5, 0, 0, 0]);
    }
}
