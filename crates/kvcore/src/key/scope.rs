//! Everything but the tokens that cached bytes depend on, encoded once into a root key.

use crate::dtype::DType;
use crate::key::BlockKey;
use crate::layout::{BlockOrder, KvShape};
use crate::rope::{Pairing, Rope};

/// Version of the encoding below; a change of it separates old keys from new ones.
const VERSION: &str = "kvcore key scope v1";

/// What a root key is made of. Every field is length-prefixed and tagged, so that no two scopes
/// encode alike.
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
    /// A scope for a model: its name and whatever identifies its weights and configuration.
    pub fn new(model: &str, revision: &[u8]) -> Self {
        let mut encoder = ScopeEncoder::default();
        encoder.field("model", model.as_bytes());
        encoder.field("revision", revision);
        Self(encoder)
    }

    /// The tokenizer's revision: the same text may give other tokens under another.
    #[must_use]
    pub fn tokenizer(mut self, revision: &[u8]) -> Self {
        self.0.field("tokenizer", revision);
        self
    }

    /// The rotary embedding of one layer: pairing, rotary window, frequency vector and factor.
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

    /// The stored form: element type, extents and order of a block.
    #[must_use]
    pub fn layout(mut self, shape: &KvShape) -> Self {
        let dtype = match shape.dtype {
            DType::F32 => 0u8,
            DType::F16 => 1,
            DType::BF16 => 2,
        };
        let order = match shape.order {
            BlockOrder::HeadMajor => 0u8,
            BlockOrder::TokenMajor => 1,
        };
        let mut bytes = vec![dtype, order];
        for extent in [shape.num_layers, shape.block_size, shape.kv_heads, shape.k_dim, shape.v_dim] {
            bytes.extend((extent as u64).to_le_bytes());
        }
        self.0.field("layout", &bytes);
        self
    }

    /// The adapter (`LoRA`) in force and its revision.
    #[must_use]
    pub fn adapter(mut self, id: &str, revision: &[u8]) -> Self {
        self.0.field("adapter", id.as_bytes());
        self.0.field("adapter revision", revision);
        self
    }

    /// The tenant's salt. It must come from the server: a salt that clients choose protects nobody.
    #[must_use]
    pub fn tenant_salt(mut self, salt: &[u8]) -> Self {
        self.0.field("tenant", salt);
        self
    }

    /// The root key from which chains start.
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
    /// Adds a field.
    pub fn field(&mut self, tag: &str, value: &[u8]) {
        for part in [tag.as_bytes(), value] {
            self.0.update(&(part.len() as u64).to_le_bytes());
            self.0.update(part);
        }
    }

    /// The key of all fields so far.
    pub fn finish(&self) -> BlockKey {
        BlockKey::from_bytes(*self.0.finalize().as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rope::RopeConfig;

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
}
