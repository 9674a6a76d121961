//! Cases for streams and events.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use kvcore::{
    ApplyRope, Attend, AttendRows, AttendWork, BlockOrder, CopyBlocks, CopyTensor, DType, Gather, KeyForm,
    KvArena, KvFormat, KvShape, Quantize, QueryRow, Rope, RopeConfig, RotateKeys, Rotation, Scatter, Stream,
    TensorView, WritePairs, WriteSlots, allocate_tensor,
};

use crate::bench::{Bench, Failure, Outcome, ensure, equal, numbers, rounded};
use crate::raw::{download, noise};

const SLOTS: [i64; 3] = [3, 17, 8];

/// The time to wait for a callback before the case fails.
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
    // An event may be queried more than once, in any order.
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

/// A write to memory that enqueued work still reads is executed after that work, for every kind of
/// memory.
pub(super) fn writes_come_in_the_order_of_the_stream(b: &Bench) -> Outcome {
    for kind in b.backend.capabilities().memory {
        // Whole words and partial words, up to more than may be staged in the stream's memory.
        for n in [61, 4096, (1 << 20) + 1, 3 << 20] {
            let source = allocate_tensor(b.backend.as_ref(), kind, DType::U8, &[n])?;
            let copy = b.tensor(DType::U8, &[n])?;
            let [old, new] = [1, 2].map(|seed| noise(seed, n));
            b.stream.write(&source, &old)?;
            b.stream.copy_tensor(&CopyTensor { src: source.clone(), dst: copy.clone() })?;
            b.stream.write(&source, &new)?;
            let seen = (download(b.stream.as_ref(), &copy)?, download(b.stream.as_ref(), &source)?);
            ensure(seen == (old, new), || format!("{n} bytes of {kind} memory"))?;
        }
    }
    Ok(())
}

/// Copies bytes through `times` tensors and returns the last one. Every tensor but the last is dropped once
/// its copies are enqueued.
fn relay(b: &Bench, stream: &dyn Stream, bytes: &[u8], times: usize) -> Outcome<TensorView> {
    let tensor = || b.tensor(DType::U8, &[bytes.len()]);
    let mut from = tensor()?;
    stream.write(&from, bytes)?;
    for _ in 0..times {
        let to = tensor()?;
        stream.copy_tensor(&CopyTensor { src: from, dst: to.clone() })?;
        from = to;
    }
    Ok(from)
}

pub(super) fn enqueued_work_keeps_its_memory(b: &Bench) -> Outcome {
    let bytes = noise(3, 1 << 16);
    let last = relay(b, b.stream.as_ref(), &bytes, 200)?;
    ensure(download(b.stream.as_ref(), &last)? == bytes, || "bytes that went through 200 tensors".to_owned())
}

pub(super) fn work_of_a_dropped_stream_is_done(b: &Bench) -> Outcome {
    let (bytes, stream) = (noise(11, 1 << 20), b.backend.stream()?);
    let last = relay(b, stream.as_ref(), &bytes, 20)?;
    drop(stream);
    let seen = download(b.backend.stream()?.as_ref(), &last)?;
    ensure(seen == bytes, || "bytes that a dropped stream copied".to_owned())
}

pub(super) fn no_work_is_no_work(b: &Bench) -> Outcome {
    let (arena, stream) = (b.arena(BlockOrder::TokenMajor)?, b.stream.as_ref());
    let storage = Arc::clone(b.tensor(DType::F32, &[64])?.storage());
    let none = |dim| TensorView::new(Arc::clone(&storage), b.dtype, &[0, 2, dim]);
    let rows = |dim| b.upload(b.dtype, &[1, 2, dim], &numbers(5, 2 * dim));
    for (k, v, slots) in [(none(10)?, none(6)?, vec![]), (rows(10)?, rows(6)?, vec![-1])] {
        let slots = WriteSlots::unchecked(slots);
        stream.scatter(&Scatter { arena: arena.clone(), layer: 0, k, v, slots, rotation: None })?;
    }
    let (k, v) = (none(10)?, none(6)?);
    stream.gather(&Gather { arena: arena.clone(), layer: 0, slots: [].into(), k, v, rotation: None })?;
    stream.copy_tensor(&CopyTensor { src: none(10)?, dst: none(10)? })?;
    let rope = Arc::new(Rope::new(RopeConfig::new(10, 100.0), 16)?);
    stream.rope(&ApplyRope { rows: none(10)?, positions: [].into(), rope: Arc::clone(&rope) })?;
    let pairs = || WritePairs::unchecked([]);
    stream.copy_blocks(&CopyBlocks { arena: arena.clone(), pairs: pairs() })?;
    let rotation = Rotation { rope: Arc::clone(&rope), delta: 1 };
    let (src, dst) = (arena.clone(), arena.clone());
    stream.rotate_keys(&RotateKeys { src, dst, layer: 0, pairs: pairs(), rotation })?;
    if !b.backend.capabilities().missing.contains(&"quantize") {
        let shape = KvShape { format: KvFormat::Int8 { group: 2 }, ..arena.layout().shape().clone() };
        let (src, dst) = (arena.clone(), b.arena_of(shape)?);
        stream.quantize(&Quantize { src, dst, pairs: pairs() })?;
    }
    for (q, batch) in [(none(10)?, vec![]), (rows(10)?, vec![]), (rows(10)?, vec![AttendRows::new(0..0, [])])]
    {
        let n = q.shape()[0];
        let out = b.upload(DType::F32, &[1, 2, 6], &[7.0; 12])?;
        stream.attend(&Attend {
            arena: arena.clone(),
            layer: 0,
            q,
            rope: Some(Arc::clone(&rope)),
            keys: KeyForm::Rotated,
            work: Arc::new(AttendWork::new(vec![QueryRow { logical: 0, position: 0 }; n], batch)),
            scale: 1.0,
            window: None,
            softcap: None,
            out: out.slice(0, 0, n)?,
            lse: None,
        })?;
        equal("rows in no entry are left alone", &b.download(&out)?, &[7.0; 12])?;
    }
    stream.write(&none(10)?, &[])?;
    stream.read(&none(10)?, &mut [])?;
    let event = stream.record()?;
    event.wait()?;
    ensure(event.is_done(), || "an event that was waited for is not done".to_owned())?;
    let (k, v) = b.contents(&arena)?;
    ensure(k.iter().chain(&v).all(|&x| x == 0.0), || "no work has written".to_owned())
}
