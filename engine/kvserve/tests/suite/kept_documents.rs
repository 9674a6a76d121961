//! Registered documents that outlive the server in a file.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kvserve::{ApiKeys, Error, Limits, ServedModel, Server, ServerConfig};
use serde_json::{Value, json};

use crate::client::{Answer, call};
use crate::common::{
    DOCUMENTS, MODEL, QUESTION, SYSTEM, assert_nothing_is_held, engine, free_port, reuse, with,
};

/// The header with the key of each tenant.
const ALICE: (&str, &str) = ("x-api-key", "key-of-alice");
const BOB: (&str, &str) = ("x-api-key", "key-of-bob");

/// Returns the keys of some tenants.
fn keys(tenants: &[&str]) -> ApiKeys {
    let mut keys = ApiKeys::default();
    assert!(tenants.iter().all(|tenant| keys.add(&format!("key-of-{tenant}"), tenant)));
    keys
}

fn config(path: &Path, tenants: &[&str]) -> ServerConfig {
    ServerConfig { documents: Some(path.to_owned()), keys: Some(keys(tenants)), ..free_port() }
}

/// Starts a server with two tenants that keeps documents in a file.
fn start(path: &Path) -> Server {
    with(Some(reuse()), config(path, &["alice", "bob"]))
}

/// Starts a server that may fail to start.
fn try_start(path: &Path) -> Result<Server, Error> {
    let (engine, codec) = engine();
    let model = ServedModel { engine, codec, names: vec![MODEL.to_owned()], reuse: None };
    Server::start(model, config(path, &["alice", "bob"]))
}

fn send(server: &Server, key: (&str, &str), method: &str, id: &str, body: &Value) -> Answer {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    call(server.address(), method, &format!("/v1/documents/{id}"), &[key], body.as_bytes())
}

fn put(server: &Server, key: (&str, &str), id: &str, body: &Value) -> u16 {
    send(server, key, "PUT", id, body).status
}

fn shown(server: &Server, key: (&str, &str), id: &str) -> Value {
    send(server, key, "GET", id, &Value::Null).json()
}

/// Returns the IDs of a tenant's documents.
fn ids(server: &Server, key: (&str, &str)) -> Vec<String> {
    let list = call(server.address(), "GET", "/v1/documents", &[key], b"").json();
    list["data"].as_array().unwrap().iter().map(|one| one["id"].as_str().unwrap().to_owned()).collect()
}

/// Waits until something is so.
fn wait_for(what: &str, is_so: impl Fn() -> bool) {
    let is_so = (0..6000).any(|_| {
        std::thread::sleep(Duration::from_millis(5));
        is_so()
    });
    assert!(is_so, "{what}");
}

fn place() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("documents.jsonl");
    (folder, path)
}

#[test]
fn documents_are_registered_again_after_a_restart_and_removed_and_expired_ones_are_not() {
    let (_folder, path) = place();
    let server = start(&path);
    let text = |at: usize| json!({"text": DOCUMENTS[at].1});
    let whole = json!({"text": DOCUMENTS[0].1, "title": "Harbour", "ttl_seconds": 1000, "system": SYSTEM});
    assert_eq!(put(&server, ALICE, "a/b%20c", &whole), 201);
    for (key, id, at) in [(ALICE, "gone", 1), (ALICE, "new", 1), (BOB, "bobs", 2)] {
        assert_eq!(put(&server, key, id, &text(at)), 201);
    }
    assert_eq!(put(&server, ALICE, "new", &text(2)), 200);
    assert_eq!(put(&server, ALICE, "short", &json!({"text": DOCUMENTS[1].1, "ttl_seconds": 1})), 201);
    assert_eq!(send(&server, ALICE, "DELETE", "gone", &Value::Null).status, 200);
    let before = shown(&server, ALICE, "a/b%20c");
    drop(server);
    std::thread::sleep(Duration::from_millis(1100));
    for most in [999.0, 1000.0] {
        let server = start(&path);
        assert_eq!(ids(&server, ALICE), ["a/b c", "new"]);
        assert_eq!(ids(&server, BOB), ["bobs"]);
        // It is computed behind its system prompt once more.
        wait_for("it is not pinned again", || shown(&server, ALICE, "a/b%20c")["pinned"] == true);
        let after = shown(&server, ALICE, "a/b%20c");
        for name in ["id", "title", "text", "tokens", "kv_bytes", "bytes"] {
            assert_eq!(after[name], before[name], "{name}");
        }
        assert!((900.0..most).contains(&after["expires_in_seconds"].as_f64().unwrap()), "{after}");
        assert_eq!(shown(&server, ALICE, "new")["text"], DOCUMENTS[2].1);
        let request = json!({
            "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": format!("{}{}", DOCUMENTS[0].1, QUESTION.0)}],
            "max_tokens": 1,
        });
        let answer =
            call(server.address(), "POST", "/v1/chat/completions", &[ALICE], request.to_string().as_bytes());
        let part = &answer.json()["kv"]["parts"][0];
        assert_eq!((&part["id"], &part["source"]), (&json!("a/b c"), &json!("cache")), "{answer:?}");
        assert_eq!(send(&server, ALICE, "DELETE", "a/b%20c", &Value::Null).status, 200);
        assert_nothing_is_held(&server);
        assert_eq!(put(&server, ALICE, "a/b%20c", &whole), 201);
    }
}

