//! Registered documents that stay in memory as long as they are registered.

use std::time::{Duration, Instant};

use kvbackend_cpu::CpuBackend;
use kvengine::{Engine, EngineConfig};
use kvmodel::ModelDirectory;
use kvserve::{ApiKeys, DocumentReuse, ServedModel, Server, ServerConfig};
use serde_json::{Value, json};

use super::client::{call, get, post};
use super::common::{
    DOCUMENTS, MODEL, QUESTION, SYSTEM, assert_nothing_is_held, free_port, loaded, reuse, small, with,
};

const CHAT: &str = "/v1/chat/completions";

/// Starts a server whose cache has room for two of the demo's three documents, and pins one of them.
fn crowded() -> Server {
    with_settings(true, free_port())
}

fn with_settings(enable_sleep_mode: bool, settings: ServerConfig) -> Server {
    with_room(2, enable_sleep_mode, settings)
}

/// Starts a server whose cache has room for so many documents, of which half may be pinned.
fn with_room(documents: usize, enable_sleep_mode: bool, settings: ServerConfig) -> Server {
    with_model(loaded, reuse(), (documents, enable_sleep_mode), settings)
}

/// Starts a server like [`with_room`], over the model that `load` loads.
pub(super) fn with_model(
    load: impl Fn() -> ModelDirectory,
    reuse: DocumentReuse,
    (documents, enable_sleep_mode): (usize, bool),
    settings: ServerConfig,
) -> Server {
    let ModelDirectory { model, codec, .. } = load();
    let longest = DOCUMENTS.iter().map(|(_, text)| codec.encode(text, false).unwrap().len()).max().unwrap();
    let probe = Engine::new(load().model, CpuBackend::new(), codec.digest(), &small()).unwrap();
    let block_bytes = probe.cache().arena().layout().block_bytes();
    let blocks = documents * longest.div_ceil(16) + 1;
    let config = EngineConfig { kv_memory: Some(2 * blocks * block_bytes), enable_sleep_mode, ..small() };
    let engine = Engine::new(model, CpuBackend::new(), codec.digest(), &config).unwrap();
    let model = ServedModel { engine, codec, names: vec![MODEL.to_owned()], reuse: Some(reuse) };
    Server::start(model, settings).unwrap()
}

pub(super) fn path(at: usize) -> String {
    format!("/v1/documents/{}", DOCUMENTS[at].0)
}

pub(super) fn put(server: &Server, at: usize, more: Value) {
    let mut body = json!({"text": DOCUMENTS[at].1});
    super::common::add(&mut body, more);
    let answer = call(server.address(), "PUT", &path(at), &[], body.to_string().as_bytes());
    assert!(answer.status < 300, "{answer:?}");
}

pub(super) fn is_pinned(server: &Server, at: usize) -> bool {
    get(server.address(), &path(at)).json()["pinned"] == true
}

pub(super) fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Returns a question about a document behind a system prompt.
fn question(system: &str, at: usize) -> Value {
    json!({
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": format!("{}{}", DOCUMENTS[at].1, QUESTION.0)}],
        "max_tokens": 2,
    })
}

/// Asks with a document, and returns where its keys and values came from.
fn source(server: &Server, at: usize) -> String {
    source_behind(server, SYSTEM, at)
}

