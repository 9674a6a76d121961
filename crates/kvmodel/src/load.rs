//! Loading a Hugging Face directory, or a GGUF file, as a model with its text codec.

use std::path::Path;
use std::sync::Arc;

use crate::config::ModelConfig;
use crate::dense::{Dense, HostDense, WeightFormat};
use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::model::Model;
use crate::text::TextCodec;
use crate::weights::Weights;

/// A loaded model.
#[derive(Debug)]
pub struct ModelDirectory {
    /// The model.
    pub model: Model,
    /// The tokenizer and the chat template.
    pub codec: TextCodec,
}

impl ModelDirectory {
    /// Loads a Hugging Face directory or a GGUF file. Calls `progress` with the bytes of weights read so far and in total.
    ///
    /// # Errors
    /// Returns [`Error::Io`], with the path, if a file cannot be read. Returns [`Error::Config`], [`Error::Gguf`],
    /// [`Error::Weights`] or [`Error::Tokenizer`], with the reason, if a file is invalid.
    pub fn load(path: &Path, format: WeightFormat, progress: &mut dyn FnMut(u64, u64)) -> Result<Self> {
        Self::load_with(path, format, Arc::new(HostDense::default()), progress)
    }

    /// Loads `path` as [`load`](Self::load) does, for other dense steps than the host's.
    ///
    /// # Errors
    /// Returns the errors of [`load`](Self::load) and of [`Dense::load`].
    pub fn load_with(
        path: &Path,
        format: WeightFormat,
        dense: Arc<dyn Dense>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self> {
        if path.is_file() {
            let Gguf { config, codec, weights } = Gguf::read(path, progress)?;
            return Ok(Self { model: Model::with_dense(config, weights, format, dense)?, codec });
        }
        let dir = path;
        let path = dir.join("config.json");
        let text = std::fs::read_to_string(&path).map_err(|source| Error::Io { path, source })?;
        let mut config = ModelConfig::from_json(&text)?;
        if let Ok(text) = std::fs::read_to_string(dir.join("generation_config.json")) {
            config.add_generation_config(&text)?;
        }
        let codec = TextCodec::from_directory(dir)?;
        let weights = Weights::from_directory(dir, progress)?;
        Ok(Self { model: Model::with_dense(config, weights, format, dense)?, codec })
    }

    /// Loads a model from the bytes of its files, for models that are part of a program. Unlike
    /// [`load`](Self::load), it reads no `generation_config.json`.
    pub fn from_bytes(
        config: &str,
        weights: &[u8],
        tokenizer: &[u8],
        tokenizer_config: Option<&[u8]>,
        format: WeightFormat,
        dense: Arc<dyn Dense>,
    ) -> Result<Self> {
        let config = ModelConfig::from_json(config)?;
        let codec = TextCodec::from_bytes(tokenizer, tokenizer_config)?;
        Ok(Self { model: Model::with_dense(config, Weights::from_bytes(weights)?, format, dense)?, codec })
    }
}
