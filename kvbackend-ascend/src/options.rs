//! Options of the backend.

/// Options of an [`AscendBackend`](crate::AscendBackend). The default is the first device.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AscendOptions {
    /// Number of the device, as ACL counts them (`ASCEND_RT_VISIBLE_DEVICES` changes the order).
    pub device: usize,
    /// Whether operations are composed of plain operators only. Otherwise those of CANN's fused operators are called that are
    /// there and that accept the operands: attention of decoding rows, and writes to paged caches.
    pub plain: bool,
}
