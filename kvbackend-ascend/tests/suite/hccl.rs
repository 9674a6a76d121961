//! NPU groups that fail because of HCCL.

use std::thread;
use std::time::{Duration, Instant};

use kvbackend_ascend::{HcclCommunicator, HcclId};
use kvcore::{Backend, Communicator, DType, Error, MemoryKind, ReduceOp, allocate_tensor};

use crate::common::opened;
use crate::simulator::{EAGER, LAZY, alone};

/// A time-out that is longer than any test takes.
const LONG: Duration = Duration::from_secs(600);

/// The time-out of a group that never becomes complete.
const SHORT: Duration = Duration::from_millis(100);

#[test]
fn a_join_whose_time_is_up_leaves_nothing() {
    let Some((simulator, _alone)) = alone() else { return };
    let backend = opened(EAGER).unwrap();
    let before = simulator.live(EAGER);
    simulator.patience(300);
    let id = HcclId::new(&backend).unwrap();
    let error = HcclCommunicator::new(&backend, &id, 1, 2, SHORT).unwrap_err();
    let call = "the start of the group".to_owned();
    assert_eq!(error, Error::RanksTimedOut { rank: 1, call, limit: SHORT });
    // HCCL's own time-out expires first.
    let id = HcclId::new(&backend).unwrap();
    let error = HcclCommunicator::new(&backend, &id, 0, 2, LONG).unwrap_err();
    assert!(matches!(&error, Error::Device { reason, .. } if reason.contains("never came")), "{error}");
    // A rank that has timed out leaves nothing behind once HCCL's call returns.
    let end = Instant::now() + Duration::from_secs(10);
    while simulator.live(EAGER) != before && Instant::now() < end {
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(simulator.live(EAGER), before);
}

#[test]
fn a_failure_that_hccl_knows_of_fails_the_group() {
    let Some((_, _alone)) = alone() else { return };
    for devices in [[EAGER, LAZY], [LAZY, EAGER]] {
        let backends = devices.map(|device| opened(device).unwrap());
        let id = HcclId::new(&backends[0]).unwrap();
        // These ranks have no information about each other, as if they were in different processes.
        let call = |number: usize| {
            let backend = &backends[number];
            let rank = HcclCommunicator::new(backend, &id, number, 2, LONG).unwrap();
            let view = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[8]).unwrap();
            let stream = backend.stream().unwrap();
            let result = match number {
                0 => rank.all_reduce(stream.as_ref(), &view, ReduceOp::Sum),
                _ => rank.broadcast(stream.as_ref(), &view, 0),
            };
            let Err(error) = result else { panic!("different calls met") };
            assert!(matches!(&error, Error::Device { reason, .. } if reason.contains("HCCL")), "{error}");
            let failure = rank.check().unwrap_err();
            assert_eq!(rank.all_reduce(stream.as_ref(), &view, ReduceOp::Sum), Err(failure.clone()));
            assert_eq!(rank.wait(stream.as_ref()), Err(failure));
            // The rank's stream still works.
            stream.write(&view, &[1; 32]).unwrap();
            stream.synchronize().unwrap();
        };
        let call = &call;
        thread::scope(|scope| {
            let ranks: Vec<_> = (0..2).map(|rank| scope.spawn(move || call(rank))).collect();
            for rank in ranks {
                rank.join().unwrap();
            }
        });
    }
}
