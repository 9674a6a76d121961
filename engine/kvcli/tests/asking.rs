//! Prompts and answers of `kvc run`: prompts in each form, conversations, documents, sampling, stop strings,
//! threads.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;
use tempfile::TempDir;

use common::{A, B, SYSTEM, assert_fails, plain as kvc};

#[allow(dead_code, reason = "other suites use the rest")]
mod common;

fn run(args: &[&str]) -> (String, String) {
    let output = kvc(&[&["run"], args].concat());
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{args:?}: {err}");
    (out, err)
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&run(&[&["--json"], args].concat()).0).expect("exactly one JSON object")
}

/// Checks that `kvc run` fails with `code`, prints `expected` on standard error, and nothing on standard
/// output.
fn fails(args: &[&str], code: i32, expected: &str) {
    assert_fails(args, &kvc(&[&["run"], args].concat()), code, &[expected]);
}

/// A folder with files, and their paths as arguments.
struct Files(TempDir);

impl Files {
    fn new(files: &[(&str, &str)]) -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        for (name, text) in files {
            fs::write(folder.path(name), text).unwrap();
        }
        folder
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn arg(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }
}

/// Returns a copy of the shipped model with another chat template, and without an end token if `endless`.
fn model(template: &str, endless: bool) -> Files {
    let files = Files::new(&[]);
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-rag");
    for name in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(shipped.join(name), files.path(name)).unwrap();
    }
    let edit = |name: &str, field: &str, value: Value| {
        let mut json: Value = serde_json::from_slice(&fs::read(files.path(name)).unwrap()).unwrap();
        json[field] = value;
        fs::write(files.path(name), json.to_string()).unwrap();
    };
    edit("tokenizer_config.json", "chat_template", template.into());
    if endless {
        edit("config.json", "eos_token_id", Value::Null);
    }
    files
}

#[test]
fn a_text_with_separators_is_ordinary_until_they_are_asked_for() {
    let markdown = "## alba\nalba is red .\n## bora\nalba ?";
    let (_, said) = run(&["-p", markdown]);
    assert!(said.contains("note: the text contains ##; give --separator '##'"), "{said}");
    assert!(said.contains("0 of 0 chunks hit"), "{said}");
    let parts = [SYSTEM, A, B, "bora ?"].join("##");
    let plain = json(&["-p", &parts]);
    assert_eq!(plain["chunks"], Value::Array(vec![]), "standard output stays one object beside the note");
    let cut = json(&["-p", &parts, "--separator", "##"]);
    assert_eq!((cut["chunks"].as_array().unwrap().len(), &cut["text"]), (2, &Value::from(" red")));
    // There is no note if nothing was lost, or if the form is explicit.
    for quiet in [&["-p", "one ## only"][..], &["-p", markdown, "--system", "a"]] {
        assert!(!run(quiet).1.contains("note:"), "{quiet:?}");
    }
    assert!(!run(&["-p", &parts, "--separator", "##"]).1.contains("note:"));
}

#[test]
fn the_default_way_is_explained_in_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let decoy = dir.path().join("decoy.txt");
    fs::write(&decoy, "emil is grey .").unwrap();
    let parts = [SYSTEM, A, B, "bora ?"].join("##");
    let asked = ["-p", &parts, "--separator", "##"];
    let explained = |more: &[&str]| {
        let said = run(&[&asked[..], more].concat()).1;
        said.lines().find(|line| line.contains("measured")).map(str::to_owned)
    };
    let recomputed = explained(&[]).unwrap();
    assert!(
        recomputed.starts_with("Half of the document tokens are recomputed (question:0.5)"),
        "{recomputed}"
    );
    let decoys = ["--decoys", decoy.to_str().unwrap()].repeat(3);
    assert_eq!(explained(&decoys[..4]).as_ref(), Some(&recomputed), "two decoys are too few");
    let behind = explained(&decoys).unwrap();
    assert!(behind.starts_with("Documents are computed behind decoys (behind:3)"), "{behind}");
    assert_eq!(json(&[&asked[..], &decoys].concat())["cell"]["mode"], "behind:3");
    let empty = dir.path().join("none");
    fs::create_dir(&empty).unwrap();
    fails(&[&asked[..], &["--decoys", empty.to_str().unwrap()]].concat(), 1, "contains no decoys");
    for chosen in [&["--chunks", "alone"][..], &["--recompute", "none"], &["--full-attention"]] {
        assert_eq!(explained(chosen), None, "{chosen:?}");
    }
    assert!(!run(&["-p", "alba ?"]).1.contains("measured"), "there are no documents");
}