fn source_behind(server: &Server, system: &str, at: usize) -> String {
    let answer = post(server.address(), CHAT, &question(system, at)).json();
    answer["kv"]["parts"][0]["source"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned()
}

/// Registers all documents without a system prompt, and asks about the first one, which is then pinned.
fn pinned_by_use(server: &Server) {
    (0..3).for_each(|at| put(server, at, json!({})));
    source(server, 0);
    wait_until("it is never pinned", || is_pinned(server, 0));
}

/// Returns the number of blocks of documents that are held.
fn held(server: &Server) -> usize {
    server.with_engine(|engine| engine.report().chunks.unwrap().shared).unwrap()
}

/// Asks with the other documents, which push out what is not pinned.
fn flood(server: &Server) {
    flood_behind(server, SYSTEM);
}

/// Asks with the other documents behind a system prompt. Documents that a request names are not pinned.
fn flood_behind(server: &Server, system: &str) {
    for at in [1, 2, 1, 2] {
        let messages = [("system", system), ("user", QUESTION.0)];
        let ask = json!({
            "messages": messages.map(|(role, content)| json!({"role": role, "content": content})),
            "documents": [{"id": "other", "text": DOCUMENTS[at].1}],
            "max_tokens": 2,
        });
        assert_eq!(post(server.address(), CHAT, &ask).status, 200);
    }
}

pub(super) fn pinned(server: &Server) {
    put(server, 0, json!({"system": SYSTEM}));
    wait_until("it is never pinned", || is_pinned(server, 0));
}

#[test]
fn a_document_with_a_system_prompt_stays_in_memory_until_it_is_deleted() {
    let server = crowded();
    (1..3).for_each(|at| put(&server, at, json!({})));
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
    wait_until("it is held although it has expired", || held(&server) == 0);
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
    let server = with_settings(false, free_port());
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

#[test]
fn a_document_without_a_system_prompt_stays_in_memory_once_a_prompt_has_used_it() {
    let server = crowded();
    pinned_by_use(&server);
    flood(&server);
    assert_eq!(source(&server, 0), "cache");
    assert!(!is_pinned(&server, 1) && !is_pinned(&server, 2), "no prompt has used them");
    assert_eq!(call(server.address(), "DELETE", &path(0), &[], b"").status, 200);
    assert_nothing_is_held(&server);
    flood(&server);
    put(&server, 0, json!({}));
    assert_eq!(source(&server, 0), "computed");
}

#[test]
fn a_document_that_a_prompt_has_used_is_pinned_until_it_expires() {
    let server = crowded();
    put(&server, 0, json!({"ttl_seconds": 2}));
    source(&server, 0);
    wait_until("it is neither pinned nor expired", || {
        is_pinned(&server, 0) || get(server.address(), &path(0)).status == 404
    });
    wait_until("it does not expire", || get(server.address(), &path(0)).status == 404);
    wait_until("it is held although it has expired", || held(&server) == 0);
}

#[test]
fn a_document_is_pinned_behind_the_beginning_of_the_last_prompt_alone() {
    let server = crowded();
    pinned_by_use(&server);
    let (other, blocks) = (format!("{SYSTEM}alba is red . "), held(&server));
    assert_eq!(source_behind(&server, &other, 0), "computed");
    flood_behind(&server, &other);
    assert_eq!(source_behind(&server, &other, 0), "cache");
    wait_until("the earlier copy is held", || held(&server) == blocks);
    assert_eq!(source(&server, 0), "computed", "the copy behind the first beginning");
}

#[test]
fn a_document_that_was_registered_with_a_system_prompt_stays_pinned_behind_it() {
    let server = crowded();
    (1..3).for_each(|at| put(&server, at, json!({})));
    pinned(&server);
    source_behind(&server, &format!("{SYSTEM}alba is red . "), 0);
    flood(&server);
    assert_eq!(source(&server, 0), "cache");
}

#[test]
fn documents_without_a_system_prompt_give_way_to_one_with_a_system_prompt() {
    let server = crowded();
    pinned_by_use(&server);
    put(&server, 1, json!({"system": SYSTEM}));
    wait_until("it is never pinned", || is_pinned(&server, 1));
    assert!(!is_pinned(&server, 0));
}

#[test]
fn the_document_gives_way_whose_last_use_is_longest_ago() {
    let server = with_room(5, true, free_port());
    (0..3).for_each(|at| put(&server, at, json!({})));
    let use_it = |at: usize| {
        source(&server, at);
        wait_until("it is never pinned", || is_pinned(&server, at));
    };
    let pinned = || [0, 1, 2].map(|at| is_pinned(&server, at));
    use_it(0);
    use_it(1);
    assert_eq!(pinned(), [true, true, false]);
    use_it(0);
    use_it(2);
    assert_eq!(pinned(), [true, false, true], "the first one was used again");
    use_it(1);
    assert_eq!(pinned(), [false, true, true]);
    flood(&server);
    assert_eq!(source(&server, 2), "cache");
}

#[test]
fn many_documents_of_a_prompt_are_pinned_up_to_the_limit() {
    let server = with_room(24, true, free_port());
    let text = |number: usize| format!("{number:02} {}\n", "alba is red . ".repeat(5));
    for number in 0..24 {
        let body = json!({"text": text(number)}).to_string();
        let answer = call(server.address(), "PUT", &format!("/v1/documents/{number}"), &[], body.as_bytes());
        assert!(answer.status < 300, "{answer:?}");
    }
    let most = server.with_engine(|engine| engine.report()).unwrap().chunks.unwrap().total / 2;
    let ask = |numbers: std::ops::Range<usize>| {
        let texts: String = numbers.map(text).collect();
        let messages = [("system", SYSTEM.to_owned()), ("user", format!("{texts}{}", QUESTION.0))];
        let messages = messages.map(|(role, content)| json!({"role": role, "content": content}));
        let answer = post(server.address(), CHAT, &json!({"messages": messages, "max_tokens": 2}));
        assert_eq!(answer.status, 200, "{answer:?}");
    };
    let listed = || get(server.address(), "/v1/documents").json();
    let pins = || {
        let list = listed();
        let is_pinned = |one: &&Value| one["pinned"] == true;
        list["data"].as_array().unwrap().iter().filter(is_pinned).count()
    };
    for numbers in [0..3, 0..20, 4..24] {
        let least = numbers.len().min(3);
        ask(numbers);
        wait_until("too few are pinned", || pins() >= least);
        wait_until("the request is held", || held(&server) <= most);
    }
    assert!(pins() < 20, "{}", listed());
    assert!((1..=most).contains(&held(&server)), "{}", held(&server));
}

#[test]
fn an_earlier_registration_with_a_system_prompt_is_not_pinned_any_more() {
    let server = with_settings(true, free_port());
    assert_eq!(post(server.address(), "/sleep", &json!({})).status, 200);
    put(&server, 0, json!({"system": SYSTEM}));
    put(&server, 1, json!({"system": SYSTEM}));
    put(&server, 0, json!({}));
    assert_eq!(call(server.address(), "DELETE", &path(1), &[], b"").status, 200);
    put(&server, 1, json!({}));
    put(&server, 2, json!({"system": SYSTEM}));
    assert_eq!(post(server.address(), "/wake_up", &json!({})).status, 200);
    // Documents are computed in the order of their registration.
    wait_until("it is never pinned", || is_pinned(&server, 2));
    for at in [0, 1] {
        let shown = get(server.address(), &path(at)).json();
        assert_eq!((&shown["pinned"], &shown["computed_ms"]), (&json!(false), &Value::Null), "{shown}");
    }
}

#[test]
fn a_copy_that_only_one_salt_finds_is_not_pinned() {
    let server = crowded();
    put(&server, 0, json!({}));
    let mut salted = question(SYSTEM, 0);
    super::common::add(&mut salted, json!({"cache_salt": "a"}));
    assert_eq!(post(server.address(), CHAT, &salted).status, 200);
    assert_eq!(held(&server), 0);
    assert!(!is_pinned(&server, 0));
}

#[test]
fn a_reset_unpins_what_prompts_have_used_until_the_next_prompt() {
    let server = crowded();
    pinned_by_use(&server);
    assert_eq!(post(server.address(), "/reset_prefix_cache", &json!({})).status, 200);
    assert!(!is_pinned(&server, 0));
    assert_nothing_is_held(&server);
    assert_eq!(source(&server, 0), "computed");
    wait_until("it is not pinned again", || is_pinned(&server, 0));
}

#[test]
fn requests_of_one_tenant_do_not_pin_the_documents_of_another() {
    let mut keys = ApiKeys::default();
    assert!(keys.add("key-a", "alice") && keys.add("key-b", "bob"));
    let server = with(Some(reuse()), ServerConfig { keys: Some(keys), ..free_port() });
    let body = |at: usize| json!({"text": DOCUMENTS[at].1}).to_string();
    let send = |key: &str, method: &str, path: &str, body: &str| {
        let answer = call(server.address(), method, path, &[("x-api-key", key)], body.as_bytes());
        assert!(answer.status < 300, "{answer:?}");
        answer.json()
    };
    let text = DOCUMENTS[0].1;
    let document = json!({"text": text}).to_string();
    let ask = json!({
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": format!("{text}{}", QUESTION.0)}],
        "max_tokens": 2,
    });
    send("key-a", "PUT", "/v1/documents/one", &document);
    send("key-b", "PUT", "/v1/documents/other", &body(1));
    let is_pinned = |key: &str| send(key, "GET", "/v1/documents/one", "")["pinned"] == true;
    let _ = send("key-b", "POST", CHAT, &ask.to_string());
    assert_eq!((held(&server), is_pinned("key-a")), (0, false), "bob's request holds alice's text");
    send("key-b", "PUT", "/v1/documents/one", &document);
    let _ = send("key-b", "POST", CHAT, &ask.to_string());
    wait_until("bob's own document is never pinned", || is_pinned("key-b"));
    assert!(!is_pinned("key-a"));
}
