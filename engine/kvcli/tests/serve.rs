//! `kvc serve`: a server from the command line, from its first to its last moment.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]
#![cfg(unix)]

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use common::{fails, kvc, run_json};
use rustix::process::Signal;
use serde_json::{Value, json};
use serving::Serving;

#[allow(dead_code, reason = "other suites use the rest")]
mod common;
#[allow(dead_code, reason = "other suites use the rest")]
#[path = "common/serving.rs"]
mod serving;

fn question() -> Value {
    json!({
        "messages": [{"role": "system", "content": "you answer questions from short documents ."}, {"role": "user", "content": "alba ?"}],
        "documents": ["alba is red . bora is same .", "cedo is blue . dilan is small ."],
        "temperature": 0,
        "max_tokens": 4,
    })
}

fn sources(answer: &Value) -> Vec<&str> {
    answer["kv"]["parts"].as_array().unwrap().iter().map(|part| part["source"].as_str().unwrap()).collect()
}

#[test]
fn a_server_answers_until_it_is_told_to_end() {
    for signal in [Signal::TERM, Signal::INT] {
        let server = Serving::start(&[]);
        let answer = server.chat("", &question());
        assert_eq!(answer["choices"][0]["message"]["content"].as_str().unwrap().trim(), "red");
        assert_eq!((&answer["model"], &answer["kv"]["full_attention"]), (&json!("tiny-rag"), &json!(true)));
        // A running answer finishes before the end.
        let body =
            json!({"prompt": "alba", "max_tokens": 1500, "ignore_eos": true, "stream": true}).to_string();
        let mut running = TcpStream::connect(&server.address).unwrap();
        let length = body.len();
        write!(running, "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}").unwrap();
        let mut first = [0; 16];
        running.read_exact(&mut first).unwrap();
        server.signal(signal);
        let mut rest = String::new();
        running.read_to_string(&mut rest).unwrap();
        assert!(rest.contains("\"finish_reason\":\"length\"") && rest.contains("data: [DONE]"), "{rest}");
        let before = server.before.clone();
        let (code, rest) = server.ended();
        let log = before + &rest;
        assert_eq!(code, Some(0), "{log}");
        assert!(rest.contains("shutting down"), "{log}");
        assert_eq!(log.matches("documents are answered by full attention").count(), 1, "{log}");
    }
}

#[test]
fn a_server_raises_the_limit_on_open_files_or_says_that_it_cannot() {
    let connections = 300;
    let limited = |limit: &str| {
        let mut command = Command::new("sh");
        let script = format!("ulimit {limit} 150 && exec \"$0\" serve --port 0");
        command.args(["-c", &script, env!("CARGO_BIN_EXE_kvc")]);
        Serving::of(command)
    };
    // A soft limit may be raised.
    let server = limited("-Sn");
    let idle: Vec<TcpStream> =
        (0..connections).map(|_| TcpStream::connect(&server.address).unwrap()).collect();
    server.chat("", &question());
    drop(idle);
    // A hard limit may not.
    let server = limited("-n");
    server.chat("", &question());
    server.signal(Signal::TERM);
    // The line about it stands before the one with the address.
    assert!(server.before.contains("leaves room for fewer connections"), "{}", server.before);
}

#[test]
fn the_log_names_a_request_also_when_its_answer_ends() {
    let server = Serving::start(&[]);
    let mut streamed = question();
    streamed["stream"] = json!(true);
    for (id, body) in [("whole-1", question()), ("stream-1", streamed)] {
        let (status, text) = server.send(
            "POST",
            "/v1/chat/completions",
            &format!("x-request-id: {id}\r\n"),
            &body.to_string(),
        );
        assert_eq!(status, 200, "{text}");
    }
    server.signal(Signal::TERM);
    let (_, log) = server.ended();
    for id in ["whole-1", "stream-1"] {
        let ended = log.lines().find(|line| line.contains(id) && line.contains("ended"));
        let ended = ended.unwrap_or_else(|| panic!("{id} in {log}"));
        assert!(ended.contains("tokens=") && ended.contains("reason=\"stop\""), "{ended}");
    }
}

