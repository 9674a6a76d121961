//! Submission: checks a request before anything is computed.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use kvchunk::{PositionPlan, TenantKeys};
use kvcore::{CacheKind, GroupKind};

use super::answer::{self, Answer, RequestId};
use super::constrained;
use super::disk::DiskFetch;
use super::live::{Branch, LiveRequest};
use super::scheduler::Scheduler;
use crate::constraint::{ConstraintState, ConstraintWorkers};
use crate::error::{Error, Result};
use crate::prompt::LivePrompt;
use crate::request::Request;
use crate::runner::{PinnedPrompt, Runner};
use crate::sampling::Sampler;

impl Scheduler {
    /// Checks a request and adds it to the waiting requests.
    pub(crate) fn submit(&mut self, runner: &Runner, mut request: Request) -> Result<Answer> {
        // A forced answer is the same for all samples.
        request.samples = if request.forced.is_some() { 1 } else { request.samples.max(1) };
        request.beams = request.beams.filter(|_| request.forced.is_none());
        check_settings(runner, &request)?;
        runner.model.check_files()?;
        let (asked, most) = (request.width(), self.limits.running);
        if asked > most {
            return Err(Error::TooManyAnswers { asked, most });
        }
        let (mut tokens, plan) = own_tokens(runner, &request)?;
        self.check_room(runner, tokens.len(), request.max_new_tokens)?;
        let end = plan.as_ref().map_or(tokens.len(), |plan| plan.end);
        let ropes = runner.ropes(end, request.max_new_tokens)?;
        let keys = runner.keys(request.owner(), &ropes)?;
        let id = RequestId(self.next);
        self.next += 1;
        let (sender, answer) = answer::channel(id);
        let limit = request.time_limit.map(|limit| u64::try_from(limit.as_millis()).unwrap_or(u64::MAX));
        let now = runner.setup.clock.millis();
        let mut sampler = Sampler::new(request.sampling).with_bias(request.logit_bias.clone());
        sampler.see(request.prompt.iter());
        // Reserves room for the answer, so that appending it needs no reallocation.
        tokens.reserve_exact(request.max_new_tokens.min(runner.longest().saturating_sub(end) + 1));
        let quotable = match request.chunked() {
            Some(prompt) if request.lookup > 0 => {
                prompt.system().iter().chain(prompt.chunks().iter().flatten()).copied().collect()
            }
            _ => Vec::new(),
        };
        let prompt = LivePrompt::new(ropes, keys, plan);
        let constraint = request.constraint.clone().map(|constraint| {
            let workers = self.workers.get_or_insert_with(|| Arc::new(ConstraintWorkers::new()));
            ConstraintState::start(Arc::clone(workers), constraint)
        });
        let owner = request.sparse.map(|_| id);
        let first = Branch { owner, constraint, ..Branch::new(tokens, prompt.start(), sampler) };
        let live = LiveRequest {
            id,
            deadline: limit.map(|limit| now.saturating_add(limit)),
            request,
            prompt,
            sender,
            submitted: Instant::now(),
            queued: None,
            branches: vec![first],
            beams: None,
            quotable,
            refused: None,
            fetch: DiskFetch::default(),
        };
        self.waiting.insert(live.rank(), live);
        Ok(answer)
    }

