//! Handles for activations and row indices. Only an implementation of the dense steps reads their contents.

use std::sync::Arc;

use kvcore::{Storage, TensorView};

use super::host::{HostIndex, HostRows};

/// A handle for the activations of some rows, in f32: `[rows, width]` or `[rows, heads, dim]`. Clones share
/// the values.
///
/// The model passes the handle from step to step and never reads the values. The values are in host memory,
/// or in device memory as a view.
// Decision: docs/decisions/models.md#an-activation-handle-is-one-of-two-types
#[derive(Debug, Clone)]
pub struct Activation(ActivationPlace);

#[derive(Debug, Clone)]
enum ActivationPlace {
    Host(HostRows),
    Device(TensorView),
}

impl Activation {
    pub(super) fn on_host(rows: HostRows) -> Self {
        Self(ActivationPlace::Host(rows))
    }

    pub(super) fn host(&self) -> Option<&HostRows> {
        match &self.0 {
            ActivationPlace::Host(rows) => Some(rows),
            ActivationPlace::Device(_) => None,
        }
    }

    /// Wraps rows in device memory. For implementations outside this crate.
    pub fn on_device(rows: TensorView) -> Self {
        Self(ActivationPlace::Device(rows))
    }

    /// Returns the view that [`on_device`](Self::on_device) wrapped, or `None` for rows on the host.
    pub fn view(&self) -> Option<&TensorView> {
        match &self.0 {
            ActivationPlace::Host(_) => None,
            ActivationPlace::Device(view) => Some(view),
        }
    }

    /// Returns the shape, `[rows, width]` or `[rows, heads, dim]`.
    pub fn shape(&self) -> &[usize] {
        match &self.0 {
            ActivationPlace::Host(rows) => rows.shape(),
            ActivationPlace::Device(view) => view.shape(),
        }
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.shape().first().copied().unwrap_or(0)
    }
}

/// A handle for a list of row indices in the memory of an implementation. Several steps may use the same
/// list.
#[derive(Debug, Clone)]
pub struct RowIndex(IndexPlace);

#[derive(Debug, Clone)]
enum IndexPlace {
    Host(HostIndex),
    Device { storage: Arc<dyn Storage>, len: usize },
}

impl RowIndex {
    pub(super) fn on_host(rows: HostIndex) -> Self {
        Self(IndexPlace::Host(rows))
    }

    pub(super) fn host(&self) -> Option<&HostIndex> {
        match &self.0 {
            IndexPlace::Host(rows) => Some(rows),
            IndexPlace::Device { .. } => None,
        }
    }

    /// Wraps `len` row indices in device memory. For implementations outside this crate.
    pub fn on_device(storage: Arc<dyn Storage>, len: usize) -> Self {
        Self(IndexPlace::Device { storage, len })
    }

    /// Returns the memory that [`on_device`](Self::on_device) wrapped, or `None` for a list on the host.
    pub fn storage(&self) -> Option<&Arc<dyn Storage>> {
        match &self.0 {
            IndexPlace::Host(_) => None,
            IndexPlace::Device { storage, .. } => Some(storage),
        }
    }

    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        match &self.0 {
            IndexPlace::Host(rows) => rows.len(),
            IndexPlace::Device { len, .. } => *len,
        }
    }

    /// Returns true if the list is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
