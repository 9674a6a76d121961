//! Device-independent data structures of a KV cache for LLM inference.
//!
//! The crate has three modules. Each one uses only the modules below it:
//!
//! ```text
//!   paging   tokens ──► BlockKey chain ──► BlockPool ──► BlockTable, PagedKvCache, StaticKvCache
//!               │ WriteSlots, Segment { blocks, logical order, offset }
//!               ▼
//!   device   Operation: Scatter, Attend, … ──► Stream of a Backend ──► KvArena in its Storage
//!               │
//!               ▼
//!   base     BlockId, SlotMapping, KvShape, KvLayout, Rope, DType, Error
//! ```
//!
//! - [`base`]: plain values, such as element types, block IDs, layouts, quantised formats, rotary embeddings,
//!   ranks and errors
//! - [`device`]: the backend contract: memory, streams, operations, tensor views, arenas, write permits,
//!   graphs, collectives
//! - [`paging`]: the data structures of an engine: keys, the block pool, block tables, caches, prefixes,
//!   sleep, batches
//!
//! All public items are also exported at the crate root.
//!
//! This crate does not depend on any device API, async runtime or model. A backend implements [`Backend`],
//! [`Stream`], [`Storage`] and [`Event`]; an engine keeps sequences in a [`PagedKvCache`] (or a
//! [`StaticKvCache`]) and passes operations to a stream.
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

// Decision: docs/decisions/crates.md#public-paths-are-flat
pub use base::*;
pub use device::*;
pub use paging::*;
