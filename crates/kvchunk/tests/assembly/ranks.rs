//! Several ranks compute a prompt together.

use super::*;
use kvchunk::LocalRank;
use std::time::Duration;

/// Three ranks, each a thread with caches of its own.
struct Ranks(Vec<(World, LocalRank)>);

impl Ranks {
    fn new(chunks: u32) -> Self {
        let ranks = LocalRank::group(3, Duration::from_secs(20));
        Self(
            ranks
                .into_iter()
                .map(|rank| (World::new(32, chunks, ChunkCacheConfig::default()), rank))
                .collect(),
        )
    }

    /// Assembles a prompt on all ranks; on each the tokens of its inputs, and what came of every chunk.
    fn run(&self, prompt: &ChunkedPrompt) -> Vec<(Vec<usize>, AssembledPrompt)> {
        std::thread::scope(|scope| {
            let run = |(w, rank): &(World, LocalRank)| {
                let ranks: &dyn RankAgreement = rank;
                let assembly = Assembler { ranks: Some(ranks), ..w.assembler() }.assemble(prompt).unwrap();
                assert!(assembly.is_ready(), "ranks wait for no other request");
                (tokens_of(&assembly), assembly.commit().unwrap())
            };
            let threads: Vec<_> = self.0.iter().map(|of| scope.spawn(move || run(of))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// The same, of which all ranks must say the same.
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
    // Of rank 1 the older chunk goes.
    assert!(ranks.0[1].0.cache.evict_lru());
    let held = ranks.run(&both);
    for (rank, (inputs, held)) in held.iter().enumerate() {
        assert_eq!((&inputs[..], hits(held)), (&[7][..], vec![false, true]), "rank {rank}");
        // Where it is cached it is computed beside what is cached, into blocks of the request's own.
        assert_eq!(held.segments()[1].blocks[0].index() >= 32, rank == 1);
    }
    let m = ranks.0[0].0.cache.metrics();
    assert_eq!((m.hit_count, m.miss_count, m.uncached, m.tokens_reused), (3, 3, 1, 21));
    drop(held);
    assert_eq!(ranks.agreed(&both), (vec![], vec![true, true]), "rank 1 has stored it again");
}

#[test]
fn rule_8_ranks_that_cached_another_part_of_the_system_prompt_compute_it() {
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
fn rule_8_what_another_request_of_one_rank_computes_is_computed_on_all() {
    let ranks = Ranks::new(16);
    let w = &ranks.0[0].0;
    let elsewhere = w.assembler().assemble(&prompt(&[2])).unwrap();
    assert_eq!(ranks.agreed(&prompt(&[2])), (vec![5, 7], vec![false]));
    drop(elsewhere);
    assert_eq!(ranks.agreed(&prompt(&[2])).1, [false], "rank 0 has not kept it");
    assert_eq!(ranks.agreed(&prompt(&[2])).1, [true]);
}
