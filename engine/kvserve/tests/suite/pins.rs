//! Registered documents that stay in memory as long as they are registered.

use std::time::{Duration, Instant};

use kvbackend_cpu::CpuBackend;
use kvengine::{Engine, EngineConfig};
use kvmodel::ModelDirectory;
use kvserve::{ServedModel, Server};
use serde_json::{Value, json};

use super::client::{call, get, post};
use super::common::{
    DOCUMENTS, MODEL, QUESTION, SYSTEM, assert_nothing_is_held, free_port, loaded, reuse, small,
};

const CHAT: &str = "/v1/chat/completions";

/// Starts a server whose cache has room for two of the demo's three documents, and pins one of them.
fn crowded() -> Server {
    with_sleep(true)
}

fn with_sleep(enable_sleep_mode: bool) -> Server {
    let ModelDirectory { model, codec, .. } = loaded();
    let longest = DOCUMENTS.iter().map(|(_, text)| codec.encode(text, false).unwrap().len()).max().unwrap();
    let probe = Engine::new(loaded().model, CpuBackend::new(), codec.digest(), &small()).unwrap();
    let block_bytes = probe.cache().arena().layout().block_bytes();
    let blocks = 2 * longest.div_ceil(16) + 1;
    let config = EngineConfig { kv_memory: Some(2 * blocks * block_bytes), enable_sleep_mode, ..small() };
    let engine = Engine::new(model, CpuBackend::new(), codec.digest(), &config).unwrap();
    let model = ServedModel { engine, codec, names: vec![MODEL.to_owned()], reuse: Some(reuse()) };
    Server::start(model, free_port()).unwrap()
}

fn path(at: usize) -> String {
    format!("/v1/documents/{}", DOCUMENTS[at].0)
}

fn put(server: &Server, at: usize, more: Value) {
    let mut body = json!({"text": DOCUMENTS[at].1});
    super::common::add(&mut body, more);
    let answer = call(server.address(), "PUT", &path(at), &[], body.to_string().as_bytes());
    assert!(answer.status < 300, "{answer:?}");
}

fn is_pinned(server: &Server, at: usize) -> bool {
    get(server.address(), &path(at)).json()["pinned"] == true
}

fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Asks with a document, and returns where its keys and values came from.
fn source(server: &Server, at: usize) -> String {
    let request = json!({
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": format!("{}{}", DOCUMENTS[at].1, QUESTION.0)}],
        "max_tokens": 2,
    });
    let answer = post(server.address(), CHAT, &request).json();
    answer["kv"]["parts"][0]["source"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned()
}

/// Asks with the other documents, which push out what is not pinned.
fn flood(server: &Server) {
    for at in [1, 2, 1, 2] {
        source(server, at);
    }
}

fn pinned(server: &Server) {
    put(server, 0, json!({"system": SYSTEM}));
    wait_until("it is never pinned", || is_pinned(server, 0));
}

#[test]
fn a_document_with_a_system_prompt_stays_in_memory_until_it_is_deleted() {
    let server = crowded();
    (0..3).for_each(|at| put(&server, at, json!({})));
    source(&server, 0);
    flood(&server);
    assert_eq!(source(&server, 0), "computed", "it is not pinned without a system prompt");
    pinned(&server);
    assert!(!is_pinned(&server, 1));
    flood(&server);
    assert_eq!(source(&server, 0), "cache");
    let listed = get(server.address(), "/v1/documents").json();
    let pins: Vec<bool> =
        listed["data"].as_array().unwrap().iter().map(|one| one["pinned"] == true).collect();
    assert_eq!(pins.iter().filter(|pinned| **pinned).count(), 1, "{listed}");
    assert_eq!(call(server.address(), "DELETE", &path(0), &[], b"").status, 200);
    assert_nothing_is_held(&server);
    put(&server, 0, json!({}));
    flood(&server);
    assert_eq!(source(&server, 0), "computed");
}

#[test]
fn a_document_is_not_pinned_beyond_its_time_or_its_text() {
    let server = crowded();
    put(&server, 0, json!({"system": SYSTEM, "ttl_seconds": 1}));
    wait_until("it is neither pinned nor expired", || {
        is_pinned(&server, 0) || get(server.address(), &path(0)).status == 404
    });
    wait_until("it does not expire", || get(server.address(), &path(0)).status == 404);
    wait_until("it is held although it has expired", || {
        server.with_engine(|engine| engine.report().chunks.unwrap().shared) == Some(0)
    });
    pinned(&server);
    put(&server, 0, json!({"text": DOCUMENTS[1].1}));
    assert!(!is_pinned(&server, 0));
    assert_nothing_is_held(&server);
}

#[test]
fn pins_neither_keep_the_caches_awake_nor_survive_a_reset_unless_computed_again() {
    let server = crowded();
    (1..3).for_each(|at| put(&server, at, json!({})));
    pinned(&server);
    assert_eq!(post(server.address(), "/sleep", &json!({})).status, 200);
    assert!(!is_pinned(&server, 0));
    assert_eq!(post(server.address(), "/wake_up", &json!({})).status, 200);
    wait_until("it is not pinned again", || is_pinned(&server, 0));
    let freed = post(server.address(), "/reset_prefix_cache", &json!({})).json();
    assert!(freed["freed_blocks"].as_u64().unwrap() > 0, "{freed}");
    wait_until("it is not computed again", || is_pinned(&server, 0));
    flood(&server);
    assert_eq!(source(&server, 0), "cache");
}

#[test]
fn what_is_registered_while_the_caches_sleep_is_computed_and_pinned_when_they_wake() {
    let server = crowded();
    pinned(&server);
    assert_eq!(post(server.address(), "/sleep", &json!({})).status, 200);
    put(&server, 0, json!({}));
    put(&server, 1, json!({"system": SYSTEM}));
    assert_eq!(post(server.address(), "/sleep", &json!({})).status, 200, "they are asleep already");
    assert_eq!(post(server.address(), "/wake_up", &json!({})).status, 200);
    wait_until("it is not pinned", || is_pinned(&server, 1));
    assert!(!is_pinned(&server, 0), "it was registered again without a system prompt");
}

#[test]
fn caches_that_cannot_sleep_keep_their_pins() {
    let server = with_sleep(false);
    pinned(&server);
    assert!(post(server.address(), "/sleep", &json!({})).status >= 400);
    assert!(is_pinned(&server, 0));
}

#[test]
fn documents_pin_nothing_but_themselves() {
    let server = crowded();
    for number in 0..20 {
        put(&server, 0, json!({"system": format!("alba {SYSTEM} {number} {}", "alba is red . ".repeat(2))}));
        wait_until("it is never pinned", || is_pinned(&server, 0));
    }
    let report = server.with_engine(|engine| engine.report()).unwrap();
    let [main, chunks] = [report.main.unwrap(), report.chunks.unwrap()];
    assert_eq!((main.mutable + main.shared, chunks.shared), (0, 2), "{main:?} {chunks:?}");
    assert_eq!(main.evictable, main.cached, "{main:?}");
}

#[test]
fn a_tenant_pins_at_most_half_of_the_memory_for_documents() {
    let server = crowded();
    pinned(&server);
    put(&server, 1, json!({"system": SYSTEM}));
    wait_until("it is never computed", || !get(server.address(), &path(1)).json()["computed_ms"].is_null());
    std::thread::sleep(Duration::from_millis(50));
    assert!(!is_pinned(&server, 1) && is_pinned(&server, 0));
    assert_eq!(source(&server, 1), "cache", "it is found all the same while there is room");
}
