//! Settings of a wgpu backend.

/// The adapter to open, and limits to impose on it. By default, the fastest adapter without additional
/// limits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WgpuOptions {
    /// Part of an adapter's name, in upper or lower case, or its index in [`adapters`](crate::adapters).
    ///
    /// By default, the backend uses the first discrete GPU that can run the kernels, otherwise the first
    /// integrated GPU that can, otherwise any other adapter that can.
    pub adapter: Option<String>,
    /// Whether to compute f16 with bit operations, as on devices without 16-bit arithmetic.
    pub packed_f16: bool,
    /// Maximum number of bytes of a buffer to bind at once, if lower than the device's own limit. Must be at
    /// least 1024.
    pub max_binding: Option<u64>,
}
