//! Registered documents that outlive `kvc serve`: killed at any moment, on a full disk, and above a disk with keys and
//! values.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]
#![cfg(unix)]

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use common::fails;
use rustix::process::Signal;
use serde_json::{Value, json};
use serving::Serving;

#[allow(dead_code, reason = "other suites use the rest")]
mod common;
#[allow(dead_code, reason = "other suites use the rest")]
#[path = "common/serving.rs"]
mod serving;

const SYSTEM: &str = "you answer questions from short documents .";
const TEXT: &str = "alba is red . bora is same . cedo is blue . dilan is small . the end .\n";

/// Sends a request to a server that may die before it answers. Returns the status of an answer.
fn try_send(address: &str, method: &str, id: &str, body: &str) -> Option<u16> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(60))).ok()?;
    let length = body.len();
    let head = format!(
        "{method} /v1/documents/{id} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n"
    );
    stream.write_all(&[head.as_bytes(), body.as_bytes()].concat()).ok()?;
    let mut answer = String::new();
    // The connection may be reset after the answer.
    let _ = stream.read_to_string(&mut answer);
    answer.split(' ').nth(1)?.parse().ok()
}

/// Returns the texts of all documents.
fn texts(server: &Serving) -> BTreeMap<String, String> {
    let list = server.send("GET", "/v1/documents", "", "");
    let list: Value = serde_json::from_str(&list.1).unwrap();
    let ids = list["data"].as_array().unwrap().iter().map(|one| one["id"].as_str().unwrap().to_owned());
    ids.map(|id| {
        let shown = server.send("GET", &format!("/v1/documents/{id}"), "", "").1;
        let shown: Value = serde_json::from_str(&shown).unwrap();
        (id, shown["text"].as_str().unwrap().to_owned())
    })
    .collect()
}

/// The changes of one client to one document.
struct Client {
    /// The texts that the document may have, `None` if it may be gone: one after a change that was answered, and one more
    /// after a change that was not.
    possible: Vec<Option<String>>,
}

impl Client {
    /// Registers and removes a document until the server dies. Returns the number of answers.
    fn change(&mut self, address: &str, id: &str, round: usize) -> usize {
        for turn in 0.. {
            let text = (turn % 4 != 3).then(|| format!("{round} {turn} {}", TEXT.repeat(1 + turn % 7)));
            let (method, body) = match &text {
                Some(text) => {
                    let system = SYSTEM.repeat(1 + turn % 5 * 100);
                    ("PUT", json!({"text": text, "system": system}).to_string())
                }
                None => ("DELETE", String::new()),
            };
            self.possible.push(text.clone());
            let Some(status) = try_send(address, method, id, &body) else { return turn };
            assert!([200, 201].contains(&status), "{status}");
            self.possible = vec![text];
        }
        0
    }
}

#[test]
fn what_was_answered_is_there_after_the_server_was_killed_at_any_moment() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("documents.jsonl");
    let args = ["--log", "warn", "--documents", path.to_str().unwrap()];
    let mut clients: Vec<Client> = (0..3).map(|_| Client { possible: vec![None] }).collect();
    let mut answered = 0;
    for round in 0..25 {
        let mut server = Serving::start(&args);
        let found = texts(&server);
        for (at, client) in clients.iter_mut().enumerate() {
            let now = found.get(&format!("d{at}")).cloned();
            let bytes = now.as_ref().map(String::len);
            assert!(client.possible.contains(&now), "round {round}, client {at}: {bytes:?} bytes are there");
            client.possible = vec![now];
        }
        let address = server.address.clone();
        answered += std::thread::scope(|scope| {
            let all: Vec<_> = clients
                .iter_mut()
                .enumerate()
                .map(|(at, client)| {
                    let address = &address;
                    scope.spawn(move || client.change(address, &format!("d{at}"), round))
                })
                .collect();
            // Each round ends at another moment.
            std::thread::sleep(Duration::from_millis(20 + 13 * round as u64));
            server.child.kill().unwrap();
            server.child.wait().unwrap();
            all.into_iter().map(|client| client.join().unwrap()).sum::<usize>()
        });
    }
    assert!(answered > 20, "{answered} answers");
}

