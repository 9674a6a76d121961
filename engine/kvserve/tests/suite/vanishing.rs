//! Clients that vanish, counted in steps of the engine: their requests are in no step that begins afterwards.

use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvserve::{Limits, Server, ServerConfig};
use rstest::rstest;
use serde_json::{Value, json};

use crate::client::{Client, post};
use crate::common::{MODEL, assert_nothing_is_held, free_port, question, with};

/// Tries until `attempt` has a result, at most so often that it must have one.
fn wait_for<R>(what: &str, mut attempt: impl FnMut() -> Option<R>) -> R {
    for _ in 0..5000 {
        if let Some(result) = attempt() {
            return result;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("never: {what}");
}

/// Returns the number of blocks that requests hold.
fn held(engine: &kvengine::Engine) -> usize {
    let report = engine.report();
    [report.main, report.chunks].into_iter().flatten().map(|counts| counts.mutable + counts.shared).sum()
}

/// Starts a server that takes so many prompts at a time.
fn server_for(requests: usize) -> Server {
    let limits = Limits { requests, ..Limits::default() };
    with(None, ServerConfig { limits, ..free_port() })
}

fn chat(stream: bool) -> Value {
    question(json!({"ignore_eos": true, "max_tokens": 1500, "n": 4, "stream": stream}))
}

fn texts(stream: bool) -> Value {
    json!({"model": MODEL, "prompt": ["alba is", "diba is"], "ignore_eos": true, "max_tokens": 1500, "stream": stream})
}

#[rstest]
#[case::chat_in_a_stream("/v1/chat/completions", chat(true))]
#[case::chat_as_a_whole("/v1/chat/completions", chat(false))]
#[case::texts_in_a_stream("/v1/completions", texts(true))]
#[case::texts_as_a_whole("/v1/completions", texts(false))]
fn no_step_computes_anything_for_a_client_that_is_gone(#[case] path: &str, #[case] request: Value) {
    let server = server_for(if path == "/v1/completions" { 2 } else { 1 });
    let mut client = Client::new(server.address());
    client.request("POST", path, &[], request.to_string().as_bytes());
    let (holds_at, holds) = channel();
    let (gone_at, is_gone) = channel::<()>();
    let is_gone = Arc::new(Mutex::new(is_gone));
    std::thread::scope(|scope| {
        let (gone_at, server) = (gone_at, &server);
        // The engine stands still between two steps, while the request runs, until the server knows that the client is gone.
        // If the thread fails, its sender goes with it, so that nobody waits.
        let engine = scope.spawn(move || {
            wait_for("the request has blocks", || {
                let (holds_at, is_gone) = (holds_at.clone(), Arc::clone(&is_gone));
                server.with_engine(move |engine| {
                    let before = held(engine);
                    (before > 0).then(|| {
                        holds_at.send(before).unwrap();
                        // If the test fails, there is no signal.
                        let _ = is_gone.lock().unwrap().recv();
                        let step = engine.step().unwrap();
                        engine.check_invariants().unwrap();
                        (step, held(engine))
                    })
                })?
            })
        });
        assert!(holds.recv().unwrap() > 0);
        drop(client);
        // A place is free as soon as the request is cancelled, which needs no step.
        wait_for("the places are free", || {
            let asked = json!({"model": MODEL, "prompt": "alba"});
            (post(server.address(), "/tokenize", &asked).status == 200).then_some(())
        });
        gone_at.send(()).unwrap();
        let (step, held) = engine.join().unwrap();
        assert_eq!((step.tokens, step.running, step.waiting, held), (0, 0, 0, 0), "after one step");
    });
    assert_nothing_is_held(&server);
}
