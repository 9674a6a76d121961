//! Memory that another owner lends.

use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use kvbackend_cpu::{CpuBackend, CpuStorage, Execution, HostView, HostViewMut, LentBytes, LentMemory};
use kvcore::{Backend, DType, Error, MemoryKind, OwnedStorage, Storage, TensorView};

#[test]
fn an_owned_storage_over_lent_memory_is_written_and_keeps_its_owner() {
    let mut bytes = vec![0u8; 64];
    let ptr = NonNull::new(bytes.as_mut_ptr()).unwrap();
    let owner: Arc<Mutex<Vec<u8>>> = Arc::new(Mutex::new(bytes));
    // SAFETY: `ptr` points to the 64 bytes of the vector, which lives in `owner` and does not move;
    // nothing else accesses them before the storage is dropped.
    let storage = unsafe { CpuStorage::from_raw(ptr, 64, MemoryKind::System, owner.clone()) }.unwrap();
    let owned = OwnedStorage::from_arc(Arc::new(storage)).unwrap();
    let view = owned.view_at(16, DType::U8, &[4]).unwrap();
    drop(owned);
    assert_eq!(Arc::strong_count(&owner), 2, "the view holds the memory");
    CpuBackend::new().stream().unwrap().write(&view, &[1, 2, 3, 4]).unwrap();
    drop(view);
    assert_eq!(Arc::strong_count(&owner), 1);
    assert_eq!(owner.lock().unwrap()[14..22], [0, 0, 1, 2, 3, 4, 0, 0]);
}

/// A lender whose bytes can be replaced, and which counts live guards.
#[derive(Clone)]
struct Lender {
    bytes: Arc<Mutex<Arc<Vec<u8>>>>,
    guards: Arc<AtomicUsize>,
}

struct Guard<'a>(Arc<Vec<u8>>, &'a AtomicUsize);

impl Deref for Guard<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.1.fetch_sub(1, Ordering::Relaxed);
    }
}

impl LentMemory for Lender {
    fn lock(&self) -> LentBytes<'_> {
        self.guards.fetch_add(1, Ordering::Relaxed);
        LentBytes::new(Guard(Arc::clone(&self.bytes.lock().unwrap()), &self.guards))
    }
}

fn lender(bytes: Vec<u8>) -> Lender {
    Lender { bytes: Arc::new(Mutex::new(Arc::new(bytes))), guards: Arc::default() }
}

#[test]
fn lent_memory_is_locked_while_it_is_read_and_never_written() {
    let owner = lender(vec![1, 2, 3, 4]);
    let storage: Arc<dyn Storage> = Arc::new(CpuStorage::lent(owner.clone()).unwrap());
    let guards = || owner.guards.load(Ordering::Relaxed);
    let view = TensorView::new(storage, DType::U8, &[4]).unwrap();
    let part = view.slice(0, 1, 3).unwrap();
    let (read, again) = (HostView::<u8>::of(&part).unwrap(), HostView::<u8>::of(&view).unwrap());
    assert_eq!((&read[..], &again[..], guards()), (&[2, 3][..], &[1, 2, 3, 4][..], 2));
    drop((read, again));
    assert_eq!(guards(), 0);
    assert!(matches!(HostViewMut::<u8>::of(&view), Err(Error::Unsupported { .. })));
    for execution in [Execution::Immediate, Execution::Deferred] {
        let stream = CpuBackend::with_execution(execution).stream().unwrap();
        let refused = view.slice(0, 0, 2).unwrap().copy_to(&view.slice(0, 2, 4).unwrap(), stream.as_ref());
        assert!(matches!(refused, Err(Error::Unsupported { .. })), "refused before it is enqueued");
        assert!(matches!(stream.write(&view, &[0; 4]), Err(Error::Unsupported { .. })));
    }
    assert_eq!((guards(), **owner.bytes.lock().unwrap() == [1, 2, 3, 4]), (0, true));
    drop((view, part));
    assert_eq!(Arc::strong_count(&owner.bytes), 1);
}

#[test]
fn memory_that_moved_is_refused() {
    let owner = lender(vec![0; 8]);
    let storage: Arc<dyn Storage> = Arc::new(CpuStorage::lent(owner.clone()).unwrap());
    let view = TensorView::new(storage, DType::U8, &[8]).unwrap();
    let before = std::mem::replace(&mut *owner.bytes.lock().unwrap(), Arc::new(vec![0; 16]));
    assert!(matches!(HostView::<u8>::of(&view), Err(Error::Device { .. })));
    *owner.bytes.lock().unwrap() = before;
    assert_eq!(HostView::<u8>::of(&view).unwrap()[..], [0; 8]);
    assert!(matches!(CpuStorage::lent(lender(vec![])), Err(Error::Zero { .. })));
}
