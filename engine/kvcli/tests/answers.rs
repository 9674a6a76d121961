//! Answer files: an interrupted evaluation continues, and files of other evaluations are refused.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use common::{assert_fails, plain as kvc};

#[allow(dead_code, reason = "other suites use the rest")]
mod common;

const ASK: [&str; 10] = [
    "eval",
    "--json",
    "--seeds",
    "2",
    "--questions",
    "4",
    "--arm",
    "sequential, alone, none",
    "--arm",
    "sequential, alone, link:2",
];
/// Full attention and two arms answer two draws with four questions of three kinds.
const ANSWERS: usize = 3 * 2 * 4 * 3;

/// Evaluates with an answer file. Returns the scores without times, and the text on standard error.
fn scores(ask: &[&str], file: &Path) -> (Value, String) {
    let output = kvc(&[ask, &["--answers", file.to_str().unwrap()]].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    let mut report: Value = serde_json::from_slice(&output.stdout).unwrap();
    for score in report["scores"].as_array_mut().unwrap() {
        score["ttft_ms"].take();
    }
    (report, said)
}

fn lines(file: &Path) -> usize {
    fs::read_to_string(file).map_or(0, |text| text.lines().count())
}

#[test]
fn an_evaluation_that_was_killed_continues_to_the_same_scores() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, killed) = (folder.path().join("whole.jsonl"), folder.path().join("killed.jsonl"));
    let many = [&ASK[..5], &["40"], &ASK[6..]].concat();
    let mut child = Command::new(env!("CARGO_BIN_EXE_kvc"))
        .args(&many)
        .arg("--answers")
        .arg(&killed)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    while lines(&killed) < 10 {
        assert!(child.try_wait().unwrap().is_none(), "answers are written as they come");
        std::thread::sleep(Duration::from_millis(2));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let kept = lines(&killed);
    assert!(kept < 10 * ANSWERS, "it was stopped before its end");
    let (continued, said) = scores(&many, &killed);
    assert!(said.contains("continuing ") && said.contains("killed.jsonl, which has "), "{said}");
    assert_eq!((lines(&killed), lines(&whole)), (1 + 10 * ANSWERS, 0));
    assert_eq!(continued, scores(&many, &whole).0);
    // Nothing is left to ask.
    let before = fs::read_to_string(&whole).unwrap();
    assert_eq!(scores(&many, &whole).0, continued);
    assert_eq!(fs::read_to_string(&whole).unwrap(), before);
}

#[test]
fn an_incomplete_line_is_dropped_and_only_missing_answers_are_asked() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("answers.jsonl");
    let (whole, said) = scores(&ASK, &file);
    assert!(!said.contains("continuing"), "{said}");
    let text = fs::read_to_string(&file).unwrap();
    assert_eq!(text.lines().count(), 1 + ANSWERS);
    // The cut is in the middle of the 31st answer.
    let end: usize = text.split_inclusive('\n').take(31).map(str::len).sum();
    fs::write(&file, &text[..end + 20]).unwrap();
    let (continued, said) = scores(&ASK, &file);
    assert_eq!(continued, whole);
    for expected in
        ["answers.jsonl: the last line is incomplete and was dropped", "which has 30 of the answers"]
    {
        assert!(said.contains(expected), "{said}");
    }
    assert!(fs::read_to_string(&file).unwrap().starts_with(&text[..end]));
    // A cut in the settings leaves nothing to continue.
    fs::write(&file, &text[..20]).unwrap();
    assert_eq!(scores(&ASK, &file).0, whole);
    // More draws and arms are asked beside the known answers.
    let more = [&ASK[..3], &["3"], &ASK[4..], &["--arm", "overlapped,alone,none"]].concat();
    let (_, said) = scores(&more, &file);
    assert!(said.contains(&format!("which has {ANSWERS} of the answers")), "{said}");
    assert_eq!(lines(&file), 1 + 4 * 3 * 4 * 3);
}

