//! Other engines' KV caches in host memory. Rows are copied from an arena to the blocks of such a cache, and
//! back.
//!
//! An engine such as vLLM has its own blocks, in its own layout. On a CPU, its keys may be transposed, or
//! stored in matrix-unit tiles, which the strides of [`KvLayout`](kvcore::KvLayout) cannot describe. Rows are
//! rotated while they are loaded, always from the stored original.

mod apart;

use std::sync::Arc;

use kvcore::{DType, Error, KvArena, KvFormat, LayerRopes, Result, SlotMapping, Storage, WriteSlots};

use crate::CpuBackend;

/// The order of one head's elements within a block of another engine's cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ForeignOrder {
    /// `[block_size, dim]`: rows, at a given distance from each other.
    Rows {
        /// Distance between consecutive tokens, in elements.
        token: usize,
    },
    /// `[dim, block_size]`: transposed rows, like the keys of vLLM's vector kernels.
    Columns,
    /// `[block_size / 16, dim / 2, 16, 2]`: keys in matrix-unit tiles, with 2-byte elements.
    KeyTiles,
    /// `[dim / 16, block_size / 2, 16, 2]`: values in matrix-unit tiles, with 2-byte elements.
    ValueTiles,
}

/// The keys or values of one layer in another engine's cache: `num_blocks × heads` pieces of `block_size ×
/// dim` elements.
#[derive(Debug, Clone)]
pub struct ForeignPlane {
    /// The memory of the plane. Keys and values may share a storage.
    pub storage: Arc<dyn Storage>,
    /// Index of the first element of block 0 and head 0 in the storage.
    pub start: usize,
    /// Distance between consecutive blocks, in elements.
    pub block: usize,
    /// Distance between consecutive heads, in elements.
    pub head: usize,
    /// The order of the elements of one head in one block.
    pub order: ForeignOrder,
}

/// The extents of another engine's cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForeignShape {
    /// Number of blocks.
    pub num_blocks: usize,
    /// Number of tokens per block.
    pub block_size: usize,
    /// Number of heads, for keys and for values.
    pub heads: usize,
    /// Number of elements per head, for keys and for values.
    pub dim: usize,
    /// Element type: f32, f16 or bf16.
    pub dtype: DType,
}

// Decision: docs/decisions/vllm.md#copies-into-another-engines-cache-are-not-an-operation
/// Another engine's cache: the keys and values of each layer.
#[derive(Debug, Clone)]
pub struct ForeignCache {
    shape: ForeignShape,
    layers: Vec<[ForeignPlane; 2]>,
}

/// Rows to load from an arena into another engine's slots.
#[derive(Debug, Clone)]
pub struct ForeignLoad {
    /// The arena slots to read, one for each token.
    pub from: SlotMapping,
    /// The engine's slots to write, one for each token. Negative slots, for example of a block that the
    /// engine has freed, are skipped.
    pub to: SlotMapping,
    /// The number of positions to rotate keys by: their new position minus the position at which they are
    /// stored.
    pub delta: i64,
}

impl ForeignShape {
    /// Checks that all of the engine's slots in one call exist. If `written` is true, also checks that no
    /// slot is written twice, and skips negative slots.
    ///
    /// # Errors
    /// Returns [`Error::OutOfRange`] for a slot that does not exist, and [`Error::Twice`] for one that is
    /// written twice.
    pub fn check_slots(&self, slots: &[&SlotMapping], written: bool) -> Result<()> {
        let most = self.num_blocks * self.block_size;
        for slots in slots {
            check_slots("slot of the other engine", slots, most, written)?;
        }
        if written { check_once(slots) } else { Ok(()) }
    }
}

