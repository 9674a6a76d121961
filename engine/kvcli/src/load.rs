//! Loads a model with a progress bar.

use std::path::Path;
use std::sync::Arc;

use kvmodel::dense::{Dense, FileAccess};
use kvmodel::{ModelDirectory, WeightFormat};

use crate::args::WeightsFormat;
use crate::embedded;
use crate::error::{Error, Result};
use crate::progress::bar;

/// Returns the weight format and the access to weight files for the value of `--weights`.
pub(crate) fn format(weights: WeightsFormat) -> (WeightFormat, FileAccess) {
    match weights {
        WeightsFormat::Stored => (WeightFormat::Stored, FileAccess::MapLarge),
        WeightsFormat::F32 => (WeightFormat::F32, FileAccess::MapLarge),
        WeightsFormat::Q8 => (WeightFormat::Q8, FileAccess::MapLarge),
        WeightsFormat::Copy => (WeightFormat::Stored, FileAccess::Copy),
    }
}

/// Loads the model from a directory or a GGUF file, or the built-in one.
pub(crate) fn model(
    dir: Option<&Path>,
    weights: WeightsFormat,
    dense: Arc<dyn Dense>,
) -> Result<ModelDirectory> {
    let format = format(weights);
    let loaded = match dir {
        None => embedded::load(format.0, dense)?,
        Some(dir) => from_files(dir, format, dense)?,
    };
    for note in &loaded.notes {
        note!("note: {note}");
    }
    Ok(loaded)
}

fn from_files(
    dir: &Path,
    format: (WeightFormat, FileAccess),
    dense: Arc<dyn Dense>,
) -> Result<ModelDirectory> {
    if !dir.exists() && !dir.is_symlink() {
        return Err(Error::NoModel(dir.to_owned()));
    }
    let bar = bar("weights", "{bytes}/{total_bytes}", true);
    let loaded = ModelDirectory::load_by(dir, format, dense, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    Ok(loaded?)
}