#[test]
fn the_file_names_tenants_and_no_keys_and_keeps_the_documents_of_tenants_without_a_key() {
    let (_folder, path) = place();
    let server = start(&path);
    for key in [ALICE, BOB] {
        assert_eq!(put(&server, key, "a", &json!({"text": DOCUMENTS[0].1})), 201);
    }
    drop(server);
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains("\"tenant\":\"alice\"") && !text.contains("key-of-"), "{text}");
    // Without her key, nobody finds her documents, and with another key she does.
    let server = with(Some(reuse()), config(&path, &["bob", "carol"]));
    assert_eq!(
        (ids(&server, BOB), ids(&server, ("x-api-key", "key-of-carol"))),
        (vec!["a".to_owned()], vec![])
    );
    drop(server);
    let server = with(Some(reuse()), ServerConfig { keys: None, ..config(&path, &[]) });
    assert_eq!(ids(&server, ALICE), Vec::<String>::new(), "the default tenant is none of them");
    drop(server);
    let mut keys = keys(&["bob"]);
    assert!(keys.add("another", "alice"));
    let server = with(Some(reuse()), ServerConfig { keys: Some(keys), ..config(&path, &[]) });
    assert_eq!(ids(&server, ("x-api-key", "another")), ["a"]);
}

#[test]
fn limits_hold_for_what_is_loaded_and_for_system_prompts_in_the_file() {
    let (_folder, path) = place();
    let sorted = |server: &Server| {
        let mut ids = ids(server, ALICE);
        ids.sort();
        ids
    };
    let limited = |documents, document_bytes| {
        let limits = Limits { documents, document_bytes, ..Limits::default() };
        with(Some(reuse()), ServerConfig { limits, ..config(&path, &["alice", "bob"]) })
    };
    let server = limited(10, 1000);
    let with_system = |bytes| json!({"text": "a ".repeat(40), "system": "s".repeat(bytes)});
    assert_eq!(put(&server, ALICE, "a", &with_system(600)), 201);
    let refused = send(&server, ALICE, "PUT", "b", &with_system(500));
    assert!(refused.status == 409 && refused.body.contains("system prompts"), "{refused:?}");
    assert_eq!(ids(&server, ALICE), ["a"], "nothing is registered");
    // Others have limits of their own, and what replaces a document does not count beside it.
    assert_eq!(
        (put(&server, BOB, "b", &with_system(500)), put(&server, ALICE, "a", &with_system(900))),
        (201, 200)
    );
    for id in ["c", "d"] {
        assert_eq!(put(&server, ALICE, id, &json!({"text": "c ".repeat(40)})), 201);
    }
    drop(server);
    let server = limited(2, 1000);
    assert_eq!(sorted(&server), ["c", "d"], "the newest ones");
    // What is not loaded has stayed in the file, and never pushes out what was answered after it.
    assert_eq!(send(&server, ALICE, "DELETE", "c", &Value::Null).status, 200);
    assert_eq!(put(&server, ALICE, "e", &json!({"text": "e ".repeat(40)})), 201);
    drop(server);
    let server = limited(2, 1000);
    assert_eq!(sorted(&server), ["d", "e"]);
    drop(server);
    let server = limited(10, 1000);
    assert_eq!(ids(&server, ALICE), ["a", "d", "e"]);
    drop(server);
    // It can be removed all the same.
    let server = limited(2, 1000);
    for (id, status) in [("a", 200), ("a", 404), ("c", 404)] {
        assert_eq!(send(&server, ALICE, "DELETE", id, &Value::Null).status, status, "{id}");
    }
    drop(server);
    assert_eq!(ids(&limited(10, 1000), ALICE), ["d", "e"]);
}

