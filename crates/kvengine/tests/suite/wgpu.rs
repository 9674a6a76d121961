//! Many requests at once with their caches on a GPU.

use kvbackend_wgpu::WgpuBackend;
use kvengine::Scheduling;

use crate::crowd::{Read, alone, assert_nothing_held, assert_same, engine_on, mixed, run};

#[test]
fn requests_at_once_on_a_gpu_answer_as_each_alone_on_the_host() {
    let backend = match WgpuBackend::new() {
        Ok(backend) => backend,
        Err(reason) => return kvconform::skip(&reason),
    };
    let requests = mixed(32, 7);
    let scheduling = Scheduling { step_tokens: 64, ..Scheduling::default() };
    let mut engine = engine_on(backend, 64, scheduling, 1 << 20);
    let mut answers: Vec<_> = requests.iter().map(|r| engine.submit(r.clone()).unwrap()).collect();
    let mut reads: Vec<_> = requests.iter().map(Read::new).collect();
    engine.step().unwrap();
    answers[9].cancel();
    let (last, _) = run(&mut engine, &mut answers, &mut reads);
    assert!(last.preemptions > 0 && last.swaps > 0, "{last:?}");
    for (i, (read, request)) in reads.iter().zip(&requests).enumerate().filter(|(i, _)| *i != 9) {
        assert!(read.error.is_none(), "request {i}: {:?}", read.error);
        for (sample, expected) in alone(request).iter().enumerate() {
            let got = read.ends[sample].as_ref().unwrap();
            assert_same(got, expected, &format!("request {i}, sample {sample}"));
        }
    }
    assert!(reads[9].error.is_some());
    assert_nothing_held(&engine);
}
