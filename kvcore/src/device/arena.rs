//! Arenas: the memory that block IDs and slots refer to.

use std::sync::Arc;

use crate::base::{
    BlockId, DType, Error, KvFormat, KvLayout, MemoryKind, PlaneStrides, Result, ScaleLayout, same,
};
use crate::device::{Backend, Dims, Storage, Stream, TensorView};

/// Memory for K and V in one layout on one device. Block IDs and slots refer to places in an arena.
///
/// Several pools, such as the main pool and the chunk pool, can share one arena, so that one `attend` can
/// read the blocks of all of them. A quantised arena has two additional storages, for the scales of K and of
/// V.
#[derive(Debug, Clone)]
pub struct KvArena {
    k: Arc<dyn Storage>,
    v: Arc<dyn Storage>,
    scales: Option<Scales>,
    layout: Arc<KvLayout>,
}

#[derive(Debug, Clone)]
struct Scales {
    k: Arc<dyn Storage>,
    v: Arc<dyn Storage>,
}

/// K or V of an arena, with everything that a kernel needs to find a row.
#[derive(Debug, Clone, Copy)]
pub struct KvPlane<'a> {
    /// The codes of a quantised plane, or the elements of a dense plane.
    pub storage: &'a Arc<dyn Storage>,
    /// Strides of the codes or elements.
    pub strides: PlaneStrides,
    /// Number of heads in this plane.
    pub heads: usize,
    /// Number of elements per row of a head.
    pub dim: usize,
    /// Storage format of the elements.
    pub format: KvFormat,
    /// The storage of the scales and their layout in it, or `None` for dense formats.
    pub scales: Option<(&'a Arc<dyn Storage>, ScaleLayout)>,
}

impl KvArena {
    /// Allocates K, V and their scales for `layout`. Static scales are 1 until
    /// [`set_scales`](Self::set_scales) is called.
    ///
    /// # Errors
    /// Returns [`Error::Allocation`] if there is not enough memory, and [`Error::Unsupported`] if the backend
    /// does not support this kind of memory.
    pub fn allocate(backend: &dyn Backend, kind: MemoryKind, layout: Arc<KvLayout>) -> Result<Self> {
        Self::allocate_with(backend, layout, |bytes, _| backend.allocate(kind, bytes))
    }

    /// Creates an arena with storages from `memory`, which is called for K, V, K's scales and V's scales, in
    /// this order, with the size in bytes, and with true if the storage is for static scales.
    pub(crate) fn allocate_with(
        backend: &dyn Backend,
        layout: Arc<KvLayout>,
        mut memory: impl FnMut(usize, bool) -> Result<Arc<dyn Storage>>,
    ) -> Result<Self> {
        let k = memory(layout.k_bytes(), false)?;
        let v = memory(layout.v_bytes(), false)?;
        let (Some(k_scales), Some(v_scales)) = (layout.k_scales(), layout.v_scales()) else {
            return Self::from_storage(k, v, layout);
        };
        let ones = |scales: ScaleLayout| vec![1.0; scales.bytes / size_of::<f32>()];
        let arena = Self::with_scales(
            k,
            v,
            memory(k_scales.bytes, k_scales.is_static())?,
            memory(v_scales.bytes, v_scales.is_static())?,
            layout,
        )?;
        if k_scales.is_static() {
            arena.set_scales(backend.stream()?.as_ref(), &ones(k_scales), &ones(v_scales))?;
        }
        Ok(arena)
    }

    /// Creates a dense arena over memory that the caller provides. In device memory, K and V may alternate in
    /// one piece of memory, for example when each row holds a key and its value. In that case `v` must begin
    /// after `k`, each storage must reach at least to the end of its own last element, and both must be parts
    /// of the same allocation.
    ///
    /// # Errors
    /// - Returns [`Error::TooLarge`] if the layout requires more bytes than a storage has.
    /// - Returns [`Error::Misaligned`] if the address of a storage is not aligned for the element type.
    /// - Returns [`Error::Aliased`] if K and V share memory without alternating.
    /// - Returns [`Error::InvalidFormat`] for a quantised layout. Use [`with_scales`](Self::with_scales)
    ///   instead.
    pub fn from_storage(k: Arc<dyn Storage>, v: Arc<dyn Storage>, layout: Arc<KvLayout>) -> Result<Self> {
        Self::validated(k, v, None, layout)
    }

    /// Creates a quantised arena over memory that the caller provides. The contents of the scale storages
    /// are kept.
    ///
    /// # Errors
    /// Returns the errors of [`from_storage`](Self::from_storage), where [`Error::Aliased`] applies to any
    /// two of the four storages. Returns [`Error::InvalidFormat`] for a dense layout.
    pub fn with_scales(
        k: Arc<dyn Storage>,
        v: Arc<dyn Storage>,
        k_scales: Arc<dyn Storage>,
        v_scales: Arc<dyn Storage>,
        layout: Arc<KvLayout>,
    ) -> Result<Self> {
        Self::validated(k, v, Some(Scales { k: k_scales, v: v_scales }), layout)
    }