#[test]
fn a_file_of_another_evaluation_is_refused_by_the_difference() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("answers.jsonl");
    let (_, file) = (scores(&ASK, &path), path.to_str().unwrap());
    let text = fs::read_to_string(&path).unwrap();
    let refused = |more: &[&str], reason: &str| {
        let args = [&ASK[..], &["--answers", file], more].concat();
        assert_fails(&args, &kvc(&args), 1, &[&format!("{file} cannot be continued: {reason}")]);
        assert_eq!(fs::read_to_string(&path).unwrap(), text, "the file stays unchanged");
    };
    let decoy = folder.path().join("decoy.txt");
    fs::write(&decoy, "alba is blue .").unwrap();
    refused(&["--dtype", "f16"], "its dtype is \"f32\", not \"f16\"");
    refused(&["--separator", " ."], "its separator is \"\", not \" .\"");
    refused(&["--decoys", decoy.to_str().unwrap()], "its decoys is ");
    refused(&["--measure", "both"], "its measure is \"answers\", not \"both\"");
    refused(&["--kind", "cross-start"], "question 0 of draw 0 is not the one that it answers");
    refused(
        &["--form", "mixed", "--texts", "2", "--decoys", "built-in"],
        "question 0 of draw 0 is not the one that it answers",
    );
    // Files without settings can be scored, but not continued.
    let old = text.split_once('\n').unwrap().1.to_owned();
    fs::write(&path, &old).unwrap();
    let args = [&ASK[..], &["--answers", file]].concat();
    assert_fails(&args, &kvc(&args), 1, &["its first line does not contain settings"]);
    let read = |text: &str| {
        fs::write(&path, text).unwrap();
        kvc(&["eval", "--json", "--read", file]).stdout
    };
    assert_eq!(read(&old), read(&text));
    assert!(!read(&text).is_empty());
    fs::write(&path, text + "no answer\n").unwrap();
    let last = format!("{file}, line {}: ", 2 + ANSWERS);
    assert_fails(&args, &kvc(&args), 1, &[&last]);
    let nowhere = ["eval", "--answers", "/nowhere/a.jsonl"];
    assert_fails(&nowhere, &kvc(&nowhere), 1, &["/nowhere/a.jsonl"]);
}

#[test]
fn texts_have_decoys_of_their_own_form_unless_the_built_in_ones_are_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let asked = |form: &str, more: &[&str]| {
        let file = folder.path().join(form).to_str().unwrap().to_owned();
        let ask =
            ["eval", "--texts", "2", "--seeds", "1", "--questions", "1", "--kind", "local", "--form", form];
        kvc(&[&ask[..], &["--arm", "full", "--answers", &file], more].concat())
    };
    let built_in = ["--decoys", "built-in"];
    assert!(asked("firms", &[]).status.success() && asked("mixed", &[]).status.success());
    for form in ["firms", "mixed"] {
        let refused = asked(form, &built_in);
        assert!(String::from_utf8_lossy(&refused.stderr).contains("its decoys is "), "{refused:?}");
    }
}

/// Pipes, devices and folders in place of answers or tuned settings are named. None of them waits or fills memory.
#[cfg(unix)]
#[test]
fn what_is_no_regular_file_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    assert!(Command::new("mkfifo").arg(path("pipe")).status().unwrap().success());
    std::os::unix::fs::symlink("/dev/zero", path("device")).unwrap();
    fs::create_dir(path("folder")).unwrap();
    fs::File::create(path("large")).unwrap().set_len(1 << 40).unwrap();
    for name in ["pipe", "device", "folder", "large"] {
        let file = path(name);
        for args in [&["eval", "--json", "--read", &file][..], &["run", "--reuse", &file, "-p", "a"]] {
            assert_fails(args, &kvc(args), 1, &[&file]);
        }
    }
    let large = path("large");
    let answers = [&ASK[..], &["--answers", &large]].concat();
    assert_fails(&answers, &kvc(&answers), 1, &["large"]);
}

/// A pipe without a reader in place of a result is named before anything is computed. None of the commands waits.
#[cfg(unix)]
#[test]
fn results_for_a_pipe_that_nobody_reads_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe").to_str().unwrap().to_owned();
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for args in [
        &["eval", "--answers", &pipe][..],
        &["eval", "--plot", &pipe],
        &["eval", "--save-questions", &pipe],
        &["tune", "--out", &pipe],
        &["bench", "rag", "--plot", &pipe],
        &["bench", "serve", "--plot", &pipe],
    ] {
        assert_fails(
            args,
            &kvc(args),
            1,
            &[&pipe, "a pipe that nobody reads; start its reader, or give a file"],
        );
    }
}

/// The reader of a pipe gets each answer.
#[cfg(unix)]
#[test]
fn answers_reach_the_reader_of_a_pipe() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let path = pipe.clone();
    // Opening one end of a pipe waits until the other end is open.
    let reader = std::thread::spawn(move || fs::read_to_string(path).unwrap());
    let held = fs::OpenOptions::new().write(true).open(&pipe).unwrap();
    scores(&ASK, &pipe);
    drop(held);
    assert_eq!(reader.join().unwrap().lines().count(), 1 + ANSWERS);
}

#[cfg(target_os = "linux")]
#[test]
fn a_file_that_cannot_be_written_ends_the_evaluation() {
    let args = [&ASK[..], &["--answers", "/dev/full"]].concat();
    assert_fails(&args, &kvc(&args), 1, &["cannot write the answers to /dev/full: No space left"]);
}
