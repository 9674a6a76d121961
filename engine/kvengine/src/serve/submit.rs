//! Taking a request on: what can be said of it before anything is computed.

use std::time::Instant;

use kvchunk::PositionPlan;
use kvcore::GroupKind;
use kvmodel::PromptTokens;

use super::answer::{self, Answer, RequestId};
use super::live::{Branch, Costs, Live, Parts};
use crate::caches::Caches;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::generate::Context;
use crate::request::Request;
use crate::sample::Sampler;

impl Engine {
    /// Takes a request on. [`step`](Self::step) computes it, together with others.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use kvbackend_cpu::CpuBackend;
    /// use kvengine::{AnswerEvent, Engine, EngineConfig, Request};
    /// use kvmodel::{Model, ModelConfig, PromptTokens, WeightFormat, Weights};
    ///
    /// let model = Model::new(ModelConfig::benchmark(1, 64)?, Weights::random(1), WeightFormat::Stored)?;
    /// let mut engine = Engine::new(model, CpuBackend::new(), b"none", &EngineConfig::default())?;
    /// let ask = |first| Request { max_new_tokens: 3, ..Request::new(PromptTokens::Plain(vec![first, 7, 8])) };
    /// let (mut one, mut other) = (engine.submit(ask(1))?, engine.submit(ask(2))?);
    /// while !engine.step()?.is_idle() {}
    /// let mut tokens = 0;
    /// for answer in [&mut one, &mut other] {
    ///     while let Some(event) = answer.try_next() {
    ///         tokens += usize::from(matches!(event?, AnswerEvent::Token { .. }));
    ///     }
    /// }
    /// assert_eq!(tokens, 6);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`generate`](Self::generate) that the request alone can show, and
    /// - [`Error::Samples`] for several samples or beams on a static cache,
    /// - [`Error::TooManyAnswers`] for more samples or beams than may run at once,
    /// - [`Error::Beams`] for beams that are drawn, or fewer than the answers that are to be given,
    /// - [`Error::Pages`] for a sparse decode that leaves no choice of blocks, of a model whose layers all have windows, or on a grouped
    ///   cache,
    /// - [`kvcore::Error::OutOfBlocks`] if a pool cannot hold the prompt and a token even without other requests.
    pub fn submit(&mut self, mut request: Request) -> Result<Answer> {
        self.check_awake()?;
        // An answer that is given is the same for all samples.
        request.samples = if request.forced.is_some() { 1 } else { request.samples.max(1) };
        request.beams = request.beams.filter(|_| request.forced.is_none());
        request.sampling.check()?;
        self.check_vocabulary(&request)?;
        if let Some(&(_, value)) = request.logit_bias.iter().find(|(_, value)| value.is_nan()) {
            return Err(Error::Sampling { setting: "logit_bias", value, needed: "a number" });
        }
        if let Some(sparse) = request.sparse {
            sparse.check(self.model.config().widest_window())?;
            if matches!(self.caches, Caches::Grouped(_)) {
                return Err(Error::Pages("blocks are chosen among those of all layers: take a paged cache"));
            }
        }
        if let Some(beams) = request.beams {
            beams.check(&request)?;
        }
        if request.width() > 1 && self.cache().as_paged().is_none() {
            return Err(Error::Samples { samples: request.width() });
        }
        let (asked, most) = (request.width(), self.scheduler.limits().running);
        if asked > most {
            return Err(Error::TooManyAnswers { asked, most });
        }
        let (mut own, end) = self.own_tokens(&request)?;
        self.check_room(own.len(), request.max_new_tokens)?;
        let ropes = self.ropes(&request, end)?;
        let keys = self.keys(&request, &ropes)?;
        let id = RequestId(self.scheduler.next);
        self.scheduler.next += 1;
        let (sender, answer) = answer::channel(id);
        let limit = request.time_limit.map(|limit| u64::try_from(limit.as_millis()).unwrap_or(u64::MAX));
        let now = self.clock.millis();
        let mut sampler = Sampler::new(request.sampling).with_bias(request.logit_bias.clone());
        sampler.see(request.prompt.iter());
        // The answer is appended without growing.
        own.reserve_exact(request.max_new_tokens.min(self.longest().saturating_sub(end) + 1));
        let text = match &request.prompt {
            PromptTokens::Chunked(prompt) if request.lookup > 0 && !request.full_attention => prompt
                .system()
                .iter()
                .chain(prompt.chunks().iter().flat_map(|chunk| chunk.iter()))
                .copied()
                .collect(),
            _ => Vec::new(),
        };
        let first = Branch::new(own, sampler);
        let live = Live {
            id,
            deadline: limit.map(|limit| now.saturating_add(limit)),
            request,
            ropes,
            keys,
            sender,
            submitted: Instant::now(),
            parts: Parts::None,
            context: Context::default(),
            branches: vec![first],
            beams: None,
            text,
            costs: Costs::default(),
            refused: None,
        };
        self.scheduler.waiting.insert(live.rank(), live);
        Ok(answer)
    }

    /// Checks a request's prompt. Returns the tokens of its own sequence, and the position behind the prompt.
    fn own_tokens(&self, request: &Request) -> Result<(Vec<u32>, usize)> {
        match &request.prompt {
            PromptTokens::Chunked(prompt) if !request.full_attention => {
                request.scaling.check()?;
                let config = self.model.config();
                let plan = PositionPlan::new(prompt, request.cell, config.max_positions)?;
                let layers = config.num_layers();
                let deepest = request.recompute.evidence().deepest_start(layers);
                if let Some(layer) = deepest.filter(|&layer| layer >= layers) {
                    let (what, value, limit) =
                        ("layer of a recompute strategy", layer as i128, layers as i128);
                    return Err(kvcore::Error::OutOfRange { what, value, limit }.into());
                }
                let question = prompt.question();
                Ok((question.to_vec(), plan.question_position as usize + question.len()))
            }
            prompt => {
                let tokens: Vec<u32> = prompt.iter().collect();
                self.check_length(&tokens)?;
                let end = tokens.len();
                Ok((tokens, end))
            }
        }
    }

    /// Checks that a sequence of `prompt` tokens, and one of its answer unless that is never fed, fits into each whole pool.
    fn check_room(&self, prompt: usize, answer: usize) -> Result<()> {
        let tokens = prompt + usize::from(answer > 1);
        for (kind, cache) in self.caches.groups() {
            let block_size = cache.kv_pool().block_size();
            let asked = match kind {
                // What lies behind the window is let go after each piece.
                GroupKind::SlidingWindow { window } => {
                    tokens.min(window + self.scheduler.limits().step_tokens).div_ceil(block_size)
                }
                GroupKind::Full | GroupKind::Latent => tokens.div_ceil(block_size),
            };
            let total = cache.pool().counts().total;
            if asked > total {
                return Err(kvcore::Error::OutOfBlocks { asked, free: total, evictable: 0, total }.into());
            }
        }
        Ok(())
    }
}
