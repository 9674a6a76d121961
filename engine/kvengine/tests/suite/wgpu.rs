//! Many requests at once, with their caches on a GPU.

use kvbackend_wgpu::WgpuBackend;
use kvengine::Scheduling;

use crate::crowd::{assert_each_as_alone, engine_on, mixed};

#[test]
fn requests_at_once_on_a_gpu_answer_as_each_alone_on_the_host() {
    let backend = match WgpuBackend::new() {
        Ok(backend) => backend,
        Err(reason) => return kvconform::skip(&reason),
    };
    let requests = mixed(32, 7);
    let scheduling = Scheduling { step_tokens: 64, ..Scheduling::default() };
    let mut engine = engine_on(backend, 64, scheduling, 1 << 20);
    let last = assert_each_as_alone(&mut engine, &requests);
    assert!(last.preemptions > 0 && last.swaps > 0, "{last:?}");
}
