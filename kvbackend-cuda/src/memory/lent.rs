//! Memory that an engine lends: a device pointer, and an owner that keeps the memory alive.

use std::any::Any;
use std::mem::MaybeUninit;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdeviceptr, CUpointer_attribute};
use kvcore::{Error, MemoryKind, Result};

use super::{CudaStorage, FreedBy};
use crate::device::CudaDevice;
use crate::driver::NAME;

impl CudaStorage {
    /// Creates a storage over lent memory. The driver reports the memory's device, kind and size.
    ///
    /// # Safety
    /// See [`CudaBackend::lent`](crate::CudaBackend::lent).
    pub(crate) unsafe fn lent(
        device: &Arc<CudaDevice>,
        address: CUdeviceptr,
        bytes: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        if bytes == 0 {
            return Err(Error::Zero { what: "bytes of lent memory" });
        }
        let _bound = device.bind()?;
        let ordinal: i32 = ask(address, CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
            .ok_or_else(|| not_memory(address))?;
        let kind: u32 = ask(address, CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
            .ok_or_else(|| not_memory(address))?;
        let on_device = kind == sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as u32;
        if on_device && ordinal != device.ordinal {
            let reason = format!(
                "lent memory at {address:#x} is on device {ordinal}, but this backend is on device {}; open a backend on \
                 device {ordinal}",
                device.ordinal
            );
            return Err(Error::Device { backend: NAME, reason });
        }
        let range = CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR;
        let size = CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE;
        if let (Some(start), Some(size)) = (ask::<CUdeviceptr>(address, range), ask::<usize>(address, size)) {
            let most = size.saturating_sub(address.saturating_sub(start) as usize);
            if bytes > most {
                let (what, value, most) = ("bytes of lent memory", bytes as i128, most as i128);
                return Err(Error::TooLarge { what, value, most });
            }
        }
        let (kind, host) = if on_device {
            (MemoryKind::Device, std::ptr::null_mut())
        } else {
            let host = ask(address, CUpointer_attribute::CU_POINTER_ATTRIBUTE_HOST_POINTER);
            (MemoryKind::Pinned, host.ok_or_else(|| not_memory(address))?)
        };
        Ok(Self {
            device: Arc::clone(device),
            address,
            len: bytes,
            kind,
            host,
            owner: FreedBy::Lent(owner),
            lender: None,
        })
    }
}

fn not_memory(address: CUdeviceptr) -> Error {
    let reason = format!("the driver does not know the lent memory at {address:#x}");
    Error::Device { backend: NAME, reason }
}

/// Asks the driver for an attribute of a pointer. `T` must be the attribute's type.
fn ask<T: Copy>(address: CUdeviceptr, attribute: CUpointer_attribute) -> Option<T> {
    let mut answer = MaybeUninit::<T>::uninit();
    // SAFETY: the callers ask for attributes of type `T`; the driver writes one on success.
    unsafe {
        sys::cuPointerGetAttribute(answer.as_mut_ptr().cast(), attribute, address).result().ok()?;
        Some(answer.assume_init())
    }
}
