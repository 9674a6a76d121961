//! The backend's options.

/// Options for a [`WgpuBackend`](crate::WgpuBackend). By default, the backend chooses the adapter itself, and
/// sets no limits other than the device's own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WgpuOptions {
    /// A part of the adapter's name, in upper or lower case, or its index in [`adapters`](crate::adapters).
    ///
    /// By default, the backend uses the first discrete GPU that can run the kernels, or else the first such
    /// integrated GPU, or else the first other such adapter.
    pub adapter: Option<String>,
    /// True to read f16 with bit operations, as on devices without 16-bit arithmetic.
    pub packed_f16: bool,
    /// The maximum number of a buffer's bytes to bind at once, if it is to be lower than the device's own
    /// limit. Must be at least 1024.
    pub max_binding: Option<u64>,
}
