//! Kinds of caches, as a user chooses them, and the memory of models and caches.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use serde_json::Value;

use common::{A, B, SYSTEM, assert_fails, fails, json, kvc, prompt};

#[allow(dead_code, reason = "other suites use the rest")]
mod common;

#[test]
fn a_static_cache_gives_the_tokens_of_a_paged_one() {
    let ask = prompt(&[SYSTEM, A, B, "bora ?"]);
    let args = ["--full-attention", "--prompt", &ask];
    let (paged, fixed) =
        (json(&args), json(&[&args[..], &["--cache", "static", "--max-len", "64"]].concat()));
    assert_eq!((&paged["tokens"], &paged["blocks"]["cache"]), (&fixed["tokens"], &Value::from("paged")));
    assert_eq!((&fixed["blocks"]["cache"], &fixed["blocks"]["main"]), (&Value::from("static"), &Value::Null));
    // The answer ends when the cache is full.
    let full = paged["prompt_tokens"].to_string();
    let end = json(&[&args[..], &["--cache", "static", "--max-len", &full]].concat());
    assert_eq!((&end["finish"], end["tokens"].as_array().unwrap().len()), (&Value::from("length"), 1));
    fails(&["run", "--cache", "static", "--prompt", &ask], 1, "full attention");
    fails(
        &["run", "--cache", "static", "--max-len", "5", "--full-attention", "--prompt", &ask],
        1,
        "static cache",
    );
    fails(&["run", "--cache", "ring", "--prompt", &ask], 2, "static");
}

#[test]
fn a_grouped_cache_gives_the_tokens_of_a_paged_one() {
    let ask = prompt(&[SYSTEM, A, B, "bora ?"]);
    let args = ["--full-attention", "--prompt", &ask];
    let (paged, grouped) = (json(&args), json(&[&args[..], &["--cache", "grouped"]].concat()));
    assert_eq!(
        (&paged["tokens"], &grouped["blocks"]["cache"]),
        (&grouped["tokens"], &Value::from("grouped"))
    );
    assert_eq!((&paged["blocks"]["groups"], &grouped["blocks"]["chunks"]), (&Value::Null, &Value::Null));
    let [group] = &grouped["blocks"]["groups"].as_array().unwrap()[..] else { panic!("{grouped}") };
    assert_eq!((&group["kind"], &group["kv_bytes"]), (&Value::from("full"), &grouped["memory"]["kv_bytes"]));
    assert_eq!(group["blocks"], grouped["blocks"]["main"]);
    fails(&["run", "--cache", "grouped", "--prompt", &ask], 1, "cannot keep chunks");
    fails(&["run", "--cache", "grouped", "--prompt", "a", "--max-len", "9"], 2, "--cache static");
    fails(&["run", "--cache", "grouped", "--prompt", "a", "--memory-share", "0.5"], 2, "--cache paged");
}

/// A model that does not fit is refused before its weights are drawn, and the error says what it would take.
#[test]
fn a_model_for_benchmarks_that_does_not_fit_is_refused() {
    // No machine has the memory for these: more than 5 TiB as f32, and more than 1 TiB as q8.
    for size in ["2048x16384", "16384x8192", "16384x16384"] {
        for command in ["rag", "serve"] {
            for weights in ["stored", "f32", "q8", "copy"] {
                let args = ["bench", command, "--size", size, "--weights", weights, "--requests", "1"];
                let expected = [size, "MiB for its weights", "choose a smaller --size"];
                assert_fails(&args, &kvc(&args), 1, &expected);
            }
        }
    }
}

#[test]
fn more_memory_for_caches_than_there_can_be_is_refused() {
    for mib in ["17592186044415", "18446744073709551615"] {
        for command in ["rag", "serve"] {
            let args = ["bench", command, "--size", "2x64", "--requests", "1", "--kv-memory", mib];
            assert_fails(&args, &kvc(&args), 1, &["too large", "--kv-memory MIB"]);
        }
        let args = ["run", "--prompt", "a", "--kv-memory", mib];
        assert_fails(&args, &kvc(&args), 1, &["too large", "--kv-memory MIB"]);
    }
}