/// Starts a server whose files may have so many blocks of 512 or 1024 bytes.
fn limited(path: &Path, blocks: usize) -> Serving {
    let mut command = Command::new("sh");
    // Without the trap, the signal of a write past the limit ends the program.
    let script = format!("trap '' XFSZ; ulimit -f {blocks} && exec \"$0\" serve --port 0 --documents \"$1\"");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_kvc"), path.to_str().unwrap()]);
    Serving::of(command)
}

#[test]
fn a_full_disk_refuses_changes_and_leaves_what_was_there() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("documents.jsonl");
    let server = limited(&path, 32);
    let put = |server: &Serving, id: &str, times: usize| {
        let body = json!({"text": TEXT.repeat(2), "title": id, "system": TEXT.repeat(times)}).to_string();
        server.send("PUT", &format!("/v1/documents/{id}"), "", &body)
    };
    assert_eq!(put(&server, "small", 10).0, 201);
    let before = fs::read(&path).unwrap();
    for id in ["large", "small"] {
        let (status, body) = put(&server, id, 1000);
        let error: Value = serde_json::from_str(&body).unwrap();
        assert_eq!((status, &error["error"]["type"]), (507, &json!("server_error")), "{body}");
        assert!(error["error"]["message"].as_str().unwrap().contains("free some space"), "{body}");
        assert_eq!(server.send("GET", "/v1/documents/large", "", "").0, 404);
        assert_eq!(fs::read(&path).unwrap(), before, "a part of the line is left");
    }
    // What fits is registered.
    assert_eq!((put(&server, "another", 5).0, put(&server, "small", 2).0), (201, 200));
    assert_eq!(server.send("DELETE", "/v1/documents/another", "", "").0, 200);
    server.signal(Signal::TERM);
    let (code, log) = server.ended();
    assert!(code == Some(0) && log.contains("cannot write a change of the registered documents"), "{log}");
    let server = Serving::start(&["--documents", path.to_str().unwrap()]);
    assert_eq!(texts(&server), BTreeMap::from([("small".to_owned(), TEXT.repeat(2))]));
    assert_eq!(put(&server, "large", 1000).0, 201);
}

#[test]
fn documents_over_a_disk_are_warm_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let (config, disk) = (folder.path().join("kvc.toml"), folder.path().join("kv"));
    let documents = folder.path().join("documents.jsonl");
    // The option stands in the file of options, too.
    let text = format!(
        "documents = {documents:?}\ndisk = {disk:?}\ndisk-limit = \"32MiB\"\ndisk-loads = \"always\"\nreuse-anyway = true\n"
    );
    fs::write(&config, text).unwrap();
    let args = ["--config", config.to_str().unwrap()];
    let pinned = |server: &Serving| {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            let shown = server.send("GET", "/v1/documents/a", "", "").1;
            let shown: Value = serde_json::from_str(&shown).unwrap();
            if shown["pinned"] == true {
                return;
            }
            assert!(Instant::now() < until, "it is never pinned: {shown}");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let loads = |server: &Serving| {
        let metrics = server.send("GET", "/metrics", "", "").1;
        let line = metrics.lines().find(|line| line.starts_with("kv_tier_hits"));
        line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .unwrap_or_else(|| panic!("{metrics}"))
    };
    let server = Serving::start(&args);
    let body = json!({"text": TEXT, "system": SYSTEM}).to_string();
    assert_eq!(server.send("PUT", "/v1/documents/a", "", &body).0, 201);
    pinned(&server);
    assert!(loads(&server) < 0.5, "nothing is on the disk yet");
    server.signal(Signal::TERM);
    assert_eq!(server.ended().0, Some(0));
    let server = Serving::start(&args);
    pinned(&server);
    assert!(loads(&server) > 0.5, "it was computed again");
}

#[test]
fn a_server_that_cannot_keep_documents_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("documents.jsonl");
    let file = path.to_str().unwrap();
    let server = Serving::start(&["--documents", file]);
    fails(&["serve", "--port", "0", "--documents", file], 1, "is in use by another server");
    drop(server);
    fs::write(&path, "{\"format\":\"kvc documents\",\"version\":1}\nnothing\n\n").unwrap();
    fails(&["serve", "--port", "0", "--documents", file], 1, "documents.jsonl, line 2");
    fs::write(&path, "key tenant\n").unwrap();
    fails(&["serve", "--port", "0", "--documents", file], 1, "not a file of registered documents");
    fails(
        &["serve", "--port", "0", "--documents", "none/a"],
        1,
        "cannot keep registered documents in none/a",
    );
}
