//! The backend's options.

/// Options of an [`AscendBackend`](crate::AscendBackend). By default, the first device is used.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AscendOptions {
    /// Index of the device, in ACL's order. `ASCEND_RT_VISIBLE_DEVICES` changes the order.
    pub device: usize,
    /// True to compose operations from plain operators only. Otherwise the backend also calls CANN's fused
    /// operators for attention of decoding rows and for writes to paged caches, if CANN has them and they
    /// accept the operands.
    pub plain: bool,
}
