//! Several ranks that compute a prompt together.

use super::*;
use kvbackend_cpu::ThreadCommunicator;
use kvchunk::{ChunkCacheMetrics, CollectiveRank};
use std::sync::Mutex;
use std::time::Duration;

/// Three ranks, each a thread with its own caches.
struct Ranks(Vec<(World, CollectiveRank)>);

impl Ranks {
    fn new(chunks: u32) -> Self {
        let rank = |thread| {
            let rank = CollectiveRank::new(Arc::new(thread), CpuBackend::new()).unwrap();
            (World::new(32, chunks, ChunkCacheConfig::default()), rank)
        };
        let threads = ThreadCommunicator::group(3, Duration::from_secs(60)).unwrap();
        Self(threads.into_iter().map(rank).collect())
    }

    /// Assembles a prompt on all ranks. Returns, for each rank, the token count of each input and the
    /// assembled prompt.
    fn run(&self, prompt: &ChunkedPrompt) -> Vec<(Vec<usize>, AssembledPrompt)> {
        std::thread::scope(|scope| {
            let run = |(w, rank): &(World, CollectiveRank)| {
                let ranks: &dyn RankAgreement = rank;
                let assembly = Assembler { ranks: Some(ranks), ..w.assembler() }.assemble(prompt).unwrap();
                assert!(assembly.is_ready(), "ranks wait for no other request");
                (tokens_of(&assembly), assembly.commit().unwrap())
            };
            let threads: Vec<_> = self.0.iter().map(|of| scope.spawn(move || run(of))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// Assembles a prompt on all ranks, and checks that all ranks have the same inputs and hits. Returns the
    /// token count of each input, and the hits.
    fn agreed(&self, prompt: &ChunkedPrompt) -> (Vec<usize>, Vec<bool>) {
        let all: Vec<_> = self.run(prompt).into_iter().map(|(inputs, held)| (inputs, hits(&held))).collect();
        assert!(all.iter().all(|one| *one == all[0]), "{all:?}");
        self.0.iter().for_each(|(w, _)| w.check());
        all[0].clone()
    }
}

#[test]
fn rule_8_over_several_ranks_a_chunk_hits_on_all_or_on_none() {
    let ranks = Ranks::new(16);
    let both = prompt(&[2, 3]);
    assert_eq!(ranks.agreed(&both), (vec![5, 7, 7], vec![false, false]));
    assert_eq!(ranks.agreed(&both), (vec![], vec![true, true]));
    // Rank 1 evicts the older chunk.
    assert!(ranks.0[1].0.cache.evict_lru());
    let held = ranks.run(&both);
    for (rank, (inputs, held)) in held.iter().enumerate() {
        assert_eq!((&inputs[..], hits(held)), (&[7][..], vec![false, true]), "rank {rank}");
        // A rank that has the chunk cached recomputes it into the request's own blocks.
        assert_eq!(held.segments()[1].blocks[0].index() >= 32, rank == 1);
    }
    let m = ranks.0[0].0.cache.metrics();
    assert_eq!((m.hit_count, m.miss_count, m.uncached, m.tokens_reused), (3, 3, 1, 21));
    drop(held);
    assert_eq!(ranks.agreed(&both), (vec![], vec![true, true]), "rank 1 has stored it again");
}

#[test]
fn rule_8_a_rank_without_room_ends_the_request_on_all_and_nothing_is_held() {
    let mut ranks = Ranks::new(16);
    // The main pool of rank 1 has room for the system prompt only, and the main pool of rank 2 does not even
    // have that. A chunk of 80 tokens is larger than any chunk pool.
    let long = ChunkedPrompt::new(vec![1; 5], vec![vec![2; 80]], vec![9]).unwrap();
    for (rank, taken) in [(1, 30), (2, 31)] {
        let w = &mut ranks.0[rank].0;
        let id = w.main.create(kvcore::SequenceStart::default()).unwrap();
        w.main.grow(id, taken * BLOCK).unwrap();
        let errors = std::thread::scope(|scope| {
            let assemble = |(w, rank): &(World, CollectiveRank)| {
                let ranks: &dyn RankAgreement = rank;
                Assembler { ranks: Some(ranks), ..w.assembler() }.assemble(&long).unwrap_err()
            };
            let threads: Vec<_> = ranks.0.iter().map(|of| scope.spawn(move || assemble(of))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        for (of, error) in errors.iter().enumerate() {
            let own = matches!(error, kvchunk::Error::Core(kvcore::Error::OutOfBlocks { .. }));
            assert!(if of == rank { own } else { *error == kvchunk::Error::RankFailed }, "{of}: {error}");
        }
        ranks.0[rank].0.main.free(id).unwrap();
        for (w, _) in &ranks.0 {
            w.check();
            assert_eq!(w.main.pool().counts().free, 32, "nothing is held");
        }
    }
    assert_eq!(ranks.agreed(&long), (vec![5, 80], vec![false]), "the next request is answered");
}

#[test]
fn rule_8_ranks_compute_what_one_of_them_lacks_of_the_system_prompt_and_keep_it() {
    let ranks = Ranks::new(16);
    assert_eq!(ranks.agreed(&prompt(&[2])).0, [5, 7]);
    // Rank 2 loses its system prompt.
    let filler = |token| ChunkedPrompt::new(vec![token; 100], vec![vec![token; 4]], vec![9]).unwrap();
    let w = &ranks.0[2].0;
    drop(w.run(&filler(7)));
    drop(w.run(&filler(8)));
    assert_eq!(ranks.agreed(&prompt(&[2])), (vec![5], vec![true]));
    assert_eq!(ranks.agreed(&prompt(&[2])), (vec![], vec![true]), "rank 2 has kept it");
}

#[test]
fn rule_8_of_a_system_prompt_that_a_rank_has_cached_in_part_the_rest_is_computed_once() {
    let ranks = Ranks::new(16);
    // The first two blocks of the system prompt are also the first two blocks of another system prompt, which
    // only rank 1 has seen.
    let long = |end: u32| {
        let system = (0..8).chain([end; 3]).collect();
        ChunkedPrompt::new(system, vec![vec![2; 7]], vec![9]).unwrap()
    };
    let before = |rank: usize, prompt: &ChunkedPrompt| drop(ranks.0[rank].0.run(prompt));
    before(1, &long(70));
    before(2, &long(71));
    before(0, &long(71));
    // Ranks 0 and 2 have the whole system prompt, and rank 1 has only two of its blocks. On rank 1, the chunk
    // was computed in another context.
    assert_eq!(ranks.agreed(&long(71)).0, [3, 7]);
    assert_eq!(ranks.agreed(&long(71)), (vec![], vec![true]), "all have kept it");
    for (w, _) in &ranks.0 {
        let all = kvchunk::PrefixFill::new(w.main.kv_pool(), Some(w.root), long(71).system()).unwrap();
        assert_eq!(all.cached(), 11);
    }
}

#[test]
fn rule_8_a_piece_that_another_request_of_one_rank_computes_is_computed_on_all() {
    let ranks = Ranks::new(16);
    let w = &ranks.0[0].0;
    let elsewhere = w.assembler().assemble(&prompt(&[2])).unwrap();
    assert_eq!(ranks.agreed(&prompt(&[2])), (vec![5, 7], vec![false]));
    drop(elsewhere);
    assert_eq!(ranks.agreed(&prompt(&[2])).1, [false], "rank 0 has not kept it");
    assert_eq!(ranks.agreed(&prompt(&[2])).1, [true]);
}

/// An agreement that reads a cache's metrics each time and decides for the other ranks.
#[derive(Debug)]
struct Scraping<'a> {
    cache: &'a ChunkCacheManager,
    seen: Mutex<Vec<ChunkCacheMetrics>>,
    others_have_it: bool,
}

impl RankAgreement for Scraping<'_> {
    fn agree(&self, flags: &mut [bool]) -> kvchunk::Result<()> {
        self.seen.lock().unwrap().push(self.cache.metrics());
        // If there are two flags, the first one means that the only chunk is held, and the second one that it
        // is exact.
        if !self.others_have_it && flags.len() == 2 {
            flags[0] = false;
        }
        Ok(())
    }
}

#[test]
fn hits_are_counted_when_the_ranks_have_agreed_and_no_count_ever_falls() {
    let w = World::new(32, 16, ChunkCacheConfig::default());
    let short = ChunkedPrompt::new(vec![1], vec![vec![2; 7]], vec![9]).unwrap();
    drop(w.run(&short));
    let counts = |m: &ChunkCacheMetrics| {
        [m.lookup_count, m.hit_count, m.miss_count, m.approximate_hits, m.tokens_reused, m.uncached]
    };
    let mut last = counts(&w.cache.metrics());
    for (others_have_it, hits) in [(false, 0), (true, 1), (false, 1), (true, 2)] {
        let scraping = Scraping { cache: &w.cache, seen: Mutex::default(), others_have_it };
        let ranks: &dyn RankAgreement = &scraping;
        drop(Assembler { ranks: Some(ranks), ..w.assembler() }.assemble(&short).unwrap().commit().unwrap());
        let mut seen = scraping.seen.into_inner().unwrap();
        assert!(seen.len() > 1, "it was asked while the chunk was held");
        seen.push(w.cache.metrics());
        for metrics in &seen {
            let now = counts(metrics);
            assert!(now.iter().zip(&last).all(|(now, before)| now >= before), "{last:?}, then {now:?}");
            last = now;
        }
        let m = w.cache.metrics();
        assert_eq!((m.hit_count, m.tokens_reused), (hits, 7 * hits));
        assert_eq!(m.lookup_count, m.hit_count + m.miss_count);
    }
    assert_eq!(w.cache.metrics().uncached, 2);
    w.check();
}