impl ForeignOrder {
    /// Returns the index of element `i` of a token, counted from the first element of its block and head.
    pub(crate) fn at(self, shape: &ForeignShape, token: usize, i: usize) -> usize {
        match self {
            Self::Rows { token: stride } => token * stride + i,
            Self::Columns => i * shape.block_size + token,
            Self::KeyTiles => (token / 16) * 16 * shape.dim + (i / 2) * 32 + (token % 16) * 2 + i % 2,
            Self::ValueTiles => {
                (i / 16) * 16 * shape.block_size + (token / 2) * 32 + (i % 16) * 2 + token % 2
            }
        }
    }

    /// Checks that the order supports the extents, and returns the number of elements from the first to the
    /// last element of a block and head.
    fn extent(self, shape: &ForeignShape) -> Result<usize> {
        let multiple = |what, value: usize, of| {
            if value.is_multiple_of(of) { Ok(()) } else { Err(Error::NotMultiple { what, value, of }) }
        };
        let invalid = |reason: &str| {
            Err(Error::InvalidStrides { what: "another engine's cache", reason: reason.to_owned() })
        };
        match self {
            Self::Rows { token } if token < shape.dim => return invalid("tokens share elements"),
            Self::Rows { token } => return Ok((shape.block_size - 1) * token + shape.dim),
            Self::Columns => {}
            Self::KeyTiles | Self::ValueTiles if shape.dtype.bits() != 16 => {
                return invalid("tiles need elements of two bytes");
            }
            Self::KeyTiles => {
                multiple("block_size", shape.block_size, 16)?;
                multiple("dim", shape.dim, 2)?;
            }
            Self::ValueTiles => {
                multiple("block_size", shape.block_size, 2)?;
                multiple("dim", shape.dim, 16)?;
            }
        }
        Ok(shape.block_size * shape.dim)
    }
}

impl ForeignCache {
    /// Creates a description of another engine's cache from the keys and values of each layer.
    ///
    /// # Errors
    /// Returns [`Error::Zero`] for an extent or a number of layers that is 0, [`Error::NotComputed`] for
    /// another element type, [`Error::InvalidStrides`] and [`Error::NotMultiple`] for an order that does not
    /// support the extents or for pieces that overlap, [`Error::TooLarge`] if a plane reaches past its
    /// memory, [`Error::Misaligned`] if the memory is not aligned for its elements, and [`Error::Aliased`] if
    /// two planes share an element, or overlap with different distances between their blocks, heads or tokens.
    pub fn new(shape: ForeignShape, layers: Vec<[ForeignPlane; 2]>) -> Result<Self> {
        let extents = [
            ("num_blocks", shape.num_blocks),
            ("block_size", shape.block_size),
            ("heads", shape.heads),
            ("dim", shape.dim),
            ("layers", layers.len()),
        ];
        if let Some(&(what, _)) = extents.iter().find(|(_, extent)| *extent == 0) {
            return Err(Error::Zero { what });
        }
        if !DType::COMPUTE.contains(&shape.dtype) {
            return Err(Error::NotComputed { what: "another engine's cache", got: shape.dtype });
        }
        for plane in layers.iter().flatten() {
            plane.check(&shape)?;
        }
        apart::check(&shape, &layers)?;
        Ok(Self { shape, layers })
    }

    /// Returns the extents.
    pub fn shape(&self) -> &ForeignShape {
        &self.shape
    }

    /// Returns the keys and the values of each layer.
    pub(crate) fn layers(&self) -> &[[ForeignPlane; 2]] {
        &self.layers
    }

