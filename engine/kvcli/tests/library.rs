//! `kvc run --library`: documents of a folder that stand verbatim in a prompt.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use common::{SYSTEM, fails, json, kvc};

#[allow(dead_code, reason = "other suites use the rest")]
mod common;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/documents")
}

fn text(name: &str) -> String {
    fs::read_to_string(folder().join(name)).unwrap()
}

/// Runs with the library of the examples.
fn with_library(args: &[&str]) -> Value {
    json(&[&["--library", folder().to_str().unwrap()], args].concat())
}

#[test]
fn documents_that_stand_in_a_prompt_are_chunks_wherever_they_stand() {
    let [a, b, c] = ["harbour.txt", "market.txt", "school.txt"];
    let pasted = format!("{SYSTEM}\n{}\n{}alba ?", text(a), text(b));
    let found = with_library(&["-p", &pasted]);
    assert_eq!(found["documents"], json!([a, b]));
    // The same prompt by options, in which white space between documents is no part of it.
    let (path_a, path_b) = (folder().join(a), folder().join(b));
    let documents = ["--document", path_a.to_str().unwrap(), "--document", path_b.to_str().unwrap()];
    let given = json(&[&documents[..], &["--system", SYSTEM, "-p", "alba ?"]].concat());
    assert_eq!((&found["tokens"], &found["prompt_tokens"]), (&given["tokens"], &given["prompt_tokens"]));
    assert!(given["documents"].is_null());

    // In another order, with text between them: the documents are hits, and the text is a chunk of its own.
    let other = format!("{SYSTEM}\n{}{}and this one : {}alba ?", text(b), text(c), text(a));
    let warmed = with_library(&["--warm", &pasted, "-p", &other]);
    assert_eq!(warmed["documents"], json!([b, c, null, a]));
    let hits: Vec<bool> =
        warmed["chunks"].as_array().unwrap().iter().map(|chunk| chunk["hit"] == true).collect();
    assert_eq!(hits, [true, false, false, true]);
    assert_eq!(warmed["tokens"], with_library(&["-p", &other])["tokens"]);
}

#[test]
fn documents_at_the_beginning_of_a_prompt_are_chunks_like_others() {
    let [a, b] = ["harbour.txt", "market.txt"];
    let pasted = format!("{}{}alba ?", text(a), text(b));
    let found = with_library(&["-p", &pasted]);
    assert_eq!(found["documents"], json!([a, b]));
    let (path_a, path_b) = (folder().join(a), folder().join(b));
    let documents = ["--document", path_a.to_str().unwrap(), "--document", path_b.to_str().unwrap()];
    let given = json(&[&documents[..], &["-p", "alba ?"]].concat());
    assert_eq!((&found["tokens"], &found["prompt_tokens"]), (&given["tokens"], &given["prompt_tokens"]));
}

#[test]
fn a_document_that_differs_by_a_byte_is_not_found_and_the_notes_say_what_was() {
    let library = folder();
    let run = |prompt: &str| {
        let output = kvc(&["run", "--library", library.to_str().unwrap(), "-p", prompt]);
        assert!(output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let changed = text("market.txt").replacen(" is ", " was ", 1);
    let notes = run(&format!("{SYSTEM} {changed}alba ?"));
    assert!(notes.contains("None of the 6 documents"), "{notes}");
    let notes = run(&format!("{SYSTEM} {changed}{}alba ?", text("school.txt")));
    assert!(notes.contains("in the prompt: school.txt\n"), "{notes}");
}

#[test]
fn a_conversation_is_searched_as_the_template_writes_it() {
    let conversation = json!([
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": format!("{}alba ?", text("harbour.txt"))},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": format!("{}bora ?", text("market.txt"))},
    ]);
    let dir = tempfile::tempdir().unwrap();
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-rag");
    for entry in fs::read_dir(&model).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    let template = "{% for m in messages %}{{ m.content }} . {% endfor %}";
    fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    let file = dir.path().join("chat.json");
    fs::write(&file, conversation.to_string()).unwrap();
    let args = ["--model", dir.path().to_str().unwrap(), "--messages", file.to_str().unwrap()];
    assert_eq!(with_library(&args)["documents"], json!(["harbour.txt", null, "market.txt"]));
}

#[test]
fn a_library_that_cannot_be_used_is_an_error_with_advice() {
    let dir = tempfile::tempdir().unwrap();
    let library = dir.path().to_str().unwrap();
    let run = ["run", "--library", library, "-p", "alba ?"];
    fails(&run, 1, "contains no documents");
    fs::write(dir.path().join("short.txt"), "alba is red .\n").unwrap();
    fails(&run, 1, "document short.txt has 14 bytes; a registered document has at least 64");
    fs::write(dir.path().join("short.txt"), " \n").unwrap();
    fails(&run, 1, "is empty");
    fails(&["run", "--library", "/nowhere", "-p", "a"], 1, "/nowhere");
    fails(&["run", "--library", library, "--document", library, "-p", "a"], 2, "cannot be used with");
}
