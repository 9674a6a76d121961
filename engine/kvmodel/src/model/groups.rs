//! Groups of layers that attend to the same tokens and therefore share a block table.

use kvcore::{GroupKind, KvExtents, KvFormat};

use super::{ComputeDevice, Model};
use crate::config::ModelConfig;
use crate::error::Result;

/// Layers that attend to the same tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerGroup {
    /// The kind of the group, which determines which tokens its layers attend to.
    pub kind: GroupKind,
    /// The layers, in order.
    pub layers: Vec<usize>,
}

/// The arena that stores a layer's keys and values, and the layer's index in this arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LayerPlace {
    /// The index of the group and of its arena.
    pub(super) group: usize,
    /// The index of the layer in the arena.
    pub(super) layer: usize,
}

/// Returns the groups of a model's layers, ordered by their first layers.
pub(super) fn groups(config: &ModelConfig) -> Vec<LayerGroup> {
    let mut groups: Vec<LayerGroup> = Vec::new();
    for (index, layer) in config.layers.iter().enumerate() {
        let kind = match layer.window {
            Some(window) => GroupKind::SlidingWindow { window },
            None if config.latent.is_some() => GroupKind::Latent,
            None => GroupKind::Full,
        };
        match groups.iter_mut().find(|group| group.kind == kind) {
            Some(group) => group.layers.push(index),
            None => groups.push(LayerGroup { kind, layers: vec![index] }),
        }
    }
    groups
}

impl Model {
    /// Returns the groups of layers that attend to the same tokens: one group for all layers, or one for each
    /// window and one for the layers without a window. A [`GroupedKvCache`](kvcore::GroupedKvCache) has
    /// separate blocks for each group.
    pub fn groups(&self) -> &[LayerGroup] {
        &self.groups
    }

    /// Returns the extents of a cache for a group's layers.
    pub fn extents_of(&self, group: &LayerGroup, format: impl Into<KvFormat>) -> KvExtents {
        KvExtents { num_layers: group.layers.len(), ..self.kv_extents(format) }
    }

    /// Checks that a device has one arena for all layers, or one per group of layers.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Mismatch`] for any other number of arenas.
    pub(super) fn check_arenas(&self, device: &ComputeDevice) -> Result<()> {
        let (expected, got) = (self.groups.len(), device.arenas.len());
        if got == 1 || got == expected {
            return Ok(());
        }
        Err(kvcore::Error::mismatch("arenas, one for each group of layers", expected, got).into())
    }

    /// Returns the index of the arena that stores a layer, and the layer's index in this arena.
    /// [`check_arenas`](Self::check_arenas) must have accepted the device.
    pub(super) fn place(&self, device: &ComputeDevice, index: usize) -> LayerPlace {
        let of = |(group, of): (usize, &LayerGroup)| {
            of.layers.binary_search(&index).ok().map(|layer| LayerPlace { group, layer })
        };
        let apart = self.groups.iter().enumerate().find_map(of).filter(|_| device.arenas.len() > 1);
        apart.unwrap_or(LayerPlace { group: 0, layer: index })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups_of(family: &str, more: &str) -> Vec<LayerGroup> {
        let text = format!(
            r#"{{"model_type":"{family}","vocab_size":10,"hidden_size":8,"intermediate_size":16,"num_hidden_layers":4,
            "num_attention_heads":2,"rms_norm_eps":1e-5,"max_position_embeddings":64{more}}}"#
        );
        groups(&ModelConfig::from_json(&text).unwrap())
    }

    #[test]
    fn layers_are_grouped_by_what_they_attend_to() {
        let window = GroupKind::SlidingWindow { window: 8 };
        let of = |kind, layers: &[usize]| LayerGroup { kind, layers: layers.to_vec() };
        assert_eq!(groups_of("llama", ""), [of(GroupKind::Full, &[0, 1, 2, 3])]);
        assert_eq!(groups_of("mistral", r#","sliding_window":8"#), [of(window, &[0, 1, 2, 3])]);
        let types = r#"["sliding_attention","full_attention","sliding_attention","sliding_attention"]"#;
        let mixed = format!(r#","use_sliding_window":true,"sliding_window":8,"layer_types":{types}"#);
        assert_eq!(groups_of("qwen3", &mixed), [of(window, &[0, 2, 3]), of(GroupKind::Full, &[1])]);
    }
}
