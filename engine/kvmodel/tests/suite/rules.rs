//! The rules of chunk reuse, one test each, named after the rule.

use crate::common::{Golden, Lab, Setup, distance, for_every, golden_name, reordered};
use kvchunk::{AssembledPrompt, ChunkedPrompt, PositionPlan, PositionReindexer, PositionStrategy, ReuseCell};
use kvcore::{KeyForm, SequenceInput, SequenceStart};
use rstest::rstest;

const EXACT: [ReuseCell; 3] =
    [ReuseCell::OVERLAPPED_WITH_SYSTEM, ReuseCell::OVERLAPPED_ALONE, ReuseCell::SEQUENTIAL_ALONE];

fn with_chunks(golden: &Golden, chunks: Vec<Vec<u32>>) -> ChunkedPrompt {
    ChunkedPrompt::new(golden.prompt.system().to_vec(), chunks, golden.prompt.question().to_vec()).unwrap()
}

#[test]
fn rule_1_the_separator_takes_no_position() {
    let (golden, mut lab) = Lab::golden("llama", Setup::default());
    let run = lab.run(&golden.prompt, ReuseCell::SEQUENTIAL_ALONE, true);
    // system 5, chunks 7, 4 and 9, without a gap
    assert_eq!(run.reports.iter().map(|r| r.position).collect::<Vec<_>>(), [5, 12, 16]);
}

for_every! {
    /// Checks each cell, with both forms of keys and every kind of format. The embedding always has the
    /// same regime, because frequencies are part of the key.
    fn rule_2_purity_bytes_depend_on_the_key_alone(
        name: every model,
        cell: every cell,
        #[values(KeyForm::Rotated, KeyForm::Unrotated)] keys: KeyForm,
        #[values("f32", "bf16", "int8:4", "fp8-e4m3")] format: &str
    ) {
        const LONGEST: usize = 40;
        let golden = Golden::load(name);
        let parts = golden.prompt.chunks().to_vec();
        let (chunk, absolute) = (parts[1].clone(), cell.strategy == PositionStrategy::Absolute);
        let run = |lab: &mut Lab, chunks: Vec<Vec<u32>>| {
            let prompt = with_chunks(&golden, chunks);
            let plan = PositionPlan::new(&prompt, cell, lab.model.config().max_positions).unwrap();
            let end = plan.question_position as usize + prompt.question().len();
            lab.run_and_generate(&prompt, cell, true, LONGEST - end)
        };
        // Returns the key and the bytes of chunk `at` in the last prompt, computed after the other prompts.
        let stored = |attended: bool, before: &[Vec<Vec<u32>>], target: Vec<Vec<u32>>, at: usize| {
            let format = format.parse().unwrap();
            let mut lab = Lab::new(name, Setup { format, keys, ..Setup::default() });
            if attended {
                lab.plain(&golden.prompt.flatten());
            }
            for earlier in before {
                drop(run(&mut lab, earlier.clone()));
            }
            let run = run(&mut lab, target);
            assert!(!run.reports[at].hit, "it was harvested");
            let piece = &run.held.holds()[at];
            (piece.chunk_hash(), lab.bytes(piece.block_ids()))
        };
        let alone = vec![chunk.clone()];
        let (key, first) = stored(false, &[], alone.clone(), 0);
        // After each of the two histories, one batch computes the chunk: once after other chunks, and once
        // after the same tokens under full attention, whose results must not be reused.
        let others = vec![parts[0].clone(), parts[2].clone()];
        let more = vec![parts[2].clone(), vec![5; 11], parts[0].clone()];
        let later = stored(false, std::slice::from_ref(&others), alone.clone(), 0);
        let other_history = stored(true, &[more], alone, 0);
        assert_eq!((later.0, other_history.0), (key, key));
        assert!(later.1 == other_history.1, "bit for bit for one batch shape");
        // A chunk at an absolute position has this key at that position only.
        let beside = if absolute { vec![chunk, vec![7; 9]] } else { vec![vec![7; 9], chunk] };
        let among = stored(false, &[others], beside, usize::from(!absolute));
        assert_eq!(among.0, key);
        for (what, bytes) in [("after others", later.1), ("beside others", among.1)] {
            assert_equal_to_rounding(format, &first, &bytes, what);
        }
    }
}

