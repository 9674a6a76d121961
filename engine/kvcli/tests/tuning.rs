//! `kvc tune`, and the files that it writes for `--reuse`.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::fs;

use serde_json::Value;
use tempfile::TempDir;

use common::{assert_fails, plain as kvc, run_json};

#[allow(dead_code, reason = "other suites use the rest")]
mod common;

fn fails(args: &[&str], code: i32, expected: &[&str]) {
    assert_fails(args, &kvc(args), code, expected);
}

/// Tunes the built-in model with two candidates. Returns the folder with the file, the file's path, and the
/// report.
fn tuned() -> (TempDir, String, Value) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("reuse.json").to_str().unwrap().to_owned();
    let ways = ["--candidate", "sequential,alone,none", "--candidate", "sequential,with-system,link:16"];
    let asked =
        ["--screen", "4", "--seeds", "2", "--questions", "40", "--within", "5", "--json", "--out", &file];
    let report = run_json(&[&["tune"][..], &ways, &asked].concat());
    (folder, file, report)
}

#[test]
fn run_and_eval_accept_the_file_that_tune_writes() {
    let (_folder, file, report) = tuned();
    assert_eq!((&report["fits"], report["rows"].as_array().unwrap().len()), (&true.into(), 2));
    let chosen = &report["rows"][report["chosen"].as_u64().unwrap() as usize];
    assert_eq!(chosen["name"], "sequential, alone, none", "the cheapest keeps the answers");
    let prompt =
        ["--json", "--separator", "##", "-p", "be brief ## alba is red . ## cedo is blue . ## alba ?"];
    let output = kvc(&[&["run", "--reuse", &file][..], &prompt].concat());
    let by_file: Value = serde_json::from_slice(&output.stdout).unwrap();
    let output = kvc(&[&["run", "--positions", "sequential", "--chunks", "alone"][..], &prompt].concat());
    let by_hand: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(by_file["cell"]["strategy"], "sequential", "{by_file}");
    for field in ["text", "cell", "recomputed_tokens"] {
        assert_eq!(by_file[field], by_hand[field], "{field}");
    }
    let output = kvc(&["eval", "--reuse", &file, "--seeds", "1", "--questions", "2", "--json"]);
    let scores: Value = serde_json::from_slice(&output.stdout).unwrap();
    let names: Vec<&str> =
        scores["scores"].as_array().unwrap().iter().map(|score| score["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"full attention") && names.contains(&"sequential, alone, none"), "{names:?}");
    let gate = ["eval", "--gate", "--reuse", &file, "--questions", "30", "--seeds", "5"];
    assert!(kvc(&gate).status.success(), "{}", String::from_utf8_lossy(&kvc(&gate).stderr));
}

#[test]
fn the_file_contains_the_decoys_that_its_mode_needs() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (file, decoys) = (path("reuse.json"), ["dana is green .", "emil is grey .", "fred is black ."]);
    for (i, decoy) in decoys.iter().enumerate() {
        fs::write(folder.path().join(format!("{i}.txt")), decoy).unwrap();
    }
    let given = [path("0.txt"), path("1.txt"), path("2.txt")];
    let given: Vec<&str> = given.iter().flat_map(|path| ["--decoys", path]).collect();
    let asked = ["tune", "--candidate", "sequential,behind:2,none", "--screen", "1", "--seeds", "1"];
    let more = ["--questions", "2", "--out", &file];
    let output = kvc(&[&asked[..], &more, &given].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut tuned: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    let seen: Vec<&str> =
        tuned["decoys"].as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect();
    assert_eq!(seen.iter().map(|text| text.trim()).collect::<Vec<_>>(), decoys[..2], "{tuned}");
    let prompt =
        ["--json", "--separator", "##", "-p", "be brief ## alba is red . ## cedo is blue . ## alba ?"];
    let by_file = run_json(&[&["run", "--reuse", &file][..], &prompt].concat());
    let by_hand = run_json(&[&["run", "--chunks", "behind:2"][..], &given[..4], &prompt].concat());
    for field in ["text", "cell"] {
        assert_eq!(by_file[field], by_hand[field], "{field}");
    }
    run_json(&["eval", "--reuse", &file, "--seeds", "1", "--questions", "1", "--json"]);
    tuned["decoys"] = serde_json::json!([decoys[0]]);
    fs::write(&file, tuned.to_string()).unwrap();
    fails(&["run", "-p", "hi", "--reuse", &file], 1, &["behind:2 needs 2 decoys, and there are 1"]);
}

#[test]
fn files_that_are_no_tuned_reuse_of_this_model_say_why() {
    let (folder, file, _) = tuned();
    let run = |file: &str, expected: &[&str]| fails(&["run", "-p", "hi", "--reuse", file], 1, expected);
    let text = fs::read_to_string(&file).unwrap();
    let changed = |from: &str, to: &str| {
        assert!(text.contains(from));
        let file = folder.path().join("changed.json");
        fs::write(&file, text.replace(from, to)).unwrap();
        file.to_str().unwrap().to_owned()
    };
    run("/nowhere/reuse.json", &["/nowhere/reuse.json", "No such file"]);
    run(&changed("\"version\": 1", "\"version\": 9"), &["version 9", "kvc tune"]);
    run(&changed("\"recompute\"", "\"recomputed\""), &["changed.json", "recomputed", "line "]);
    run(&changed("\"none\"", "\"some\""), &["some", "link:K", "line "]);
    run(&changed("\"temperature\": 1.0", "\"temperature\": 0.0"), &["temperature"]);
    let model: Value = serde_json::from_str(&text).unwrap();
    let model = model["model"].as_str().unwrap();
    run(&changed(model, &"0".repeat(64)), &["tuned for the model 000000000000", &model[..12], "kvc tune"]);
    fails(&["run", "-p", "hi", "--reuse", &file, "--recompute", "full"], 2, &["--reuse", "--recompute"]);
    fails(&["tune", "--out", "/nowhere/reuse.json"], 1, &["/nowhere/reuse.json"]);
    fails(&["tune", "--kind", "cross-start", "--seeds", "1", "--questions", "1"], 1, &["local"]);
}

#[test]
fn no_file_is_written_where_full_attention_itself_answers_too_little() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let wrong = r#"{"system": "you answer questions", "documents": ["alba is red .", "cedo is blue ."], "question": "alba ?", "answer": "green"}"#;
    fs::write(path("questions.jsonl"), wrong).unwrap();
    let (questions, file) = (path("questions.jsonl"), path("reuse.json"));
    let ask = [
        "tune",
        "--dataset",
        &questions,
        "--seeds",
        "1",
        "--candidate",
        "sequential,alone,none",
        "--out",
        &file,
    ];
    for json in [&[][..], &["--json"]] {
        let output = kvc(&[&ask[..], json].concat());
        let (stdout, stderr) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(
            stderr.contains("answers only 0 % of the questions") && stderr.contains("--floor 50"),
            "{stderr}"
        );
        assert!(stdout.contains("sequential, alone, none"), "what was measured is shown: {stdout}");
        assert!(!fs::exists(&file).unwrap());
    }
}
