//! What a backend is opened with.

/// Which adapter, and what is forced. The default takes the fastest adapter as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WgpuOptions {
    /// A part of an adapter's name, in any case, or its number in [`adapters`](crate::adapters). Without it
    /// the first discrete GPU that can run the kernels, else the first integrated one, else any other.
    pub adapter: Option<String>,
    /// Computes f16 without the device's 16-bit arithmetic, as on devices that have none.
    pub packed_f16: bool,
    /// Binds at most so many bytes of a buffer at once, where the device would take more: at least 1024.
    pub max_binding: Option<u64>,
}
