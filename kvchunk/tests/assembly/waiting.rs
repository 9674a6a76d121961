//! Waiting for other requests is limited.

use super::*;
use kvchunk::ChunkWaiter;
use std::time::{Duration, Instant};

fn impatient() -> World {
    World::new(16, 16, ChunkCacheConfig { max_wait_ms: 30, ..ChunkCacheConfig::default() })
}

#[test]
fn a_request_whose_piece_never_comes_computes_it_for_itself() {
    let w = impatient();
    drop(w.run(&prompt(&[9])));
    // A request that never ends is computing chunks 2 and 3.
    let stalled = w.assembler().assemble(&prompt(&[2, 3])).unwrap();
    let both = prompt(&[2, 4, 3]);
    let mut assembly = w.assembler().assemble(&both).unwrap();
    assert!(!assembly.is_ready());
    assert_eq!(tokens_of(&assembly), [7], "chunk 4");
    let since = Instant::now();
    while !assembly.is_ready() {
        assembly.advance(&w.assembler(), &both).unwrap();
    }
    assert!(since.elapsed() >= Duration::from_millis(30), "it did wait");
    assert_eq!(tokens_of(&assembly), [7, 7]);
    let held = assembly.commit().unwrap();
    assert_eq!((hits(&held), held.holds().len()), (vec![false; 3], 1), "only chunk 4 is kept");
    assert_eq!(held.segments()[1].blocks[0].index() / 16, 0, "the others lie in blocks of the main pool");
    assert_eq!(w.cache.metrics().uncached, 2);
    w.check();
    drop(stalled.commit().unwrap());
    assert_eq!(hits(&w.run(&both)), [true; 3]);
    drop(held);
    w.check();
}

#[test]
fn a_piece_that_comes_in_time_is_a_hit() {
    let w = World::new(16, 16, ChunkCacheConfig::default());
    let first = w.assembler().assemble(&prompt(&[2])).unwrap();
    let mut second = w.assembler().assemble(&prompt(&[2])).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            drop(first.commit().unwrap());
        });
        second.advance(&w.assembler(), &prompt(&[2])).unwrap();
    });
    assert!(second.is_ready() && second.inputs().is_empty());
    assert_eq!(w.cache.metrics().uncached, 0);
}

#[test]
fn a_stopped_request_leaves_its_pieces_to_waiting_requests() {
    let w = World::new(16, 16, ChunkCacheConfig::default());
    let stopped = w.assembler().assemble(&prompt(&[2, 3])).unwrap();
    let mut waiting = w.assembler().assemble(&prompt(&[2, 3])).unwrap();
    assert!(!waiting.is_ready());
    let since = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            drop(stopped);
        });
        while !waiting.is_ready() {
            waiting.advance(&w.assembler(), &prompt(&[2, 3])).unwrap();
        }
    });
    assert!(since.elapsed() < w.cache.config().max_wait(), "it did not wait for the limit");
    assert_eq!(tokens_of(&waiting), [5, 7, 7], "everything is computed by the request that waited");
    let held = waiting.commit().unwrap();
    assert_eq!((hits(&held), held.holds().len()), (vec![false; 2], 2), "and kept");
    assert_eq!(w.cache.metrics().uncached, 0);
    drop(held);
    w.check();
    assert_eq!(hits(&w.run(&prompt(&[2, 3]))), [true; 2]);
}

#[test]
fn a_piece_after_one_that_another_request_computes_counts_as_one_hit() {
    let config = ChunkCacheConfig { max_chunk_tokens: 4, ..ChunkCacheConfig::default() };
    let w = World::new(16, 16, config);
    let of = |tokens: &[u32]| ChunkedPrompt::new(vec![1; 5], vec![tokens.to_vec()], vec![9]).unwrap();
    let (long, short) = (of(&[2, 2, 2, 2, 3, 3, 3, 3]), of(&[2, 2, 2, 2]));
    drop(w.run(&long));
    assert!(w.cache.evict_lru(), "the first piece goes, the second stays");
    let first = w.assembler().assemble(&short).unwrap();
    let mut second = w.assembler().assemble(&long).unwrap();
    assert_eq!((second.is_ready(), w.cache.metrics().hit_count), (false, 0), "nothing is used yet");
    drop(first.commit().unwrap());
    second.advance(&w.assembler(), &long).unwrap();
    assert!(second.is_ready() && second.inputs().is_empty());
    assert_eq!((w.cache.metrics().hit_count, w.cache.metrics().tokens_reused), (2, 8));
    drop(second);
    w.check();
}

#[test]
fn one_thread_drives_two_requests_that_miss_the_same_chunk() {
    let w = World::new(16, 16, ChunkCacheConfig::default());
    let both = prompt(&[2, 3]);
    let first = w.assembler().assemble(&both).unwrap();
    let mut second = w.assembler().assemble(&both).unwrap();
    assert!(second.inputs().is_empty() && second.waiters().count() == 1, "it waits for the system prompt");
    for _ in 0..3 {
        second.try_advance(&w.assembler(), &both).unwrap();
        assert!(!second.is_ready() && second.inputs().is_empty(), "nothing has ended");
    }
    drop(first.commit().unwrap());
    assert!(second.waiters().all(ChunkWaiter::is_over));
    second.try_advance(&w.assembler(), &both).unwrap();
    assert!(second.is_ready() && second.inputs().is_empty());
    let held = second.commit().unwrap();
    assert_eq!(hits(&held), [true; 2], "computed once");
    drop(held);
    w.check();
}

