//! Settings of a wgpu backend.

/// The adapter to open, and limits to impose on it. By default, the fastest adapter without further limits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WgpuOptions {
    /// A part of an adapter's name, in upper or lower case, or its number in [`adapters`](crate::adapters).
    ///
    /// Without it, the backend takes the first discrete GPU that can run the kernels, otherwise the first
    /// such integrated GPU, otherwise any other such adapter.
    pub adapter: Option<String>,
    /// True to compute f16 by bit operations, as on devices without 16-bit arithmetic of their own.
    pub packed_f16: bool,
    /// Most bytes of a buffer to bind at once, if the device would bind more; at least 1024.
    pub max_binding: Option<u64>,
}
