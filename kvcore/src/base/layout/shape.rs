//! The extents that define a layout.

use serde::{Deserialize, Serialize};

use crate::base::KvFormat;

/// The order of the two outer axes inside a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BlockOrder {
    /// `[heads, block_size, dim]`: the tokens of one head are contiguous.
    HeadMajor,
    /// `[block_size, heads, dim]`: the heads of one token are contiguous. Most GPU kernels read this order.
    TokenMajor,
}

/// The extents that define a [`KvLayout`](crate::KvLayout).
///
/// K and V may differ in their number of heads and in their width. Multi-head latent attention (MLA) has one
/// head in K and one in V: K holds the rotated part (`k_dim` = `qk_rope_head_dim`) and V the latent (`v_dim`
/// = `kv_lora_rank`).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KvShape {
    /// Number of layers held by this rank.
    pub num_layers: usize,
    /// Number of physical blocks per layer.
    pub num_blocks: usize,
    /// Number of tokens per block.
    pub block_size: usize,
    /// Number of key heads held by this rank.
    pub k_heads: usize,
    /// Number of value heads held by this rank.
    pub v_heads: usize,
    /// Number of elements per head of K.
    pub k_dim: usize,
    /// Number of elements per head of V.
    pub v_dim: usize,
    /// Storage format of the elements.
    pub format: KvFormat,
    /// Order of heads and tokens inside a block.
    pub order: BlockOrder,
}
