//! Plain values: element types, block IDs, layouts, quantised formats, rotary embeddings, ranks and errors.
//! Nothing in this module touches memory or depends on a device.

mod dtype;
mod error;
mod ids;
pub mod layout;
mod memory;
pub mod quant;
mod rank;
pub mod rope;
mod slots;

pub use dtype::DType;
pub use error::{Compared, Error, Result};
pub(crate) use error::{product, same};
pub use ids::BlockId;
pub use layout::{BlockOrder, KvLayout, KvShape, PlaneStrides, ScaleLayout};
pub use memory::MemoryKind;
pub use quant::{Fp8Kind, IntKind, KvFormat, ScaleScope};
pub use rank::{HeadShare, RankInfo};
pub use rope::{
    KeyForm, LayerRopes, Pairing, Regime, Rope, RopeConfig, RopeFamily, RopeScaling, RopeTable, rotate_row,
};
pub use slots::SlotMapping;