    /// Copies rows of all layers from an arena to the engine's slots, and rotates the keys of each layer.
    ///
    /// The call returns when the copies are done. The engine must not use any of the slots during the call,
    /// and all work on the arena must be done.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use kvbackend_cpu::{CpuBackend, ForeignCache, ForeignLoad, ForeignOrder, ForeignPlane, ForeignShape};
    /// use kvcore::{Backend, BlockOrder, DType, KvArena, KvLayout, KvShape, MemoryKind, RopeConfig, RopeFamily, WriteSlots};
    ///
    /// let backend = CpuBackend::new();
    /// let shape = KvShape {
    ///     num_layers: 1, num_blocks: 4, block_size: 8, k_heads: 2, v_heads: 2, k_dim: 16, v_dim: 16,
    ///     format: DType::F32.into(), order: BlockOrder::TokenMajor,
    /// };
    /// let arena = KvArena::allocate(backend.as_ref(), MemoryKind::System, Arc::new(KvLayout::new(shape)?))?;
    /// // Two blocks of 32 tokens; the keys of a head are transposed, and its values follow them.
    /// let theirs = ForeignShape { num_blocks: 2, block_size: 32, heads: 2, dim: 16, dtype: DType::F32 };
    /// let memory = backend.allocate(MemoryKind::System, 2 * 2 * 32 * 32 * 4)?;
    /// let plane = |start, order| ForeignPlane {
    ///     storage: Arc::clone(&memory), start, block: 2 * 32 * 32, head: 32 * 32, order,
    /// };
    /// let keys = plane(0, ForeignOrder::Columns);
    /// let values = plane(32 * 16, ForeignOrder::Rows { token: 16 });
    /// let cache = ForeignCache::new(theirs, vec![[keys, values]])?;
    ///
    /// let ropes = RopeFamily::new(&[RopeConfig::new(16, 10_000.0)], 128)?.at(128)?;
    /// cache.save(&backend, &arena, &WriteSlots::unchecked(vec![3, 4]), &vec![40, 41].into())?;
    /// let load = ForeignLoad { from: vec![3, 4].into(), to: vec![7, 8].into(), delta: 100 };
    /// cache.load(&backend, &arena, &[load], &ropes)?;
    /// # Ok::<(), kvcore::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::Mismatch`] if the arena's format, extents or number of layers differ from this
    /// cache's, if `ropes` has a different number of layers, or if the slot lists of a load differ in length,
    /// [`Error::OutOfRange`] for a slot that does not exist, [`Error::Twice`] for a slot that is written
    /// twice, the errors of [`Rope::table`](kvcore::Rope::table) for a distance past the model's positions,
    /// [`Error::Aliased`] if the arena shares memory with this cache, and [`Error::ForeignHandle`] for memory of
    /// another backend.
    pub fn load(
        &self,
        backend: &CpuBackend,
        arena: &KvArena,
        loads: &[ForeignLoad],
        ropes: &LayerRopes,
    ) -> Result<()> {
        self.check_arena(arena)?;
        same("layers with rotary embeddings", self.layers.len(), ropes.layers().len())?;
        for load in loads {
            same("slots to write", load.from.len(), load.to.len())?;
            check_slots("slot of the arena", &load.from, arena.layout().num_slots(), false)?;
        }
        let written: Vec<&SlotMapping> = loads.iter().map(|load| &load.to).collect();
        self.shape.check_slots(&written, true)?;
        backend.kernels.load_foreign(self, arena, loads, ropes)
    }

    /// Copies rows of all layers from the engine's slots to an arena. Keys are stored unchanged.
    ///
    /// The call returns when the copies are done. The engine must not write to any of the slots during the
    /// call.
    ///
    /// # Errors
    /// Returns the errors of [`load`](Self::load), and [`Error::PermitVoid`] for slots that may not be
    /// written.
    pub fn save(
        &self,
        backend: &CpuBackend,
        arena: &KvArena,
        to: &WriteSlots,
        from: &SlotMapping,
    ) -> Result<()> {
        self.check_arena(arena)?;
        to.check()?;
        same("slots to write", from.len(), to.len())?;
        check_slots("slot of the arena", to.mapping(), arena.layout().num_slots(), false)?;
        check_once(&[to.mapping()])?;
        self.shape.check_slots(&[from], false)?;
        backend.kernels.save_foreign(self, arena, to.mapping(), from)
    }