    fn validated(
        k: Arc<dyn Storage>,
        v: Arc<dyn Storage>,
        scales: Option<Scales>,
        layout: Arc<KvLayout>,
    ) -> Result<Self> {
        let format = layout.shape().format;
        if format.is_quantized() != scales.is_some() {
            let reason = if scales.is_some() { "it has no scales" } else { "it needs storage for scales" };
            return Err(Error::InvalidFormat { format, reason: reason.to_owned() });
        }
        let arena = Self { k, v, scales, layout };
        let dtype = format.storage_dtype();
        fits("K", &arena.k, arena.layout.k_bytes(), dtype)?;
        fits("V", &arena.v, arena.layout.v_bytes(), dtype)?;
        for (what, plane) in [("K scales", arena.k_plane()), ("V scales", arena.v_plane())] {
            if let Some((storage, scales)) = plane.scales {
                fits(what, storage, scales.bytes, scales.dtype)?;
            }
        }
        for (i, storage) in arena.storages().enumerate() {
            let mut shared =
                arena.storages().skip(i + 1).filter(|other| storage.shares_memory(other.as_ref()));
            if shared.next().is_some() && !arena.planes_in_turn() {
                return Err(Error::Aliased { what: "K, V and their scales" });
            }
        }
        Ok(arena)
    }

    /// Returns whether K and V alternate in one piece of device memory. Host kernels use whole planes, so on
    /// the host K and V must be separate.
    fn planes_in_turn(&self) -> bool {
        let distance = self.v.address().checked_sub(self.k.address());
        self.k.kind() == MemoryKind::Device && distance.is_some_and(|distance| self.layout.in_turn(distance))
    }

    /// Returns the K storage. The rule stated at [`views`](Self::views) applies to views of this storage.
    pub fn k(&self) -> &Arc<dyn Storage> {
        &self.k
    }

    /// Returns the V storage. The rule stated at [`views`](Self::views) applies to views of this storage.
    pub fn v(&self) -> &Arc<dyn Storage> {
        &self.v
    }

