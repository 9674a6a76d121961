//! `loom` models that check the pool's concurrent paths under the interleavings of two threads.
//!
//! `cargo xtask loom` runs these models. It builds with `--cfg loom` and checks all interleavings with up to
//! three preemptions (with `--exhaustive`, all interleavings). Without `--cfg loom` this file is empty. The
//! hints about free blocks are plain atomics that `loom` does not see: they only select a path, and every
//! path is correct.
#![cfg(loom)]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use kvcore::{BlockKey, BlockPool, KeyScope, PoolConfig, SharedBlocks};
use loom::thread;

fn keys(first: u32, n: u32) -> Vec<BlockKey> {
    let root = KeyScope::new("m", b"").root();
    (first..first + n).map(|i| root.child(&[i])).collect()
}

/// Runs `a` and `b` on two threads over one pool, under each interleaving. Checks at the end that all
/// blocks are accounted for.
fn both<T: Send + 'static>(
    blocks: u32,
    shards: usize,
    prepare: fn(&BlockPool) -> T,
    a: fn(&BlockPool),
    b: fn(&BlockPool),
) {
    loom::model::Builder::new().check(move || {
        let pool = BlockPool::with_config(0..blocks, PoolConfig::default().shards(shards)).unwrap();
        let kept = prepare(&pool);
        let other = pool.clone();
        let thread = thread::spawn(move || a(&other));
        b(&pool);
        pool.check_invariants().unwrap();
        thread.join().unwrap();
        drop(kept);
        pool.check_invariants().unwrap();
        pool.clear_cached();
        assert_eq!(pool.counts().free, blocks as usize);
    });
}

fn cached(pool: &BlockPool, first: u32, n: usize) {
    drop(pool.allocate(n).unwrap().register(None, &keys(first, n as u32)).unwrap());
}

/// Looks up keys and asserts that every block stays registered under its key as long as it is held.
fn hold(pool: &BlockPool, first: u32, n: u32) -> SharedBlocks {
    let held = pool.lookup_chain(&keys(first, n));
    let again = pool.lookup_chain(&keys(first, held.len() as u32));
    assert_eq!(held.ids(), again.ids());
    held
}

#[test]
fn the_same_key_registered_twice_is_one_block() {
    for shards in [1, 2] {
        both(
            4,
            shards,
            |_| (),
            |pool| cached(pool, 0, 1),
            |pool| {
                let mine = pool.allocate(1).unwrap().register(None, &keys(0, 1)).unwrap();
                let found = pool.lookup(&keys(0, 1)[0]).unwrap();
                assert_eq!(mine.ids(), found.ids(), "one block under one key");
            },
        );
    }
}

#[test]
fn a_block_is_held_or_evicted_never_both() {
    for shards in [1, 2] {
        both(
            2,
            shards,
            |pool| cached(pool, 0, 2),
            |pool| drop(hold(pool, 0, 2)),
            |pool| {
                if let Ok(taken) = pool.allocate(2) {
                    assert!(pool.lookup_chain(&keys(0, 2)).is_empty(), "evicted blocks are not found");
                    drop(taken);
                }
            },
        );
    }
}

#[test]
fn two_allocations_take_different_blocks_or_none() {
    for shards in [1, 2] {
        both(
            3,
            shards,
            |_| (),
            |pool| drop(pool.allocate(2)),
            |pool| {
                let mine = pool.allocate(2);
                let more = pool.allocate(1);
                if let (Ok(mine), Ok(more)) = (&mine, &more) {
                    assert!(!mine.ids().contains(&more.ids()[0]));
                }
            },
        );
    }
}

#[test]
fn an_admission_sees_a_whole_prefix_or_room_for_it() {
    both(
        4,
        2,
        |pool| cached(pool, 0, 2),
        |pool| drop(hold(pool, 0, 2)),
        |pool| {
            let (found, fresh) = pool.admit_prefix(&keys(0, 2), 3, 0).unwrap();
            assert_eq!(found.len() + fresh.len(), 3);
        },
    );
}

#[test]
fn a_pin_outlives_its_holders() {
    both(
        2,
        1,
        |pool| pool.allocate(1).unwrap().share().pin(),
        |pool| drop(pool.allocate(1)),
        |pool| {
            let counts = pool.counts();
            assert_eq!((counts.cached, counts.evictable), (1, 0));
        },
    );
}

#[test]
fn a_known_block_that_goes_and_comes_back_is_joined() {
    // While one thread is about to take the block known under its key, the other thread evicts that block
    // and registers it again.
    both(
        2,
        2,
        |pool| cached(pool, 0, 1),
        |pool| {
            pool.clear_cached();
            if let Ok(block) = pool.allocate(1) {
                drop(block.register(None, &keys(0, 1)).unwrap());
            }
        },
        |pool| {
            if let Ok(mine) = pool.allocate(1) {
                let mine = mine.register(None, &keys(0, 1)).unwrap();
                let found = pool.lookup(&keys(0, 1)[0]).unwrap();
                assert_eq!(mine.ids(), found.ids(), "one block under one key");
            }
        },
    );
}

#[test]
fn a_block_waits_for_blocks_of_another_shard_that_leave_or_are_found() {
    // A chain of two blocks, each in its own shard: the first one is selected first.
    both(
        2,
        2,
        |pool| {
            let chain = KeyScope::new("m", b"").root().chain(&[1, 2], 1);
            let second = pool.allocate(2).unwrap().register(None, &chain).unwrap().split_off(1).unwrap();
            drop(second);
        },
        |pool| drop(pool.allocate(1)),
        |pool| drop((pool.lookup_chain(&KeyScope::new("m", b"").root().chain(&[1, 2], 1)), pool.allocate(1))),
    );
}
