//! Engines with the same model pull chunks from each other.

use std::sync::Arc;

use kvchunk::{LocalReplica, ReuseCell};
use kvcore::DType;
use kvengine::Engine;

use crate::asking::{ask_three, engine};
use crate::common::{Golden, distance, for_every};

/// Creates two engines that pull chunks from each other.
fn engines(name: &str) -> [Engine; 2] {
    let mut replicas = LocalReplica::group(2).into_iter();
    [(); 2].map(|()| {
        let mut engine = engine(name, DType::F32.into());
        let replica = replicas.next().unwrap();
        replica.serve(engine.chunks().unwrap(), &engine.replica_device());
        engine.join(Arc::new(replica));
        engine
    })
}

for_every! {
    fn what_one_has_computed_the_other_reads(
        #[values("llama", "mistral", "deepseek-v3")] name: &str,
        cell: every cell,
    ) {
        let golden = Golden::load(name);
        let [mut a, mut b] = engines(name);
        let first = ask_three(&mut a, &golden.prompt, cell);
        let second = ask_three(&mut b, &golden.prompt, cell);
        for (x, y) in first.logits.iter().zip(&second.logits) {
            assert!(distance(x, y) < 1e-4, "the same numbers, wherever they were computed");
        }
        let [of_a, of_b] = [&a, &b].map(|engine| engine.chunks().unwrap().metrics());
        assert_eq!((of_a.fetched, of_a.tokens_computed > 0), (0, true));
        assert_eq!((of_b.fetched, of_b.tokens_computed), (of_a.insertions, 0), "all has come from the other");
        assert!(second.chunks.iter().all(|chunk| chunk.hit && chunk.exact));
        let third = ask_three(&mut b, &golden.prompt, cell);
        assert!(third.chunks.iter().all(|chunk| chunk.hit));
        assert_eq!(b.chunks().unwrap().metrics().fetched, of_b.fetched, "it is here now");
        // The engine that gave the chunks may leave.
        drop(a);
        b.chunks().unwrap().clear();
        let alone = ask_three(&mut b, &golden.prompt, cell);
        assert!(alone.chunks.iter().all(|chunk| !chunk.hit));
        assert!(distance(&alone.logits[0], &first.logits[0]) < 1e-4);
        b.check_invariants().unwrap();
    }
}
