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
//! `places` checks where the tensors lie, and `tensors` gives weights the names and the order of rows that Hugging Face models
//! have. Errors have the names of the file: [`load`] gives them its path, and its names of tensors.

use std::path::Path;
use std::sync::Arc;

use crate::dense::{Dense, SharedBytes, WeightFormat};
use crate::error::{Error, Result, WeightProblem};
use crate::load::ModelDirectory;
use crate::model::Model;

mod config;
mod fields;
mod places;
mod tensors;
mod tokenizer;

use fields::{Header, Reader};

/// The remedy for a file that contradicts itself.
const AGAIN: &str = "download the file again, or convert the model again";

/// Loads the model of a file. Calls `progress` with the bytes of tensors read so far and in total. A `tokenizer.json` in the
/// same folder takes the place of the tokenizer of the file. The file must not change while the model is in use
/// ([`SharedBytes::map`]).
///
/// # Errors
/// Returns [`Error::Io`] if the file cannot be read, and [`Error::Gguf`], with the path and the field or tensor, if it is no
/// GGUF file, contradicts itself, or holds a model, a tokenizer or an element type that is not supported. Returns
/// [`Error::File`] for a malformed `tokenizer.json`.
pub(crate) fn load(
    path: &Path,
    format: WeightFormat,
    dense: Arc<dyn Dense>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<ModelDirectory> {
    read(path, format, dense, progress).map_err(|failure| {
        let reason = match failure {
            Failure::Io(source) => return Error::Io { path: path.to_owned(), source },
            Failure::Wrong(reason) | Failure::Other(Error::Config(reason)) => reason,
            Failure::Other(Error::Weight { name, problem }) => {
                let name = tensors::name_in_file(&name);
                match problem {
                    WeightProblem::Shape { expected, got } => {
                        format!("tensor {name:?} has shape {got:?}, the fields ask for {expected:?}; {AGAIN}")
                    }
                    problem => format!("tensor {name:?} {problem}; {AGAIN}"),
                }
            }
            Failure::Other(Error::Tokenizer(reason)) => format!("the tokenizer of its fields: {reason}"),
            Failure::Other(error) => return error,
        };
        Error::Gguf { path: path.to_owned(), reason }
    })
}

fn read(
    path: &Path,
    format: WeightFormat,
    dense: Arc<dyn Dense>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<ModelDirectory, Failure> {
    let mut file = std::fs::File::open(path).map_err(Failure::Io)?;
    let length = file.metadata().map_err(Failure::Io)?.len();
    let header = Header::read(&mut Reader::new(&mut file, length))?;
    let mut config = config::config(&header)?;
    let codec = tokenizer::codec(&header, path)?;
    let mapped = SharedBytes::map(&file).map_err(Failure::Io)?;
    let weights = tensors::weights(&header, &mut config, &mapped, progress)?;
    Ok(ModelDirectory { model: Model::with_dense(config, weights, format, dense)?, codec })
}

/// The reason why a file cannot be read.
#[derive(Debug)]
enum Failure {
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
