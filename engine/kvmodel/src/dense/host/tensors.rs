//! Lends candle tensors to a CPU backend's operations, and turns results into tensors, both without a copy.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use candle_core::{CpuStorage as Elements, Device, Storage, StorageRef, Tensor};
use kvbackend_cpu::{CpuStorage, HostView, LentBytes, LentMemory};
use kvcore::{DType, Dims, MemoryKind, TensorView};

use super::failed;
use crate::error::Result;

/// A tensor whose memory is lent as a [`Storage`]. candle's lock on the tensor is held while an operation
/// reads the memory.
struct Lender(Tensor);

struct Guard<'a>(StorageRef<'a>);

impl Deref for Guard<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &*self.0 {
            Storage::Cpu(Elements::F32(values)) => bytemuck::cast_slice(values),
            Storage::Cpu(Elements::F16(values)) => bytemuck::cast_slice(values),
            Storage::Cpu(Elements::BF16(values)) => bytemuck::cast_slice(values),
            _ => &[],
        }
    }
}

impl LentMemory for Lender {
    fn lock(&self) -> LentBytes<'_> {
        LentBytes::new(Guard(self.0.storage_and_layout().0))
    }
}

// Decision: docs/decisions/models.md#candle-tensors-are-lent-to-operations
/// Lends a candle tensor on the CPU, in f32, f16 or bf16, to operations of a
/// [`CpuBackend`](kvbackend_cpu::CpuBackend) for reading. Copies the elements only if the last axis is not
/// contiguous. The view keeps the tensor's memory alive.
///
/// ```
/// use std::sync::Arc;
/// use candle_core::{Device, Tensor};
/// use kvbackend_cpu::CpuBackend;
/// use kvcore::{
///     Attend, AttendRows, AttendWork, Backend, BlockId, BlockOrder, DType, KeyForm, KvArena, KvLayout, KvShape, MemoryKind,
///     QueryRow, Scatter, Segment, WriteSlots,
/// };
/// use kvmodel::dense::{OutputTensor, lend_tensor};
///
/// let backend = CpuBackend::new();
/// let stream = backend.stream()?;
/// let shape = KvShape {
///     num_layers: 1, num_blocks: 1, block_size: 4, k_heads: 2, v_heads: 2, k_dim: 8, v_dim: 8,
///     format: DType::BF16.into(), order: BlockOrder::TokenMajor,
/// };
/// let arena = KvArena::allocate(backend.as_ref(), MemoryKind::Device, Arc::new(KvLayout::new(shape)?))?;
///
/// // Three tokens, with keys and values as columns of one projection.
/// let kv = Tensor::ones((3, 2, 16), candle_core::DType::F32, &Device::Cpu)?;
/// let (k, v) = (lend_tensor(&kv.narrow(2, 0, 8)?)?, lend_tensor(&kv.narrow(2, 8, 8)?)?);
/// let slots = WriteSlots::unchecked([0i64, 1, 2].into_iter().collect::<Arc<[_]>>());
/// stream.scatter(&Scatter { arena: arena.clone(), layer: 0, k, v, slots, rotation: None })?;
///
/// let q = Tensor::ones((1, 2, 8), candle_core::DType::F32, &Device::Cpu)?;
/// let segment = Segment::new([BlockId(0)].into_iter().collect::<Arc<[_]>>(), 3, 0, 0);
/// let row = QueryRow { logical: 2, position: 2 };
/// let out = OutputTensor::new(&[1, 2, 8])?;
/// stream.attend(&Attend {
///     arena, layer: 0, q: lend_tensor(&q)?, rope: None, keys: KeyForm::Rotated,
///     work: Arc::new(AttendWork::new([row], [AttendRows::new(0..1, [segment])])),
///     scale: 1.0, window: None, softcap: None, out: out.view().clone(), lse: None,
/// })?;
/// stream.synchronize()?;
/// assert_eq!(out.into_tensor()?.to_vec3::<f32>()?, [[[1.0; 8]; 2]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Returns [`Error::Dense`](crate::Error::Dense) if the tensor has another type or is on another device.
pub fn lend_tensor(tensor: &Tensor) -> Result<TensorView> {
    let dtype = match tensor.dtype() {
        candle_core::DType::F32 => DType::F32,
        candle_core::DType::F16 => DType::F16,
        candle_core::DType::BF16 => DType::BF16,
        other => {
            return Err(failed(candle_core::Error::Msg(format!("tensors of type {other:?} cannot be lent"))));
        }
    };
    if !tensor.device().is_cpu() {
        return Err(failed(candle_core::Error::msg("only tensors on the CPU can be lent")));
    }
    if tensor.elem_count() == 0 {
        let storage = CpuStorage::allocate(MemoryKind::System, size_of::<f32>())?;
        return Ok(TensorView::new(Arc::new(storage), dtype, tensor.dims())?);
    }
    let side_by_side = tensor.dims().last() == Some(&1) || tensor.stride().last() == Some(&1);
    let tensor = if side_by_side { tensor.clone() } else { tensor.contiguous().map_err(failed)? };
    let (shape, strides) = (Dims::new(tensor.dims())?, Dims::new(tensor.stride())?);
    let offset = tensor.layout().start_offset();
    let storage = CpuStorage::lent(Lender(tensor))?;
    Ok(TensorView::with_strides(Arc::new(storage), dtype, shape, strides, offset)?)
}

/// f32 memory that operations of a [`CpuBackend`](kvbackend_cpu::CpuBackend) write to, and that becomes a
/// candle tensor without a copy; see the example of [`lend_tensor`].
pub struct OutputTensor {
    storage: Arc<CpuStorage>,
    view: TensorView,
}

impl fmt::Debug for OutputTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OutputTensor({:?})", self.view.shape())
    }
}

