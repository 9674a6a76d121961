//! GGUF: llama.cpp's format for a model in one file.
//!
//! ```text
//!   header      magic "GGUF", version, number of tensors, number of fields
//!   fields      name, type, value: sizes, rotary embedding, vocabulary, merges, chat template
//!   tensors     name, extents (innermost first), element type, offset
//!   data        the tensors, each at a multiple of the alignment
//! ```
//!
//! `config` converts the fields to the config that a `config.json` would contain, and `tokenizer` converts
//! them to a `tokenizer.json`, with the splitting from `pretokenize`, merges from `scores` if the file lists none,
//! and end tokens from `ends`. `places` checks the offsets of tensors, and `tensors` gives weights the names and
//! the row order of Hugging Face models. `notes` names the fields that nobody has read. [`load`] adds the file's path to errors, and restores
//! the tensor names of the file.

use std::path::Path;
use std::sync::Arc;

use crate::config::ModelConfig;
use crate::dense::{Dense, FileAccess, WeightFile, WeightFormat};
use crate::error::{Error, Result, WeightProblem};
use crate::model::Model;
use crate::text::TextCodec;

mod config;
mod ends;
mod failure;
mod fields;
mod notes;
mod places;
mod pretokenize;
mod scores;
mod tensors;
mod tokenizer;

use failure::{AGAIN, GgufFailure};
use fields::{FieldReader, Header};

/// Loads the model and the text codec from a file, with notes on the fields that are not used. Calls `progress`
/// with the number of tensor bytes read so far and the total number. A `tokenizer.json` in the same folder
/// replaces the file's tokenizer. If the file is mapped ([`FileAccess`]), it must not change while the model is
/// in use.
///
/// # Errors
/// Returns [`Error::Io`] if the file cannot be read, and [`Error::Gguf`], with the path and the field or
/// tensor, if it is not a GGUF file, contradicts itself, or holds a model, a tokenizer or an element type
/// that is not supported. Returns [`Error::File`] if `tokenizer.json` is malformed.
pub(crate) fn load(
    path: &Path,
    (format, access): (WeightFormat, FileAccess),
    dense: Arc<dyn Dense>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(Model, TextCodec, Vec<String>)> {
    read(path, (format, access), dense, progress).map_err(|failure| in_file(path, failure))
}

/// Reads the config in the header of a file. The tensors need not be there.
///
/// # Errors
/// Returns the errors of [`load`] that concern the header.
pub(crate) fn read_config(path: &Path) -> Result<ModelConfig> {
    let read = || {
        let mut file = std::fs::File::open(path).map_err(GgufFailure::Io)?;
        let length = file.metadata().map_err(GgufFailure::Io)?.len();
        config::config(&Header::read(&mut FieldReader::new(&mut file, length))?)
    };
    read().map_err(|failure| in_file(path, failure))
}

/// Adds the path to a failure.
fn in_file(path: &Path, failure: GgufFailure) -> Error {
    let reason = match failure {
        GgufFailure::Io(source) => return Error::Io { path: path.to_owned(), source },
        GgufFailure::Wrong(reason) | GgufFailure::Other(Error::Config(reason)) => reason,
        GgufFailure::Other(Error::Tokenizer(reason)) => format!("the tokenizer in its fields: {reason}"),
        GgufFailure::Other(error) => return error,
    };
    Error::Gguf { path: path.to_owned(), reason }
}

fn read(
    path: &Path,
    (format, access): (WeightFormat, FileAccess),
    dense: Arc<dyn Dense>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(Model, TextCodec, Vec<String>), GgufFailure> {
    let mut file = std::fs::File::open(path).map_err(GgufFailure::Io)?;
    let length = file.metadata().map_err(GgufFailure::Io)?.len();
    let header = Header::read(&mut FieldReader::new(&mut file, length))?;
    let mut config = config::config(&header)?;
    let codec = tokenizer::codec(&header, path)?;
    drop(file);
    let file = WeightFile::open(path, access).map_err(GgufFailure::Io)?;
    let family = config.family;
    let weights = tensors::weights(&header, &mut config, file.bytes(), progress);
    let model =
        weights.and_then(|weights| Ok(Model::with_dense(config, weights.with_file(file), format, dense)?));
    let model = model.map_err(|failure| match failure {
        GgufFailure::Other(Error::Weight { name, problem }) => {
            let name = tensors::name_in_file(&name, family);
            GgufFailure::Wrong(match problem {
                WeightProblem::Shape { expected, got } => {
                    format!("tensor {name:?} has shape {got:?}, but the fields require {expected:?}; {AGAIN}")
                }
                problem => format!("tensor {name:?} {problem}; {AGAIN}"),
            })
        }
        other => other,
    })?;
    let own_tokenizer = !path.with_file_name("tokenizer.json").exists();
    let architecture = header.text("general.architecture")?.unwrap_or_default();
    let notes = [notes::unused(&header, architecture, own_tokenizer), ends::outside(&header)?];
    Ok((model, codec, notes.into_iter().flatten().collect()))
}
