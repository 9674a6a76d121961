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
    fn read(text: &str, longest: Option<usize>, layers: Option<Vec<usize>>) -> Result<Self> {
        let config = ModelConfig::from_json(text)?;
        let own = |layer: usize| {
            let found = config.layers.get(layer).map(|own| own.rope.clone());
            found.ok_or_else(|| unknown(layer, config.layers.len()))
        };
        let layers = layers.unwrap_or_else(|| (0..config.layers.len()).collect());
        let ropes = layers.into_iter().map(own).collect::<std::result::Result<Vec<_>, _>>()?;
        let family = RopeFamily::new(&ropes, config.max_positions)?;
        let layers = family.at(longest.unwrap_or(config.max_positions).min(config.max_positions))?;
        Ok(Self { layers, max_positions: config.max_positions })
    }

    /// Returns the embedding of a layer.
    pub(crate) fn layer(&self, layer: usize) -> Result<Arc<Rope>> {
        let ropes = self.layers.layers();
        let found = ropes.get(layer).map(Arc::clone);
        found.ok_or_else(|| unknown(layer, ropes.len()).into())
    }
}

fn unknown(layer: usize, count: usize) -> kvcore::Error {
    kvcore::Error::OutOfRange { what: "layer", value: layer as i128, limit: count as i128 }
}

#[pymethods]
impl PyRopes {
    /// Reads the embeddings for requests with up to `longest` positions. With `layers`, reads only those of
    /// these layers, in this order.
    #[new]
    #[pyo3(signature = (config_json, longest = None, layers = None))]
    fn new(config_json: &str, longest: Option<usize>, layers: Option<Vec<usize>>) -> PyResult<Self> {
        Ok(Self::read(config_json, longest, layers)?)
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
