//! The main pool and the chunk pool never exchange blocks.

use super::*;
use kvcore::{PromptKeys, SequenceStart};

#[test]
fn filling_the_chunk_pool_evicts_nothing_of_the_main_pool() {
    let w = World::new(16, 4, ChunkCacheConfig::default());
    drop(w.run(&prompt(&[2])));
    let cached = w.main.pool().counts().cached;
    assert_eq!(cached, 2, "the system prompt");
    for chunk in 3..23 {
        let assembly = w.assembler().assemble(&prompt(&[chunk])).unwrap();
        assert_eq!(tokens_of(&assembly), [7], "the system prompt is still there");
        drop(assembly.commit().unwrap());
    }
    assert_eq!((w.cache.metrics().evictions, w.main.pool().counts().cached), (19, cached));
    w.check();
}

#[test]
fn filling_the_main_pool_evicts_no_chunk() {
    let mut w = World::new(8, 8, ChunkCacheConfig::default());
    drop(w.run(&prompt(&[2, 3])));
    for token in 10..30 {
        let tokens = [token; 32];
        let (id, cached) = w
            .main
            .create_with_prefix(&PromptKeys::new(w.root, &tokens, w.main.kv_pool().block_size()))
            .unwrap();
        assert_eq!(cached, 0);
        drop(w.main.grow(id, 32).unwrap());
        w.main.commit(id, &tokens).unwrap();
        w.main.free(id).unwrap();
    }
    let id = w.main.create(SequenceStart::default()).unwrap();
    w.main.grow(id, 24).unwrap();
    assert!(w.main.grow(id, 32).is_err(), "however full it is");
    assert_eq!((w.cache.metrics().cached_chunks, w.cache.metrics().evictions), (2, 0));
    w.main.free(id).unwrap();
    assert_eq!(hits(&w.run(&prompt(&[2, 3]))), [true, true]);
    w.check();
}

/// Checks the only case in which a piece uses the other pool: for a single request, until the request ends,
/// and only in blocks that are free or idle.
#[test]
fn pieces_without_room_take_blocks_of_the_main_pool_while_their_request_lives() {
    let w = World::new(8, 2, ChunkCacheConfig::default());
    let held = w.run(&prompt(&[2, 3]));
    assert_eq!(w.cache.metrics().uncached, 1);
    let counts = w.main.pool().counts();
    assert_eq!(counts.total - counts.free - counts.cached, 4, "the system prompt and chunk 3");
    drop(held);
    assert_eq!(w.main.pool().counts().cached, 2, "nothing of the chunk is kept there");
    let error = w.assembler().assemble(&prompt(&[4, 5, 6, 7, 8])).unwrap_err();
    assert!(matches!(error, kvchunk::Error::Core(kvcore::Error::OutOfBlocks { .. })), "{error}");
    w.check();
}
