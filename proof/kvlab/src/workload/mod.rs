//! Workloads: a service's requests, drawn from a seed, and the times of their answers.

use std::sync::Arc;

use kvchunk::ChunkedPrompt;
use rand::distr::Distribution;
use rand::distr::weighted::WeightedIndex;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde::Serialize;

use crate::error::{Error, Result};

mod client;
mod decoys;
mod disk;
mod serve;
mod traffic;
mod ttft;

pub use client::{ClientReport, ClientTally, TrafficPrompts, cpu_seconds, thread_cpu_seconds};
pub use decoys::decoy_rows;
pub use disk::disk_rows;
pub use serve::{ArrivalTimes, RagReport, Times, serve};
pub use traffic::{Arrival, SharedPrefix, Traffic, TrafficReport, play};
pub use ttft::{TtftRow, TtftTarget, ttft_rows};

/// The rule by which a request's documents are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Popularity {
    /// Draws document `i` of the library with weight `1 / i^s`, without repeating a document within a
    /// request.
    Zipf(f64),
    /// With this probability, picks a document that was used before, and otherwise a new one.
    Repetition(f64),
}

/// The prompts of a retrieval service.
///
/// ```
/// use kvlab::{Popularity, RagWorkload};
/// let workload = RagWorkload { requests: 50, ..RagWorkload::default() };
/// let prompts = workload.prompts(1000)?;
/// assert_eq!((prompts.len(), prompts[0].chunks().len()), (50, 5));
/// assert_eq!(prompts, workload.prompts(1000)?);
/// # Ok::<(), kvlab::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RagWorkload {
    /// The number of requests.
    pub requests: usize,
    /// The number of documents in the library that Zipf's law draws from.
    pub documents: usize,
    /// The number of tokens per document.
    pub document_tokens: usize,
    /// The number of documents per request (the `k` of retrieval).
    pub per_request: usize,
    /// The number of decoys, which are the same in every request and as long as its documents.
    pub decoys: usize,
    /// The number of tokens per system prompt.
    pub system_tokens: usize,
    /// The number of tokens per question. Every request has its own question.
    pub question_tokens: usize,
    /// The probability that a request's system prompt differs from the previous request's.
    pub system_changes: f64,
    /// The rule by which documents are chosen.
    pub popularity: Popularity,
    /// Random seed.
    pub seed: u64,
}

impl Default for RagWorkload {
    fn default() -> Self {
        Self {
            requests: 100,
            documents: 50,
            document_tokens: 100,
            per_request: 5,
            decoys: 0,
            system_tokens: 32,
            question_tokens: 32,
            system_changes: 0.0,
            popularity: Popularity::Zipf(1.0),
            seed: 0,
        }
    }
}

/// The number of system prompts that a workload alternates between.
const SYSTEMS: u64 = 4;

/// The part of a prompt that tokens are drawn for. It is part of the seed, so a document never equals a
/// question or a decoy.
#[derive(Clone, Copy)]
enum PromptPart {
    System = 1,
    Document = 2,
    Question = 3,
    Decoy = 4,
}

/// The maximum number of requests, or of documents in a library.
const MOST_REQUESTS: usize = 1 << 20;
/// The maximum number of tokens in a part of a prompt, or in an answer.
const MOST_TOKENS: usize = 1 << 24;
/// The maximum number of tokens that a workload draws. They take 1 GiB.
const MOST_DRAWN: usize = 1 << 28;

/// Checks counts against their limits, so that no allocation or loop grows without bound.
fn check_counts(counts: &[(&str, usize, usize)]) -> Result<()> {
    match counts.iter().find(|(_, count, most)| count > most) {
        Some((what, count, most)) => {
            Err(Error::Workload(format!("{count} {what} are more than the limit of {most}")))
        }
        None => Ok(()),
    }
}

