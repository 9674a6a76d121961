//! `--prompt-cache`: restores the keys and values of a prompt from a file, and saves them there.

use std::path::Path;
use std::sync::Arc;

use kvengine::{Engine, Generation, PromptTokens, Request, RestoredPrompt, SavedPrompt};
use kvtier::Error::{DamagedFile, OtherScope};
use serde::Serialize;

use crate::error::Result;

/// The file of a prompt's keys and values, and what was restored from it.
#[derive(Debug, Clone, Copy)]
pub(super) struct PromptCache<'a> {
    path: &'a Path,
    restored: RestoredPrompt,
}

/// A report on the file.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct PromptCacheJson {
    restored: RestoredPrompt,
    saved: SavedPrompt,
}

impl<'a> PromptCache<'a> {
    /// Restores what the file contains, if it exists. A file that was saved with another model or is damaged is named,
    /// and replaced after the answer. A file of another kind is never replaced.
    pub(super) fn restore(path: &'a Path, engine: &mut Engine) -> Result<Self> {
        let mut restored = RestoredPrompt::default();
        if path.exists() {
            match engine.restore_prompt(path, None) {
                Ok(all) => restored = all,
                Err(kvengine::Error::Tier(error @ (DamagedFile { .. } | OtherScope { .. }))) => {
                    note!("{error}. The prompt is computed, and the file replaced.");
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Self { path, restored })
    }

    /// Saves the prompt and, if it is not in parts, its answer. An error is only a note, because the answer is there.
    pub(super) fn save(
        self,
        engine: &Engine,
        request: &Request,
        answer: &Generation,
    ) -> Option<PromptCacheJson> {
        let mut request = request.clone();
        if let PromptTokens::Plain(prompt) = request.prompt.as_ref() {
            // The last token of an answer is not computed. The keys depend on the longest possible answer.
            let computed = answer.tokens.len().saturating_sub(1);
            let tokens = prompt.iter().chain(&answer.tokens[..computed]).copied().collect();
            request.prompt = Arc::new(PromptTokens::Plain(tokens));
            request.max_new_tokens -= computed;
        }
        match engine.save_prompt(&request, self.path) {
            Ok(saved) => Some(PromptCacheJson { restored: self.restored, saved }),
            Err(error) => {
                note!("The prompt was not saved: {error}");
                None
            }
        }
    }
}

impl std::fmt::Display for PromptCacheJson {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { restored, saved } = self;
        let mib = saved.bytes as f64 / f64::from(1 << 20);
        write!(
            f,
            "{} tokens restored from the file; {} tokens saved there ({mib:.1} MiB)",
            restored.tokens, saved.tokens
        )
    }
}
