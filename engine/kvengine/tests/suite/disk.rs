//! Chunks on a disk: after a restart, they are found bit by bit, and nothing else is.

use std::fs;
use std::path::Path;
use std::time::Duration;

use kvchunk::{ChunkParcel, LoadRule, ReuseCell};
use kvcore::{DType, KvFormat};
use kvengine::Engine;
use kvtier::{Slab, SlabConfig};
use rstest::rstest;

use crate::asking::{ask_three, engine};
use crate::common::{Golden, distance, for_every};

/// Starts an engine whose chunks are saved in `folder`.
fn started(name: &str, format: KvFormat, folder: &Path) -> Engine {
    let mut engine = engine(name, format);
    let config = SlabConfig { limit: 8 << 20, cell_bytes: 8 << 10, ..SlabConfig::default() };
    engine.open_disk(folder, config).unwrap();
    // The models are so small that computing is faster.
    engine.load_from_disk(LoadRule::Always(Duration::from_secs(20)));
    engine
}

/// Waits until the chunks are on the disk. Returns the number of records.
fn saved(engine: &Engine) -> usize {
    let disk = engine.disk().unwrap();
    assert!(disk.flush(Duration::from_secs(20)));
    disk.usage().records
}

/// Returns the contents of the chunks in memory.
fn contents(engine: &Engine) -> Vec<ChunkParcel> {
    let (chunks, device) = (engine.chunks().unwrap(), engine.replica_device());
    let infos = chunks.chunks();
    let packed = infos.iter().map(|info| device.pack(chunks, &info.chunk_hash).unwrap().unwrap());
    let mut parcels: Vec<ChunkParcel> = packed.collect();
    parcels.sort_by_key(|parcel| parcel.record.id.key);
    assert!(!parcels.is_empty());
    parcels
}

for_every! {
    fn after_a_restart_chunks_are_found_bit_by_bit(
        #[values("llama", "mistral", "deepseek-v3")] name: &str,
        cell: every cell,
    ) {
        let (golden, folder) = (Golden::load(name), tempfile::tempdir().unwrap());
        let mut first = started(name, DType::F32.into(), folder.path());
        let computed = ask_three(&mut first, &golden.prompt, cell);
        let (records, here) = (saved(&first), contents(&first));
        assert!(records as u64 > first.chunks().unwrap().metrics().insertions, "chunks, and the system prompt");
        drop(first);
        let mut second = started(name, DType::F32.into(), folder.path());
        let found = ask_three(&mut second, &golden.prompt, cell);
        assert!(found.chunks.iter().all(|chunk| chunk.hit && chunk.exact));
        assert_eq!(contents(&second), here, "the same bits");
        assert!(distance(&found.logits.concat(), &computed.logits.concat()) < 1e-4);
        let (disk, chunks) = (second.disk().unwrap().usage(), second.chunks().unwrap().metrics());
        assert_eq!((disk.hits, disk.misses, chunks.tokens_computed), (records as u64, 0, 0));
        ask_three(&mut second, &golden.prompt, cell);
        assert_eq!(second.disk().unwrap().usage().hits, disk.hits, "all is in memory now");
        second.check_invariants().unwrap();
    }
}

#[rstest]
fn every_format_survives_a_restart(
    #[values("f16", "bf16", "int8:8", "int4:8", "fp8-e4m3", "fp8-e5m2:head")] format: &str,
) {
    let (golden, folder) = (Golden::load("llama"), tempfile::tempdir().unwrap());
    let (format, cell) = (format.parse().unwrap(), ReuseCell::SEQUENTIAL_WITH_SYSTEM);
    let mut first = started("llama", format, folder.path());
    ask_three(&mut first, &golden.prompt, cell);
    let here = contents(&first);
    drop(first);
    let mut second = started("llama", format, folder.path());
    let there = ask_three(&mut second, &golden.prompt, cell);
    assert!(there.chunks.iter().all(|chunk| chunk.hit));
    assert_eq!(contents(&second), here);
}

#[test]
fn other_models_formats_and_modes_find_nothing() {
    let (golden, folder) = (Golden::load("llama"), tempfile::tempdir().unwrap());
    let ask = |name: &str, format: KvFormat, cell| {
        let mut engine = started(name, format, folder.path());
        ask_three(&mut engine, &golden.prompt, cell);
        engine.chunks().unwrap().metrics().fetched
    };
    let (f32, cell) = (KvFormat::from(DType::F32), ReuseCell::SEQUENTIAL_WITH_SYSTEM);
    assert_eq!(ask("llama", f32, cell), 0);
    assert_eq!(ask("qwen2", f32, cell), 0, "another model");
    assert_eq!(ask("llama", DType::BF16.into(), cell), 0, "another format");
    assert_eq!(ask("llama", f32, ReuseCell::SEQUENTIAL_ALONE), 0, "another mode");
    assert_eq!(ask("llama", f32, ReuseCell::ABSOLUTE_WITH_SYSTEM), 0, "another position");
    assert_eq!(ask("llama", f32, cell), 3);
}

#[test]
fn a_damaged_disk_costs_time_and_changes_no_answer() {
    let (golden, folder) = (Golden::load("llama"), tempfile::tempdir().unwrap());
    let (f32, cell) = (KvFormat::from(DType::F32), ReuseCell::SEQUENTIAL_WITH_SYSTEM);
    let mut first = started("llama", f32, folder.path());
    let computed = ask_three(&mut first, &golden.prompt, cell);
    drop(first);
    let path = folder.path().join(Slab::FILE);
    let intact = fs::read(&path).unwrap();
    let mut damaged = 0;
    for start in (0..intact.len()).step_by(200_000) {
        let mut bytes = intact.clone();
        let end = (start + 200_000).min(bytes.len());
        bytes[start..end].iter_mut().step_by(97).for_each(|byte| *byte ^= 0x55);
        fs::write(&path, &bytes).unwrap();
        let mut engine = started("llama", f32, folder.path());
        let answer = ask_three(&mut engine, &golden.prompt, cell);
        assert_eq!(answer.tokens, computed.tokens);
        damaged += engine.disk().unwrap().usage().misses;
        engine.check_invariants().unwrap();
    }
    assert!(damaged > 0);
}