    /// Checks that every pool is large enough for a sequence of `prompt` tokens, plus one answer token if the
    /// answer may have more than one token.
    fn check_room(&self, runner: &Runner, prompt: usize, answer: usize) -> Result<()> {
        let tokens = prompt + usize::from(answer > 1);
        for &(kind, ref cache) in runner.caches.sequences.groups() {
            let block_size = cache.kv_pool().block_size();
            let asked = match kind {
                // Blocks that the window has passed are freed after each piece.
                GroupKind::SlidingWindow { window } => {
                    tokens.min(window + self.limits.step_tokens).div_ceil(block_size)
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

/// Returns whether the disk has everything that it can store for a prompt in parts.
pub(crate) fn is_saved(runner: &Runner, request: &Request) -> Result<bool> {
    prompt_of(runner, request)?.0.is_saved(runner, request)
}

/// Pins the cached parts of a prompt.
pub(crate) fn pin(runner: &Runner, request: &Request) -> Result<PinnedPrompt> {
    let (prompt, keys, tokens) = prompt_of(runner, request)?;
    match prompt.pin(runner, request)? {
        Some(parts) => Ok(PinnedPrompt::parts(parts, runner.caches.sequences.block_size())),
        None => runner.pin(&keys, &tokens),
    }
}

/// Returns the prompt of a request that is not submitted, its keys, and the tokens of its own sequence.
fn prompt_of(runner: &Runner, request: &Request) -> Result<(LivePrompt, TenantKeys, Vec<u32>)> {
    let (tokens, plan) = own_tokens(runner, request)?;
    let end = plan.as_ref().map_or(tokens.len(), |plan| plan.end);
    let ropes = runner.ropes(end, request.max_new_tokens)?;
    let keys = runner.keys(request.owner(), &ropes)?;
    Ok((LivePrompt::new(ropes, keys, plan), keys, tokens))
}

/// Checks the settings of a request against each other, the model and the caches.
fn check_settings(runner: &Runner, request: &Request) -> Result<()> {
    request.sampling.check()?;
    check_vocabulary(runner.model.config().vocab_size, request)?;
    check_bias(runner.model.config().vocab_size, &request.logit_bias)?;
    if let Some(sparse) = request.sparse {
        sparse.check(runner.model.config().widest_window())?;
        if runner.caches.kind() == CacheKind::Grouped {
            return Err(Error::Pages("blocks are chosen from one pool for all layers; use a paged cache"));
        }
    }
    constrained::check(request)?;
    if let Some(beams) = request.beams {
        beams.check(request)?;
    }
    if request.width() > 1 && runner.caches.sequences.first().as_paged().is_none() {
        return Err(Error::Samples { samples: request.width() });
    }
    Ok(())
}

/// Checks that every bias is a number or negative infinity, and that some token is not excluded.
fn check_bias(vocabulary: usize, bias: &[(u32, f32)]) -> Result<()> {
    let wrong = |value, needed| Err(Error::Sampling { setting: "logit_bias", value, needed });
    if let Some(&(_, value)) = bias.iter().find(|(_, value)| value.is_nan() || *value == f32::INFINITY) {
        return wrong(value, "a number, or negative infinity to exclude the token");
    }
    let excluded = bias.iter().filter(|(_, value)| *value == f32::NEG_INFINITY).map(|(token, _)| *token);
    if excluded.collect::<HashSet<u32>>().len() >= vocabulary {
        return wrong(f32::NEG_INFINITY, "a finite number for at least one token");
    }
    Ok(())
}

/// Checks that all tokens are in the vocabulary. This is checked on submission, because a request that cannot
/// be computed must not evict anything.
fn check_vocabulary(vocabulary: usize, request: &Request) -> Result<()> {
    let forced = request.forced.iter().flat_map(|forced| forced.iter().copied());
    let biased = request.logit_bias.iter().map(|&(token, _)| token);
    let mut tokens = forced.chain(biased).chain(request.prompt.iter());
    match tokens.find(|&token| token as usize >= vocabulary) {
        Some(token) => Err(kvmodel::Error::TokenOutOfVocabulary { token, vocabulary }.into()),
        None => Ok(()),
    }
}

/// Checks a request's prompt. Returns the tokens of its own sequence and, for a chunked prompt, the positions
/// of its parts.
pub(super) fn own_tokens(runner: &Runner, request: &Request) -> Result<(Vec<u32>, Option<PositionPlan>)> {
    let config = runner.model.config();
    let limit = config.max_positions;
    let Some(prompt) = request.chunked() else {
        return match request.prompt.len() {
            0 => Err(Error::EmptyPrompt),
            n if n > limit => Err(kvchunk::Error::TooLong { largest: n as i64 - 1, limit }.into()),
            _ => Ok((request.prompt.iter().collect(), None)),
        };
    };
    request.scaling.check()?;
    let plan = PositionPlan::new(prompt, request.cell, limit)?;
    let layers = config.num_layers();
    let deepest = request.recompute.evidence().deepest_start(layers);
    if let Some(layer) = deepest.filter(|&layer| layer >= layers) {
        let (what, value, limit) = ("layer of a recompute strategy", layer as i128, layers as i128);
        return Err(kvcore::Error::OutOfRange { what, value, limit }.into());
    }
    Ok((prompt.question().to_vec(), Some(plan)))
}
