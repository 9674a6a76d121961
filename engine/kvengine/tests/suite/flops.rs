//! Compares the counted operations with a formula over the prompt's rows, for a dense Llama.

use kvchunk::{ComputeMode, ReuseCell};
use kvengine::{Generation, Request};
use rstest::rstest;

use crate::asking::{ask, engine, with};
use crate::common::{Golden, for_every, golden_name};

/// The extents of the golden Llamas: `hidden`, `heads × head_dim`, `kv_heads × head_dim`, width of the
/// feed-forward layer, vocabulary.
const H: u64 = 32;
const Q: u64 = 4 * 8;
const KV: u64 = 2 * 8;
const F: u64 = 40;
const VOCABULARY: u64 = 48;

/// Counts the multiplications and additions of a pass. `seen` has one number per row: the number of tokens
/// that the row sees, including itself. Only the last row's logits are needed, so only this row is computed
/// to the end of the last layer.
fn pass(layers: u64, seen: &[u64]) -> u64 {
    let (rows, all, last) = (seen.len() as u64, seen.iter().sum::<u64>(), *seen.last().unwrap());
    let whole = projections(rows, rows) + attention(all) + finish(rows);
    2 * ((layers - 1) * whole + projections(rows, 1) + attention(last) + finish(1) + H * VOCABULARY)
}

/// Counts the multiplications to project `rows` rows to keys and values, and `asking` rows to queries.
fn projections(rows: u64, asking: u64) -> u64 {
    rows * H * 2 * KV + asking * H * Q
}

/// Counts the multiplications for the scores and the sum of values, for `pairs` pairs of a row and a token
/// that it sees.
fn attention(pairs: u64) -> u64 {
    2 * Q * pairs
}

/// Counts the multiplications for the projection of the attention output, and for the three matrices of the
/// feed-forward layer.
fn finish(rows: u64) -> u64 {
    rows * (Q * H + 3 * H * F)
}

/// The golden prompt: a system prompt of 5 tokens, chunks of 7, 4 and 9, and a question of 3.
const SYSTEM: u64 = 5;
const CHUNKS: [u64; 3] = [7, 4, 9];
const CONTEXT: u64 = SYSTEM + 20;
const ALL: u64 = CONTEXT + 3;

/// Returns the number of tokens that each row sees if it sees everything before it.
fn causal(rows: impl IntoIterator<Item = u64>) -> Vec<u64> {
    rows.into_iter().map(|index| index + 1).collect()
}

/// Returns the indices of the first `k` tokens of each chunk except the first `skip` chunks.
fn firsts(k: u64, skip: usize) -> impl Iterator<Item = u64> {
    let starts = CHUNKS.iter().scan(SYSTEM, |next, len| {
        let start = *next;
        *next += len;
        Some((start, *len))
    });
    starts.skip(skip).flat_map(move |(start, len)| start..start + k.min(len))
}

/// Returns the second answer, which finds everything cached.
fn hit(name: &str, strategy: &str, cell: ReuseCell) -> Generation {
    let golden = Golden::load(name);
    let mut engine = engine(name, "f32".parse().unwrap());
    ask(&mut engine, &golden.prompt, with("none", cell));
    let got = ask(&mut engine, &golden.prompt, with(strategy, cell));
    assert_eq!(got.cached_tokens as u64, CONTEXT, "to the token");
    got
}

#[test]
fn full_attention_costs_what_its_rows_see() {
    let golden = Golden::load("llama");
    let mut engine = engine("llama", "f32".parse().unwrap());
    let full = |request: &mut Request| request.full_attention = true;
    let got = ask(&mut engine, &golden.prompt, full);
    assert_eq!(got.prefill_flops, pass(2, &causal(0..ALL)));
    // Computed by hand: 57,344 + 25,984 + 136,192 multiplications in the first layer, 29,696 + 1,792 + 4,864
    // in the last one, and 1,536 in the head.
    assert_eq!(got.prefill_flops, 2 * 257_408);
}

for_every! {
    fn computed_chunks_see_the_tokens_of_their_mode(cell: every cell) {
        let golden = Golden::load("llama");
        let cold = ask(&mut engine("llama", "f32".parse().unwrap()), &golden.prompt, with("none", cell));
        let before = if cell.mode == ComputeMode::WithSystem { SYSTEM } else { 0 };
        let chunks = CHUNKS.iter().flat_map(|len| causal(before..before + len));
        let seen: Vec<u64> = causal(0..SYSTEM).into_iter().chain(chunks).chain(causal(CONTEXT..ALL)).collect();
        assert_eq!(cold.prefill_flops, pass(2, &seen));
        assert_eq!(
            hit("llama", "none", cell).prefill_flops,
            pass(2, &causal(CONTEXT..ALL)),
            "the question alone"
        );
    }
}

#[rstest]
// In *alone* mode, the first chunk has not seen the system prompt.
#[case(ReuseCell::SEQUENTIAL_ALONE, "link:2", firsts(2, 0).collect())]
#[case(ReuseCell::SEQUENTIAL_WITH_SYSTEM, "link:2", firsts(2, 1).collect())]
#[case(ReuseCell::SEQUENTIAL_WITH_SYSTEM, "link:5", firsts(5, 1).collect())]
#[case(ReuseCell::SEQUENTIAL_ALONE, "full", (SYSTEM..CONTEXT).collect())]
#[case(ReuseCell::SEQUENTIAL_WITH_SYSTEM, "full", (SYSTEM..CONTEXT).collect())]
fn recomputed_tokens_cost_what_they_see(
    #[case] cell: ReuseCell,
    #[case] strategy: &str,
    #[case] recomputed: Vec<u64>,
) {
    let got = hit("llama", strategy, cell);
    assert_eq!(got.recomputed_tokens, recomputed.len());
    assert_eq!(got.prefill_flops, pass(2, &causal(recomputed.into_iter().chain(CONTEXT..ALL))));
}

#[rstest]
fn a_blend_costs_all_tokens_up_to_its_check_and_the_chosen_ones_from_there_on(
    #[values(1, 2, 3)] layer: u64,
    #[values(ReuseCell::SEQUENTIAL_ALONE, ReuseCell::SEQUENTIAL_WITH_SYSTEM)] cell: ReuseCell,
) {
    let chosen = Golden::load("llama-deep").ids(&format!("blend_chosen.{}.{layer}", golden_name(cell)));
    let got = hit("llama-deep", &format!("blend:0.4@{layer}:both"), cell);
    assert_eq!((got.recomputed_tokens, chosen.len()), (8, 8));
    let first = if cell.mode == ComputeMode::WithSystem { SYSTEM + CHUNKS[0] } else { SYSTEM };
    let candidates = causal(first..ALL);
    let rows = candidates.len() as u64;
    let down = layer * (projections(rows, rows) + attention(candidates.iter().sum()) + finish(rows));
    // At the check, all tokens are projected. The chosen tokens and the question continue, and only one row
    // is computed to the end of the last layer.
    let on = causal(chosen.iter().map(|&token| SYSTEM + u64::from(token)).chain(CONTEXT..ALL));
    let (going, pairs) = (on.len() as u64, on.iter().sum());
    let check = projections(rows, rows);
    let ends = |last: bool| if last { attention(ALL) + finish(1) } else { attention(pairs) + finish(going) };
    let after: u64 =
        (layer + 1..4).map(|at| projections(going, if at == 3 { 1 } else { going }) + ends(at == 3)).sum();
    assert_eq!(got.prefill_flops, 2 * (down + check + ends(layer == 3) + after + H * VOCABULARY));
}
