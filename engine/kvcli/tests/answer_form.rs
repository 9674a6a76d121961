//! `kvc run --answer-schema`, `--answer-regex` and `--answer-grammar`: answers of a given form.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use common::{A, B, SYSTEM, fails, json, prompt};

#[allow(dead_code, reason = "other suites use the rest")]
mod common;

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// Writes a file, and returns its path.
fn file(dir: &tempfile::TempDir, text: &str) -> String {
    let path = dir.path().join("form");
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Returns the built-in model with another tokenizer, whose tokens are bytes.
fn bytes_model() -> tempfile::TempDir {
    let dir = folder();
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-rag");
    for name in ["config.json", "model.safetensors"] {
        fs::copy(model.join(name), dir.path().join(name)).unwrap();
    }
    let mut others = 0x100..;
    let printable = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let letter = |byte: u32| if printable(byte) { byte } else { others.next().unwrap() };
    let letters = (0..256).map(letter).map(|c| char::from_u32(c).unwrap().to_string());
    let vocabulary: serde_json::Map<String, Value> =
        letters.zip(10..).map(|(letter, id)| (letter, id.into())).collect();
    let bytes =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "post_processor": null, "pre_tokenizer": bytes, "decoder": bytes,
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary, "merges": [] },
    });
    fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    dir
}

#[test]
fn an_expression_chooses_among_answers() {
    let asked = prompt(&[SYSTEM, A, B, "alba ?"]);
    let answer = |regex: &str| json(&["--prompt", &asked, "--answer-regex", regex]);
    assert_eq!(answer(" (red|blue|gold)")["text"], " red", "the answer without a form");
    let other = answer(" (blue|gold)");
    assert!([" blue", " gold"].contains(&other["text"].as_str().unwrap()), "{other}");
    assert_eq!(other["finish"], "stop");
    let cut = json(&["--prompt", &asked, "--answer-regex", "( red){5}", "--max-new-tokens", "3"]);
    assert_eq!((&cut["text"], &cut["finish"]), (&json!(" red red red"), &json!("length")));
}

#[test]
fn answers_match_a_schema_and_a_grammar() {
    let (model, dir) = (bytes_model(), folder());
    let schema = json!({
        "type": "object", "required": ["colour", "count"], "additionalProperties": false,
        "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 1, "maximum": 99}},
    });
    let schema = file(&dir, &schema.to_string());
    let run = |option: &str, path: &str, seed: &str| {
        let model = model.path().to_str().unwrap();
        let usual =
            ["--model", model, "-p", "a", "--max-new-tokens", "300", "--temperature", "1.5", "--seed", seed];
        json(&[&usual[..], &[option, path]].concat())
    };
    for seed in ["1", "2", "3"] {
        let answer = run("--answer-schema", &schema, seed);
        let value: Value = serde_json::from_str(answer["text"].as_str().unwrap()).unwrap();
        assert!(["red", "blue"].contains(&value["colour"].as_str().unwrap()), "{value}");
        assert!((1..=99).contains(&value["count"].as_i64().unwrap()), "{value}");
    }
    let grammar = file(&folder(), "start: \"a\" | \"(\" start \")\"");
    fails(&["run", "-p", "a", "--answer-grammar", &grammar], 1, "cannot read the form of the answer");
    let grammar = file(&dir, "start: \"a\" | \"(\" start \")\"");
    let text = run("--answer-grammar", &grammar, "4")["text"].as_str().unwrap().to_owned();
    assert_eq!(text.trim_start_matches('(').trim_end_matches(')'), "a");
}

#[test]
fn forms_that_cannot_be_used_are_errors_with_advice() {
    let dir = folder();
    let schema = |text: &str| file(&dir, text);
    for (text, words) in [
        ("{", "the schema is not JSON"),
        (r#"{"type": "colour"}"#, "colour"),
        (r#"{"type": "string", "enum": []}"#, "nsatisfiable"),
    ] {
        fails(&["run", "-p", "alba ?", "--answer-schema", &schema(text)], 1, words);
    }
    fails(&["run", "-p", "a", "--answer-regex", "("], 1, "the constraint on the answer");
    fails(&["run", "-p", "a", "--answer-regex", "a", "--beams", "2"], 2, "cannot be used with");
    let both = ["run", "-p", "a", "--answer-regex", "a", "--answer-grammar", "b"];
    fails(&both, 2, "cannot be used with");
}
