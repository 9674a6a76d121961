//! Answers that are given: what the model would have said at each of their tokens.

use kvcore::{Logits, SequenceId};
use kvmodel::Observer;

use crate::error::{Error, Result};
use crate::generate::{Asked, Prefilled};
use crate::{Engine, FinishReason, Generation};

impl Engine {
    // Decision: docs/decisions/models.md#a-given-answer-is-read-back-in-one-pass
    /// Reads an answer back after the prefill, in one pass, and keeps the logits of each of its tokens and of the one behind
    /// it, as far as the request and the model have room for them.
    pub(crate) fn follow(
        &mut self,
        asked: &Asked,
        answer: &[u32],
        own: SequenceId,
        prefilled: Prefilled,
        mut generation: Generation,
        observer: &mut dyn Observer,
    ) -> Result<Generation> {
        let (request, longest) = (asked.request, self.longest());
        let Prefilled { context, logits, next, .. } = prefilled;
        let left = (longest as i64).saturating_sub(next.position).max(0) as usize;
        if request.max_new_tokens == 0 {
            return Ok(generation);
        }
        let wanted = answer.len().min(request.max_new_tokens);
        // The last token of a whole answer is fed, too, for the logits behind it.
        let mut fed = if answer.len() < request.max_new_tokens { wanted } else { wanted - 1 }.min(left);
        if fed == answer.len() {
            generation.finish = FinishReason::Stop;
        }
        for &token in &answer[..wanted.min(left.saturating_add(1))] {
            generation.tokens.push(token);
            if observer.token(token).is_break() {
                return Err(Error::Cancelled);
            }
            if observer.is_complete() {
                generation.finish = FinishReason::StopString;
                fed = fed.min(generation.tokens.len() - 1);
                break;
            }
        }
        if request.keep_logits {
            generation.logits.push(logits);
        }
        if fed > 0 {
            let input = self.next_input(own, &answer[..fed], &context)?.with_logits(Logits::All);
            let pass = self.model.forward(&self.device(), &asked.ropes, &[input], observer)?;
            self.caches.sequences_mut().commit(own, &answer[..fed])?;
            if let (true, Some(rows)) = (request.keep_logits, pass.logits) {
                let vocabulary = rows.vocabulary().max(1);
                generation.logits.extend(rows.values().chunks_exact(vocabulary).map(<[f32]>::to_vec));
            }
        }
        generation.total = asked.started.elapsed();
        Ok(generation)
    }
}