/// Checks that numbers in a format, rounded from sums in different orders, are nearly all equal and otherwise
/// one step apart.
fn assert_equal_to_rounding(format: &str, a: &[u8], b: &[u8], what: &str) {
    let floats = |bytes: &[u8]| -> Vec<f32> {
        match format {
            "bf16" => bytes
                .chunks_exact(2)
                .map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16))
                .collect(),
            _ => bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
        }
    };
    let (a, b) = (floats(a), floats(b));
    if format == "f32" {
        let gap = distance(&a, &b);
        assert!(gap < 1e-5, "{what}: {gap}");
        return;
    }
    // The step at the largest magnitude, with a margin for the effect that one layer's steps have on the
    // next layer.
    let step = match format {
        "bf16" => 1.0 / 128.0,
        "int8:4" => 1.0 / 127.0,
        _ => 1.0 / 8.0,
    };
    let largest = a.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let gap = distance(&a, &b);
    // For int8, differing codes are counted: a scale that is rounded the other way moves a number by far
    // less than one code.
    let group = if format == "int8:4" { 4 } else { 1 };
    let differ: usize = a
        .chunks(group)
        .zip(b.chunks(group))
        .map(|(a, b)| {
            let scale = a.iter().fold(0.0f32, |most, x| most.max(x.abs())) / 127.0;
            let limit = if format == "int8:4" { scale / 4.0 } else { 1e-5 };
            a.iter().zip(b).filter(|(x, y)| (*x - *y).abs() > limit).count()
        })
        .sum();
    assert!(gap <= step * largest, "{what}: {gap}, largest {largest}");
    assert!(differ * 20 <= a.len(), "{what}: {differ} of {} differ", a.len());
}

#[test]
fn rule_3_immutability_placements_write_nothing() {
    let (golden, mut lab) = Lab::golden("llama", Setup::default());
    let first = lab.run(&golden.prompt, ReuseCell::OVERLAPPED_ALONE, true);
    let blocks: Vec<_> = first.held.holds().iter().flat_map(|h| h.block_ids().iter().copied()).collect();
    let before = lab.bytes(&blocks);
    for i in 0..1000u32 {
        let mut chunks = golden.prompt.chunks().to_vec();
        chunks.rotate_left(i as usize % 3);
        let cell = [ReuseCell::OVERLAPPED_ALONE, ReuseCell::SEQUENTIAL_ALONE][i as usize % 2];
        let prompt = ChunkedPrompt::new(vec![i % 48; 1 + i as usize % 9], chunks, vec![i % 48]).unwrap();
        let run = lab.run(&prompt, cell, true);
        assert!(run.reports.iter().all(|r| r.hit));
    }
    assert!(before == lab.bytes(&blocks), "a thousand placements changed a byte");
}

#[test]
fn rule_3_two_live_requests_share_blocks_at_different_offsets() {
    let (golden, mut lab) = Lab::golden("llama3", Setup::default());
    let cell = ReuseCell::SEQUENTIAL_ALONE;
    let other = reordered(&golden.prompt);
    let alone = (
        Lab::new("llama3", Setup::default()).run(&golden.prompt, cell, true).logits,
        Lab::new("llama3", Setup::default()).run(&other, cell, true).logits,
    );
    let a = lab.run(&golden.prompt, cell, true);
    let b = lab.run(&other, cell, true);
    // chunk 1 of `a` is chunk 0 of `b`
    assert_eq!(a.held.holds()[1].block_ids(), b.held.holds()[0].block_ids());
    assert_ne!(a.reports[1].offset, b.reports[0].offset);
    assert!(distance(&a.logits, &alone.0) < 1e-5 && distance(&b.logits, &alone.1) < 1e-5);
    let again = lab.run(&golden.prompt, cell, true);
    assert!(distance(&again.logits, &alone.0) < 1e-5, "while the other request lives");
    drop((a, b, again));
    lab.assert_nothing_held();
}

