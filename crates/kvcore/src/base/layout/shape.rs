//! The extents from which a layout is made.

use serde::{Deserialize, Serialize};

use crate::base::KvFormat;

/// Order of the two inner axes of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BlockOrder {
    /// `[heads, block_size, dim]`: one head's tokens are contiguous.
    HeadMajor,
    /// `[block_size, heads, dim]`: one token's heads are contiguous; most GPU kernels read this.
    TokenMajor,
}

/// The extents from which a [`KvLayout`](crate::KvLayout) is made.
///
/// K and V may differ in heads and in width. Multi-head latent attention is the shape with one head
/// of each, where K holds the rotated part (`k_dim` = `qk_rope_head_dim`) and V the latent
/// (`v_dim` = `kv_lora_rank`).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KvShape {
    /// Layers held by this rank.
    pub num_layers: usize,
    /// Physical blocks per layer.
    pub num_blocks: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Key heads held by this rank.
    pub k_heads: usize,
    /// Value heads held by this rank.
    pub v_heads: usize,
    /// Elements per head of K.
    pub k_dim: usize,
    /// Elements per head of V.
    pub v_dim: usize,
    /// How elements are stored.
    pub format: KvFormat,
    /// Order of heads and tokens inside a block.
    pub order: BlockOrder,
}
