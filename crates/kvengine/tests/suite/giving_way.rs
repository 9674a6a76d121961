//! Requests that give way: to host memory and back, or computed again, with the same answer.

use std::sync::Arc;
use std::time::Duration;

use kvbackend_cpu::CpuBackend;
use kvcore::Backend;
use kvengine::{Engine, PreemptionCosts, Request, Sampling, Scheduling, Step};
use kvmodel::PromptTokens;
use rstest::rstest;

use crate::crowd::{Read, alone, assert_nothing_held, assert_same, engine_on, run};
use crate::faulty::Faulty;

const SCHEDULING: Scheduling = Scheduling { step_tokens: 64, running: 64, watermark: 1 };
/// The costs at which everything, or nothing, goes to host memory.
const MOVING_IS_FREE: PreemptionCosts =
    PreemptionCosts { token: Duration::from_secs(1), block: Duration::ZERO };
const COMPUTING_IS_FREE: PreemptionCosts =
    PreemptionCosts { token: Duration::ZERO, block: Duration::from_secs(1) };

/// Returns requests that together need three times the blocks of a small engine. One has four samples.
fn requests() -> Vec<Request> {
    let of = |i: u32| {
        let prompt = (0..10 + i).map(|j| 3 + (i * 7 + j * 5) % 40).collect();
        let sampling = Sampling { temperature: if i == 3 { 0.8 } else { 0.0 }, ..Sampling::default() };
        let samples = if i == 3 { 4 } else { 1 };
        let ignore_end = true;
        let request = Request::new(PromptTokens::Plain(prompt));
        Request { max_new_tokens: 20, keep_logits: true, samples, sampling, ignore_end, ..request }
    };
    (0..6).map(of).collect()
}

/// Answers all requests, and checks that each is answered as alone.
fn serve(engine: &mut Engine) -> Step {
    let requests = requests();
    let mut answers: Vec<_> = requests.iter().map(|r| engine.submit(r.clone()).unwrap()).collect();
    let mut reads: Vec<_> = requests.iter().map(Read::new).collect();
    let (last, _) = run(engine, &mut answers, &mut reads);
    for (i, (read, request)) in reads.iter().zip(&requests).enumerate() {
        assert!(read.error.is_none(), "request {i}: {:?}", read.error);
        for (sample, expected) in alone(request).iter().enumerate() {
            let got = read.ends[sample].as_ref().unwrap();
            assert_same(got, expected, &format!("request {i}, sample {sample}"));
        }
    }
    assert_nothing_held(engine);
    last
}

fn small(backend: Arc<dyn Backend>, swap_memory: usize) -> Engine {
    engine_on(backend, 36, SCHEDULING, swap_memory)
}

#[rstest]
#[case("moving costs nothing", MOVING_IS_FREE, 1 << 20, true)]
#[case("computing costs nothing", COMPUTING_IS_FREE, 1 << 20, false)]
#[case("no host memory", MOVING_IS_FREE, 0, false)]
#[case("host memory for less than a block", MOVING_IS_FREE, 1, false)]
fn what_costs_less_is_done(
    #[case] what: &str,
    #[case] costs: PreemptionCosts,
    #[case] memory: usize,
    #[case] swaps: bool,
) {
    let mut engine = small(CpuBackend::new(), memory);
    engine.set_preemption_costs(costs);
    let last = serve(&mut engine);
    assert!(last.preemptions > 2, "{what}: {last:?}");
    assert_eq!(last.swaps > 0, swaps, "{what}: {last:?}");
    if swaps {
        assert!(2 * last.swaps > last.preemptions, "{what}: all that have computed something: {last:?}");
    }
}

#[test]
fn what_does_not_fit_into_host_memory_is_computed_again() {
    let backend = CpuBackend::new();
    let one = small(backend.clone(), 0);
    let block = one.cache().arena().layout().block_bytes();
    let mut engine = small(backend, 9 * block);
    engine.set_preemption_costs(MOVING_IS_FREE);
    let last = serve(&mut engine);
    assert!(last.swaps > 0 && last.swaps < last.preemptions, "{last:?}");
    assert_eq!(engine.report().swapped.unwrap().total, 9);
}

/// The device may refuse any copy, on the way out and on the way back: the request is computed again.
#[test]
fn a_refused_copy_costs_time_and_nothing_else() {
    for passing in 0.. {
        let backend = Faulty::new();
        let mut engine = small(backend.clone(), 1 << 20);
        engine.set_preemption_costs(MOVING_IS_FREE);
        backend.refuse_only("swap_blocks", passing);
        serve(&mut engine);
        if backend.disarm() {
            assert!(passing > 6, "both ways were refused: {passing} copies");
            break;
        }
        assert!(backend.refused().contains("swap_blocks"));
    }
}