    /// Returns K with its strides and scales.
    pub fn k_plane(&self) -> KvPlane<'_> {
        let (layout, s) = (&self.layout, self.layout.shape());
        KvPlane {
            storage: &self.k,
            strides: layout.k_strides(),
            heads: s.k_heads,
            dim: s.k_dim,
            format: s.format,
            scales: self.scales.as_ref().map(|scales| &scales.k).zip(layout.k_scales()),
        }
    }

    /// Returns V with its strides and scales.
    pub fn v_plane(&self) -> KvPlane<'_> {
        let (layout, s) = (&self.layout, self.layout.shape());
        KvPlane {
            storage: &self.v,
            strides: layout.v_strides(),
            heads: s.v_heads,
            dim: s.v_dim,
            format: s.format,
            scales: self.scales.as_ref().map(|scales| &scales.v).zip(layout.v_scales()),
        }
    }

    /// Returns all of K and all of V as strided views `[num_layers, num_blocks, block_size, heads, dim]`. The
    /// axes have this order, regardless of the order in memory. The views of a quantised arena contain the
    /// codes. No elements are copied.
    ///
    /// Operations accept these views as destinations without a permit. The caller must not write through them
    /// to a block that a [`BlockPool`](crate::BlockPool) has shared.
    ///
    /// # Errors
    /// Returns the errors of [`TensorView::with_strides`].
    pub fn views(&self) -> Result<(TensorView, TensorView)> {
        let s = self.layout.shape();
        let view = |plane: KvPlane<'_>| {
            let PlaneStrides { layer, block, head, token } = plane.strides;
            TensorView::with_strides(
                Arc::clone(plane.storage),
                s.format.storage_dtype(),
                Dims::new(&[s.num_layers, s.num_blocks, s.block_size, plane.heads, plane.dim])?,
                Dims::new(&[layer, block, token, head, 1])?,
                0,
            )
        };
        Ok((view(self.k_plane())?, view(self.v_plane())?))
    }

    /// Returns the first `len` tokens of every block of one layer, as strided views `[num_blocks, len, heads,
    /// dim]` of K and of V. The rule stated at [`views`](Self::views) applies.
    ///
    /// # Errors
    /// Returns [`Error::OutOfRange`] if the layer does not exist, and [`Error::TooLarge`] if `len` exceeds
    /// the block size.
    pub fn layer_views(&self, layer: usize, len: usize) -> Result<(TensorView, TensorView)> {
        let layers = self.layout.shape().num_layers;
        if layer >= layers {
            return Err(Error::range("layer", layer, layers));
        }
        let (k, v) = self.views()?;
        let of = |all: TensorView| all.select(0, layer)?.slice(1, 0, len);
        Ok((of(k)?, of(v)?))
    }

    /// Returns the storages of K, V and their scales, if there are any.
    pub fn storages(&self) -> impl Iterator<Item = &Arc<dyn Storage>> {
        let scales = self.scales.iter().flat_map(|scales| [&scales.k, &scales.v]);
        [&self.k, &self.v].into_iter().chain(scales)
    }

    /// Returns the layout of K and V.
    pub fn layout(&self) -> &Arc<KvLayout> {
        &self.layout
    }

    /// Sets the static scales of an fp8 arena, `[num_layers]` or `[num_layers, heads]` for each of K and V,
    /// and waits until the scales take effect. New scales change the values of rows that are already cached,
    /// so set them before the first row is stored. [`Fp8Kind::scale_for`](crate::Fp8Kind::scale_for) computes
    /// a scale.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use kvbackend_cpu::CpuBackend;
    /// # use kvcore::{Backend, BlockOrder, Fp8Kind, KvArena, KvLayout, KvShape, MemoryKind};
    /// # let backend = CpuBackend::new();
    /// # let stream = backend.stream()?;
    /// let shape = KvShape {
    ///     num_layers: 2, num_blocks: 4, block_size: 16, k_heads: 2, v_heads: 2, k_dim: 8, v_dim: 8,
    ///     format: "fp8-e4m3:head".parse()?, order: BlockOrder::TokenMajor,
    /// };
    /// let arena = KvArena::allocate(backend.as_ref(), MemoryKind::Device, Arc::new(KvLayout::new(shape)?))?;
    /// let scale = Fp8Kind::E4M3.scale_for(30.0); // the largest magnitude that was seen
    /// arena.set_scales(stream.as_ref(), &[scale; 2 * 2], &[scale; 2 * 2])?;
    /// # Ok::<(), kvcore::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::InvalidFormat`] if the format has no static scales or if a scale is not a positive
    /// finite number, and [`Error::Mismatch`] if the number of scales is wrong.
    pub fn set_scales(&self, stream: &dyn Stream, k: &[f32], v: &[f32]) -> Result<()> {
        let format = self.layout.shape().format;
        let invalid = |reason: String| Error::InvalidFormat { format, reason };
        let mut writes = Vec::new();
        for (plane, values) in [(self.k_plane(), k), (self.v_plane(), v)] {
            let Some((storage, scales)) = plane.scales.filter(|(_, scales)| scales.is_static()) else {
                return Err(invalid("it has no static scales".to_owned()));
            };
            same("static scales", scales.bytes / size_of::<f32>(), values.len())?;
            if let Some(scale) = values.iter().find(|scale| !(scale.is_finite() && **scale > 0.0)) {
                return Err(invalid(format!("{scale} is not a scale")));
            }
            let bytes: Vec<u8> = values.iter().flat_map(|scale| scale.to_ne_bytes()).collect();
            writes.push((TensorView::new(Arc::clone(storage), DType::F32, &[values.len()])?, bytes));
        }
        writes.iter().try_for_each(|(view, bytes)| stream.write(view, bytes))?;
        stream.synchronize()
    }

    pub(crate) fn check_layer(&self, layer: usize) -> Result<()> {
        let limit = self.layout.shape().num_layers;
        if layer < limit { Ok(()) } else { Err(Error::range("layer", layer, limit)) }
    }

    /// Checks that the storage of `view` does not share memory with the arena, so that the view is not read
    /// while the arena is written.
    pub(crate) fn check_apart(&self, what: &'static str, view: &TensorView) -> Result<()> {
        if self.holds(view.storage()) { Err(Error::Aliased { what }) } else { Ok(()) }
    }

    /// Returns whether a storage shares memory with the arena.
    fn holds(&self, storage: &Arc<dyn Storage>) -> bool {
        self.storages().any(|own| own.shares_memory(storage.as_ref()))
    }

    /// Returns whether two arenas share memory.
    pub(crate) fn shares_memory(&self, other: &Self) -> bool {
        other.storages().any(|storage| self.holds(storage))
    }

    pub(crate) fn check_block(&self, block: BlockId) -> Result<()> {
        let limit = self.layout.shape().num_blocks;
        if block.index() < limit { Ok(()) } else { Err(Error::range("block", block.index(), limit)) }
    }
}

/// Checks that a storage is large enough and aligned.
fn fits(what: &'static str, storage: &Arc<dyn Storage>, bytes: usize, dtype: DType) -> Result<()> {
    if storage.len() < bytes {
        return Err(Error::too_large("bytes of a plane in its storage", bytes, storage.len()));
    }
    let (address, align) = (storage.address(), dtype.align());
    if address.is_multiple_of(align as u64) {
        Ok(())
    } else {
        Err(Error::Misaligned { what, address, align })
    }
}