#[test]
fn a_file_that_is_damaged_or_in_use_keeps_the_server_from_starting() {
    let (_folder, path) = place();
    let server = start(&path);
    for id in ["a", "b"] {
        assert_eq!(put(&server, ALICE, id, &json!({"text": DOCUMENTS[0].1})), 201);
    }
    assert!(matches!(try_start(&path), Err(Error::DocumentsInUse { .. })));
    drop(server);
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replacen("harbour", "harbor", 1).replacen("\"a\"", "\"x\"", 1)).unwrap();
    assert!(matches!(try_start(&path), Err(Error::DocumentsLine { line: 2, .. })));
    fs::write(&path, text.replacen("\"version\":1", "\"version\":9", 1)).unwrap();
    assert!(matches!(try_start(&path), Err(Error::DocumentsVersion { version: 9, .. })));
    // A torn end is only a warning.
    fs::write(&path, &text[..text.len() - 10]).unwrap();
    assert_eq!(ids(&start(&path), ALICE), ["a"]);
}

#[test]
fn the_file_is_written_again_while_documents_change_and_are_found() {
    let (folder, path) = place();
    // Without reuse, nothing is computed at leisure.
    let server = with(None, config(&path, &["alice", "bob"]));
    let (address, size) = (server.address(), || fs::metadata(&path).unwrap().len());
    let shrunk = AtomicUsize::new(0);
    let (writers, rounds) = (3, 40);
    std::thread::scope(|scope| {
        for writer in 0..writers {
            let (server, shrunk) = (&server, &shrunk);
            scope.spawn(move || {
                for round in 0..rounds {
                    let before = size();
                    let text = format!("{writer} {round} {}", DOCUMENTS[0].1);
                    let body = json!({"text": text, "system": "a system prompt ".repeat(1500)});
                    let (kept, gone) = (format!("kept-{writer}"), format!("gone-{writer}"));
                    for id in [&kept, &gone] {
                        let answer = send(server, ALICE, "PUT", id, &body);
                        assert!([200, 201].contains(&answer.status), "{answer:?}");
                    }
                    assert_eq!(send(server, ALICE, "DELETE", &gone, &Value::Null).status, 200);
                    shrunk.fetch_add(usize::from(size() < before), Ordering::Relaxed);
                }
            });
        }
        let request = json!({"prompt": "a ".repeat(50), "max_tokens": 2}).to_string();
        for _ in 0..rounds {
            let answer = call(address, "POST", "/v1/completions", &[ALICE], request.as_bytes());
            assert_eq!(answer.status, 200, "{answer:?}");
        }
    });
    assert!(shrunk.into_inner() > 0, "the file was never written again");
    let kept: Vec<String> = (0..writers).map(|writer| format!("kept-{writer}")).collect();
    assert_eq!(ids(&server, ALICE), kept);
    drop(server);
    let server = start(&path);
    assert_eq!(ids(&server, ALICE), kept);
    for (writer, id) in kept.iter().enumerate() {
        let text = shown(&server, ALICE, id)["text"].as_str().unwrap().to_owned();
        assert!(text.starts_with(&format!("{writer} {} ", rounds - 1)), "{}", &text[..20]);
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "the file and its lock");
}
