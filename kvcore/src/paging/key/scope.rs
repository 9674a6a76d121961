//! Scopes, which encode everything that cached bytes depend on, except the tokens, into a root key.

use crate::base::{BlockOrder, KeyForm, KvShape, LayerRopes, Pairing, Rope};
use crate::paging::BlockKey;

/// Version of the encoding below. Increase it whenever the encoding changes, so that old keys are no longer
/// found.
const VERSION: &str = "kvcore key scope v2";

/// The inputs of a root key. Every field is tagged and length-prefixed, so different scopes never have the
/// same encoding.
///
/// ```
/// use kvcore::KeyScope;
/// let a = KeyScope::new("llama", b"rev 1").tenant_salt(b"alice").root();
/// let b = KeyScope::new("llama", b"rev 1").tenant_salt(b"bob").root();
/// assert_ne!(a, b); // tenants never share a block
/// ```
#[derive(Debug, Clone)]
pub struct KeyScope(ScopeEncoder);

impl KeyScope {
    /// Creates a scope for the model `model`. `revision` must identify the model's weights and configuration.
    pub fn new(model: &str, revision: &[u8]) -> Self {
        let mut encoder = ScopeEncoder::default();
        encoder.field("model", model.as_bytes());
        encoder.field("revision", revision);
        Self(encoder)
    }

    /// Adds the revision of the tokenizer, because a different tokenizer may split the same string into
    /// different tokens.
    #[must_use]
    pub fn tokenizer(mut self, revision: &[u8]) -> Self {
        self.0.field("tokenizer", revision);
        self
    }

    /// Adds the rotary embedding of one layer: pairing, rotary dimension, frequencies and attention factor.
    #[must_use]
    pub fn rope(mut self, layer: usize, rope: &Rope) -> Self {
        let mut bytes = (layer as u64).to_le_bytes().to_vec();
        bytes.push(match rope.pairing() {
            Pairing::HalfSplit => 0,
            Pairing::Interleaved => 1,
        });
        bytes.extend((rope.config().rotary_dim as u64).to_le_bytes());
        bytes.extend(rope.attention_factor().to_bits().to_le_bytes());
        bytes.extend(rope.frequencies().iter().flat_map(|f| f.to_bits().to_le_bytes()));
        self.0.field("rope", &bytes);
        self
    }

    /// Adds the rotary embeddings of all layers for a request. Different regimes result in different scopes.
    #[must_use]
    pub fn ropes(self, ropes: &LayerRopes) -> Self {
        ropes.layers().iter().enumerate().fold(self, |scope, (layer, rope)| scope.rope(layer, rope))
    }

    /// Adds the storage layout of a block: format, extents and order.
    #[must_use]
    pub fn layout(mut self, shape: &KvShape) -> Self {
        self.0.field("format", shape.format.to_string().as_bytes());
        let mut bytes = vec![match shape.order {
            BlockOrder::HeadMajor => 0u8,
            BlockOrder::TokenMajor => 1,
        }];
        let KvShape { num_layers, block_size, k_heads, v_heads, k_dim, v_dim, .. } = *shape;
        for extent in [num_layers, block_size, k_heads, v_heads, k_dim, v_dim] {
            bytes.extend((extent as u64).to_le_bytes());
        }
        self.0.field("layout", &bytes);
        self
    }

    /// Adds the form in which keys are stored: rotated or not.
    #[must_use]
    pub fn keys(mut self, form: KeyForm) -> Self {
        self.0.field("keys", form.to_string().as_bytes());
        self
    }

    /// Adds the static scales of an fp8 cache. This is needed if [`set_scales`](crate::KvArena::set_scales)
    /// changed them, because codes have different values with different scales.
    #[must_use]
    pub fn static_scales(mut self, k: &[f32], v: &[f32]) -> Self {
        for (tag, scales) in [("K scales", k), ("V scales", v)] {
            let bytes: Vec<u8> = scales.iter().flat_map(|s| s.to_bits().to_le_bytes()).collect();
            self.0.field(tag, &bytes);
        }
        self
    }

