//! Reports and errors that only this backend has. The conformance suite tests the errors that all backends
//! share (`rig`).

use kvcore::{Backend, Error, MemoryKind};

use crate::common::opened;
use crate::double::{EAGER, SMALL, alone, among_others};

#[test]
fn devices_are_reported_with_what_decides_whether_they_are_fit() {
    let _shared = among_others();
    let Some(_) = opened(EAGER) else { return };
    let devices = kvbackend_cuda::devices().unwrap();
    assert!(!devices.is_empty() && devices[0].total_memory > 0 && devices[0].driver >= 12_000);
    assert!(devices[0].unfit.is_none() && devices[0].compute_capability.0 >= 8);
}

#[test]
fn free_memory_in_pieces_is_named_as_such() {
    const OUT_OF_MEMORY: i32 = 2;
    let Some((double, _alone)) = alone() else { return };
    let backend = opened(SMALL).unwrap();
    double.fail("cuMemAllocFromPoolAsync", 1, OUT_OF_MEMORY);
    let refused = backend.allocate(MemoryKind::Device, 1 << 20);
    assert!(
        matches!(&refused, Err(Error::Allocation { reason, .. }) if reason.contains("not contiguously")),
        "{refused:?}"
    );
}
