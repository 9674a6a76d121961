//! `kvc run --answer-schema` and its like: the form that an answer must have.

use std::path::Path;
use std::sync::Arc;

use kvengine::{AnswerConstraint, AnswerForm, AnswerGuide};
use kvmodel::{ModelConfig, TextCodec};

use crate::args::FormArgs;
use crate::error::{Error, Result};
use crate::text_file;

/// Compiles the form that the options ask for, or returns `None` if they ask for none.
pub(super) fn constraint(
    args: &FormArgs,
    codec: &TextCodec,
    config: &ModelConfig,
) -> Result<Option<Arc<dyn AnswerConstraint>>> {
    let read = |path: &Path| {
        text_file::read(path).map_err(|source| Error::ReadForm { path: path.to_owned(), source })
    };
    let (path, form) = match args {
        FormArgs { schema: Some(path), .. } => (Some(path), AnswerForm::json_schema(&read(path)?)),
        FormArgs { grammar: Some(path), .. } => (Some(path), Ok(AnswerForm::Lark(read(path)?))),
        FormArgs { regex: Some(text), .. } => (None, Ok(AnswerForm::Regex(text.clone()))),
        _ => return Ok(None),
    };
    let compiled = form.and_then(|form| AnswerGuide::new(codec, config)?.constraint(&form));
    compiled.map(Some).map_err(|source| match path {
        Some(path) => Error::Form { path: path.clone(), source },
        None => source.into(),
    })
}