#[test]
fn a_second_signal_ends_running_answers_with_a_reason() {
    let server = Serving::start(&[]);
    let body = json!({"prompt": "alba", "max_tokens": 2000, "n": 100, "ignore_eos": true, "stream": true})
        .to_string();
    let mut running = TcpStream::connect(&server.address).unwrap();
    let length = body.len();
    write!(running, "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}").unwrap();
    let mut first = [0; 16];
    running.read_exact(&mut first).unwrap();
    let started = Instant::now();
    server.signal(Signal::TERM);
    std::thread::sleep(Duration::from_millis(300));
    server.signal(Signal::TERM);
    let mut rest = Vec::new();
    running.read_to_end(&mut rest).unwrap();
    assert!(String::from_utf8_lossy(&rest).contains("the server is shutting down"));
    assert_eq!(server.ended().0, Some(0));
    assert!(started.elapsed() < Duration::from_secs(15));
}

#[test]
#[cfg(target_os = "linux")]
fn an_idle_server_uses_no_processor_time() {
    let server = Serving::start(&[]);
    server.chat("", &question());
    let ticks = || {
        let stat = fs::read_to_string(format!("/proc/{}/stat", server.child.id())).unwrap();
        let rest = stat.rsplit_once(')').unwrap().1;
        let numbers: Vec<&str> = rest.split_whitespace().collect();
        numbers[11].parse::<u64>().unwrap() + numbers[12].parse::<u64>().unwrap()
    };
    std::thread::sleep(Duration::from_millis(300));
    let before = ticks();
    std::thread::sleep(Duration::from_secs(2));
    // A tick is a hundredth of a second. A thread that spins would use two hundred.
    assert!(ticks() - before <= 2, "{} ticks", ticks() - before);
}

#[test]
fn a_server_over_a_disk_is_warm_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("kv");
    let args = [
        "--reuse-anyway",
        "--disk",
        disk.to_str().unwrap(),
        "--disk-limit",
        "32MiB",
        "--disk-loads",
        "always",
    ];
    let server = Serving::start(&args);
    assert_eq!(sources(&server.chat("", &question())), ["computed"; 2]);
    server.signal(Signal::TERM);
    assert_eq!(server.ended().0, Some(0));
    let server = Serving::start(&args);
    let mut reversed = question();
    reversed["documents"].as_array_mut().unwrap().reverse();
    assert_eq!(sources(&server.chat("", &reversed)), ["cache"; 2]);
}

#[test]
fn an_answer_is_the_one_of_kvc_run() {
    let folder = tempfile::tempdir().unwrap();
    let asked = question();
    let mut args =
        vec!["--chat".to_owned(), "--max-new-tokens".to_owned(), "4".to_owned(), "--logprobs=1".to_owned()];
    args.extend(["--system".to_owned(), asked["messages"][0]["content"].as_str().unwrap().to_owned()]);
    args.extend(["--prompt".to_owned(), asked["messages"][1]["content"].as_str().unwrap().to_owned()]);
    for (i, text) in asked["documents"].as_array().unwrap().iter().enumerate() {
        let path = folder.path().join(i.to_string());
        fs::write(&path, text.as_str().unwrap()).unwrap();
        args.extend(["--document".to_owned(), path.to_str().unwrap().to_owned()]);
    }
    for (serve, run) in [("--reuse-anyway", "--reuse-anyway"), ("--log=info", "--full-attention")] {
        let server = Serving::start(&[serve]);
        let mut asked = asked.clone();
        (asked["logprobs"], asked["top_logprobs"]) = (json!(true), json!(1));
        let answer = server.chat("", &asked);
        let mut args: Vec<&str> = args.iter().map(String::as_str).collect();
        // Without options, kvc run reuses documents with the default settings.
        args.extend((run == "--full-attention").then_some(run));
        let own = common::json(&args);
        assert_eq!(answer["choices"][0]["message"]["content"], own["text"]);
        assert_eq!(answer["usage"]["prompt_tokens"], own["prompt_tokens"]);
        assert_eq!(answer["kv"]["recomputed"], own["recomputed_tokens"]);
        let logprobs = [&answer["choices"][0]["logprobs"]["content"], &own["logprobs"]];
        let [served, run] = logprobs.map(|all| all[0]["logprob"].as_f64().unwrap());
        assert!((served - run).abs() < 1e-5, "{served} {run}");
    }
}

