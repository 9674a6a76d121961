//! `kvc doctor answers`: why an answer with reuse differs from others.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::fs;

use common::{SYSTEM, fails, kvc, plain, run_json};
use serde_json::Value;

#[allow(dead_code, reason = "other suites use the rest")]
mod common;

/// Two documents of which the second one is understood only by who sees the first one.
const FIRST: &str = "alba is red .";
const SECOND: &str = "bora is same .";

/// Writes the documents, and returns the arguments that ask about them.
fn question(folder: &tempfile::TempDir) -> Vec<String> {
    let mut args = ["doctor", "answers", "--system", SYSTEM, "-p", "bora ?"].map(str::to_owned).to_vec();
    for (name, text) in [("first.txt", FIRST), ("second.txt", SECOND)] {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        args.extend(["--document".to_owned(), path.to_str().unwrap().to_owned()]);
    }
    args
}

fn examined(args: &[String], more: &[&str]) -> Value {
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    run_json(&[&args[..], &["--json"], more].concat())
}

/// Returns a field of each answer: reuse, reuse again, without a cache, full attention.
fn each<'a>(report: &'a Value, field: &str) -> Vec<&'a Value> {
    let answers = report["answers"].as_array().unwrap();
    assert_eq!(answers.len(), 4, "{report}");
    answers.iter().map(|answer| &answer[field]).collect()
}

#[test]
fn an_answer_that_changes_because_documents_do_not_see_each_other_is_recognised() {
    let folder = tempfile::tempdir().unwrap();
    let asked = question(&folder);
    for format in ["f32", "bf16", "int8", "fp8-e4m3"] {
        let apart = ["--chunks", "alone", "--recompute", "none", "--dtype", format];
        let report = examined(&asked, &apart);
        assert_eq!(report["conclusion"], "documents_apart", "{report}");
        assert!(report["remedy"].as_str().unwrap().contains("--recompute"), "{report}");
        assert_eq!(each(&report, "found"), [0, 2, 0, 0]);
        assert_eq!(report["not_examined"], 0);
        assert_eq!(each(&report, "documents"), [2, 2, 2, 0]);
        let texts = each(&report, "text");
        assert!(texts[3] == " red" && texts[..3].iter().all(|text| *text == texts[0] && *text != " red"));
        assert_eq!(
            each(&report, "first_other_token"),
            [&Value::Null, &Value::Null, &Value::Null, &Value::from(1)]
        );
        let gaps = each(&report, "largest_difference");
        assert!(
            gaps[3].as_f64().unwrap() > 1.0 && gaps[1].as_f64() < report["rounding"].as_f64(),
            "{report}"
        );
    }
    let args: Vec<&str> = asked.iter().map(String::as_str).collect();
    let table = kvc(&[&args[..], &["--chunks", "alone", "--recompute", "none"]].concat());
    let text = String::from_utf8(table.stdout).unwrap();
    assert!(table.status.success() && text.contains("The cache is right."), "{text}");
    assert!(text.contains("reuse, again") && text.contains("2 of 2"), "{text}");
    let full = text.lines().find(|line| line.contains("full attention")).unwrap();
    assert!(full.split_whitespace().any(|cell| cell == "1"), "tokens are not counted as in JSON: {full}");
}

#[test]
fn the_default_strategy_in_a_narrow_format_is_not_called_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let asked = question(&folder);
    for format in ["f32", "bf16", "int8", "int4:8", "fp8-e4m3"] {
        let report = examined(&asked, &["--dtype", format]);
        assert_ne!(report["conclusion"], "cache_is_wrong", "{report}");
        assert_eq!(report["not_examined"], 0, "{report}");
        assert_eq!(report["rounding"], if format == "f32" { 0.01 } else { 0.1 }, "{format}");
    }
    let eight_bits = examined(&asked, &["--compute", "int8"]);
    assert_eq!(eight_bits["rounding"], 0.1);
}

#[test]
fn an_answer_that_full_attention_gives_too_is_not_blamed_on_reuse() {
    let folder = tempfile::tempdir().unwrap();
    let asked = question(&folder);
    let report = examined(&asked, &["--recompute", "full"]);
    assert_eq!(report["conclusion"], "not_reuse", "{report}");
    assert!(each(&report, "text").iter().all(|text| *text == " red"), "{report}");
    assert!(each(&report, "largest_difference").iter().all(|gap| gap.as_f64() < Some(1e-3)), "{report}");
}

#[test]
fn documents_of_earlier_prompts_and_of_a_disk_are_found_by_the_first_answer() {
    let folder = tempfile::tempdir().unwrap();
    let asked = question(&folder);
    let warmed = examined(&asked, &["--recompute", "none", "--warm", "alba ?"]);
    assert_eq!(each(&warmed, "found"), [2, 2, 0, 0]);
    let kv = folder.path().join("kv");
    let disk = ["--disk", kv.to_str().unwrap(), "--disk-limit", "32MiB", "--disk-loads", "always"];
    let disk = [&disk[..], &["--recompute", "none"]].concat();
    assert_eq!(each(&examined(&asked, &disk), "found"), [0, 2, 0, 0]);
    let loaded = examined(&asked, &disk);
    assert_eq!(each(&loaded, "found"), [2, 2, 0, 0]);
    assert_ne!(loaded["conclusion"], "cache_is_wrong");
}

#[test]
fn an_examination_that_shows_little_says_so() {
    let nothing = plain(&["doctor", "answers", "-p", "bora ?"]);
    let stderr = String::from_utf8_lossy(&nothing.stderr);
    assert!(nothing.status.success() && stderr.contains("The prompt has no documents"), "{stderr}");
    fails(&["doctor", "answers"], 2, "--prompt");
    fails(&["doctor", ".", "answers", "-p", "a"], 2, "cannot be used with");
    fails(&["doctor", "answers", "-p", "a", "--full-attention"], 2, "unexpected argument");
    fails(&["doctor", "answers", "-p", "a", "--max-new-tokens", "0"], 2, "1 or more");
    fails(&["doctor", "answers", "-p", "a", "--template-arg", "x=1"], 2, "--template-arg applies only");
}