#[rstest]
fn rule_3_concurrent_placements_equal_each_alone(#[values("llama", "mistral", "deepseek-v3")] name: &str) {
    let (golden, mut lab) = Lab::golden(name, Setup::default());
    let cell = ReuseCell::SEQUENTIAL_ALONE;
    let (ropes, root) = lab.regime(lab.model.config().max_positions);
    let reindexer = PositionReindexer::for_layers(&ropes);
    // The chunks follow system prompts of one to four tokens, in three different orders.
    let prompts = (0..4usize).map(|i| {
        let mut chunks = golden.prompt.chunks().to_vec();
        chunks.rotate_left(i % 3);
        ChunkedPrompt::new(vec![3; 1 + i], chunks, golden.prompt.question().to_vec()).unwrap()
    });
    let requests: Vec<(AssembledPrompt, SequenceInput)> = prompts
        .map(|prompt| {
            let assembly = lab.assembler(root, cell, &reindexer).assemble(&prompt).unwrap();
            lab.forward(&ropes, assembly.inputs());
            let (logical, position) = (assembly.plan().question_logical, assembly.plan().question_position);
            let held = assembly.commit().unwrap();
            let start = SequenceStart { logical, position };
            let (_, question) = lab.after(prompt.question(), start, held.segments().to_vec());
            (held, question)
        })
        .collect();
    let blocks = requests[0].0.holds()[1].block_ids();
    let offsets = requests.iter().map(|(held, _)| {
        let segment = held.segments().iter().find(|segment| segment.blocks == *blocks);
        segment.expect("all requests read it").position_offset
    });
    let mut offsets: Vec<i64> = offsets.collect();
    offsets.sort_unstable();
    offsets.dedup();
    assert_eq!(offsets.len(), 4, "each at an offset of its own");
    let alone: Vec<Vec<f32>> = requests
        .iter()
        .map(|(_, question)| lab.forward(&ropes, std::slice::from_ref(question)).remove(0))
        .collect();
    let (together, lab) = (std::sync::Barrier::new(requests.len()), &lab);
    std::thread::scope(|scope| {
        for ((_, question), alone) in requests.iter().zip(&alone) {
            let (together, ropes) = (&together, &ropes);
            scope.spawn(move || {
                let stream = lab.backend.stream().unwrap();
                let rounds = (0..20).map(|_| {
                    together.wait();
                    lab.forward_on(stream.as_ref(), ropes, std::slice::from_ref(question)).remove(0)
                });
                let rounds: Vec<Vec<f32>> = rounds.collect();
                assert!(rounds.iter().all(|logits| logits == alone));
            });
        }
    });
}

#[test]
fn rule_3_the_same_chunk_twice_is_two_segments_over_the_same_blocks() {
    for cell in EXACT {
        let golden = Golden::load("qwen2");
        let twice = golden.prompt.chunks()[0].clone();
        let prompt = with_chunks(&golden, vec![twice.clone(), golden.prompt.chunks()[1].clone(), twice]);
        let mut lab = Lab::new("qwen2", Setup::default());
        let separate = lab.run(&prompt, cell, false);
        let cold = lab.run(&prompt, cell, true);
        let hit = lab.run(&prompt, cell, true);
        for run in [&cold, &hit] {
            assert_eq!(run.held.holds()[0].block_ids(), run.held.holds()[2].block_ids());
            assert!(distance(&run.logits, &separate.logits) < 1e-5, "{cell:?}");
        }
        assert_eq!(lab.chunks.metrics().insertions, 2);
    }
}

#[test]
fn rule_5_rotation_keeps_length_under_yarn() {
    // In other engines, keys grow by the attention factor at each shift. Here, a shifted chunk gives
    // transformers' logits, for which the factor is applied to keys once.
    let (golden, mut lab) = Lab::golden("llama-yarn", Setup::default());
    assert!(lab.regime(1).0.layers()[0].attention_factor() > 1.1);
    for cell in [ReuseCell::OVERLAPPED_ALONE, ReuseCell::SEQUENTIAL_ALONE] {
        drop(lab.run(&reordered(&golden.prompt), cell, true));
        let run = lab.run(&golden.prompt, cell, true);
        assert!(run.reports.iter().all(|r| r.hit && r.offset > 0));
        assert!(distance(&run.logits, &golden.logits(golden_name(cell))) < 1e-4);
    }
}

/// Returns the golden prompt with `question` tokens at its end.
fn with_question(golden: &Golden, question: usize) -> ChunkedPrompt {
    let tokens = (0..question as u32).map(|i| i * 7 % 48).collect();
    let prompt = &golden.prompt;
    ChunkedPrompt::new(prompt.system().to_vec(), prompt.chunks().to_vec(), tokens).unwrap()
}

