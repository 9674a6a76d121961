//! Registered documents that are removed, replaced or expire, or whose caches fall asleep, while they are computed.

use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use kvbackend_cpu::CpuBackend;
use kvengine::{Engine, EngineConfig, Scheduling};
use kvmodel::ModelDirectory;
use kvserve::{ServedModel, Server};
use serde_json::{Value, json};

use super::arrivals::posted;
use super::client::{call, get, post};
use super::common::{MODEL, QUESTION, SYSTEM, assert_nothing_is_held, free_port, loaded, reuse, small};

/// The number of tokens per step, so that a document takes many steps.
const STEP: usize = 8;

/// The longest time to wait for anything.
const PATIENCE: Duration = Duration::from_secs(60);

/// Starts a server that computes documents in many steps.
fn slow() -> Server {
    let ModelDirectory { model, codec, .. } = loaded();
    let scheduling = Scheduling { step_tokens: STEP, ..Scheduling::default() };
    let config = EngineConfig { scheduling, ..small() };
    let engine = Engine::new(model, CpuBackend::new(), codec.digest(), &config).unwrap();
    let model = ServedModel { engine, codec, names: vec![MODEL.to_owned()], reuse: Some(reuse()) };
    Server::start(model, free_port()).unwrap()
}

/// Returns a document of about a thousand tokens.
fn text(name: &str) -> String {
    format!("{name} is red . ").repeat(200)
}

fn put(address: SocketAddr, name: &str, more: Value) {
    let mut body = json!({"text": text(name)});
    super::common::add(&mut body, more);
    let answer = call(address, "PUT", "/v1/documents/one", &[], body.to_string().as_bytes());
    assert!(answer.status < 300, "{answer:?}");
}

fn shown(address: SocketAddr) -> Value {
    get(address, "/v1/documents/one").json()
}

fn delete(address: SocketAddr) {
    assert_eq!(call(address, "DELETE", "/v1/documents/one", &[], b"").status, 200);
}

fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < until, "{what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Returns whether a request computes documents.
fn computes(engine: &Engine) -> bool {
    engine.report().chunks.unwrap().mutable > 0
}

/// Registers a document that is not in the cache with a system prompt, and runs `act` between two steps that compute it.
/// Registers it again if it was computed, or has expired, before it was caught.
fn while_computing<R: Send + 'static>(
    server: &Server,
    more: Value,
    act: impl FnOnce(SocketAddr, &mut Engine) -> R + Send + 'static,
) -> R {
    let address = server.address();
    let mut registration = json!({"system": SYSTEM});
    super::common::add(&mut registration, more);
    let until = Instant::now() + PATIENCE;
    let mut waiting = act;
    loop {
        call(address, "DELETE", "/v1/documents/one", &[], b"");
        assert_eq!(post(address, "/reset_prefix_cache", &json!({})).status, 200);
        put(address, "alba", registration.clone());
        while shown(address)["pinned"] == false {
            let catch = move |engine: &mut Engine| {
                if computes(engine) { Ok(waiting(address, engine)) } else { Err(waiting) }
            };
            match server.with_engine(catch).unwrap() {
                Ok(result) => return result,
                Err(act) => waiting = act,
            }
            assert!(Instant::now() < until, "it was not caught");
        }
        assert!(Instant::now() < until, "it was never caught");
    }
}

/// Checks that the document is soon neither pinned nor held, and that the server computes and pins others.
fn assert_forgotten(server: &Server) {
    let address = server.address();
    wait_until("it is computed for ever", || !server.with_engine(|engine| computes(engine)).unwrap());
    // The document could be pinned after it was computed.
    let until = Instant::now() + Duration::from_millis(100);
    while Instant::now() < until {
        assert_ne!(shown(address)["pinned"], true);
        thread::sleep(Duration::from_millis(5));
    }
    assert_nothing_is_held(server);
    assert_goes_on(server);
}