impl OutputTensor {
    /// Allocates zeroed memory for a tensor of `shape`.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Overflow`] if the size does not fit in the address space.
    pub fn new(shape: &[usize]) -> Result<Self> {
        let overflow = kvcore::Error::Overflow { what: "elements of an output" };
        let elements = shape.iter().try_fold(1usize, |n, extent| n.checked_mul(*extent)).ok_or(overflow)?;
        Self::of(vec![0.0; elements], shape)
    }

    /// Wraps the elements of a tensor of `shape`.
    pub(super) fn of(mut values: Vec<f32>, shape: &[usize]) -> Result<Self> {
        if values.is_empty() {
            values.push(0.0); // a storage is never empty, even for an empty tensor
        }
        let storage = Arc::new(CpuStorage::from_vec(values)?);
        let view = TensorView::new(storage.clone(), DType::F32, shape)?;
        Ok(Self { storage, view })
    }

    /// Returns the memory as a view.
    pub fn view(&self) -> &TensorView {
        &self.view
    }

    /// Returns the tensor. The caller must have waited for the operations that write it.
    ///
    /// Copies the elements if another handle to the view still exists, for example in an operation that the
    /// caller kept.
    ///
    /// # Errors
    /// Returns candle's errors.
    pub fn into_tensor(self) -> Result<Tensor> {
        let Self { storage, view } = self;
        let (shape, elements) = (view.shape().to_vec(), view.len());
        drop(view);
        let values = match storage.try_into_vec() {
            Ok(mut values) => {
                values.truncate(elements);
                values
            }
            Err(storage) => {
                let view = TensorView::new(storage, DType::F32, &[elements])?;
                HostView::<f32>::of(&view)?.to_vec()
            }
        };
        Tensor::from_vec(values, shape, &Device::Cpu).map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use kvcore::Storage as _;

    use super::*;

    fn tensor(shape: &[usize]) -> Tensor {
        let values: Vec<f32> = (0..shape.iter().product::<usize>()).map(|i| i as f32).collect();
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
    }

    /// Returns the address of a tensor's first element.
    fn address(tensor: &Tensor) -> u64 {
        let (storage, layout) = tensor.storage_and_layout();
        let Storage::Cpu(values) = &*storage else { panic!("not on the CPU") };
        values.as_slice::<f32>().unwrap()[layout.start_offset()..].as_ptr() as u64
    }

    #[test]
    fn a_tensor_is_lent_where_it_lies_with_its_strides() {
        let whole = tensor(&[3, 2, 8]);
        let part = whole.narrow(2, 4, 4).unwrap().narrow(0, 1, 2).unwrap();
        for tensor in [whole, part] {
            let view = lend_tensor(&tensor).unwrap();
            assert_eq!((view.shape(), view.strides()), (tensor.dims(), tensor.stride()));
            assert_eq!(view.address(&[0, 0, 0]).unwrap(), address(&tensor));
            let row = HostView::<f32>::of(&view.select(0, 1).unwrap().select(0, 1).unwrap())
                .map(|row| row.to_vec());
            assert_eq!(row.unwrap(), tensor.to_vec3::<f32>().unwrap()[1][1]);
        }
    }

    #[test]
    fn a_lent_tensor_outlives_its_handle_and_is_not_written() {
        let tensor = tensor(&[2, 2]);
        let address = address(&tensor);
        let view = lend_tensor(&tensor).unwrap();
        drop(tensor);
        assert_eq!((view.storage().address(), HostView::<f32>::of(&view).unwrap()[3]), (address, 3.0));
        let refused = kvbackend_cpu::HostViewMut::<f32>::of(&view).map(drop);
        assert!(matches!(refused, Err(kvcore::Error::Unsupported { .. })));
    }

    #[test]
    fn halves_columns_and_empty_tensors_are_lent_and_integers_are_not() {
        let halves = tensor(&[2, 2]).to_dtype(candle_core::DType::BF16).unwrap();
        let view = lend_tensor(&halves).unwrap();
        assert_eq!(
            (view.dtype(), HostView::<bf16>::of(&view).unwrap()[3]),
            (DType::BF16, bf16::from_f32(3.0))
        );
        let turned = lend_tensor(&tensor(&[2, 3]).t().unwrap()).unwrap();
        assert_eq!(HostView::<f32>::of(&turned).unwrap()[..], [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
        assert_eq!(lend_tensor(&tensor(&[0, 3])).unwrap().shape(), [0, 3]);
        let integers = Tensor::zeros((2, 2), candle_core::DType::U32, &Device::Cpu).unwrap();
        assert!(matches!(lend_tensor(&integers), Err(crate::Error::Dense { .. })));
    }

    #[test]
    fn an_output_becomes_a_tensor_where_it_lies_unless_it_is_shared() {
        let output = OutputTensor::new(&[2, 3]).unwrap();
        let written = output.storage.address();
        kvbackend_cpu::HostViewMut::<f32>::of(output.view()).unwrap()[5] = 7.0;
        let result = output.into_tensor().unwrap();
        assert_eq!((address(&result), result.to_vec2::<f32>().unwrap()[1][2]), (written, 7.0));
        let output = OutputTensor::new(&[2]).unwrap();
        let (kept, written) = (output.view().clone(), output.storage.address());
        let result = output.into_tensor().unwrap();
        assert_ne!(address(&result), written);
        assert_eq!(HostView::<f32>::of(&kept).unwrap()[..], [0.0; 2]);
        assert_eq!(OutputTensor::new(&[0, 3]).unwrap().into_tensor().unwrap().dims(), [0, 3]);
        assert!(OutputTensor::new(&[usize::MAX, 2]).is_err());
    }
}
