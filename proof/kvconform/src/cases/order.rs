//! Streams and events.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use kvcore::{BlockOrder, Gather, KvArena, Scatter, TensorView, WriteSlots};

use crate::bench::{Bench, Failure, Outcome, ensure, equal, numbers, rounded};

const SLOTS: [i64; 3] = [3, 17, 8];
/// The time after which a call that has not come is taken for lost.
const PATIENCE: Duration = Duration::from_secs(60);

/// Returns a scatter of three rows, and the keys that it stores.
fn write(b: &Bench, arena: &KvArena) -> Outcome<(Scatter, Vec<f32>)> {
    let values = numbers(7, 3 * 2 * 10);
    let op = Scatter {
        arena: arena.clone(),
        layer: 1,
        k: b.upload(b.dtype, &[3, 2, 10], &values)?,
        v: b.upload(b.dtype, &[3, 2, 6], &numbers(8, 36))?,
        slots: WriteSlots::unchecked(SLOTS),
        rotation: None,
    };
    Ok((op, rounded(b.dtype, &values)))
}

fn read(b: &Bench, arena: &KvArena) -> Outcome<(Gather, TensorView)> {
    let k = b.tensor(b.dtype, &[3, 2, 10])?;
    let v = b.tensor(b.dtype, &[3, 2, 6])?;
    let op = Gather { arena: arena.clone(), layer: 1, slots: SLOTS.into(), k: k.clone(), v, rotation: None };
    Ok((op, k))
}

pub(super) fn a_stream_keeps_its_order(b: &Bench) -> Outcome {
    let arena = b.arena(BlockOrder::TokenMajor)?;
    let (scatter, expected) = write(b, &arena)?;
    let (gather, k) = read(b, &arena)?;
    b.stream.scatter(&scatter)?;
    b.stream.gather(&gather)?;
    equal("gather after scatter on one stream", &b.download(&k)?, &expected)
}

pub(super) fn events_order_streams(b: &Bench) -> Outcome {
    let arena = b.arena(BlockOrder::HeadMajor)?;
    let (writer, reader) = (b.backend.stream()?, b.backend.stream()?);
    let (scatter, expected) = write(b, &arena)?;
    let (gather, k) = read(b, &arena)?;
    b.stream.synchronize()?;
    writer.scatter(&scatter)?;
    let written = writer.record()?;
    reader.wait_for(&written)?;
    reader.gather(&gather)?;
    let done = reader.record()?;
    done.wait()?;
    ensure(done.is_done() && written.is_done(), || "an event that was waited for is not done".to_owned())?;
    equal("gather after an event of another stream", &b.download(&k)?, &expected)
}

pub(super) fn events_call_back_when_they_are_done(b: &Bench) -> Outcome {
    let arena = b.arena(BlockOrder::TokenMajor)?;
    let (scatter, expected) = write(b, &arena)?;
    let (gather, k) = read(b, &arena)?;
    b.stream.scatter(&scatter)?;
    let scattered = b.stream.record()?;
    b.stream.gather(&gather)?;
    let gathered = b.stream.record()?;
    let (tell, told) = channel();
    // An event may be asked more than once, in any order.
    for (i, event) in [&gathered, &scattered, &gathered].into_iter().enumerate() {
        let (tell, seen) = (tell.clone(), Arc::clone(event));
        let call = move |result| drop(tell.send((i, result, seen.is_done())));
        Arc::clone(event).on_done(Box::new(call));
    }
    drop(tell);
    let mut calls = [0; 3];
    for _ in 0..3 {
        let lost = |_| Failure::new("an event did not call back".to_owned());
        let (i, result, is_done) = told.recv_timeout(PATIENCE).map_err(lost)?;
        result?;
        ensure(is_done, || "an event called back before it was done".to_owned())?;
        calls[i] += 1;
    }
    ensure(calls == [1; 3], || format!("calls of three requests: {calls:?}"))?;
    equal("gather whose event called back", &b.download(&k)?, &expected)
}

pub(super) fn dropping_handles_loses_no_work(b: &Bench) -> Outcome {
    let arena = b.arena(BlockOrder::TokenMajor)?;
    let (gather, k) = read(b, &arena)?;
    let expected = {
        let (scatter, expected) = write(b, &arena)?;
        b.stream.scatter(&scatter)?;
        expected
    };
    b.stream.gather(&gather)?;
    drop((gather, arena));
    equal("work whose operands the caller dropped", &b.download(&k)?, &expected)
}