    /// Adds the ID and the revision of the active adapter (`LoRA`).
    #[must_use]
    pub fn adapter(mut self, id: &str, revision: &[u8]) -> Self {
        self.0.field("adapter", id.as_bytes());
        self.0.field("adapter revision", revision);
        self
    }

    /// Adds the tenant's salt. The server must choose it, because a salt chosen by clients does not protect
    /// anyone.
    #[must_use]
    pub fn tenant_salt(mut self, salt: &[u8]) -> Self {
        self.0.field("tenant", salt);
        self
    }

    /// Returns the root key, from which chains start.
    pub fn root(&self) -> BlockKey {
        self.0.finish()
    }
}

/// A tagged, length-prefixed encoding that is hashed as it grows.
#[derive(Debug, Clone)]
pub struct ScopeEncoder(blake3::Hasher);

impl Default for ScopeEncoder {
    fn default() -> Self {
        Self(blake3::Hasher::new_derive_key(VERSION))
    }
}

impl ScopeEncoder {
    /// Adds a tagged field.
    pub fn field(&mut self, tag: &str, value: &[u8]) {
        for part in [tag.as_bytes(), value] {
            self.0.update(&(part.len() as u64).to_le_bytes());
            self.0.update(part);
        }
    }

    /// Returns the key of all fields added so far.
    pub fn finish(&self) -> BlockKey {
        BlockKey::from_bytes(*self.0.finalize().as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{DType, RopeConfig};

    #[test]
    fn fields_do_not_run_into_each_other() {
        let ab = KeyScope::new("ab", b"c").root();
        assert_ne!(ab, KeyScope::new("a", b"bc").root());
        assert_ne!(
            KeyScope::new("m", b"").tokenizer(b"x").root(),
            KeyScope::new("m", b"").tenant_salt(b"x").root()
        );
    }

    #[test]
    fn another_frequency_is_another_key() {
        let rope = |theta| Rope::new(RopeConfig::new(8, theta), 16).unwrap();
        let scope = |theta| KeyScope::new("m", b"w").rope(0, &rope(theta)).root();
        assert_ne!(scope(10_000.0), scope(10_000.1 * 5.0));
    }

    #[test]
    fn every_format_and_every_extent_is_another_key() {
        let shape = KvShape {
            num_layers: 2,
            num_blocks: 8,
            block_size: 4,
            k_heads: 2,
            v_heads: 4,
            k_dim: 32,
            v_dim: 64,
            format: DType::F16.into(),
            order: BlockOrder::TokenMajor,
        };
        let mut shapes = vec![
            shape.clone(),
            KvShape { num_layers: 3, ..shape.clone() },
            KvShape { block_size: 8, ..shape.clone() },
            KvShape { k_heads: 4, v_heads: 2, ..shape.clone() },
            KvShape { v_heads: 2, ..shape.clone() },
            KvShape { k_dim: 64, v_dim: 32, ..shape.clone() },
            KvShape { order: BlockOrder::HeadMajor, ..shape.clone() },
        ];
        for format in
            ["f32", "bf16", "int8:32", "int8:16", "int4:32", "fp8-e4m3", "fp8-e4m3:head", "fp8-e5m2"]
        {
            shapes.push(KvShape { format: format.parse().unwrap(), ..shape.clone() });
        }
        let root = |shape: &KvShape| KeyScope::new("m", b"w").layout(shape).root();
        let mut keys: Vec<_> = shapes.iter().map(root).collect();
        assert_eq!(
            root(&KvShape { num_blocks: 9, ..shape.clone() }),
            keys[0],
            "the pool's size is in no key"
        );
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), shapes.len());
        let scaled = |k: &[f32], v: &[f32]| KeyScope::new("m", b"w").static_scales(k, v).root();
        assert_ne!(scaled(&[1.0, 2.0], &[1.0]), scaled(&[1.0], &[2.0, 1.0]));
    }
}
