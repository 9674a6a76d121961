//! The model and the documents that are embedded in the program.

use std::sync::Arc;

use kvmodel::dense::Dense;
use kvmodel::{ModelDirectory, WeightFormat};

use crate::error::Result;

const CONFIG: &str = include_str!("../../../models/tiny-rag/config.json");
const WEIGHTS: &[u8] = include_bytes!("../../../models/tiny-rag/model.safetensors");
const TOKENIZER: &[u8] = include_bytes!("../../../models/tiny-rag/tokenizer.json");
const TOKENIZER_CONFIG: &[u8] = include_bytes!("../../../models/tiny-rag/tokenizer_config.json");

/// The names and values in the invented world that the built-in model was trained on.
pub(crate) const WORLD: &str = include_str!("../../../models/tiny-rag/world.json");

/// The demo's documents, by name.
pub(crate) const DOCUMENTS: [(&str, &str); 6] = [
    ("harbour", include_str!("../../../examples/documents/harbour.txt")),
    ("market", include_str!("../../../examples/documents/market.txt")),
    ("school", include_str!("../../../examples/documents/school.txt")),
    ("forest", include_str!("../../../examples/documents/forest.txt")),
    ("station", include_str!("../../../examples/documents/station.txt")),
    ("kitchen", include_str!("../../../examples/documents/kitchen.txt")),
];

/// The demo's system prompt.
pub(crate) const SYSTEM: &str = include_str!("../../../examples/system.txt");

/// The demo's questions, one per line: `question = answer`.
pub(crate) const QUESTIONS: &str = include_str!("../../../examples/questions.txt");

/// Loads the built-in model.
pub(crate) fn load(format: WeightFormat, dense: Arc<dyn Dense>) -> Result<ModelDirectory> {
    Ok(ModelDirectory::from_bytes(CONFIG, WEIGHTS, TOKENIZER, Some(TOKENIZER_CONFIG), format, dense)?)
}