#[test]
fn prompts_come_from_files_and_standard_input_too() {
    let text = [SYSTEM, A, B, "dilan ?"].join("##");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("prompt.txt");
    fs::write(&file, &text).unwrap();
    let from_file = json(&["--prompt-file", file.to_str().unwrap(), "--separator", "##"]);
    let mut child = Command::new(env!("CARGO_BIN_EXE_kvc"))
        .args(["run", "--prompt", "-", "--separator", "##"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(from_file["text"], " small");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "small\n");
    assert!(String::from_utf8_lossy(&output.stderr).contains("first token after"));
}

#[test]
fn documents_after_a_sink_are_hits_under_each_system_prompt_that_begins_with_it() {
    let ask = format!("{SYSTEM} ## {A} ## {B} ## bora ?");
    let warm = format!("you answer questions ## {B} ## {A} ## cedo ?");
    let hits = |mode: &str| {
        let asked = ["--separator", "##", "--positions", "sequential", "--chunks", mode, "--prompt", &ask];
        let answer = json(&[&asked[..], &["--warm", &warm]].concat());
        answer["chunks"].as_array().unwrap().iter().filter(|chunk| chunk["hit"] == true).count()
    };
    assert_eq!((hits("sink:2"), hits("sink:3"), hits("with-system"), hits("alone")), (2, 2, 0, 2));
    assert_eq!(hits("sink:4"), 0, "the other system prompt has three tokens");
}

#[test]
fn documents_are_files_and_are_hits_in_later_prompts() {
    let files = Files::new(&[("a.txt", A), ("b.txt", &format!("{B}\n")), ("warm.txt", "cedo ?")]);
    let (a, b, warm) = (files.arg("a.txt"), files.arg("b.txt"), files.arg("warm.txt"));
    let ask = ["--system", SYSTEM, "--document", &a, "--document", &b, "--prompt", "bora ?"];
    let cold = json(&ask);
    assert_eq!(cold["text"], " red");
    // The parts equal those of the same text split at a separator, each with a line break at its end.
    let parts = format!("{SYSTEM}\n|{A}\n|{B}\n|bora ?");
    let cut = json(&["--prompt", &parts, "--separator", "|"]);
    assert_eq!((&cut["prompt_tokens"], &cut["tokens"]), (&cold["prompt_tokens"], &cold["tokens"]));
    assert_eq!(cut["chunks"], cold["chunks"]);
    for more in [&["--warm", "cedo ?"], &["--warm-file", warm.as_str()]] {
        let warmed = json(&[&ask[..], more].concat());
        assert!(warmed["chunks"].as_array().unwrap().iter().all(|chunk| chunk["hit"] == true), "{more:?}");
        assert_eq!(warmed["tokens"], cold["tokens"]);
    }
    assert!(cold["chunks"].as_array().unwrap().iter().all(|chunk| chunk["hit"] == false));
}

#[test]
fn documents_may_be_the_beginning_of_a_prompt() {
    let files = Files::new(&[("a.txt", A), ("b.txt", B)]);
    let (a, b) = (files.arg("a.txt"), files.arg("b.txt"));
    let cold = json(&["--document", &a, "--document", &b, "-p", "bora ?"]);
    let chunks = cold["chunks"].as_array().unwrap();
    assert_eq!(chunks.len(), 2, "{cold}");
    assert!(chunks.iter().all(|chunk| chunk["hit"] == false), "{cold}");
    let cut = json(&["--prompt", &format!("|{A}\n|{B}\n|bora ?"), "--separator", "|"]);
    assert_eq!((&cut["prompt_tokens"], &cut["tokens"]), (&cold["prompt_tokens"], &cold["tokens"]));
    // The same documents in the same order, behind another question.
    let warm = json(&["--document", &a, "--document", &b, "-p", "bora ?", "--warm", "alba ?"]);
    assert!(warm["chunks"].as_array().unwrap().iter().all(|chunk| chunk["hit"] == true), "{warm}");
    assert_eq!(warm["tokens"], cold["tokens"]);
}

#[test]
fn a_system_prompt_stands_before_the_prompt() {
    let joined = json(&["--system", SYSTEM, "-p", "alba ?"]);
    let written = json(&["-p", &format!("{SYSTEM}\nalba ?")]);
    assert_eq!(
        (&joined["prompt_tokens"], &joined["tokens"]),
        (&written["prompt_tokens"], &written["tokens"])
    );
}

#[test]
fn a_conversation_is_rendered_in_the_chat_template() {
    let template = "{% for m in messages %}{{ m.role }} says {{ m.content }} . {% endfor %}{% if add_generation_prompt %}alba ?{% endif %}";
    let model = model(template, false);
    let messages = r#"[{"role": "system", "content": "be brief"}, {"role": "user", "content": "alba is blue"},
        {"role": "assistant", "content": "yes"}, {"role": "user", "content": "alba is red"}]"#;
    let files = Files::new(&[("chat.json", messages), ("a.txt", A), ("b.txt", B)]);
    let (dir, chat) = (model.arg(""), files.arg("chat.json"));
    let rendered =
        "system says be brief . user says alba is blue . assistant says yes . user says alba is red . alba ?";
    let told = json(&["--model", &dir, "--messages", &chat]);
    let raw = json(&["--model", &dir, "-p", rendered]);
    assert_eq!((&told["tokens"], &told["prompt_tokens"]), (&raw["tokens"], &raw["prompt_tokens"]));
    // A system prompt is a separate message.
    let system = json(&["--model", &dir, "--chat", "--system", "be brief", "-p", "alba is red"]);
    let raw = json(&["--model", &dir, "-p", "system says be brief . user says alba is red . alba ?"]);
    assert_eq!((&system["tokens"], &system["prompt_tokens"]), (&raw["tokens"], &raw["prompt_tokens"]));
    // Documents are at the start of the last message.
    let documents = ["--document", &files.arg("a.txt"), "--document", &files.arg("b.txt")];
    let told = json(&[&["--model", &dir, "--messages", &chat], &documents[..]].concat());
    let parts = rendered.replace("user says alba is red", &format!("user says |{A}\n|{B}\n|alba is red"));
    let cut = json(&["--model", &dir, "--separator", "|", "-p", &parts]);
    assert_eq!((&told["chunks"], &told["tokens"]), (&cut["chunks"], &cut["tokens"]));
    assert_eq!(told["prompt_tokens"], cut["prompt_tokens"]);
    let hit = json(&[&["--model", &dir, "--messages", &chat, "--warm", "cedo ?"], &documents[..]].concat());
    assert!(hit["chunks"].as_array().unwrap().iter().all(|chunk| chunk["hit"] == true));
}