#[test]
fn documents_at_the_beginning_of_a_prompt_are_those_of_kvc_run() {
    let folder = tempfile::tempdir().unwrap();
    let documents = question()["documents"].clone();
    let mut args: Vec<String> = ["--max-new-tokens", "4", "--prompt", "alba ?"].map(str::to_owned).into();
    for (i, text) in documents.as_array().unwrap().iter().enumerate() {
        let path = folder.path().join(i.to_string());
        fs::write(&path, text.as_str().unwrap()).unwrap();
        args.extend(["--document".to_owned(), path.to_str().unwrap().to_owned()]);
    }
    let server = Serving::start(&["--reuse-anyway"]);
    let asked = json!({"prompt": "alba ?", "documents": documents, "temperature": 0, "max_tokens": 4});
    let (status, text) = server.send("POST", "/v1/completions", "", &asked.to_string());
    assert_eq!(status, 200, "{text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    let own = common::json(&args.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(answer["choices"][0]["text"], own["text"]);
    assert_eq!(answer["usage"]["prompt_tokens"], own["prompt_tokens"]);
    assert_eq!(answer["kv"]["recomputed"], own["recomputed_tokens"]);
}

/// Writes a file as `kvc tune` does, for the built-in model.
fn tuned(path: &Path, fits: &str) {
    let written = common::kvc(&["tune", "--out", path.to_str().unwrap(), "--questions", "1", "--seeds", "1"]);
    assert!(written.status.success(), "{}", String::from_utf8_lossy(&written.stderr));
    let mut file: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    file["measured"]["fits"] = serde_json::from_str(fits).unwrap();
    fs::write(path, file.to_string()).unwrap();
}

#[test]
fn documents_are_reused_only_with_a_file_that_passed_or_anyway() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("reuse.json");
    let file = path.to_str().unwrap();
    tuned(&path, "true");
    let server = Serving::start(&["--reuse", file]);
    assert_eq!(server.chat("", &question())["kv"]["full_attention"], false);
    drop(server);
    for fits in ["false", "null"] {
        tuned(&path, fits);
        fails(&["serve", "--reuse", file], 1, "does not show that the settings lose at most");
        let server = Serving::start(&["--reuse", file, "--reuse-anyway"]);
        assert_eq!(server.chat("", &question())["kv"]["full_attention"], false);
    }
    fails(&["serve", "--recompute", "none"], 2, "need --reuse-anyway");
    fails(&["serve", "--reuse", "none.json"], 1, "none.json");
}

#[test]
fn pages_of_the_origins_in_a_file_may_use_the_server() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kvc.toml");
    fs::write(&path, "allow-origin = [\"https://app.example\", \"http://localhost:3000\"]").unwrap();
    let server = Serving::start(&["--config", path.to_str().unwrap()]);
    for (origin, status) in
        [("https://app.example", 200), ("http://localhost:3000", 200), ("https://example.com", 403)]
    {
        assert_eq!(
            server.send("GET", "/v1/models", &format!("origin: {origin}\r\n"), "").0,
            status,
            "{origin}"
        );
    }
    fails(&["serve", "--allow-origin", "*"], 1, "name the origins, or give --api-key-file");
    fails(&["serve", "--allow-origin", "https://app.example/"], 1, "leave out the path and the slash");
}

