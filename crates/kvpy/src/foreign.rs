//! The caches of other engines that rows of an arena go to and come from.

use std::sync::Arc;

use kvbackend_cpu::{ForeignOrder, ForeignPlane, ForeignShape};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::device::Device;
use crate::error::Failure;
use crate::tensor::Tensor;

/// The cache of another engine in host memory: the keys and values of each layer, where they lie.
#[pyclass(frozen, module = "kvcache")]
pub(crate) struct ForeignCache(pub(crate) kvbackend_cpu::ForeignCache);

/// Returns the strides of a tensor of `N` axes, in elements.
fn strides<const N: usize>(tensor: &Tensor, what: &str) -> PyResult<[usize; N]> {
    let wrong =
        || PyValueError::new_err(format!("{what} has the shape {:?}; {N} axes are needed", tensor.shape));
    <[usize; N]>::try_from(tensor.strides.as_slice()).map_err(|_| wrong())
}

#[pymethods]
impl ForeignCache {
    /// Describes a cache whose layers lie in one tensor each, `[blocks, heads, block_size, 2 × head_dim]`. Within a block and head the
    /// keys come first. `order` is `"columns"` (keys `[head_dim, block_size]`, values `[block_size, head_dim]`) or `"tiles"` (both in
    /// tiles of a matrix unit).
    #[staticmethod]
    fn interleaved(layers: Vec<Bound<'_, PyAny>>, order: &str) -> PyResult<Self> {
        let orders = |dim| match order {
            "columns" => Ok([ForeignOrder::Columns, ForeignOrder::Rows { token: dim }]),
            "tiles" => Ok([ForeignOrder::KeyTiles, ForeignOrder::ValueTiles]),
            _ => Err(PyValueError::new_err(format!("unknown order {order:?}: take columns or tiles"))),
        };
        Self::of_layers(&layers, |tensor| {
            let [block, head, token, element] = strides(tensor, "a layer")?;
            let (block_size, both) = (tensor.shape[2], tensor.shape[3]);
            if element != 1 || token != both || both % 2 != 0 {
                let text =
                    format!("a head of a block must lie without gaps; strides are {:?}", tensor.strides);
                return Err(PyValueError::new_err(text));
            }
            let (dim, [keys, values]) = (both / 2, orders(both / 2)?);
            let shape = ForeignShape {
                num_blocks: tensor.shape[0],
                block_size,
                heads: tensor.shape[1],
                dim,
                dtype: tensor.dtype,
            };
            let storage = &tensor.storage;
            let plane =
                |start, order| ForeignPlane { storage: Arc::clone(storage), start, block, head, order };
            Ok((shape, [plane(0, keys), plane(block_size * dim, values)]))
        })
    }

    /// Describes a cache whose layers lie in one tensor each, with rows of `head_dim` elements: `[2, blocks, block_size, heads, head_dim]`
    /// for `axes = "kbtho"`. The letters name the axes: k for keys and values, b blocks, t tokens, h heads, o elements.
    #[staticmethod]
    fn rows(layers: Vec<Bound<'_, PyAny>>, axes: &str) -> PyResult<Self> {
        let unknown = || {
            PyValueError::new_err(format!("axes must be the letters k, b, t, h, o once each, not {axes:?}"))
        };
        let place = |letter| axes.find(letter).filter(|_| axes.len() == 5).ok_or_else(unknown);
        let [k, b, t, h, o] = [place('k')?, place('b')?, place('t')?, place('h')?, place('o')?];
        Self::of_layers(&layers, |tensor| {
            let strides: [usize; 5] = strides(tensor, "a layer")?;
            if tensor.shape[k] != 2 || strides[o] != 1 {
                let text = format!(
                    "keys and values need an axis of 2, rows a stride of 1; the shape is {:?}",
                    tensor.shape
                );
                return Err(PyValueError::new_err(text));
            }
            let shape = ForeignShape {
                num_blocks: tensor.shape[b],
                block_size: tensor.shape[t],
                heads: tensor.shape[h],
                dim: tensor.shape[o],
                dtype: tensor.dtype,
            };
            let plane = |start| ForeignPlane {
                storage: Arc::clone(&tensor.storage),
                start,
                block: strides[b],
                head: strides[h],
                order: ForeignOrder::Rows { token: strides[t] },
            };
            Ok((shape, [plane(0), plane(strides[k])]))
        })
    }
}

impl ForeignCache {
    fn of_layers(
        layers: &[Bound<'_, PyAny>],
        describe: impl Fn(&Tensor) -> PyResult<(ForeignShape, [ForeignPlane; 2])>,
    ) -> PyResult<Self> {
        let host = Device::open("cpu")?;
        let mut all = Vec::with_capacity(layers.len());
        let mut first: Option<ForeignShape> = None;
        for layer in layers {
            let (shape, planes) = describe(&Tensor::of(layer, &host)?)?;
            match &first {
                Some(first) if *first != shape => {
                    return Err(PyValueError::new_err(format!("layers differ: {first:?} and {shape:?}")));
                }
                _ => first = Some(shape),
            }
            all.push(planes);
        }
        let Some(shape) = first else {
            return Err(PyValueError::new_err("a cache needs at least one layer"));
        };
        Ok(Self(kvbackend_cpu::ForeignCache::new(shape, all).map_err(Failure::from)?))
    }
}