#[test]
fn variables_and_the_beginning_of_an_answer_reach_the_template() {
    let template = "{% for m in messages %}{{ m.role }} says {{ m.content }} . {% endfor %}{% for t in tools or [] %}{{ t.name }} is tool . {% endfor %}{{ mood }}{% if add_generation_prompt %}alba ?{% endif %}";
    let model = model(template, false);
    let begun = r#"[{"role": "user", "content": [{"type": "text", "text": "alba is blue"}]},
        {"role": "tool", "content": null}, {"role": "assistant", "content": "bora is"}]"#;
    let files = Files::new(&[
        ("begun.json", &format!("\u{FEFF}{begun}")),
        ("tools.json", r#"[{"name": "cedo"}]"#),
        ("bad.json", "{"),
    ]);
    let dir = model.arg("");
    let same = |args: &[&str], raw: &str| {
        let told = json(&[&["--model", &dir], args].concat());
        let raw = json(&["--model", &dir, "-p", raw]);
        assert_eq!((&told["tokens"], &told["prompt_tokens"]), (&raw["tokens"], &raw["prompt_tokens"]));
    };
    let tools = format!("tools=@{}", files.arg("tools.json"));
    same(&["--chat", "-p", "a", "--template-arg", "mood=red ."], "user says a . red .alba ?");
    same(&["--chat", "-p", "a", "--template-arg", &tools], "user says a . cedo is tool . alba ?");
    same(&["--chat", "-p", "a", "--template-arg", "add_generation_prompt=false"], "user says a . ");
    same(
        &["--messages", &files.arg("begun.json")],
        "user says alba is blue . tool says  . assistant says bora is",
    );
    let fails = |args: &[&str], code: i32, expected: &str| {
        let output = kvc(&[&["run", "--model", &dir], args].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(code) && stderr.contains(expected), "{stderr}");
    };
    fails(&["--chat", "-p", "a", "--template-arg", "mood"], 2, "must be NAME=VALUE");
    fails(&["-p", "a", "--template-arg", "mood=red"], 2, "--template-arg applies only to --chat");
    fails(&["--chat", "-p", "a", "--template-arg", "messages=[]"], 1, "the conversation itself");
    fails(&["--chat", "-p", "a", "--template-arg", "tools=red"], 1, "must be a list of objects");
    let bad = format!("tools=@{}", files.arg("bad.json"));
    fails(&["--chat", "-p", "a", "--template-arg", &bad], 1, "bad.json: template variables: EOF");
    fails(&["--chat", "-p", "a", "--template-arg", "tools=@/no/such"], 1, "/no/such");
}

