//! Recomputation by deviation, with shares between 0 and 1. The reference is one pass in which tokens that
//! were not chosen keep their stored keys and values, starting at the layer of the check
//! (`proof/goldens/models/blending.py`).

use std::sync::{Arc, Mutex};

use kvchunk::{
    ChunkSpan, ChunkedPrompt, DeviationOf, Evidence, Findings, Recompute, RecomputeStrategy, ReuseCell,
    TokenSelection,
};
use rstest::rstest;

use crate::asking::{ask, by, engine, last, spoil, with};
use crate::common::{Golden, distance, for_every, golden_name};

/// A strategy that chooses tokens like a blend and remembers its choice. Without a blend, it chooses the
/// given tokens.
#[derive(Debug)]
pub(crate) struct Spy {
    blend: Option<Recompute>,
    chosen: Mutex<Vec<Vec<u32>>>,
    found: Mutex<Findings>,
}

impl Spy {
    pub(crate) fn on(blend: &str) -> Arc<Self> {
        let blend = Some(blend.parse().unwrap());
        Arc::new(Self { blend, chosen: Mutex::default(), found: Mutex::default() })
    }

    pub(crate) fn told(chosen: Vec<Vec<u32>>) -> Arc<Self> {
        Arc::new(Self { blend: None, chosen: Mutex::new(chosen), found: Mutex::default() })
    }

    pub(crate) fn chosen(&self) -> Vec<Vec<u32>> {
        self.chosen.lock().unwrap().clone()
    }

    /// Returns the findings that the strategy received.
    pub(crate) fn found(&self) -> Findings {
        self.found.lock().unwrap().clone()
    }

    fn deviations(&self) -> Vec<Vec<f32>> {
        self.found().deviations.unwrap().chunks().to_vec()
    }
}

impl RecomputeStrategy for Spy {
    fn name(&self) -> String {
        "spy".to_owned()
    }
    fn evidence(&self) -> Evidence {
        self.blend.as_ref().map(RecomputeStrategy::evidence).unwrap_or_default()
    }
    fn select(&self, chunks: &[ChunkSpan], found: &Findings) -> TokenSelection {
        let Some(blend) = &self.blend else { return TokenSelection::new(self.chosen()) };
        let selection = blend.select(chunks, found);
        *self.found.lock().unwrap() = found.clone();
        *self.chosen.lock().unwrap() = selection.chunks().to_vec();
        selection
    }
}

for_every! {
    #[case("llama-deep", 1)]
    #[case("llama-deep", 2)]
    #[case("llama-deep", 3)]
    #[case("llama-yarn", 1)]
    #[case("qwen3", 1)]
    #[case("mistral", 1)]
    #[case("gemma3", 3)]
    #[case("deepseek-v3", 1)]
    fn a_blend_between_its_ends_equals_one_pass_over_stored_and_fresh_tokens(
        #[case] name: &str,
        #[case] layer: usize,
        cell: every cell,
    ) {
        let golden = Golden::load(name);
        let of = |what: &str| format!("{what}.{}.{layer}", golden_name(cell));
        let mut engine = engine(name, "f32".parse().unwrap());
        let vocabulary = engine.model().config().vocab_size;
        // In the first round nothing is cached, and in the second round everything is.
        for round in 0..2 {
            let spy = Spy::on(&format!("blend:0.4@{layer}:both"));
            // The second token sees the KV that is cached after the blend, in every layer.
            let got = ask(&mut engine, &golden.prompt, |request| {
                by(&spy, cell)(request);
                request.max_new_tokens = 2;
            });
            assert_eq!(got.chunks.iter().all(|chunk| chunk.hit), round == 1);
            let starts = golden.prompt.chunks().iter().scan(0, |next, chunk| {
                let start = *next;
                *next += chunk.len() as u32;
                Some(start)
            });
            let chosen = spy.chosen();
            let flat: Vec<u32> = chosen
                .iter()
                .zip(starts)
                .flat_map(|(tokens, start)| tokens.iter().map(move |t| start + t))
                .collect();
            assert_eq!(flat, golden.ids(&of("blend_chosen")), "round {round}: the tokens that deviate most");
            assert_eq!(got.recomputed_tokens, flat.len());
            for (logits, what) in got.logits.iter().zip(["blend", "blend_next"]) {
                let expected = golden.logits(&of(what));
                let gap = distance(logits, last(&expected, vocabulary));
                println!("| {name} | {}@{layer} | f32 | {what} | {gap:.3e} |", golden_name(cell));
                assert!(gap < 1e-4, "round {round}, {what}: {gap}");
            }
            assert_eq!(got.logits.len(), 2);
        }
    }

    fn a_blend_of_documents_that_are_full_attentions_already_changes_nothing(
        cell: every cell,
        #[values(1, 2)] documents: usize,
    ) {
        // If chunks see the system prompt, the first of two chunks has no deviations, nor does a single
        // chunk.
        let golden = Golden::load("llama-deep");
        let chunks = golden.prompt.chunks()[..documents].to_vec();
        let (system, question) = (golden.prompt.system().to_vec(), golden.prompt.question().to_vec());
        let prompt = ChunkedPrompt::new(system, chunks, question).unwrap();
        let mut engine = engine("llama-deep", "f32".parse().unwrap());
        for round in 0..2 {
            for layer in [0, 1, 3] {
                let spy = Spy::on(&format!("blend:0.4@{layer}:both"));
                let got = ask(&mut engine, &prompt, by(&spy, cell));
                let asked = spy.chosen().iter().map(Vec::len).sum::<usize>();
                assert!(got.recomputed_tokens <= asked, "round {round}, layer {layer}");
                if documents == 1 && got.recomputed_tokens == 0 {
                    let plain = ask(&mut engine, &prompt, with("none", cell));
                    assert!(distance(&got.logits[0], &plain.logits[0]) < 1e-5, "round {round}, layer {layer}");
                }
            }
        }
    }
}