#[test]
fn rule_6_another_regime_is_a_miss_and_the_same_one_hits() {
    for (name, cell) in [
        ("llama-dynamic", ReuseCell::OVERLAPPED_WITH_SYSTEM),
        ("llama-dynamic", ReuseCell::SEQUENTIAL_ALONE),
        ("llama-longrope", ReuseCell::SEQUENTIAL_ALONE),
    ] {
        let (golden, mut lab) = Lab::golden(name, Setup::default());
        // The other prompt is one token shorter, which puts dynamic NTK in another regime. For LongRoPE,
        // it lacks two of the chunks and ends at 20 positions, within the original context.
        let other = match name {
            "llama-dynamic" => with_question(&golden, golden.prompt.question().len() - 1),
            _ => ChunkedPrompt::new(
                golden.prompt.system().to_vec(),
                golden.prompt.chunks()[2..].to_vec(),
                vec![1; 6],
            )
            .unwrap(),
        };
        drop(lab.run(&other, cell, true));
        let missed = lab.run(&golden.prompt, cell, true);
        assert!(missed.reports.iter().all(|r| !r.hit), "{name}: {:?}", missed.reports);
        assert_eq!(missed.reused, 0, "the system prompt of another regime is a miss too");
        let hit = lab.run(&golden.prompt, cell, true);
        assert!(hit.reports.iter().all(|r| r.hit));
        for (what, run) in [("another regime cached", &missed), ("the same", &hit)] {
            let gap = distance(&run.logits, &golden.logits(golden_name(cell)));
            assert!(gap < 1e-4, "{name}, {what}: {gap}");
        }
        let again = lab.run(&other, cell, true);
        assert!(again.reports.iter().all(|r| r.hit), "both regimes stay cached");
    }
}

#[test]
fn rule_6_a_request_has_the_regime_of_the_longest_position_it_may_reach() {
    let (golden, mut lab) = Lab::golden("llama-longrope", Setup::default());
    let cell = ReuseCell::OVERLAPPED_WITH_SYSTEM;
    // The prompt has 17 positions, and the original context has 20.
    let expected = golden.logits(golden_name(cell));
    let short = lab.run_and_generate(&golden.prompt, cell, true, 3);
    assert!(distance(&short.logits, &expected) < 1e-4);
    let long = lab.run_and_generate(&golden.prompt, cell, true, 4);
    assert!(long.reports.iter().all(|r| !r.hit) && long.reused == 0);
    assert!(distance(&long.logits, &expected) > 1e-2, "from the first token on");
}

#[rstest]
fn rule_7_oversized_chunks_are_split_for_storage_only(
    #[values("llama3", "llama-dynamic", "mistral", "deepseek-v3")] name: &str,
) {
    for cell in EXACT {
        for max_chunk_tokens in [1, 3, 4, 5] {
            let (golden, mut lab) =
                Lab::golden(name, Setup { max_chunk_tokens, chunk_blocks: 64, ..Setup::default() });
            let expected = golden.logits(golden_name(cell));
            let cold = lab.run(&golden.prompt, cell, true);
            let hit = lab.run(&golden.prompt, cell, true);
            assert!(hit.reports.iter().all(|r| r.hit) && hit.held.holds().len() > 3);
            for run in [&cold, &hit] {
                let gap = distance(&run.logits, &expected);
                assert!(gap < 1e-4, "{cell:?}, pieces of {max_chunk_tokens}: {gap}");
            }
        }
    }
}

#[test]
fn a_hit_copies_no_kv_byte() {
    let golden = Golden::load("llama");
    for cell in ReuseCell::ALL {
        let mut lab = Lab::new("llama", Setup::default());
        let earlier = match cell.strategy {
            PositionStrategy::Absolute => golden.prompt.clone(),
            _ => reordered(&golden.prompt),
        };
        drop(lab.run(&earlier, cell, true));
        let before = lab.backend.counters();
        drop(lab.run(&golden.prompt, cell, true));
        let moved = lab.backend.counters().since(&before);
        assert_eq!((moved.gather_bytes, moved.block_copy_bytes), (0, 0));
        let layout = lab.main.arena().layout();
        let row = layout.token_bytes() * layout.shape().num_layers;
        let question = golden.prompt.question().len() * row;
        assert_eq!(moved.scatter_bytes, question as u64, "only the question's own rows are written");
    }
}

#[rstest]
fn a_layer_with_the_cpu_backend_copies_nothing_across_the_border(
    #[values("llama", "deepseek-v3")] name: &str,
    #[values(false, true)] reuse: bool,
) {
    let (golden, mut lab) = Lab::golden(name, Setup::default());
    drop(lab.run(&golden.prompt, ReuseCell::OVERLAPPED_WITH_SYSTEM, reuse));
    let before = lab.backend.counters();
    drop(lab.run(&golden.prompt, ReuseCell::OVERLAPPED_WITH_SYSTEM, reuse));
    let moved = lab.backend.counters().since(&before);
    let layout = lab.main.arena().layout();
    let rows = moved.scatter_bytes as usize / (layout.token_bytes() * layout.shape().num_layers);
    let question = golden.prompt.question().len();
    assert_eq!(rows == question, reuse);
    assert_eq!((moved.host_write_bytes, moved.host_read_bytes, moved.tensor_copy_bytes), (0, 0, 0));
}

