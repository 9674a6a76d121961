//! The price of decoys: one new document behind stored decoys, and a prompt whose documents are all cached,
//! each compared with chunks that see the system prompt alone.

use std::sync::Arc;
use std::time::Duration;

use kvchunk::{ChunkedPrompt, ComputeMode, ReuseCell};
use kvengine::{Engine, PromptTokens, Request};

use super::{Popularity, RagWorkload, TtftRow, TtftTarget};
use crate::error::Result;

/// The number of measurements in each mode. The best times are reported.
const RUNS: usize = 8;

/// The targets for a new document and for a prompt whose documents are all cached, against the same without
/// decoys.
const TARGETS: [TtftTarget; 2] = [TtftTarget::TimesAsLong(1.3), TtftTarget::TimesAsLong(1.02)];

/// Measures prompts with documents of `length` tokens and a question of 32 tokens, in a mode with decoys and
/// without decoys: with one new document, and with `chunks` documents that are all cached. Returns nothing if
/// the mode has no decoys.
///
/// # Errors
/// Returns the errors of the engine, for example if a prompt is too long for the model, or the chunk pool is
/// too small for the documents.
pub fn decoy_rows(
    engine: &mut Engine,
    mode: ComputeMode,
    chunks: usize,
    length: usize,
) -> Result<Vec<TtftRow>> {
    if mode.num_decoys() == 0 {
        return Ok(Vec::new());
    }
    let workload = RagWorkload {
        requests: 1 + RUNS,
        document_tokens: length,
        per_request: chunks,
        decoys: mode.num_decoys(),
        system_tokens: 64,
        popularity: Popularity::Repetition(0.0),
        seed: 0xdec0,
        ..RagWorkload::default()
    };
    let prompts = workload.prompts(engine.model().config().vocab_size)?;
    let (system, decoys) = (prompts[0].system(), prompts[0].decoys());
    let cells =
        [ComputeMode::WithSystem, mode].map(|mode| ReuseCell { mode, ..ReuseCell::SEQUENTIAL_WITH_SYSTEM });
    let mut ttft = |cell, documents: &[Vec<u32>], question: &[u32]| -> Result<Duration> {
        let prompt = ChunkedPrompt::new(system.to_vec(), documents.to_vec(), question.to_vec())?;
        let prompt = PromptTokens::Chunked(prompt.with_decoys(Arc::clone(decoys))?);
        let request = Request { max_new_tokens: 1, cell, ..Request::new(prompt) };
        Ok(engine.generate(&request, &mut ())?.ttft)
    };
    // The first request of each mode also computes the system prompt and the decoys. Afterwards, the modes
    // take turns.
    let mut new = [Duration::MAX; 2];
    for (i, prompt) in prompts.iter().enumerate() {
        for mode in [i % 2, 1 - i % 2] {
            let took = ttft(cells[mode], &prompt.chunks()[..1], prompt.question())?;
            if i > 0 {
                new[mode] = new[mode].min(took);
            }
        }
    }
    let (last, mut cached) = (&prompts[RUNS], [Duration::MAX; 2]);
    for (i, prompt) in prompts.iter().enumerate() {
        let mut documents = last.chunks()[..chunks].to_vec();
        documents.rotate_left(i % chunks);
        for mode in [i % 2, 1 - i % 2] {
            let took = ttft(cells[mode], &documents, prompt.question())?;
            // The first prompt of each mode computes its documents.
            if i > 0 {
                cached[mode] = cached[mode].min(took);
            }
        }
    }
    let tokens = |documents: usize| system.len() + documents * length + last.question().len();
    let row = |what, documents, [limit_took, took]: [Duration; 2], target| TtftRow {
        what,
        tokens: tokens(documents),
        took,
        limit: "the same without decoys",
        limit_took,
        target: Some(target),
    };
    Ok(vec![
        row("one new document behind decoys", 1, new, TARGETS[0]),
        row("all chunks hit, behind decoys", chunks, cached, TARGETS[1]),
    ])
}
