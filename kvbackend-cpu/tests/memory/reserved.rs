//! Reserved memory, whose pages go and come back. The system's page table shows which pages are there.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use kvbackend_cpu::{CpuBackend, CpuReserved, Execution};
use kvcore::{Backend, DType, Error, MemoryKind, ReservedStorage, Storage, TensorView};
use rstest::rstest;
use rustix::param::page_size;

/// Returns the number of pages in a range that are backed by physical memory, according to the system's
/// page table.
fn resident(storage: &CpuReserved, range: Range<usize>) -> usize {
    let table = File::open("/proc/self/pagemap").unwrap();
    let page = |at: usize| (storage.address() as usize + at) / page_size();
    let present = |&page: &usize| {
        let mut entry = [0; 8];
        table.read_exact_at(&mut entry, 8 * page as u64).unwrap();
        u64::from_ne_bytes(entry) >> 62 != 0 // in memory or in swap
    };
    (page(range.start)..page(range.end)).filter(present).count()
}

fn reserved(pages: usize) -> Arc<CpuReserved> {
    Arc::new(CpuReserved::reserve(MemoryKind::Device, pages * page_size()).unwrap())
}

#[rstest]
fn physical_memory_goes_and_comes_back_as_zeros_at_the_same_address(
    #[values(Execution::Immediate, Execution::Deferred)] execution: Execution,
) {
    let (storage, page) = (reserved(64), page_size());
    let (address, len) = (storage.address(), storage.len());
    let stream = CpuBackend::with_execution(execution).stream().unwrap();
    let view = TensorView::new(storage.clone(), DType::U8, &[len]).unwrap();
    let ones = vec![1; len];
    stream.write(&view, &ones).unwrap();
    stream.synchronize().unwrap();
    assert_eq!((resident(&storage, 0..len), storage.mapped_bytes()), (64, len));

    let asleep = 8 * page..40 * page;
    storage.unmap(asleep.clone()).unwrap();
    assert_eq!((resident(&storage, asleep.clone()), resident(&storage, 0..len)), (0, 32));
    assert_eq!((storage.mapped_bytes(), storage.address()), (32 * page, address));

    storage.map(asleep.clone()).unwrap();
    let mut bytes = vec![7; len];
    stream.read(&view, &mut bytes).unwrap();
    assert!(bytes[asleep.clone()].iter().all(|&byte| byte == 0));
    assert!(bytes[..asleep.start].iter().chain(&bytes[asleep.end..]).all(|&byte| byte == 1));
    stream.write(&view, &ones).unwrap();
    stream.read(&view, &mut bytes).unwrap();
    assert_eq!((bytes, resident(&storage, 0..len), storage.address()), (ones, 64, address));
}

#[test]
fn an_unmapped_range_may_be_read_and_written_and_is_zero_once_mapped() {
    let (storage, page) = (reserved(4), page_size());
    let stream = CpuBackend::new().stream().unwrap();
    let view = TensorView::new(storage.clone(), DType::U8, &[4 * page]).unwrap();
    storage.unmap(0..4 * page).unwrap();
    let mut bytes = vec![1; 4 * page];
    stream.read(&view, &mut bytes).unwrap();
    assert!(bytes.iter().all(|&byte| byte == 0));
    stream.write(&view, &vec![9; 4 * page]).unwrap();
    storage.unmap(0..page).unwrap();
    assert_eq!(resident(&storage, 0..page), 0, "unmapping again releases what was written");
    storage.map(page..3 * page).unwrap();
    stream.read(&view, &mut bytes).unwrap();
    assert!(bytes[..3 * page].iter().all(|&byte| byte == 0));
    assert_eq!(storage.mapped_bytes(), 2 * page);
    // Mapping a range that is already mapped keeps its contents.
    stream.write(&view, &vec![9; 4 * page]).unwrap();
    storage.map(0..4 * page).unwrap();
    stream.read(&view, &mut bytes).unwrap();
    assert!(bytes[page..3 * page].iter().all(|&byte| byte == 9));
    assert!(bytes[..page].iter().chain(&bytes[3 * page..]).all(|&byte| byte == 0));
}

#[test]
fn wrong_sizes_and_ranges_are_refused_and_change_nothing() {
    let refused = |bytes| CpuReserved::reserve(MemoryKind::System, bytes).unwrap_err();
    assert!(matches!(refused(0), Error::Zero { .. }));
    for bytes in [usize::MAX, usize::MAX / 2, 1 << 62] {
        assert!(matches!(refused(bytes), Error::Allocation { .. }));
    }
    let (storage, page) = (reserved(2), page_size());
    for range in [0..page - 1, 1..page, 0..3 * page, Range { start: page, end: 0 }] {
        assert!(storage.unmap(range.clone()).is_err() && storage.map(range).is_err());
    }
    storage.unmap(page..page).unwrap();
    assert_eq!(storage.mapped_bytes(), 2 * page);
    let odd = CpuReserved::reserve(MemoryKind::System, page + 1).unwrap();
    assert_eq!((odd.len(), odd.kind()), (2 * page, MemoryKind::System));
}

#[test]
fn readers_and_writers_of_other_threads_meet_no_fault() {
    let (storage, page) = (reserved(8), page_size());
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let storage = &storage;
            scope.spawn(move || {
                let stream = CpuBackend::new().stream().unwrap();
                let view = TensorView::new(storage.clone(), DType::U8, &[8 * page]).unwrap();
                let mut bytes = vec![0; 8 * page];
                for round in 0..200 {
                    match (thread + round) % 4 {
                        0 => storage.unmap(page..5 * page).unwrap(),
                        1 => storage.map(2 * page..6 * page).unwrap(),
                        2 => stream.write(&view, &vec![3; 8 * page]).unwrap(),
                        _ => stream.read(&view, &mut bytes).unwrap(),
                    }
                    assert!(bytes.iter().all(|&byte| byte == 0 || byte == 3));
                }
            });
        }
    });
    storage.map(0..8 * page).unwrap();
    assert_eq!(storage.mapped_bytes(), 8 * page);
}