/// Checks that the server answers, and computes and pins another document.
fn assert_goes_on(server: &Server) {
    let address = server.address();
    let messages = [("system", SYSTEM), ("user", QUESTION.0)];
    let messages = messages.map(|(role, content)| json!({"role": role, "content": content}));
    let ask = json!({"messages": messages, "max_tokens": 2});
    assert_eq!(post(address, "/v1/chat/completions", &ask).status, 200);
    put(address, "bora", json!({"system": SYSTEM}));
    wait_until("another document is never pinned", || shown(address)["pinned"] == true);
    delete(address);
    assert_nothing_is_held(server);
}

#[test]
fn a_document_that_is_deleted_while_it_is_computed_is_not_pinned() {
    let server = slow();
    while_computing(&server, json!({}), |address, _| delete(address));
    assert_forgotten(&server);
}

#[test]
fn a_document_that_is_deleted_when_it_has_been_computed_is_not_pinned() {
    let server = slow();
    while_computing(&server, json!({}), |address, engine| {
        // The answer ends, and what pins the document waits for the engine's thread.
        while !engine.step().unwrap().is_idle() {}
        wait_until("its costs are not noted", || !shown(address)["computed_ms"].is_null());
        thread::sleep(Duration::from_millis(50));
        delete(address);
    });
    assert_forgotten(&server);
}

#[test]
fn a_document_that_is_registered_again_while_it_is_computed_is_pinned_as_the_last_registration_says() {
    let server = slow();
    let address = server.address();
    while_computing(&server, json!({}), |address, _| put(address, "alba", json!({})));
    assert_forgotten(&server);
    while_computing(&server, json!({}), |address, _| put(address, "cedo", json!({})));
    assert_forgotten(&server);
    // The same text is computed again, in a moment.
    while_computing(&server, json!({}), |address, _| put(address, "alba", json!({"system": SYSTEM})));
    wait_until("the same text is not pinned", || shown(address)["pinned"] == true);
    delete(address);
    assert_nothing_is_held(&server);
    while_computing(&server, json!({}), |address, _| put(address, "dilan", json!({"system": SYSTEM})));
    wait_until("another text is not pinned", || shown(address)["pinned"] == true);
    assert!(shown(address)["text"].as_str().unwrap().starts_with("dilan"));
    delete(address);
    assert_nothing_is_held(&server);
    assert_goes_on(&server);
}

#[test]
fn a_document_that_expires_while_it_is_computed_is_not_pinned() {
    let server = slow();
    while_computing(&server, json!({"ttl_seconds": 2}), |address, _| {
        wait_until("it does not expire", || get(address, "/v1/documents/one").status == 404);
    });
    assert_forgotten(&server);
}

#[test]
fn caches_fall_asleep_after_the_document_that_is_computed_and_pin_it_when_they_wake() {
    let server = slow();
    let address = server.address();
    let asleep =
        while_computing(&server, json!({}), |address, _| posted(address, "/sleep", "asleep-then-awake"));
    assert_eq!(asleep.join().unwrap(), 200);
    assert_eq!(get(address, "/is_sleeping").json()["is_sleeping"], true);
    assert_eq!(shown(address)["pinned"], false);
    assert_eq!(post(address, "/wake_up", &json!({})).status, 200);
    wait_until("it is not pinned again", || shown(address)["pinned"] == true);
    delete(address);
    assert_nothing_is_held(&server);
    assert_goes_on(&server);
}

#[test]
fn a_document_that_is_deleted_while_the_caches_wait_to_fall_asleep_is_not_pinned_when_they_wake() {
    let server = slow();
    let address = server.address();
    let asleep = while_computing(&server, json!({}), |address, _| {
        let sleeping = posted(address, "/sleep", "asleep-then-deleted");
        delete(address);
        sleeping
    });
    assert_eq!(asleep.join().unwrap(), 200);
    assert_eq!(post(address, "/wake_up", &json!({})).status, 200);
    assert_forgotten(&server);
}

#[test]
fn a_reset_while_a_document_is_computed_leaves_it_pinned_again() {
    let server = slow();
    let address = server.address();
    let reset = while_computing(&server, json!({}), |address, _| {
        posted(address, "/reset_prefix_cache", "reset-while-computing")
    });
    assert_eq!(reset.join().unwrap(), 200);
    wait_until("it is not pinned again", || shown(address)["pinned"] == true);
    delete(address);
    assert_nothing_is_held(&server);
    assert_goes_on(&server);
}
