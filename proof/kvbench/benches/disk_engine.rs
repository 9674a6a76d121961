//! Compares how fast records of 2 MiB are saved from the pool of a running engine, and loaded into it, with plain direct
//! writes and reads of the same bytes on the same disk.
//!
//! `--mib N` sets the number of MiB of the prompt (default 128), and `--turns N` the number of turns (default 15). The
//! rows contain medians, because the speed of a disk that others use changes from turn to turn.
//!
//! A record is one block of an ordinary prompt, and takes the way that an engine's does: a save ends when the records are
//! on the disk, and a load when the blocks are filled and registered, so that prompts find them. The times include all
//! copies, digests and checkpoints. One row says when the last record had arrived; blocks are filled while others arrive. The
//! plain program has one thread for each request under way. Its memory is as large as the prompt. Two rows compare with
//! a program that uses the same 4 MiB again and again, which a virtual disk copies from the processor's cache: such a
//! program keeps nothing of what it reads.
#![allow(clippy::expect_used, reason = "a benchmark fails by panicking")]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvbackend_cpu::CpuBackend;
use kvbench::{option, row};
use kvchunk::{BeganFetch, LoadRule, ReplicaDevice, TierLink};
use kvcore::{
    Backend, BlockKey, BlockOrder, BlockPool, DType, KeyForm, KeyScope, KvArena, KvLayout, KvPool, KvShape,
    MemoryKind,
};
use kvtier::{AccountId, Slab, SlabConfig};

mod direct;

use direct::Plain;

/// The number of bytes of a block of all layers.
const RECORD: usize = 2 << 20;
/// The number of tokens in a block.
const BLOCK: usize = 16;
/// The number of prompts that the slab has room for.
const PROMPTS: u64 = 16;
/// The longest time that a turn waits for the disk.
const PATIENCE: Duration = Duration::from_secs(60);

/// An engine's pool, with a disk below it.
struct Engine {
    pool: KvPool,
    link: TierLink,
    root: BlockKey,
    blocks: usize,
}

impl Engine {
    fn new(folder: &Path, blocks: usize) -> Self {
        let shape = KvShape {
            num_layers: 16,
            num_blocks: blocks,
            block_size: BLOCK,
            k_heads: 8,
            v_heads: 8,
            k_dim: 128,
            v_dim: 128,
            format: DType::F32.into(),
            order: BlockOrder::TokenMajor,
        };
        let layout = Arc::new(KvLayout::new(shape).expect("a layout"));
        assert_eq!(layout.k_bytes() + layout.v_bytes(), blocks * RECORD, "a block is a record of 2 MiB");
        let backend = CpuBackend::new();
        let arena = KvArena::allocate(backend.as_ref(), MemoryKind::Device, layout).expect("an arena");
        let stream = backend.stream().expect("a stream");
        let pool = KvPool::new(arena.clone(), BlockPool::new(0..blocks as u32).expect("blocks"));
        let device = ReplicaDevice { backend, stream, arena, keys: KeyForm::Rotated };
        let root = KeyScope::new("bench", b"").root();
        let bytes = (blocks * RECORD) as u64;
        // A checkpoint opens an eighth of the slab, so that one prompt of two needs a checkpoint.
        let limit = PROMPTS * bytes + (32 << 20);
        let slab = Slab::open(folder, root, SlabConfig { limit, ..SlabConfig::default() }).expect("a slab");
        let mut link = TierLink::new(device, Arc::new(slab));
        link.rule = LoadRule::Always(PATIENCE);
        Self { pool: pool.expect("a pool"), link, root, blocks }
    }

    /// Returns the tokens of a turn's prompt, and the keys of its blocks.
    fn prompt(&self, turn: u32) -> (Vec<u32>, Vec<BlockKey>) {
        let tokens: Vec<u32> = (0..(self.blocks * BLOCK) as u32).map(|token| token ^ (turn << 24)).collect();
        let keys = self.root.chain(&tokens, BLOCK);
        (tokens, keys)
    }

    /// Saves a new prompt, and returns the time in seconds.
    fn save(&self, turn: u32) -> f64 {
        let (tokens, keys) = self.prompt(turn);
        self.pool.blocks().clear_cached();
        let blocks = self.pool.blocks().allocate(self.blocks).expect("room");
        let start = Instant::now();
        self.link
            .save_prefix(AccountId::default(), &tokens, &keys, blocks.ids())
            .expect("the blocks are read");
        assert!(self.link.slab.flush(PATIENCE), "the records were not written in time");
        let seconds = start.elapsed().as_secs_f64();
        assert!(keys.iter().all(|key| self.link.slab.contains(key)), "a record was dropped");
        seconds
    }

    /// Loads the prompt of a turn. Returns the seconds until the last record has arrived, and until the blocks are
    /// registered.
    fn load(&self, turn: u32) -> [f64; 2] {
        let (tokens, keys) = self.prompt(turn);
        self.pool.blocks().clear_cached();
        let start = Instant::now();
        let BeganFetch::Loading(fetch) = self.link.fetch_prefix(&self.pool, &keys, &tokens) else {
            panic!("the records are not loaded");
        };
        while !fetch.is_over() {
            self.link.put_arrived(&self.pool, (&self.root, &keys), &fetch).expect("the blocks are filled");
            fetch.wait_for(PATIENCE);
        }
        let arrived = start.elapsed().as_secs_f64();
        let _held =
            self.link.put_prefix(&self.pool, (&self.root, &keys), &fetch).expect("the blocks are filled");
        let filled = start.elapsed().as_secs_f64();
        assert_eq!(self.pool.blocks().cached_prefix(&keys), self.blocks, "all blocks are found");
        fetch.finish();
        [arrived, filled]
    }
}

/// Returns the median of a few numbers.
fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_unstable_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

fn main() {
    let blocks = (option("--mib", 128) * (1 << 20) / RECORD).max(1);
    let bytes = blocks * RECORD;
    let turns = option("--turns", 15).max(1) as u32;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let plain = Plain::new(&folder.path().join("plain"), bytes as u64, PROMPTS);
    let engine = Engine::new(folder.path(), blocks);
    let way = engine.link.slab.io_choice().map(|choice| choice.way).expect("a way of I/O");
    // The first turns write to places that were never written.
    let first = PROMPTS as u32 + 1;
    for turn in 0..first {
        plain.write();
        engine.save(turn);
    }
    let mut memory = engine.link.slab.buffers(&[bytes]).remove(0);
    let mut seconds = [const { Vec::new() }; 7];
    for turn in first..first + turns {
        let (saved, wrote) = (engine.save(turn), plain.write_from(&mut memory));
        let ([arrived, filled], read) = (engine.load(turn), plain.read_to(&mut memory));
        let all = [saved, filled, arrived, wrote, read, plain.write(), plain.read()];
        for (seconds, second) in seconds.iter_mut().zip(all) {
            seconds.push(second);
        }
    }
    let [saved, filled, arrived, wrote, read, wrote_again, read_again] = seconds.map(median);
    let what = |does: &str| format!("disk tier in an engine: {does} 2 MiB, {way}");
    row(&what("save blocks of"), bytes, saved, "direct writes", wrote);
    row(&what("load blocks of"), bytes, filled, "direct reads", read);
    row(&what("records arrive, of"), bytes, arrived, "direct reads", read);
    row(&what("save blocks of"), bytes, saved, "4 MiB, written directly again and again", wrote_again);
    row(&what("load blocks of"), bytes, filled, "4 MiB, read directly again and again", read_again);
}
