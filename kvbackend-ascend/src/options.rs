//! The backend's options.

/// Options for an [`AscendBackend`](crate::AscendBackend). The default is the first device.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AscendOptions {
    /// Index of the device, in ACL's order. `ASCEND_RT_VISIBLE_DEVICES` changes the order.
    pub device: usize,
    /// If true, operations are composed of plain operators only. Otherwise, the backend also calls CANN's
    /// fused operators for decode attention and for writes to paged caches, if CANN has these operators and
    /// they accept the operands.
    pub plain: bool,
}
