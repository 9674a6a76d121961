//! Reserved memory: granules are released and mapped again at the same addresses, and no neighbour changes.

use std::ops::Range;
use std::sync::Arc;

use kvcore::{BlockOrder, CopyBlocks, DType, Error, KvArena, MemoryKind, ReservedStorage, TensorView};

use super::blocks::{for_tokens, pairs};
use crate::bench::{Bench, Failure, Outcome, ensure, equal};

/// The number of granules in these cases' storages.
const GRANULES: usize = 6;

fn reserve(b: &Bench) -> Outcome<(Arc<dyn ReservedStorage>, usize)> {
    let granularity = b.backend.reserve(MemoryKind::Device, 1)?.granularity();
    ensure(granularity.is_power_of_two(), || format!("the granularity is {granularity}"))?;
    let bytes = (GRANULES - 1) * granularity + 1;
    let storage = b.backend.reserve(MemoryKind::Device, bytes)?;
    ensure((storage.granularity(), storage.len()) == (granularity, GRANULES * granularity), || {
        format!("{bytes} bytes in granules of {granularity} gave {} bytes", storage.len())
    })?;
    Ok((storage, granularity))
}

fn view(storage: &Arc<dyn ReservedStorage>) -> Outcome<TensorView> {
    Ok(TensorView::new(Arc::clone(storage) as _, DType::U8, &[storage.len()])?)
}

fn read(b: &Bench, view: &TensorView, range: &Range<usize>) -> Outcome<Vec<u8>> {
    let mut bytes = vec![0xff; range.len()];
    b.stream.read(&view.slice(0, range.start, range.end)?, &mut bytes)?;
    Ok(bytes)
}

/// Checks that every byte of a range is `byte`.
fn holds(b: &Bench, what: &str, view: &TensorView, range: &Range<usize>, byte: u8) -> Outcome {
    let seen = read(b, view, range)?;
    match seen.iter().position(|&other| other != byte) {
        Some(at) => {
            let message = format!("{what}: byte {} is {:#x}, expected {byte:#x}", range.start + at, seen[at]);
            Err(Failure::new(message))
        }
        None => Ok(()),
    }
}

pub(super) fn memory_goes_and_comes_back_as_zeros_at_its_address(b: &Bench) -> Outcome {
    let (storage, granule) = reserve(b)?;
    let (address, all) = (storage.address(), 0..storage.len());
    let (asleep, before, after) = (granule..4 * granule, 0..granule, 4 * granule..all.end);
    let view = view(&storage)?;
    let mapped = |expected: usize| {
        ensure(storage.mapped_bytes() == expected && storage.address() == address, || {
            format!("{} bytes are mapped at {:#x}, not {expected}", storage.mapped_bytes(), storage.address())
        })
    };
    mapped(all.end)?;
    holds(b, "fresh memory", &view, &all, 0)?;
    for round in 1..4 {
        b.stream.write(&view, &vec![round; all.end])?;
        b.stream.synchronize()?;
        storage.unmap(asleep.clone())?;
        mapped(3 * granule)?;
        holds(b, "what stayed before", &view, &before, round)?;
        holds(b, "what stayed after", &view, &after, round)?;
        storage.map(asleep.clone())?;
        mapped(all.end)?;
        holds(b, "what was mapped again", &view, &asleep, 0)?;
        holds(b, "before what was mapped", &view, &before, round)?;
        holds(b, "after what was mapped", &view, &after, round)?;
    }
    Ok(())
}

pub(super) fn mapping_twice_keeps_contents_and_unmapping_twice_is_nothing(b: &Bench) -> Outcome {
    let (storage, granule) = reserve(b)?;
    let view = view(&storage)?;
    b.stream.write(&view, &vec![7; storage.len()])?;
    b.stream.synchronize()?;
    storage.unmap(0..2 * granule)?;
    storage.unmap(granule..3 * granule)?;
    storage.unmap(granule..granule)?;
    ensure(storage.mapped_bytes() == 3 * granule, || format!("{} bytes mapped", storage.mapped_bytes()))?;
    storage.map(2 * granule..storage.len())?;
    ensure(storage.mapped_bytes() == 4 * granule, || format!("{} bytes mapped", storage.mapped_bytes()))?;
    holds(b, "what was unmapped", &view, &(2 * granule..3 * granule), 0)?;
    holds(b, "what was mapped all the time", &view, &(3 * granule..storage.len()), 7)
}

pub(super) fn wrong_ranges_are_refused_and_change_nothing(b: &Bench) -> Outcome {
    let none = b.backend.reserve(MemoryKind::Device, 0);
    match none {
        Err(Error::Zero { .. }) => {}
        Err(error) => return Err(error.into()),
        Ok(storage) => return Err(Failure::new(format!("no bytes gave {storage:?}"))),
    }
    let (storage, granule) = reserve(b)?;
    let view = view(&storage)?;
    b.stream.write(&view, &vec![7; storage.len()])?;
    b.stream.synchronize()?;
    let len = storage.len();
    let reversed = Range { start: 2 * granule, end: granule };
    for range in [0..granule / 2, 1..granule, 0..len + granule, len + granule..len + granule, reversed] {
        for (what, result) in [("unmap", storage.unmap(range.clone())), ("map", storage.map(range.clone()))] {
            ensure(matches!(result, Err(Error::Misaligned { .. } | Error::TooLarge { .. })), || {
                format!("{what} of {range:?} gave {result:?}")
            })?;
        }
    }
    ensure(storage.mapped_bytes() == len, || format!("{} bytes mapped", storage.mapped_bytes()))?;
    holds(b, "after refusals", &view, &(0..len), 7)
}

pub(super) fn kernels_work_on_reserved_memory(b: &Bench) -> Outcome {
    let layout = Arc::clone(b.arena(BlockOrder::TokenMajor)?.layout());
    let k = b.backend.reserve(MemoryKind::Device, layout.k_bytes())?;
    let v = b.backend.reserve(MemoryKind::Device, layout.v_bytes())?;
    let arena = KvArena::from_storage(Arc::clone(&k) as _, Arc::clone(&v) as _, layout)?;
    for storage in [&k, &v] {
        storage.unmap(0..storage.len())?;
        storage.map(0..storage.len())?;
    }
    let (k0, v0) = b.fill(&arena, 30)?;
    b.stream.copy_blocks(&CopyBlocks { arena: arena.clone(), pairs: pairs(&[(2, 8), (5, 1)]) })?;
    let (k1, v1) = b.contents(&arena)?;
    for block in [(2, 8), (5, 1), (0, 0), (2, 2)] {
        let check = |_: usize, old: &[f32], new: &[f32]| equal("a copied block", new, old);
        for_tokens((&arena, &k0), (&arena, &k1), block, true, check)?;
        for_tokens((&arena, &v0), (&arena, &v1), block, false, check)?;
    }
    Ok(())
}