#[rstest]
fn deviations_are_of_the_requested_kind(
    #[values("llama", "deepseek-v3")] name: &str,
    #[values("f32", "bf16")] format: &str,
) {
    let (golden, cell) = (Golden::load(name), ReuseCell::OVERLAPPED_WITH_SYSTEM);
    let of = |what: &str, spoilt: [bool; 2]| {
        let mut engine = engine(name, format.parse().unwrap());
        ask(&mut engine, &golden.prompt, with("none", cell));
        // The fresh rows of the check layer depend on the first chunk below that layer, which is unchanged.
        spoil(&engine, 1..2, spoilt);
        let spy = Spy::on(&format!("blend:0.4@1:{what}"));
        ask(&mut engine, &golden.prompt, by(&spy, cell));
        spy.deviations()
    };
    for (what, of_this, of_the_other) in
        [("keys", [true, false], [false, true]), ("values", [false, true], [true, false])]
    {
        let right = of(what, [false, false]);
        assert!(right.iter().flatten().any(|deviation| *deviation > 0.0));
        assert_eq!(of(what, of_the_other), right, "{what} are what they were");
        assert_ne!(of(what, of_this), right, "{what} are zeros");
        assert_ne!(of("both", of_this), of("both", [false, false]));
    }
}

for_every! {
    fn a_blend_at_the_first_layer_equals_the_same_tokens_chosen_by_hand(
        #[values("llama", "qwen3", "mistral", "deepseek-v3")] name: &str,
        cell: moving cell,
    ) {
        // At layer 0, the tokens are chosen before any later layer is computed. A blend therefore computes
        // exactly the same for its chosen tokens as any other strategy.
        let golden = Golden::load(name);
        let mut engine = engine(name, "f32".parse().unwrap());
        let mut run = |strategy: &Arc<Spy>| ask(&mut engine, &golden.prompt, by(strategy, cell));
        let choosing = Spy::on("blend:0.4@0:both");
        let blended = run(&choosing);
        let expected = run(&Spy::told(choosing.chosen()));
        assert!(blended.recomputed_tokens > 0);
        assert!(expected.recomputed_tokens >= blended.recomputed_tokens);
        let gap = distance(&blended.logits[0], &expected.logits[0]);
        assert!(gap < 1e-4, "{name} {cell:?}: {gap}");
    }
}

#[rstest]
fn deeper_checkpoints_cost_more_and_move_rows(
    #[values("llama", "deepseek-v3")] name: &str,
    #[values("f32", "bf16")] format: &str,
) {
    let golden = Golden::load(name);
    let mut engine = engine(name, format.parse().unwrap());
    let cell = ReuseCell::OVERLAPPED_WITH_SYSTEM;
    let mut run = |strategy| ask(&mut engine, &golden.prompt, with(strategy, cell));
    let none = run("none");
    let costs: Vec<_> = ["none", "link:1", "blend:0.3@0", "blend:0.3@1", "full"]
        .map(&mut run)
        .into_iter()
        .map(|got| (got.prefill_flops, got.recomputed_tokens))
        .collect();
    assert!(costs.windows(2).all(|pair| pair[0].0 < pair[1].0), "{costs:?}");
    assert_eq!((costs[0].1, costs[1].1, costs[2].1), (0, 2, costs[3].1));
    assert!(costs[0].0 < none.prefill_flops, "chunks were computed the first time");
    let past = engine.model().config().num_layers();
    let mut request = kvengine::Request::new(kvengine::PromptTokens::Chunked(golden.prompt.clone()));
    request.recompute = Arc::new(Recompute::Blend { share: 0.5, layer: past, of: DeviationOf::default() });
    assert!(engine.generate(&request, &mut ()).unwrap_err().to_string().contains("layer"));
    engine.check_invariants().unwrap();
}