    /// Checks that an arena's rows match the cache's.
    fn check_arena(&self, arena: &KvArena) -> Result<()> {
        let (own, shape) = (&self.shape, arena.layout().shape());
        if shape.format != own.dtype.into() {
            let (expected, got) = (KvFormat::from(own.dtype), shape.format);
            return Err(Error::mismatch("arena", expected, got));
        }
        for (what, expected, got) in [
            ("layers of the arena", self.layers.len(), shape.num_layers),
            ("heads of keys of the arena", own.heads, shape.k_heads),
            ("heads of values of the arena", own.heads, shape.v_heads),
            ("k_dim of the arena", own.dim, shape.k_dim),
            ("v_dim of the arena", own.dim, shape.v_dim),
        ] {
            same(what, expected, got)?;
        }
        let memory = |storage: &dyn Storage| (storage.address(), storage.address() + storage.len() as u64);
        for own in arena.storages() {
            let (start, end) = memory(own.as_ref());
            let shares = |plane: &ForeignPlane| {
                let (first, last) = memory(plane.storage.as_ref());
                start < last && first < end
            };
            if self.layers.iter().flatten().any(shares) {
                return Err(Error::Aliased { what: "the arena and another engine's cache" });
            }
        }
        Ok(())
    }
}

impl ForeignPlane {
    fn check(&self, shape: &ForeignShape) -> Result<()> {
        let piece = self.order.extent(shape)?;
        let elements = self.elements(shape, piece)?;
        let end = self.start.checked_add(elements).and_then(|end| end.checked_mul(shape.dtype.bits() / 8));
        let end = end.ok_or(Error::Overflow { what: "bytes of another engine's cache" })?;
        if end > self.storage.len() {
            let what = "end of another engine's plane";
            return Err(Error::TooLarge { what, value: end as i128, most: self.storage.len() as i128 });
        }
        let (address, align) = (self.storage.address(), shape.dtype.bits() / 8);
        if !address.is_multiple_of(align as u64) {
            return Err(Error::Misaligned { what: "another engine's cache", address, align });
        }
        Ok(())
    }

    /// Checks that no two elements of the plane share an address, and returns the number of elements from the
    /// first to the last one. `piece` is this number for a single block and head; its rows may alternate with
    /// the rows of other heads.
    fn elements(&self, shape: &ForeignShape, piece: usize) -> Result<usize> {
        let (rows, mut covered) = match self.order {
            ForeignOrder::Rows { token } => ((token, shape.block_size), shape.dim),
            _ => ((0, 1), piece),
        };
        let mut axes = [rows, (self.head, shape.heads), (self.block, shape.num_blocks)];
        axes.sort_unstable();
        for (stride, count) in axes.into_iter().filter(|axis| axis.1 > 1) {
            if stride < covered {
                let reason =
                    format!("the stride {stride} is smaller than the {covered} elements that it must skip");
                return Err(Error::InvalidStrides { what: "another engine's cache", reason });
            }
            let overflow = Error::Overflow { what: "extent of another engine's cache" };
            covered =
                stride.checked_mul(count - 1).and_then(|far| far.checked_add(covered)).ok_or(overflow)?;
        }
        Ok(covered)
    }
}

fn same(what: &'static str, expected: usize, got: usize) -> Result<()> {
    if expected == got { Ok(()) } else { Err(Error::mismatch(what, expected, got)) }
}

/// Checks that slots are below `limit`. Negative slots are allowed only if `padding` is true.
fn check_slots(what: &'static str, slots: &[i64], limit: usize, padding: bool) -> Result<()> {
    let wrong = |slot: &&i64| if **slot < 0 { !padding } else { **slot as u64 >= limit as u64 };
    match slots.iter().find(wrong) {
        Some(&slot) => Err(Error::OutOfRange { what, value: slot.into(), limit: limit as i128 }),
        None => Ok(()),
    }
}

/// Checks that no slot is written twice.
fn check_once(slots: &[&SlotMapping]) -> Result<()> {
    let mut all: Vec<i64> =
        slots.iter().flat_map(|slots| slots.iter().copied()).filter(|slot| *slot >= 0).collect();
    all.sort_unstable();
    match all.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(Error::Twice { what: "slot", number: pair[0] as u64 }),
        None => Ok(()),
    }
}
