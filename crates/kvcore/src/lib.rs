//! Device-agnostic structures of a KV cache for LLM inference.
//!
//! ```text
//!   tokens ──► BlockKey chain ──► BlockPool ──► BlockTable ──► WriteSlots ───► Scatter ─┐
//!                                   │  guards: Mutable → Shared → Cached               │
//!                                   ▼                                                  ▼
//!                                Segment { blocks, logical order, offset } ──► Attend ◄─ KvArena
//! ```
//!
//! This crate knows no device API, no async runtime and no model. A backend implements
//! [`Backend`] and [`Stream`]; an engine keeps sequences in a [`PagedKvCache`] (or a
//! [`StaticKvCache`]) and hands operations to a stream.
//!
//! ```
//! use kvcore::{BlockPool, BlockTable};
//!
//! let pool = BlockPool::new(0..4)?;
//! let mut table = BlockTable::new(&pool, 16)?;
//! let slots = table.grow(20)?;                       // 20 tokens over two blocks
//! assert_eq!(slots.len(), 20);
//! drop(table);                                       // both blocks are free again
//! assert_eq!(pool.counts().free, 4);
//! # Ok::<(), kvcore::Error>(())
//! ```

#![forbid(unsafe_code)]

pub mod base;
pub mod device;
pub mod paging;

pub use base::*;
pub use device::*;
pub use paging::*;