impl RagWorkload {
    /// Checks that every number is in its valid range.
    ///
    /// # Errors
    /// Returns [`Error::Workload`], with the name of the number that is out of range.
    pub fn check(&self) -> Result<()> {
        let bad = |what: &str| Err(Error::Workload(what.to_owned()));
        let positive =
            [self.requests, self.document_tokens, self.per_request, self.system_tokens, self.question_tokens];
        if positive.contains(&0) {
            return bad("the numbers of requests, documents per request and tokens must be at least 1");
        }
        check_counts(&[
            ("requests", self.requests, MOST_REQUESTS),
            ("documents", self.documents, MOST_REQUESTS),
            ("documents per request", self.per_request, MOST_TOKENS),
            ("decoys", self.decoys, MOST_TOKENS),
            ("document tokens", self.document_tokens, MOST_TOKENS),
            ("system tokens", self.system_tokens, MOST_TOKENS),
            ("question tokens", self.question_tokens, MOST_TOKENS),
        ])?;
        // Products of these counts fit into 64 bits.
        let documents = self.per_request * self.document_tokens;
        let prompt = documents + self.system_tokens + self.question_tokens;
        check_counts(&[
            ("tokens of all prompts", prompt.saturating_mul(self.requests), MOST_DRAWN),
            ("tokens of decoys", self.decoys * self.document_tokens, MOST_DRAWN),
        ])?;
        if !(0.0..=1.0).contains(&self.system_changes) {
            return bad("the fraction of system prompt changes must be between 0 and 1");
        }
        match self.popularity {
            Popularity::Zipf(s) if !(s.is_finite() && s >= 0.0) => bad("the Zipf exponent must be 0 or more"),
            Popularity::Zipf(_) if self.documents < self.per_request => {
                bad("the library must have at least as many documents as one request uses")
            }
            Popularity::Repetition(p) if !(0.0..=1.0).contains(&p) => {
                bad("the repetition probability must be between 0 and 1")
            }
            _ => Ok(()),
        }
    }

    /// Draws the prompts. Token IDs are below `vocabulary`.
    ///
    /// # Errors
    /// Returns the errors of [`check`](Self::check).
    pub fn prompts(&self, vocabulary: usize) -> Result<Vec<ChunkedPrompt>> {
        self.check()?;
        let mut rng = StdRng::seed_from_u64(self.seed);
        let tokens = |part: PromptPart, number: u64, count: usize| -> Vec<u32> {
            let mut rng =
                StdRng::seed_from_u64(self.seed ^ (part as u64) << 56 ^ number.wrapping_mul(0x9e37_79b9));
            (0..count).map(|_| rng.random_range(0..vocabulary.max(1)) as u32).collect()
        };
        let decoys = 0..self.decoys as u64;
        let decoys: Arc<[Vec<u32>]> =
            decoys.map(|id| tokens(PromptPart::Decoy, id, self.document_tokens)).collect();
        let (mut used, mut system): (Vec<u64>, u64) = (Vec::new(), 0);
        let mut prompts = Vec::with_capacity(self.requests);
        for request in 0..self.requests as u64 {
            if request > 0 && rng.random_bool(self.system_changes) {
                system = (system + 1 + rng.random_range(0..SYSTEMS - 1)) % SYSTEMS;
            }
            let documents = match self.popularity {
                Popularity::Zipf(s) => self.zipf(s, &mut rng)?,
                Popularity::Repetition(p) => self.repeated(p, &mut used, &mut rng),
            };
            let chunks =
                documents.iter().map(|&id| tokens(PromptPart::Document, id, self.document_tokens)).collect();
            let prompt = ChunkedPrompt::new(
                tokens(PromptPart::System, system, self.system_tokens),
                chunks,
                tokens(PromptPart::Question, request, self.question_tokens),
            )?;
            prompts.push(prompt.with_decoys(Arc::clone(&decoys))?);
        }
        Ok(prompts)
    }

    /// Returns the probability that at least one of a request's documents was seen before, assuming
    /// independent repetition: `1 − (1 − p)^k`. Returns `None` except for [`Popularity::Repetition`]. The
    /// probability is not a hit rate.
    pub fn predicted_any_hit(&self) -> Option<f64> {
        match self.popularity {
            Popularity::Repetition(p) => Some(1.0 - (1.0 - p).powi(self.per_request as i32)),
            Popularity::Zipf(_) => None,
        }
    }

    fn zipf(&self, s: f64, rng: &mut StdRng) -> Result<Vec<u64>> {
        let mut weights: Vec<f64> = (1..=self.documents).map(|i| (i as f64).powf(-s)).collect();
        let mut chosen = Vec::with_capacity(self.per_request);
        while chosen.len() < self.per_request {
            let index = WeightedIndex::new(&weights).map_err(|e| Error::Workload(e.to_string()))?.sample(rng);
            weights[index] = 0.0;
            chosen.push(index as u64);
        }
        Ok(chosen)
    }

