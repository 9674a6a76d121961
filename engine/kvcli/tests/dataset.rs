//! A user's own questions: the dataset file, its errors, and the gate.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use common::{A, B, SYSTEM, fails, kvc, run_json};

#[allow(dead_code, reason = "other suites use the rest")]
mod common;

#[test]
fn a_dataset_is_read_and_the_gate_decides_by_exit_code() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("questions.jsonl");
    let line = |question: &str, answer: &str| {
        format!(
            r#"{{"system": "{SYSTEM}", "documents": ["{A}", "{B}"], "question": "{question} ?", "answer": "{answer}"}}"#
        )
    };
    std::fs::write(&file, [line("alba", "red"), line("cedo", "blue")].join("\n")).unwrap();
    let file = file.to_str().unwrap();
    let overlapped = ["--positions", "overlapped"];
    for (way, identities) in [(&[][..], 9), (&overlapped, 11)] {
        let asked = ["eval", "--gate", "--json", "--seeds", "2", "--dataset", file, "--within", "60"];
        let gate = run_json(&[&asked[..], way].concat());
        let checks = gate["checks"].as_array().unwrap();
        assert!(checks.len() == identities + 1 && gate["fit"] == true, "{gate}");
        assert!(checks.iter().all(|check| check["holds"] == true));
    }
    let gate = |text: &str| {
        std::fs::write(file, text).unwrap();
        let asked = ["eval", "--gate", "--seeds", "1", "--dataset", file, "--within", "10"];
        let output = kvc(&[&asked[..], &overlapped].concat());
        assert_eq!(output.status.code(), Some(1));
        (
            String::from_utf8_lossy(&output.stdout).into_owned(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    };
    // The answer is in another document, so reuse loses it.
    let lost = format!(
        r#"{{"system": "{SYSTEM}", "documents": ["alba is red .", "bora is same . cedo is blue ."], "question": "bora ?", "answer": "red"}}"#
    );
    let (shown, said) = gate(&[lost.as_str(); 8].join("\n"));
    assert!(shown.contains("NOT suit"), "{shown}");
    assert!(
        said.contains("these checks failed: 8 local questions: 100.0 points lost")
            && !said.contains("recomputing"),
        "{said}"
    );
    // One question is not enough to bound the loss.
    let (shown, said) = gate(&lost);
    assert!(shown.contains("cannot be judged") && said.contains("1 local questions"), "{shown}{said}");
    // Without right answers, reuse has nothing to lose.
    let (shown, said) = gate(&line("alba", "nobody"));
    assert!(
        shown.contains("undecided") && said.contains("full attention answers 0.0 % of 1"),
        "{shown}{said}"
    );
    let (_, said) = gate(&line("alba", "red").replace('}', r#", "kind": "cross-start"}"#));
    assert!(said.contains("no local questions"), "{said}");
    std::fs::write(file, "{").unwrap();
    fails(&["eval", "--dataset", file], 1, &format!("{file}: questions, line 1: EOF"));
    std::fs::write(
        file,
        ["", &line("alba", "red"), &line("cedo", "blue").replace("bora is", "bora ## is")].join("\n"),
    )
    .unwrap();
    let held = format!("{file}, line 3: documents[0] contains the separator");
    fails(&["eval", "--dataset", file, "--separator", " ##\n"], 1, &held);
    let none = format!("{file}: questions, line 2: answer \"red\": it has no numbers");
    fails(&["eval", "--dataset", file, "--grader", "numbers"], 1, &none);
    std::fs::write(file, "\n").unwrap();
    fails(&["eval", "--dataset", file], 1, &format!("{file}: questions: no question"));
    fails(&["eval", "--dataset", "/nowhere"], 1, "/nowhere");
}

#[test]
fn saved_questions_are_the_dataset_that_is_asked() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("questions.jsonl");
    let file = file.to_str().unwrap();
    let drawn =
        ["eval", "--texts", "3", "--form", "mixed", "--seeds", "2", "--questions", "4", "--kind", "local"];
    let saved = kvc(&[&drawn[..], &["--save-questions", file]].concat());
    assert!(saved.status.success() && saved.stdout.is_empty());
    assert!(String::from_utf8_lossy(&saved.stderr).contains("8 questions"));
    let text = std::fs::read_to_string(file).unwrap();
    let parsed: Vec<serde_json::Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert!(parsed.len() == 8 && parsed.iter().all(|question| question["documents"][2].is_string()));
    let asked = run_json(&["eval", "--json", "--arm", "full", "--dataset", file, "--seeds", "1"]);
    assert_eq!(asked["questions"], 8, "{asked}");
    fails(
        &["eval", "--texts", "2", "--save-questions", "/nowhere/at/all"],
        1,
        "cannot write the questions to /nowhere",
    );
}
