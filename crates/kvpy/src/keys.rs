//! Roots of keys: everything that the bytes of a chunk depend on beside its tokens.

use kvcore::KeyScope;
use pyo3::prelude::*;

use crate::arena::shape;
use crate::rope::Ropes;

/// Returns the root of the keys of a model's chunks: of the model and its revision, the rotary embeddings, the layout, an adapter and
/// the tenant's salt. Two caches with different roots find nothing of each other.
#[pyfunction]
#[pyo3(signature = (model, revision, ropes, *, dtype_name, num_heads, head_dim, block_size, adapter = None, salt = None))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments in Python")]
pub(crate) fn key_root(
    model: &str,
    revision: &[u8],
    ropes: &Ropes,
    dtype_name: &str,
    num_heads: usize,
    head_dim: usize,
    block_size: usize,
    adapter: Option<(String, Vec<u8>)>,
    salt: Option<Vec<u8>>,
) -> PyResult<[u8; 32]> {
    let shape = shape(ropes.layers.layers().len(), 1, block_size, (num_heads, head_dim), dtype_name)?;
    let mut scope = KeyScope::new(model, revision).ropes(&ropes.layers).layout(&shape);
    if let Some((id, revision)) = &adapter {
        scope = scope.adapter(id, revision);
    }
    if let Some(salt) = salt.as_deref().filter(|salt| !salt.is_empty()) {
        scope = scope.tenant_salt(salt);
    }
    Ok(*scope.root().as_bytes())
}