#[test]
fn finished_pieces_are_used_while_the_rest_is_awaited() {
    let w = World::new(16, 16, ChunkCacheConfig::default());
    drop(w.run(&prompt(&[9])));
    let (two, three) =
        (w.assembler().assemble(&prompt(&[2])).unwrap(), w.assembler().assemble(&prompt(&[3])).unwrap());
    let all = prompt(&[2, 3, 4]);
    let mut waiting = w.assembler().assemble(&all).unwrap();
    assert_eq!((tokens_of(&waiting), waiting.waiters().count()), (vec![7], 2), "chunk 4 is its own");
    drop(two.commit().unwrap());
    waiting.try_advance(&w.assembler(), &all).unwrap();
    assert_eq!((waiting.inputs().len(), waiting.waiters().count(), waiting.is_ready()), (0, 1, false));
    assert_eq!(hits(&w.run(&prompt(&[4]))), [true], "its own chunk serves others already");
    drop(three);
    waiting.try_advance(&w.assembler(), &all).unwrap();
    assert_eq!(
        (tokens_of(&waiting), waiting.is_ready()),
        (vec![7], true),
        "chunk 3 was given up: it is taken over"
    );
    drop(waiting.commit().unwrap());
    assert_eq!(w.cache.metrics().shared_flights, 2, "each wait counts once");
    w.check();
}

#[test]
fn two_threads_compute_a_prompt_once() {
    let w = World::new(16, 16, ChunkCacheConfig::default());
    let both = prompt(&[2, 3]);
    let (started, start) = std::sync::mpsc::channel();
    let (over, ended) = std::sync::mpsc::channel();
    let (w, both) = (&w, &both);
    let computed: usize = std::thread::scope(|scope| {
        let first = scope.spawn(move || {
            let assembly = w.assembler().assemble(both).unwrap();
            started.send(()).unwrap();
            // This request ends only after the other request has started to wait.
            ended.recv().unwrap();
            let tokens: usize = tokens_of(&assembly).iter().sum();
            drop(assembly.commit().unwrap());
            tokens
        });
        let second = scope.spawn(move || {
            start.recv().unwrap();
            let mut assembly = w.assembler().assemble(both).unwrap();
            over.send(()).unwrap();
            let mut tokens = 0;
            while !assembly.is_ready() {
                assembly.waiters().next().unwrap().clone().wait();
                assembly.try_advance(&w.assembler(), both).unwrap();
                tokens += tokens_of(&assembly).iter().sum::<usize>();
            }
            drop(assembly.commit().unwrap());
            tokens
        });
        first.join().unwrap() + second.join().unwrap()
    });
    assert_eq!(computed, 5 + 7 + 7, "everything once");
    w.check();
}

#[test]
fn a_system_prompt_is_computed_once_or_by_the_request_that_takes_it_over() {
    let w = World::new(16, 16, ChunkCacheConfig::default());
    let prompts: Vec<ChunkedPrompt> = (2..6).map(|chunk| prompt(&[chunk])).collect();
    let mut all: Vec<Assembly> =
        prompts.iter().map(|prompt| w.assembler().assemble(prompt).unwrap()).collect();
    let tokens: Vec<Vec<usize>> = all.iter().map(tokens_of).collect();
    assert_eq!(tokens, [vec![5, 7], vec![], vec![], vec![]], "one of four computes it");
    drop(all.remove(0));
    for (assembly, prompt) in all.iter_mut().zip(&prompts[1..]) {
        assembly.try_advance(&w.assembler(), prompt).unwrap();
    }
    let tokens: Vec<Vec<usize>> = all.iter().map(tokens_of).collect();
    assert_eq!(tokens, [vec![5, 7], vec![], vec![]], "the next one takes it over");
    let mut last = all.pop().unwrap();
    last.stop_waiting();
    last.try_advance(&w.assembler(), &prompts[3]).unwrap();
    assert_eq!(
        (tokens_of(&last), last.is_ready()),
        (vec![5, 7], true),
        "who waits no longer computes it alone"
    );
    drop(last.commit().unwrap());
    drop(all.remove(0).commit().unwrap());
    let mut third = all.pop().unwrap();
    third.try_advance(&w.assembler(), &prompts[2]).unwrap();
    assert_eq!((tokens_of(&third), third.is_ready()), (vec![7], true));
    drop(third.commit().unwrap());
    w.check();
}

#[test]
fn a_request_ends_though_every_piece_is_evicted_before_the_request_can_hold_it() {
    // The index holds as many pieces as `kept`, and both requests need three.
    for kept in [1, 2, 3] {
        let w = World::new(32, 32, ChunkCacheConfig { max_chunks: kept, ..ChunkCacheConfig::default() });
        let both = prompt(&[2, 3, 4]);
        let first = w.assembler().assemble(&both).unwrap();
        let mut second = w.assembler().assemble(&both).unwrap();
        assert_eq!((tokens_of(&second).len(), second.waiters().count() > 0), (0, true));
        drop(first.commit().unwrap());
        let (mut rounds, mut computed) = (0, 0);
        while !second.is_ready() {
            // Nothing that is not held stays, and other requests take its place.
            while w.cache.evict_lru() {}
            drop(w.run(&prompt(&[20 + rounds, 40 + rounds])));
            second.try_advance(&w.assembler(), &both).unwrap();
            computed += tokens_of(&second).iter().sum::<usize>();
            rounds += 1;
            assert!(rounds < 4, "{kept}: the request waits for ever");
        }
        assert_eq!(computed, 21, "each piece is computed once, and held by the request that computed it");
        drop(second.commit().unwrap());
        w.check();
    }
}