    fn repeated(&self, p: f64, used: &mut Vec<u64>, rng: &mut StdRng) -> Vec<u64> {
        let known = used.len();
        let mut chosen: Vec<u64> = Vec::with_capacity(self.per_request);
        while chosen.len() < self.per_request {
            let again = known > chosen.len() && rng.random_bool(p);
            let mut id = used.len() as u64;
            if again {
                id = used[rng.random_range(0..known)];
                // A request has each document once. More documents are in use than were chosen, so another
                // one can always be drawn.
                while chosen.contains(&id) {
                    id = used[rng.random_range(0..known)];
                }
            } else {
                used.push(id);
            }
            chosen.push(id);
        }
        chosen
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// Returns the share of documents that were used before, and the share of requests that have such a
    /// document.
    fn repeats(workload: &RagWorkload) -> (f64, f64) {
        let (mut seen, mut documents, mut any) = (HashSet::new(), 0, 0);
        let prompts = workload.prompts(5000).unwrap();
        for prompt in &prompts {
            let again = prompt.chunks().iter().filter(|chunk| seen.contains(*chunk)).count();
            (documents, any) = (documents + again, any + usize::from(again > 0));
            seen.extend(prompt.chunks().iter().cloned());
        }
        let all = prompts.len() as f64;
        (documents as f64 / (all * workload.per_request as f64), any as f64 / all)
    }

    #[test]
    fn repetition_is_what_was_asked_for() {
        for p in [0.1, 0.5, 0.8] {
            let workload = RagWorkload {
                popularity: Popularity::Repetition(p),
                requests: 2000,
                document_tokens: 8,
                ..RagWorkload::default()
            };
            // The bounds are three standard deviations, for 10,000 draws and for 2000 requests.
            let (share, any) = repeats(&workload);
            assert!((share - p).abs() < 0.015, "{share} for {p}");
            let predicted = workload.predicted_any_hit().unwrap();
            assert!((any - predicted).abs() < 0.033, "{any} for {predicted}");
        }
    }

    #[test]
    fn popular_documents_come_more_often_and_once_a_request() {
        let prompts = RagWorkload { requests: 300, ..RagWorkload::default() }.prompts(5000).unwrap();
        let mut counts = std::collections::HashMap::new();
        for prompt in &prompts {
            let distinct: HashSet<_> = prompt.chunks().iter().collect();
            assert_eq!(distinct.len(), 5);
            for chunk in prompt.chunks() {
                *counts.entry(chunk.clone()).or_insert(0) += 1;
            }
        }
        let mut counts: Vec<i32> = counts.into_values().collect();
        counts.sort_unstable();
        assert!(counts[counts.len() - 1] > 5 * counts[counts.len() / 2]);
    }

    #[test]
    fn decoys_are_the_same_in_every_request_and_never_documents() {
        let workload = RagWorkload { decoys: 3, requests: 20, ..RagWorkload::default() };
        let prompts = workload.prompts(5000).unwrap();
        let decoys = prompts[0].decoys();
        assert_eq!((decoys.len(), decoys[0].len()), (3, workload.document_tokens));
        assert!(prompts.iter().all(|prompt| prompt.decoys() == decoys));
        let documents: HashSet<_> = prompts.iter().flat_map(ChunkedPrompt::chunks).collect();
        assert!(decoys.iter().all(|decoy| !documents.contains(decoy)));
        let without = RagWorkload { decoys: 0, ..workload }.prompts(5000).unwrap();
        assert!(without.iter().zip(&prompts).all(|(without, with)| without.chunks() == with.chunks()));
    }

    #[test]
    fn systems_change_as_often_as_asked() {
        let changes = |system_changes| {
            let workload = RagWorkload { system_changes, requests: 200, ..RagWorkload::default() };
            let prompts = workload.prompts(100).unwrap();
            prompts.windows(2).filter(|pair| pair[0].system() != pair[1].system()).count()
        };
        assert_eq!((changes(0.0), changes(1.0)), (0, 199));
        assert!((40..=80).contains(&changes(0.3)));
    }

    #[test]
    fn nonsense_is_named() {
        let good = RagWorkload::default();
        for (bad, word) in [
            (RagWorkload { requests: 0, ..good }, "requests"),
            (RagWorkload { documents: 4, ..good }, "library"),
            (RagWorkload { system_changes: 1.5, ..good }, "system"),
            (RagWorkload { popularity: Popularity::Zipf(f64::NAN), ..good }, "Zipf"),
            (RagWorkload { popularity: Popularity::Repetition(2.0), ..good }, "repetition"),
        ] {
            assert!(bad.prompts(10).unwrap_err().to_string().contains(word));
        }
    }
}
