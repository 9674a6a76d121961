//! The keys of blocks, and the roots of keys. A root covers everything that a block's bytes depend on apart
//! from tokens.

use kvcore::{BlockKey, KeyScope, PromptKeys, VllmChain, VllmExtras};
use pyo3::prelude::*;

use crate::arena::shape;
use crate::names::dtype;
use crate::rope::PyRopes;

/// Returns the root for the keys of blocks and chunks. It covers the model and its revision, the rotary
/// embeddings, the layout, an adapter and the tenant's salt. Caches with different roots never find each
/// other's blocks.
#[pyfunction]
#[pyo3(signature = (model, revision, ropes, *, dtype_name, num_heads, head_dim, block_size, adapter = None, salt = None))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments in Python")]
pub(crate) fn key_root(
    model: &str,
    revision: &[u8],
    ropes: &PyRopes,
    dtype_name: &str,
    num_heads: usize,
    head_dim: usize,
    block_size: usize,
    adapter: Option<(String, Vec<u8>)>,
    salt: Option<Vec<u8>>,
) -> PyResult<[u8; 32]> {
    let shape = shape(ropes.layers.layers().len(), 1, block_size, (num_heads, head_dim), dtype(dtype_name)?);
    let mut scope = KeyScope::new(model, revision).ropes(&ropes.layers).layout(&shape);
    if let Some((id, revision)) = &adapter {
        scope = scope.adapter(id, revision);
    }
    if let Some(salt) = salt.as_deref().filter(|salt| !salt.is_empty()) {
        scope = scope.tenant_salt(salt);
    }
    Ok(*scope.root().as_bytes())
}

/// Returns the keys of a prompt's full blocks under a root. A key covers its block and all blocks before it.
#[pyfunction]
pub(crate) fn prefix_keys(root: [u8; 32], tokens: Vec<u32>, block_size: usize) -> Vec<[u8; 32]> {
    bytes(PromptKeys::new(BlockKey::from_bytes(root), &tokens, block_size).keys())
}

/// Returns the keys of a prompt's full blocks, as vLLM computes them with `--prefix-caching-hash-algo
/// sha256_cbor`. `seed` is vLLM's `PYTHONHASHSEED`. `lora` is an adapter's name and path.
#[pyfunction]
#[pyo3(signature = (tokens, block_size, *, cache_salt = None, lora = None, seed = None))]
pub(crate) fn vllm_keys(
    tokens: Vec<u32>,
    block_size: usize,
    cache_salt: Option<String>,
    lora: Option<(String, String)>,
    seed: Option<&str>,
) -> Vec<[u8; 32]> {
    let chain = seed.map_or_else(VllmChain::default, VllmChain::with_seed);
    bytes(&chain.keys(&tokens, block_size, &VllmExtras { cache_salt, lora, inputs: Vec::new() }))
}

fn bytes(keys: &[BlockKey]) -> Vec<[u8; 32]> {
    keys.iter().map(|key| *key.as_bytes()).collect()
}
