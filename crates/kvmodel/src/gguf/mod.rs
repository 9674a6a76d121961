//! GGUF: a model in one file, as llama.cpp has it.
//!
//! ```text
//!   header      magic "GGUF", version, numbers of tensors and of fields
//!   fields      name, type, value: extents, rotary embedding, vocabulary, merges, chat template      `fields`
//!   tensors     name, extents from the innermost, element type, place
//!   data        the tensors, each at a multiple of the alignment
//! ```
//!
//! `config` makes the fields a config as `config.json` would have it, `tokenizer` a tokenizer as `tokenizer.json` would have it,
//! and `tensors` gives weights the names and the order of rows that Hugging Face models have.

use std::path::Path;

use crate::config::ModelConfig;
use crate::dense::SharedBytes;
use crate::error::{Error, Result};
use crate::text::TextCodec;
use crate::weights::Weights;

mod config;
mod fields;
mod tensors;
mod tokenizer;

use fields::{Header, Reader};

/// The parts of a model that a GGUF file holds.
#[derive(Debug)]
pub(crate) struct Gguf {
    pub(crate) config: ModelConfig,
    pub(crate) codec: TextCodec,
    pub(crate) weights: Weights,
}

impl Gguf {
    /// Reads a file. Calls `progress` with the bytes of tensors read so far and in total. A `tokenizer.json` in the same folder
    /// takes the place of the tokenizer of the file. The file must not change while the model is in use
    /// ([`SharedBytes::map`]).
    ///
    /// # Errors
    /// Returns [`Error::Io`] if the file cannot be read, and [`Error::Gguf`], with the path and the field or tensor, if it is no
    /// GGUF file, contradicts itself, or holds a model, a tokenizer or an element type that is not supported.
    pub(crate) fn read(path: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<Self> {
        let io = |source| Error::Io { path: path.to_owned(), source };
        let mut file = std::fs::File::open(path).map_err(io)?;
        let length = file.metadata().map_err(io)?.len();
        let read = |file: &mut std::fs::File, progress: &mut dyn FnMut(u64, u64)| {
            let header = Header::read(&mut Reader::new(&mut *file, length))?;
            let mut config = config::config(&header)?;
            let beside = path.with_file_name("tokenizer.json");
            let codec = if beside.exists() {
                TextCodec::beside(&beside, &tokenizer::template(&header)?)?
            } else {
                tokenizer::codec(&header)?
            };
            let mapped = SharedBytes::map(file).map_err(Failure::Io)?;
            let weights = tensors::weights(&header, &mut config, &mapped, progress)?;
            Ok(Self { config, codec, weights })
        };
        read(&mut file, progress).map_err(|failure| match failure {
            Failure::Io(source) => io(source),
            Failure::Wrong(reason) => Error::Gguf { path: path.to_owned(), reason },
            Failure::Other(error) => error,
        })
    }
}

/// The reason why a file cannot be read.
#[derive(Debug)]
pub(crate) enum Failure {
    Io(std::io::Error),
    Wrong(String),
    Other(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Other(error)
    }
}

/// Returns the failure of a file that contradicts itself, or that holds what is not supported.
fn wrong<T>(reason: impl Into<String>) -> Result<T, Failure> {
    Err(Failure::Wrong(reason.into()))
}