#[test]
fn options_come_from_a_file_and_from_the_command_line() {
    let folder = tempfile::tempdir().unwrap();
    let (config, keys) = (folder.path().join("kvc.toml"), folder.path().join("keys"));
    fs::write(&keys, "secret alice\n").unwrap();
    let text = format!(
        "served-model-name = [\"a\", \"b\"]\nport = 1\napi_key_file = {:?}\nmax-body = \"2KiB\"\nreuse-anyway = true\n",
        keys.to_str().unwrap()
    );
    fs::write(&config, text).unwrap();
    let server = Serving::start(&["--config", config.to_str().unwrap(), "--port", "0"]);
    let key = "authorization: Bearer secret\r\n";
    let mut asked = question();
    asked["model"] = json!("b");
    let answer = server.chat(key, &asked);
    assert_eq!((&answer["model"], &answer["kv"]["full_attention"]), (&json!("b"), &json!(false)));
    assert_eq!(server.send("POST", "/v1/chat/completions", "", "{}").0, 401);
    let long = json!({"prompt": "a".repeat(3000)}).to_string();
    assert_eq!(server.send("POST", "/v1/completions", key, &long).0, 413);
    drop(server);
    for (text, words) in
        [("pott = 1", "--pott"), ("port = \"x\"", "invalid value 'x'"), ("port =", "kvc.toml")]
    {
        fs::write(&config, text).unwrap();
        fails(&["serve", "--config", config.to_str().unwrap()], 2, words);
    }
    fails(&["serve", "--config", "none.toml"], 2, "none.toml");
}

#[test]
fn a_server_that_cannot_start_says_why() {
    let server = Serving::start(&[]);
    let port = server.address.rsplit_once(':').unwrap().1.to_owned();
    fails(&["serve", "--port", &port], 1, "choose another --host or --port");
    fails(&["serve", "no-model"], 1, "no-model does not exist");
    fails(&["serve", "--log", "a=b=c"], 1, "--log");
    fails(&["serve", "--max-requests", "0"], 2, "1 or more");
    fails(&["serve", "--api-key-file", "none"], 1, "cannot read the keys from none");
}

#[test]
fn bench_serve_measures_a_server_of_this_process_and_of_another() {
    let small =
        ["bench", "serve", "--json", "--requests", "6", "--prompt-tokens", "30", "--answer-tokens", "5"];
    let report = json_of(&[&small[..], &["--http", "--rounds", "2"]].concat());
    let (engine, server) = (&report["engine"], &report["server"]);
    for name in ["requests", "failed", "shortened", "prompt_tokens", "answer_tokens", "cached_tokens"] {
        assert_eq!(engine[name], server[name], "{name}: {report}");
    }
    assert_eq!((&server["requests"], &server["failed"]), (&json!(6), &json!(0)));
    assert!(engine["steps"].as_u64().unwrap() > 0 && server.get("steps").is_none());
    #[cfg(target_os = "linux")]
    assert!(server["client_cpu_seconds"].as_f64() > Some(0.0), "{report}");
    assert!(engine["client_cpu_seconds"].is_null(), "{report}");
    let seconds = |of: &Value| of["seconds"].as_f64().unwrap();
    let ratio = report["ratio"].as_f64().unwrap();
    assert!((ratio - seconds(server) / seconds(engine)).abs() < 1e-9, "{report}");
    for (rounds, median) in [("engine_seconds", seconds(engine)), ("server_seconds", seconds(server))] {
        let rounds = report[rounds].as_array().unwrap();
        assert!(rounds.len() == 2 && rounds.contains(&json!(median)), "{report}");
    }
    // A model with random weights has a tokenizer for the server.
    let report = json_of(&[&small[..], &["--size", "1x64", "--http", "--rounds", "1"]].concat());
    assert_eq!(report["server"]["answer_tokens"], report["engine"]["answer_tokens"]);

    let server = Serving::start(&[]);
    let url = format!("http://{}/v1", server.address);
    let report = json_of(&[&small[..], &["--url", &url]].concat());
    assert_eq!(
        (&report["requests"], &report["failed"], &report["shortened"]),
        (&json!(6), &json!(0), &json!(0))
    );
    assert!(report["cpu_seconds"].is_null(), "the work is in another process");
    fails(&[&small[..], &["--url", &url, "--model-name", "none"]].concat(), 1, "does not exist here");
    fails(&[&small[..], &["--url", "https://a"]].concat(), 2, "does not encrypt");
    fails(&[&small[..], &["--url", &url, "--http"]].concat(), 2, "cannot be used with");
    fails(&[&small[..], &["--http", "--shared-prefix", "9", "--pin"]].concat(), 2, "cannot be used with");
    fails(&[&small[..], &["--rounds", "2"]].concat(), 2, "--http");
}

