//! A model's rotary embeddings.

use std::sync::Arc;

use kvcore::{LayerRopes, Rope, RopeFamily};
use kvmodel::ModelConfig;
use pyo3::prelude::*;

use crate::error::{CallError, Result};

/// The rotary embeddings of a model's layers, read from the contents of its `config.json`.
#[pyclass(frozen, name = "Ropes", module = "kvcache")]
pub(crate) struct PyRopes {
    pub(crate) layers: LayerRopes,
    pub(crate) max_positions: usize,
}

impl PyRopes {
    fn read(text: &str, longest: Option<usize>) -> Result<Self> {
        let config = ModelConfig::from_json(text)?;
        let ropes: Vec<_> = config.layers.iter().map(|layer| layer.rope.clone()).collect();
        let family = RopeFamily::new(&ropes, config.max_positions)?;
        let layers = family.at(longest.unwrap_or(config.max_positions).min(config.max_positions))?;
        Ok(Self { layers, max_positions: config.max_positions })
    }

    /// Returns the embedding of a layer.
    pub(crate) fn layer(&self, layer: usize) -> Result<Arc<Rope>> {
        let ropes = self.layers.layers();
        let found = ropes.get(layer).map(Arc::clone);
        let range =
            kvcore::Error::OutOfRange { what: "layer", value: layer as i128, limit: ropes.len() as i128 };
        found.ok_or_else(|| range.into())
    }
}

#[pymethods]
impl PyRopes {
    /// Reads the embeddings for requests with up to `longest` positions.
    #[new]
    #[pyo3(signature = (config_json, longest = None))]
    fn new(config_json: &str, longest: Option<usize>) -> PyResult<Self> {
        Ok(Self::read(config_json, longest)?)
    }

    /// The number of layers.
    #[getter]
    fn num_layers(&self) -> usize {
        self.layers.layers().len()
    }

    /// The number of positions that the model supports: the largest position plus 1.
    #[getter]
    fn max_positions(&self) -> usize {
        self.max_positions
    }

    /// Returns three values for a layer and a position: the cosines, the sines, and the attention factor, by
    /// which both are multiplied when a row is first rotated.
    fn at(&self, layer: usize, position: i64) -> PyResult<(Vec<f32>, Vec<f32>, f32)> {
        let rope = self.layer(layer)?;
        let table = rope.table([position]).map_err(CallError::from)?;
        let mut sin = vec![0.0; rope.frequencies().len()];
        let cos = table.at(position, &mut sin).to_vec();
        Ok((cos, sin, rope.attention_factor()))
    }
}
