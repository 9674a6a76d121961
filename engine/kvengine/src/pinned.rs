//! Prompts whose cached beginning is kept, whoever needs blocks.

use kvcore::{PinnedBlocks, PromptKeys};
use kvmodel::PromptTokens;

use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::request::Request;

/// A claim on what is cached of the beginning of a prompt. Its blocks are neither evicted nor do they expire.
///
/// # Drop behaviour
/// The blocks stay cached until room is needed.
#[derive(Debug)]
#[must_use = "dropping the claim lets the blocks go when room is needed"]
pub struct PinnedPrompt {
    blocks: PinnedBlocks,
    block_size: usize,
}

impl PinnedPrompt {
    /// Returns the number of tokens that are kept.
    pub fn tokens(&self) -> usize {
        self.blocks.ids().len() * self.block_size
    }
}

impl Engine {
    /// Keeps what is cached of the beginning of a request's prompt; of a chunked prompt, of its system prompt. Answer a request with
    /// that beginning first: nothing is computed here. What is kept is found by requests of the same tenant and regime only.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use kvbackend_cpu::CpuBackend;
    /// use kvengine::{Engine, EngineConfig, Request};
    /// use kvmodel::{Model, ModelConfig, PromptTokens, WeightFormat, Weights};
    ///
    /// let model = Model::new(ModelConfig::benchmark(1, 64)?, Weights::random(1), WeightFormat::Stored)?;
    /// let mut engine = Engine::new(model, CpuBackend::new(), b"none", &EngineConfig::default())?;
    /// let instructions = Request::new(PromptTokens::Plain((0..40).collect()));
    /// engine.generate(&instructions, &mut ())?;
    /// let pinned = engine.pin(&instructions)?;
    /// assert_eq!(pinned.tokens(), 32); // two whole blocks
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::NoChunks`] for a static or a grouped cache, and the errors of a request's tenant and positions.
    pub fn pin(&self, request: &Request) -> Result<PinnedPrompt> {
        let Some(cache) = self.cache().as_paged().filter(|_| self.caches.arenas().len() == 1) else {
            return Err(Error::NoChunks("take a paged cache to keep prompts"));
        };
        let (tokens, end): (Vec<u32>, usize) = match &request.prompt {
            PromptTokens::Chunked(prompt) if !request.full_attention => {
                (prompt.system().to_vec(), prompt.total_tokens())
            }
            prompt => (prompt.iter().collect(), prompt.len()),
        };
        let keys = self.keys(request, &self.ropes(request, end)?)?;
        let block_size = self.caches.block_size();
        let keys = PromptKeys::new(*keys.root(), &tokens, block_size);
        Ok(PinnedPrompt { blocks: cache.pool().lookup_chain(keys.keys()).pin(), block_size })
    }
}