#[test]
fn a_model_without_questions_of_its_own_is_asked_about_invented_notes() {
    let model = model("", true);
    let ask =
        ["eval", "--model", &model.arg(""), "--seeds", "1", "--questions", "1", "--kind", "local", "--json"];
    let output = kvc(&[&ask[..], &["--strategy", "link:2"]].concat());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && stderr.contains("2 invented notes (--texts N"), "{stderr}");
    let scores: Value = serde_json::from_slice(&output.stdout).unwrap();
    let by_name = kvc(&[&ask[..], &["--strategy", "link:2", "--texts", "2"]].concat());
    assert!(!String::from_utf8_lossy(&by_name.stderr).contains("invented"), "they were asked for");
    let named: Value = serde_json::from_slice(&by_name.stdout).unwrap();
    let operations = |report: &Value| report["scores"][0]["flops"].clone();
    assert!(
        operations(&scores).is_number() && operations(&scores) == operations(&named),
        "the same questions"
    );
}

#[test]
fn a_stop_string_ends_the_answer_and_is_not_printed() {
    let dir = model("", true).0.keep();
    let dir = dir.to_str().unwrap();
    let ask = ["--model", dir, "-p", "alba is red . alba ?", "--max-new-tokens", "8"];
    let whole = json(&ask);
    let (text, tokens) = (whole["text"].as_str().unwrap(), whole["tokens"].as_array().unwrap().len());
    assert_eq!((&whole["finish"], tokens), (&Value::from("length"), 8));
    // The stop string starts in the middle of one word and ends in the middle of another.
    let (start, end) = (text.len() / 3, text.len() / 2);
    let stop = &text[start..end];
    let before = text.find(stop).unwrap();
    let ended = json(&[&ask[..], &["--stop", "never", "--stop", stop]].concat());
    assert_eq!(
        (&ended["text"], &ended["finish"]),
        (&Value::from(&text[..before]), &Value::from("stop-string"))
    );
    assert!(ended["tokens"].as_array().unwrap().len() < tokens);
    let (out, said) = run(&[&ask[..], &["--stop", stop]].concat());
    assert_eq!(out.trim_end_matches('\n'), text[..before].trim_start());
    assert!(!said.contains("cut"), "{said}");
    let (out, _) = run(&[&ask[..], &["--stop", "never"]].concat());
    assert_eq!(out.trim_end_matches('\n'), text.trim_start());
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn missing_parts_of_a_prompt_are_reported() {
    let documents: Vec<String> =
        (0..40).map(|n| format!("alba is red . {}", "bora is blue . ".repeat(n))).collect();
    let parts: Vec<&str> =
        [SYSTEM].into_iter().chain(documents.iter().map(String::as_str)).chain(["alba ?"]).collect();
    let (ask, no_room) = (parts.join("##"), "no room to keep a document");
    // Overlapped, so all of them fit into the model's positions.
    let ask = [
        "--prompt",
        &ask,
        "--positions",
        "overlapped",
        "--separator",
        "##",
        "--kv-memory",
        "16",
        "--memory-share",
    ];
    assert!(run(&[&ask[..], &["0.05"]].concat()).1.contains(no_room));
    assert!(!run(&[&ask[..], &["0.5"]].concat()).1.contains(no_room));
    let said = |text: &str| run(&["--separator", "##", "--prompt", text]).1;
    assert!(said("alba is red . ## alba ?").contains(
        "The prompt contains \"##\" only once, so it is treated as an \
         ordinary prompt"
    ));
    assert!(
        said("alba ?").contains("The prompt does not contain \"##\", so it is treated as an ordinary prompt")
    );
    assert!(!said(&[SYSTEM, A, "alba ?"].join("##")).contains("ordinary"));
}

#[test]
fn an_answer_that_was_cut_says_so() {
    let dir = model("", true);
    let dir = dir.arg("");
    let ask = ["--model", &dir, "-p", "alba is red . alba ?"];
    let (_, said) = run(&[&ask[..], &["--max-new-tokens", "5"]].concat());
    assert!(said.contains("The answer was cut off after 5 tokens; raise --max-new-tokens"), "{said}");
    let fixed = ["--cache", "static", "--max-len", "16", "--max-new-tokens", "100"];
    let (_, said) = run(&[&ask[..], &fixed].concat());
    assert!(said.contains("at the last position of the model or of a static cache"), "{said}");
    let (_, said) = run(&["-p", "alba is red . alba ?"]);
    assert!(!said.contains("cut"), "{said}");
}

#[test]
fn sampling_options_reach_the_choice_of_tokens() {
    let draw = |more: &[&str]| {
        let ask = ["-p", "alba", "--temperature", "50", "--seed", "3", "--max-new-tokens", "12"];
        json(&[&ask[..], more].concat())["tokens"].clone()
    };
    let greedy = json(&["-p", "alba", "--max-new-tokens", "12"])["tokens"].clone();
    let free = draw(&[]);
    assert_ne!(free, greedy);
    // Each filter at its strictest leaves the most likely token.
    for one in [["--top-k", "1"], ["--top-p", "1e-6"], ["--min-p", "1"]] {
        assert_eq!(draw(&one), greedy, "{one:?}");
    }
    let endless = model("", true);
    let ask = ["--model", &endless.arg(""), "-p", "alba is red . alba ?", "--max-new-tokens", "4"];
    let (plain, punished) = (json(&ask), json(&[&ask[..], &["--repetition-penalty", "100"]].concat()));
    assert_ne!(plain["tokens"], punished["tokens"]);
    for penalty in ["--presence-penalty", "--frequency-penalty"] {
        assert_ne!(plain["tokens"], json(&[&ask[..], &[penalty, "50"]].concat())["tokens"], "{penalty}");
    }
    let first = plain["tokens"][0].as_u64().unwrap();
    let banned = json(&[&ask[..], &["--logit-bias", &format!("{first}=-inf"), "--logprobs", "2"]].concat());
    assert!(banned["tokens"].as_array().unwrap().iter().all(|token| token.as_u64() != Some(first)));
    let of_first = &banned["logprobs"][0];
    assert_eq!((&of_first["token"], &of_first["top"][0][0]), (&banned["tokens"][0], &first.into()));
    assert!(of_first["logprob"].as_f64() < of_first["top"][0][1].as_f64());
}

#[test]
fn a_given_answer_is_read_back_token_by_token() {
    let ids = |value: &Value| value.as_array().unwrap().iter().map(ToString::to_string).collect::<Vec<_>>();
    let ask = ["-p", "alba is red . alba ?", "--max-new-tokens", "6"];
    let chosen = json(&ask);
    assert_eq!(chosen["read_back"], Value::Null);
    let tokens = ids(&chosen["tokens"]);
    let read = |answer: &[String]| json(&[&ask[..], &["--answer", &answer.join(",")]].concat());
    let back = read(&tokens);
    assert_eq!(back["tokens"], chosen["tokens"]);
    assert_eq!(ids(&back["read_back"]["likeliest"])[..tokens.len()], tokens);
    assert_eq!(ids(&back["read_back"]["prompt"]).len() as u64, back["prompt_tokens"].as_u64().unwrap());
    // The first choice depends only on the prompt, not on the given answer.
    let other = read(&ids(&back["read_back"]["prompt"])[..1]);
    assert_eq!(ids(&other["read_back"]["likeliest"])[0], tokens[0]);
    assert_ne!(other["tokens"][0], chosen["tokens"][0]);
}

#[test]
#[cfg(target_os = "linux")]
fn threads_are_as_many_as_asked_for() {
    /// Returns the largest number of threads that a run had.
    fn most(threads: &str) -> usize {
        let long = "alba is red . ".repeat(450);
        let mut child = Command::new(env!("CARGO_BIN_EXE_kvc"))
            .args(["run", "--threads", threads, "-p", &long, "--max-new-tokens", "30"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut most = 0;
        while child.try_wait().unwrap().is_none() {
            let tasks = fs::read_dir(format!("/proc/{}/task", child.id())).map_or(0, Iterator::count);
            most = most.max(tasks);
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert!(child.wait().unwrap().success());
        most
    }
    assert_eq!(most("1"), 1);
    assert!(most("6") >= 6);
}

#[test]
fn wrong_usage_is_exit_code_2() {
    for (args, expected) in [
        (&["-p", "a", "--messages", "b"][..], "cannot be used with"),
        (&["--messages", "a", "--system", "b"], "cannot be used with"),
        (&["--messages", "a", "--separator", "##"], "cannot be used with"),
        (&["-p", "a", "--document", "b", "--separator", "##"], "cannot be used with"),
        (&["-p", "a", "--chunks", "sink:0"], "behind:DECOYS or slots:SLOTS, with at least one"),
        (&["-p", "a", "--stop", ""], "end every answer immediately"),
        (&["-p", "a", "--threads", "0"], "from 1 to 1024"),
        (&["-p", "a", "--threads", "18446744073709551615"], "from 1 to 1024"),
        (&["-p", "a", "--answer", "1"], "--json"),
        (&["--json", "-p", "a", "--answer", "1,b"], "invalid digit"),
        (&["-p", "a", "--temperature", "1", "--top-k", "-1"], "--top-k"),
        (&["-p", "a", "--temperature", "1", "--top-p", "-0.5"], "above 0 and at most 1"),
        (&["-p", "a", "--temperature", "1", "--top-p", "0"], "above 0 and at most 1"),
        (&["-p", "a", "--temperature", "1", "--top-p", "nan"], "above 0 and at most 1"),
        (&["-p", "a", "--temperature", "1", "--min-p", "1.5"], "from 0 to 1"),
        (&["-p", "a", "--repetition-penalty", "0"], "above 0"),
        (&["-p", "a", "--repetition-penalty", "-1"], "above 0"),
        (&["-p", "a", "--presence-penalty", "nan"], "must be a number"),
        (&["-p", "a", "--logit-bias", "5"], "504=-5"),
        (&["-p", "a", "--logprobs", "2"], "--json"),
        (&["-p", "a", "--top-k", "5"], "--top-k has no effect at temperature 0"),
        (&["-p", "a", "--top-p", "0.5"], "--top-p has no effect at temperature 0"),
        (&["-p", "a", "--min-p", "0.5"], "--min-p has no effect at temperature 0"),
    ] {
        fails(args, 2, expected);
    }
}

#[test]
fn bad_files_are_exit_code_1_and_are_named_with_the_field() {
    let wrong = |text: &str, expected: &str| {
        let files = Files::new(&[("chat.json", text)]);
        let path = files.arg("chat.json");
        fails(&["--messages", &path], 1, &format!("{path}: messages: {expected}"));
    };
    wrong("[\n{]", "key must be a string at line 2 column 2");
    wrong("{}", "it is an object; it must be a JSON list");
    wrong("[]", "the list is empty");
    wrong(r#"[{"role": "user"}]"#, "message 1: field \"content\" is missing");
    wrong(r#"[{"role": "wizard", "content": "a"}]"#, "message 1: field \"role\" is \"wizard\"");
    wrong(r#"[{"role": "user", "content": 1}]"#, "message 1: field \"content\" is a number");
    wrong(r#"[{"role": "system", "content": "a"}]"#, "the last message, 1, has the role system");
    fails(&["--messages", "/no/such/chat.json"], 1, "/no/such/chat.json");
    fails(&["-p", "a", "--warm-file", "/no/such/warm.txt"], 1, "/no/such/warm.txt");
    fails(&["-p", "a", "--system", "b", "--document", "/no/such/a.txt"], 1, "the document /no/such/a.txt");
    let files = Files::new(&[("empty.txt", " \n")]);
    let empty = files.arg("empty.txt");
    fails(&["-p", "a", "--system", "b", "--document", &empty], 1, &format!("the document {empty} is empty"));
}

#[test]
fn a_template_that_fails_names_its_line_or_its_own_words() {
    let fails_with = |template: &str, expected: &str| {
        let model = model(template, false);
        let place = format!("chat template of {}: {expected}", model.arg("tokenizer_config.json"));
        let (dir, chat) =
            (model.arg(""), Files::new(&[("chat.json", r#"[{"role": "user", "content": "a"}]"#)]));
        fails(&["--model", &dir, "--chat", "-p", "a"], 1, &place);
        fails(&["--model", &dir, "--chat", "-p", "a"], 1, "or omit --chat");
        fails(&["--model", &dir, "--messages", &chat.arg("chat.json")], 1, &place);
        fails(&["--model", &dir, "--messages", &chat.arg("chat.json")], 1, "hint: change the conversation");
    };
    fails_with(
        "a\n{{ raise_exception('only pirates, please') }}",
        "line 2: it rejects the conversation: only pirates, please",
    );
    fails_with("a\nb\n{% for %}", "line 3: syntax error");
}