#[test]
fn bench_rag_measures_documents_that_a_server_finds() {
    let folder = tempfile::tempdir().unwrap();
    let plot = folder.path().join("ttft.svg");
    let small = [
        "bench",
        "rag",
        "--json",
        "--http",
        "--size",
        "1x64",
        "--document-tokens",
        "64",
        "--per-request",
        "5",
    ];
    let report = json_of(&[&small[..], &["--plot", plot.to_str().unwrap()]].concat());
    // A system prompt, five documents, a question.
    assert_eq!(report["prompt_tokens"], 64 + 5 * 64 + 32);
    let share = |server: usize, name: &str| report["servers"][server][name][1].as_f64().unwrap();
    for server in 0..3 {
        let times = report["servers"][server]["ttft_ms"].as_array().unwrap();
        assert!(times.len() == 13 && times.iter().all(|ms| ms.as_f64().unwrap() > 0.0), "{report}");
        // Before the first question, only the system prompt may be known.
        assert!(share(server, "cold") <= 64.0 / 416.0 && share(server, "same_order") >= 0.85, "{report}");
    }
    assert!(share(0, "other_orders") >= 0.85 && share(1, "other_orders") >= 0.85, "{report}");
    assert!(share(2, "other_orders") < 0.5, "prefix caching finds the beginning alone: {report}");
    assert!(fs::read_to_string(plot).unwrap().contains("prefix caching alone"));
    fails(&[&small[..], &["--zipf", "1"]].concat(), 2, "cannot be used with");
}

/// Returns what a command writes as JSON.
fn json_of(args: &[&str]) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_kvc")).args(args).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_doctor_examines_a_running_server() {
    let serving = Serving::start(&["--reuse-anyway"]);
    let url = format!("http://{}", serving.address);
    let young = run_json(&["doctor", "--url", &url, "--json"]);
    assert_eq!(young, json!([]));
    let table = kvc(&["doctor", "--url", &url]);
    assert!(String::from_utf8(table.stdout).unwrap().starts_with("Nothing unusual after 0 answers"));
    // The system prompt changes with every request, and documents are computed behind it.
    for number in 0..12 {
        let body = json!({
            "messages": [{"role": "system", "content": format!("alba is {number} .")}, {"role": "user", "content": "alba ?"}],
            "documents": ["alba is red .", "the market is blue ."],
            "max_tokens": 1,
        });
        assert_eq!(serving.send("POST", "/v1/chat/completions", "", &body.to_string()).0, 200);
    }
    let found = run_json(&["doctor", "--url", &url, "--json"]);
    assert_eq!(found[0]["symptom"], "few documents are found", "{found}");
    assert!(found[0]["numbers"].as_str().unwrap().contains("other_context"), "{found}");
    let table = String::from_utf8(kvc(&["doctor", "--url", &url]).stdout).unwrap();
    assert!(table.contains("keep the system prompt constant"), "{table}");
    fails(&["doctor", "--url", &format!("{url}/v1/models/")], 1, "404");
    let full = Serving::start(&[]);
    let found = run_json(&["doctor", "--url", &format!("http://{}", full.address), "--json"]);
    assert_eq!(found[0]["symptom"], "documents are not reused");
}
