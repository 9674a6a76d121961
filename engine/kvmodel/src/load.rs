//! Loads a model and its text codec from a Hugging Face directory or a GGUF file.

use std::path::Path;
use std::sync::Arc;

use crate::config::ModelConfig;
use crate::dense::{Dense, FileAccess, HostDense, WeightFormat, check_regular_file};
use crate::error::{Error, Result};
use crate::files::SmallFile;
use crate::gguf;
use crate::model::Model;
use crate::notes;
use crate::text::TextCodec;
use crate::weights::{self, Weights};

/// A loaded model.
#[derive(Debug)]
pub struct ModelDirectory {
    /// The model.
    pub model: Model,
    /// The tokenizer and the chat template.
    pub codec: TextCodec,
    /// What the files say and the model does not do, or does otherwise, as sentences for people.
    pub notes: Vec<String>,
}

impl ModelDirectory {
    /// Loads a Hugging Face directory or a GGUF file. Calls `progress` with the number of weight bytes read
    /// so far and the total number.
    ///
    /// # Errors
    /// Returns [`Error::Io`], with the path, if a file cannot be read. Returns [`Error::File`] or
    /// [`Error::Gguf`], with the path and the field or tensor, if a file is invalid.
    pub fn load(path: &Path, format: WeightFormat, progress: &mut dyn FnMut(u64, u64)) -> Result<Self> {
        Self::load_with(path, format, Arc::new(HostDense::default()), progress)
    }

    /// Like [`load`](Self::load), but with the given dense steps instead of the host's.
    ///
    /// # Errors
    /// Returns the errors of [`load`](Self::load) and of [`Dense::load`].
    pub fn load_with(
        path: &Path,
        format: WeightFormat,
        dense: Arc<dyn Dense>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self> {
        Self::load_by(path, (format, FileAccess::default()), dense, progress)
    }

    /// Like [`load_with`](Self::load_with), but with a choice between mapping and copying large weight files.
    ///
    /// # Errors
    /// Returns the errors of [`load_with`](Self::load_with).
    pub fn load_by(
        path: &Path,
        (format, access): (WeightFormat, FileAccess),
        dense: Arc<dyn Dense>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self> {
        if path.is_dir() {
            return directory(path, (format, access), dense, progress);
        }
        check_regular_file(path).map_err(|source| Error::Io { path: path.to_owned(), source })?;
        let (model, codec, notes) = gguf::load(path, (format, access), dense, progress)?;
        Ok(Self::of(model, codec, notes))
    }

    /// Reads only the config of a model: of a Hugging Face directory, of a `config.json`, or of a GGUF file's header.
    /// Weights and tokenizer need not be there.
    ///
    /// # Errors
    /// Returns [`Error::Io`] if the file cannot be read, and [`Error::File`] or [`Error::Gguf`] if it is invalid.
    pub fn read_config(path: &Path) -> Result<ModelConfig> {
        let is_json = path.extension().is_some_and(|end| end.eq_ignore_ascii_case("json"));
        let file = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
        if !path.is_dir() && !is_json {
            check_regular_file(path).map_err(|source| Error::Io { path: path.to_owned(), source })?;
            return gguf::read_config(path);
        }
        let config = SmallFile::read(file.clone())?.parse(ModelConfig::from_json)?;
        config.check().map_err(|error| error.in_file(file))?;
        Ok(config)
    }

    /// Loads a model from the bytes of its files, for models embedded in a program. Unlike
    /// [`load`](Self::load), it does not read a `generation_config.json`.
    pub fn from_bytes(
        config: &str,
        weights: &[u8],
        tokenizer: &[u8],
        tokenizer_config: Option<&[u8]>,
        format: WeightFormat,
        dense: Arc<dyn Dense>,
    ) -> Result<Self> {
        let mut notes = notes::unused(config);
        let mut config = ModelConfig::from_json(config)?;
        let codec = TextCodec::from_bytes(tokenizer, tokenizer_config)?;
        let weights = Weights::from_bytes(weights)?;
        notes.extend(notes::untie(&mut config, &weights));
        Ok(Self::of(Model::with_dense(config, weights, format, dense)?, codec, notes))
    }

    fn of(model: Model, codec: TextCodec, mut notes: Vec<String>) -> Self {
        notes.extend(notes::tensors(model.unused(), model.config()));
        notes.extend(model.dense_note());
        let codec = codec.with_limit(model.config().max_positions);
        Self { model, codec, notes }
    }
}

/// Loads a Hugging Face directory.
fn directory(
    dir: &Path,
    (format, access): (WeightFormat, FileAccess),
    dense: Arc<dyn Dense>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<ModelDirectory> {
    let Some(config) = SmallFile::read_if_there(dir.join("config.json"))? else {
        let reason = "it is a directory without config.json; give a directory with config.json, tokenizer.json and \
                      *.safetensors, or a GGUF file itself";
        let source = std::io::Error::new(std::io::ErrorKind::NotFound, reason);
        return Err(Error::Io { path: dir.to_owned(), source });
    };
    let (mut config, mut notes) =
        config.parse(|text| Ok((ModelConfig::from_json(text)?, notes::unused(text))))?;
    if let Some(generation) = SmallFile::read_if_there(dir.join("generation_config.json"))? {
        generation.parse(|text| config.add_generation_config(text))?;
    }
    config.check().map_err(|error| error.in_file(dir.join("config.json")))?;
    let codec = TextCodec::from_directory(dir)?;
    let weights = Weights::open_directory(dir, access, progress)?;
    notes.extend(notes::untie(&mut config, &weights));
    let model = Model::with_dense(config, weights, format, dense).map_err(|error| match &error {
        Error::Weight { name, .. } => {
            let file = weights::file_of(dir, name);
            error.in_file(file)
        }
        _ => error,
    })?;
    Ok(ModelDirectory::of(model, codec, notes))
}