#[test]
fn without_room_for_chunks_the_answer_is_the_same_and_nothing_is_lost() {
    let (golden, mut lab) = Lab::golden("qwen3", Setup { chunk_blocks: 2, ..Setup::default() });
    let cell = ReuseCell::OVERLAPPED_WITH_SYSTEM;
    for _ in 0..2 {
        let run = lab.run(&golden.prompt, cell, true);
        assert!(distance(&run.logits, &golden.logits(golden_name(cell))) < 1e-4);
    }
    assert!(lab.chunks.metrics().uncached > 0);
    lab.assert_nothing_held();
}

#[test]
fn two_requests_that_compute_one_system_prompt_at_once_keep_its_blocks() {
    let (golden, mut lab) = Lab::golden("llama", Setup::default());
    let cell = ReuseCell::OVERLAPPED_WITH_SYSTEM;
    let (ropes, root) = lab.regime(lab.model.config().max_positions);
    let reindexer = PositionReindexer::for_layers(&ropes);
    let a = lab.assembler(root, cell, &reindexer).assemble(&golden.prompt).unwrap();
    let mut b = lab.assembler(root, cell, &reindexer).assemble(&golden.prompt).unwrap();
    assert!(b.inputs().is_empty() && b.waiters().count() == 1, "it waits for the system prompt");
    b.stop_waiting();
    b.try_advance(&lab.assembler(root, cell, &reindexer), &golden.prompt).unwrap();
    assert!(a.is_ready() && !b.is_ready(), "the chunks are computed once");
    assert_eq!((a.inputs().len(), b.inputs().len()), (4, 1));
    lab.forward(&ropes, &[a.inputs(), b.inputs()].concat());
    let a = a.commit().unwrap();
    b.advance(&lab.assembler(root, cell, &reindexer), &golden.prompt).unwrap();
    assert!(b.is_ready() && b.inputs().is_empty());
    assert!(b.reports().iter().all(|report| report.hit));
    let b = b.commit().unwrap();
    assert_eq!(a.segments()[0].blocks, b.segments()[0].blocks, "the first to end is the one that stays");
    let before = lab.bytes(&b.segments()[0].blocks);
    // Overwrite all freed blocks.
    for token in 0..8 {
        lab.plain(&[token; 40]);
    }
    assert!(before == lab.bytes(&b.segments()[0].blocks));
    drop((a, b));
    let run = lab.run(&golden.prompt, cell, true);
    assert!(run.reports.iter().all(|r| r.hit));
    assert!(distance(&run.logits, &golden.logits(golden_name(cell))) < 1e-4);
    drop(run);
    lab.assert_nothing_held();
}

#[test]
fn a_prompt_does_not_evict_its_own_chunks() {
    let golden = Golden::load("llama");
    let cell = ReuseCell::OVERLAPPED_WITH_SYSTEM;
    // The pool has room for chunks 1 and 2 (one and three blocks), but not for chunk 0 (two blocks) as
    // well.
    let mut lab = Lab::new("llama", Setup { chunk_blocks: 4, ..Setup::default() });
    let known = with_chunks(&golden, golden.prompt.chunks()[1..].to_vec());
    drop(lab.run(&known, cell, true));
    let run = lab.run(&golden.prompt, cell, true);
    assert_eq!(run.reports.iter().map(|r| r.hit).collect::<Vec<_>>(), [false, true, true]);
    assert_eq!(lab.chunks.metrics().evictions, 0);
    assert!(distance(&run.logits, &golden.logits(golden_name(cell))) < 1e-4);
}

#[test]
fn a_pass_that_wants_no_logits_fills_the_cache() {
    let (golden, mut lab) = Lab::golden("qwen2", Setup::default());
    let cell = ReuseCell::SEQUENTIAL_ALONE;
    let (ropes, root) = lab.regime(lab.model.config().max_positions);
    let reindexer = PositionReindexer::for_layers(&ropes);
    let assembly = lab.assembler(root, cell, &reindexer).assemble(&golden.prompt).unwrap();
    assert!(lab.forward(&ropes, assembly.inputs()).is_empty());
    drop(assembly.commit().unwrap());
    let run = lab.run(&golden.prompt, cell, true);
    assert!(run.reports.iter().all(|r| r.hit));
    assert!(distance(&run.logits, &golden.logits(golden_name(cell))) < 1e-4);
}
