//! `kvc size`: the memory of keys and values, without weights.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use common::{fails, json, kvc, run_json};

#[allow(dead_code, reason = "other suites use the rest")]
mod common;

fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-rag")
}

#[test]
fn sizes_are_those_of_an_engine_in_every_format() {
    let config = model().join("config.json");
    for format in ["f32", "f16", "int8", "int8:16", "int4", "fp8-e4m3", "fp8-e4m3:head"] {
        for block in ["16", "32"] {
            let (dtype, block_size) = (["--dtype", format], ["--block-size", block]);
            let size = ["size", config.to_str().unwrap(), "--json", "--context", "100", "--requests", "3"];
            let size = run_json(&[&size[..], &dtype, &block_size].concat());
            let run = json(&[&["-p", "alba ?", "--max-new-tokens", "1"][..], &dtype, &block_size].concat());
            let engine = &run["blocks"];
            let per_block = engine["kv_bytes"].as_f64().unwrap() / engine["total"].as_f64().unwrap();
            let tokens: f64 = block.parse().unwrap();
            let blocks = (100.0 / tokens).ceil();
            for (field, expected) in [
                ("bytes_per_token", per_block / tokens),
                ("bytes_per_request", per_block * blocks),
                ("bytes", 3.0 * per_block * blocks),
            ] {
                let bytes = size["formats"][0][field].as_f64().unwrap();
                // An engine also has some scales for all blocks.
                assert!((bytes / expected - 1.0).abs() < 1e-4, "{field} in {format}, {block}: {bytes}");
            }
        }
    }
}

#[test]
fn a_folder_a_config_and_the_beginning_of_a_gguf_file_are_enough() {
    let of = |path: &Path| run_json(&["size", path.to_str().unwrap(), "--json"])["formats"].clone();
    let folder = tempfile::tempdir().unwrap();
    fs::copy(model().join("config.json"), folder.path().join("config.json")).unwrap();
    assert_eq!(of(folder.path()), of(&model()));
    let gguf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kvmodel/tests/goldens/gguf");
    for name in ["linear.gguf", "iq4_nl.gguf", "scores.gguf"] {
        let file = gguf.join(name);
        let bytes = fs::read(&file).unwrap();
        let cut = folder.path().join("cut.gguf");
        fs::write(&cut, &bytes[..bytes.len() - 1000.min(bytes.len() / 4)]).unwrap();
        assert_eq!(of(&cut), of(&file), "{name}");
    }
}

#[test]
fn a_table_shows_what_fits_and_wrong_input_is_an_error() {
    let path = model();
    let path = path.to_str().unwrap();
    let output = kvc(&["size", path, "--context", "4096", "--requests", "4", "--kv-memory", "64"]);
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    for words in [
        "4 requests",
        "requests in 64 MiB",
        "2.0 KiB",
        "8.0 MiB",
        "32.0 MiB",
        "bf16",
        "at most 2048 positions",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let rows = run_json(&["size", path, "--json", "--kv-memory", "64", "--dtype", "f32"]);
    assert_eq!(rows["formats"][0]["fit"], Value::from(16), "{rows}");
    fails(&["size", "/nowhere"], 1, "/nowhere");
    fails(&["size", path, "--context", "0"], 2, "--context");
    fails(&["size", path, "--dtype", "f99"], 2, "f99");
    let folder = tempfile::tempdir().unwrap();
    fails(&["size", folder.path().to_str().unwrap()], 1, "config.json");
    fs::write(folder.path().join("config.json"), "{}").unwrap();
    fails(&["size", folder.path().to_str().unwrap()], 1, "config.json");
}
