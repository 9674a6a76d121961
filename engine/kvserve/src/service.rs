//! What handlers share: the engine's thread, the tokenizer, and the limits.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use kvengine::{PromptTokens, Request};
use kvmodel::{TextCodec, TextStream};
use tokio::sync::watch;
use tracing::{debug, info};

use crate::ask::{AnswerSettings, Ask, AskedPrompt, Documents, Owner};
use crate::config::{DocumentReuse, Limits};
use crate::engine_thread::EngineHandle;
use crate::metrics::ServerMetrics;
use crate::prompt::{self, BuiltPrompt};
use crate::refusal::{Kind, Refusal};
use crate::reply::{Reply, ReplyForm};
use crate::report::Described;
use crate::tenants::ApiKeys;

/// What all handlers share.
#[derive(Debug)]
pub(crate) struct Service {
    pub(crate) engine: EngineHandle,
    pub(crate) codec: TextCodec,
    pub(crate) names: Vec<String>,
    pub(crate) reuse: Option<DocumentReuse>,
    pub(crate) keys: Option<ApiKeys>,
    pub(crate) limits: Limits,
    pub(crate) metrics: Arc<ServerMetrics>,
    /// The maximum number of positions of a request.
    pub(crate) context: usize,
    /// The number of tokens that the model knows.
    pub(crate) vocabulary: usize,
    /// The number of requests that are answered or wait.
    pub(crate) seats: Arc<AtomicUsize>,
    /// True once the shutdown ends all answers.
    pub(crate) closing: watch::Receiver<bool>,
    /// The time at which the server started, in seconds since 1970.
    pub(crate) started: u64,
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
        let (codec, Ask { prompt, documents, settings, owner, priority, label }) = (self.codec.clone(), ask);
        // A request that is given up keeps its place until its text is tokenised.
        let built = self.tokenised(seat, move || prompt::build(&codec, prompt, documents));
        let (built, seat) = built.await?;
        let (request, described) = self.request(built, &settings, owner, priority)?;
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
            describe: described,
            metrics: Arc::clone(&self.metrics),
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
        let built = self.tokenised(seat, move || prompt::build(&codec, prompt, documents));
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
        let BuiltPrompt { tokens, ids, not_reusable } = built;
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
            described.documents = ids.into_iter().zip(prompt.chunks().iter().map(Vec::len)).collect();
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
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
