//! Kinds of caches, as a user chooses them.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use serde_json::Value;

use common::{A, B, SYSTEM, fails, json, prompt};

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
