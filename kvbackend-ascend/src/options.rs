//! Options of the backend.

/// Options of an [`AscendBackend`](crate::AscendBackend). The default is the first device.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AscendOptions {
    /// Number of the device, as ACL counts them (`ASCEND_RT_VISIBLE_DEVICES` changes the order).
    pub device: usize,
    /// True to compose operations of plain operators only. Otherwise the backend also calls CANN's fused
    /// operators, if CANN has them and they accept the operands: for attention of decoding rows, and for
    /// writes to paged caches.
    pub plain: bool,
}
