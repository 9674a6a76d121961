//! The program as a user sees it: output, exit codes, and errors with advice.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use common::{A, B, SYSTEM, fails, json, kvc, prompt, run_json};

#[allow(dead_code, reason = "other suites use the rest")]
mod common;

fn model_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-rag")
}

/// Returns a copy of the shipped model that `change` may break.
fn broken(change: impl FnOnce(&Path)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(model_dir().join(name), dir.path().join(name)).unwrap();
    }
    change(dir.path());
    dir
}

fn edit(dir: &Path, name: &str, from: &str, to: &str) {
    let text = fs::read_to_string(dir.join(name)).unwrap();
    assert!(text.contains(from), "{name} has no {from}");
    fs::write(dir.join(name), text.replace(from, to)).unwrap();
}

#[test]
fn the_demo_shows_right_answers_and_reuse() {
    let output = kvc(&["demo"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    for expected in
        ["6 of 6 answers are right", "6 of 6 equal", "6 hit, 0 missed", "0 hit, 6 missed", "harbour"]
    {
        assert!(text.contains(expected), "{expected:?} is not in\n{text}");
    }
    let rows: Value = serde_json::from_slice(&kvc(&["demo", "--json"]).stdout).unwrap();
    for row in &rows.as_array().unwrap()[1..] {
        assert!(row["chunks"].as_array().unwrap().iter().all(|c| c["hit"] == true));
        assert_eq!(row["computed_tokens"], 2);
    }
}

#[test]
fn warm_chunks_in_another_order_are_hits_and_give_the_tokens_of_a_cold_run() {
    let (ask, warm) = (prompt(&[SYSTEM, A, B, "bora ?"]), prompt(&[SYSTEM, B, A, "cedo ?"]));
    for positions in ["overlapped", "sequential"] {
        for chunks in ["with-system", "alone"] {
            for dtype in ["f32", "f16", "bf16", "int8", "fp8-e4m3:head"] {
                let cell = ["--positions", positions, "--chunks", chunks, "--dtype", dtype, "--prompt", &ask];
                let cold = json(&cell);
                let warmed = json(&[&cell[..], &["--warm", &warm]].concat());
                let none = json(&[&cell[..], &["--no-chunk-cache"]].concat());
                assert_eq!(cold["text"], " red", "{cell:?}");
                assert_eq!((&warmed["tokens"], &none["tokens"]), (&cold["tokens"], &cold["tokens"]));
                assert!(warmed["chunks"].as_array().unwrap().iter().all(|c| c["hit"] == true));
                assert!(cold["chunks"].as_array().unwrap().iter().all(|c| c["hit"] == false));
                assert_eq!(
                    (&cold["cached_tokens"], &none["cached_tokens"]),
                    (&Value::from(0), &Value::from(0))
                );
                assert_eq!(
                    warmed["cached_tokens"].as_u64().unwrap() + 2,
                    warmed["prompt_tokens"].as_u64().unwrap()
                );
            }
        }
    }
}

#[test]
fn the_json_has_every_field_and_blocks_add_up() {
    let row = json(&["--prompt", &prompt(&[SYSTEM, A, B, "cedo ?"]), "--profile"]);
    assert_eq!(row["text"], " blue");
    assert_eq!(row["tokens"].as_array().unwrap().len(), 1, "the stop token is left out");
    assert_eq!(row["finish"], "stop");
    assert_eq!(row["chunks"][0]["tokens"], 8);
    assert!(row["ttft_ms"].as_f64().unwrap() > 0.0);
    let memory = |part: &str| row["memory"][part].as_u64().unwrap();
    assert_eq!(memory("weight_bytes"), 4 * 312_704, "its head is its embedding");
    assert!(memory("kv_bytes") > 1 << 20);
    if cfg!(target_os = "linux") {
        // The program itself, its tokenizer and one prompt's activations take less than 64 MiB. Memory for
        // keys and values is allocated on first access.
        let limit = memory("weight_bytes") + memory("kv_bytes") + (64 << 20);
        assert!((memory("weight_bytes")..limit).contains(&memory("peak_bytes")), "{}", row["memory"]);
        let large = json(&["--prompt", &prompt(&[SYSTEM, A, B, "cedo ?"]), "--kv-memory", "4096"]);
        let (kv, peak) = (&large["memory"]["kv_bytes"], &large["memory"]["peak_bytes"]);
        assert!(
            kv.as_u64().unwrap() > 4000 << 20 && peak.as_u64().unwrap() < 512 << 20,
            "{}",
            large["memory"]
        );
    }
    let blocks = &row["blocks"];
    let sum: u64 = ["free", "mutable", "shared", "cached"].iter().map(|k| blocks[k].as_u64().unwrap()).sum();
    assert_eq!(Value::from(sum), blocks["total"]);
    assert_eq!((&blocks["shared"], &blocks["mutable"]), (&Value::from(0), &Value::from(0)));
    assert!(row["profile"]["spans"]["attend"]["count"].as_u64().unwrap() > 0);
}

#[test]
fn documents_sleep_after_each_warm_prompt_and_hits_wake_them() {
    let (ask, warm) = (prompt(&[SYSTEM, A, B, "bora ?"]), prompt(&[SYSTEM, B, A, "cedo ?"]));
    let args = ["--prompt", &ask, "--warm", &warm];
    let awake = json(&args);
    assert_eq!((&awake["sleep"], &awake["blocks"]["chunk_sleep"]), (&Value::Null, &Value::Null));
    for form in ["plain", "compressed", "int8:32", "fp8-e4m3"] {
        let row = json(&[&args[..], &["--chunk-sleep", form, "--chunk-sleep-memory", "1"]].concat());
        assert_eq!((&row["tokens"], &row["cached_tokens"]), (&awake["tokens"], &awake["cached_tokens"]));
        let exact = !form.contains('8');
        for chunk in row["chunks"].as_array().unwrap() {
            assert_eq!((&chunk["hit"], &chunk["exact"]), (&Value::from(true), &Value::from(exact)), "{form}");
        }
        let (sleep, approximate) = (&row["sleep"], &row["blocks"]["chunk_cache"]["approximate_hits"]);
        assert_eq!(
            (&sleep["form"], approximate),
            (&Value::from(form), &Value::from(if exact { 0 } else { 2 }))
        );
        let number = |name: &str| sleep[name].as_u64().unwrap();
        assert_eq!((number("slept"), number("woken"), number("lost")), (2, 2, 0));
        assert_eq!(number("device_bytes") - number("host_bytes"), number("saved_bytes"), "{form}");
        assert_eq!(number("saved_bytes") > 0, form != "plain", "{form}");
        assert_eq!(row["blocks"]["chunk_sleep"]["limit_bytes"], 1 << 20);
    }
    let output = kvc(&[&["run", "--chunk-sleep", "compressed"], &args[..]].concat());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("2 chunks put to sleep (compressed), 2 woken by hits"), "{stderr}");
    fails(&["run", "--prompt", "a", "--chunk-sleep", "f16"], 2, "plain, compressed, int8[:GROUP]");
    fails(&["run", "--prompt", "a", "--chunk-sleep-memory", "1"], 2, "--chunk-sleep <FORM>");
    fails(&["run", "--prompt", "a", "--chunk-sleep", "plain", "--cache", "static"], 1, "cannot keep chunks");
}

#[test]
fn fewer_than_two_separators_are_an_ordinary_prompt() {
    let plain = json(&["--prompt", &format!("{SYSTEM} {A} ## bora ?"), "--max-new-tokens", "2"]);
    assert_eq!(plain["chunks"], Value::Array(vec![]));
    let full = json(&["--prompt", &prompt(&[SYSTEM, A, B, "bora ?"]), "--full-attention"]);
    assert_eq!((&full["text"], &full["chunks"]), (&Value::from(" red"), &Value::Array(vec![])));
    for separator in ["|", "---"] {
        let other = json(&["--prompt", &[SYSTEM, A, B, "bora ?"].join(separator), "--separator", separator]);
        assert_eq!(other["chunks"].as_array().unwrap().len(), 2);
    }
    assert_eq!(json(&["--prompt", "- alba ?"])["finish"], "stop");
}

#[test]
fn model_directories_load_with_shards_chat_and_eight_bit_weights() {
    let dir = broken(|dir| {
        let bytes = fs::read(dir.join("model.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let mut map = serde_json::Map::new();
        for part in 0..2 {
            let name = format!("model-{part}.safetensors");
            let tensors: Vec<_> =
                file.iter().enumerate().filter(|(i, _)| i % 2 == part).map(|(_, t)| t).collect();
            for (tensor, _) in &tensors {
                map.insert((*tensor).to_owned(), Value::from(name.clone()));
            }
            fs::write(dir.join(&name), safetensors::serialize(tensors, None).unwrap()).unwrap();
        }
        let index = serde_json::json!({ "weight_map": map });
        fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
        fs::remove_file(dir.join("model.safetensors")).unwrap();
    });
    let model = dir.path().to_str().unwrap();
    let text = prompt(&[SYSTEM, A, B, "cedo ?"]);
    for more in [&[][..], &["--chat"], &["--weights", "q8"], &["--temperature", "0.01", "--seed", "7"]] {
        let row = json(&[&["--model", model, "--prompt", &text], more].concat());
        assert_eq!(row["text"], " blue", "{more:?}");
    }
}

#[test]
fn wrong_usage_is_exit_code_2() {
    for (args, expected) in [
        (&["run"][..], "--prompt"),
        (&["run", "--prompt", "a", "--prompt-file", "b"], "cannot be used with"),
        (&["run", "--prompt", "a", "--backend", "abacus"], "abacus"),
        (&["run", "--prompt", "a", "--dtype", "f64"], "bf16, int8[:GROUP]"),
        (&["run", "--prompt", "a", "--temperature", "-1"], "temperature"),
        (&["run", "--prompt", "a", "--positions", "sideways"], "overlapped"),
        (&["run", "--prompt", "a", "--recompute", "link"], "link:K"),
        (&["run", "--prompt", "a", "--context-scale", "0"], "above 0"),
        (&["run", "--prompt", "a##b##c", "--separator", ""], "split the prompt everywhere"),
        (&["run", "--prompt", "a", "--block-size", "0"], "1 or more"),
        (&["run", "--prompt", "a", "--kv-memory", "0"], "1 or more"),
        (&["run", "--prompt", "a", "--full-attention", "--recompute", "full"], "cannot be used with"),
        (&["run", "--prompt", "a", "--full-attention", "--chunks", "alone"], "cannot be used with"),
        (&["run", "--prompt", "a", "--no-chunk-cache", "--chunk-sleep", "plain"], "cannot be used with"),
        (&["run", "--prompt", "a", "--keys", "turned"], "rotated or unrotated"),
        (&["run", "--prompt", "a", "--max-len", "5"], "--max-len applies only to --cache static"),
        (
            &["run", "--prompt", "a", "--cache", "static", "--memory-share", "0.5"],
            "applies only to --cache paged",
        ),
        (&["run", "--prompt", "a", "--memory-share", "1.5"], "above 0 and below 1"),
        (&["bench", "rag", "--memory-share", "0"], "above 0 and below 1"),
        (&["eval", "--gate", "--plot", "a.svg"], "cannot be used with"),
        (&["eval", "--gate", "--measure", "both"], "cannot be used with"),
        (&["eval", "--gate", "--arm", "full"], "cannot be used with"),
        (&["eval", "--arm", "sideways,alone,none"], "is not a strategy"),
        (&["eval", "--texts", "1"], "from 2 to 20"),
        (&["eval", "--texts", "2", "--length", "50"], "from 100 to 10000"),
        (&["eval", "--form", "mixed"], "--texts <N>"),
        (&["eval", "--grader", "odd"], "token-f1"),
        (&["eval", "--within", "3"], "--gate"),
        (&["eval", "--gate", "--context-scale", "0.9"], "cannot be used with"),
        (&["eval", "--gate", "--floor=-1"], "from 0 to 100"),
        (&["eval", "--gate", "--floor", "nan"], "from 0 to 100"),
        (&["eval", "--chunks", "alone"], "--gate"),
        (&["fly"], "fly"),
    ] {
        fails(args, 2, expected);
    }
}

#[test]
fn bad_prompts_are_exit_code_1_and_explain_the_fault() {
    let long = prompt(&[SYSTEM, &"alba is red . ".repeat(600), "alba ?"]);
    for (text, expected) in [
        ("", "the prompt is empty"),
        ("a####b", "chunk 1 is empty"),
        ("a##b##", "question is empty"),
        ("####", "chunk 1 is empty"),
        (&long, "the prompt needs position 2408, but the model has only 2048 positions"),
    ] {
        fails(&["run", "--json", "--prompt", text], 1, expected);
    }
    fails(&["run", "--prompt-file", "/no/such/file"], 1, "/no/such/file");
    let chunks = prompt(&[SYSTEM, &"alba is red . ".repeat(200), "alba ?"]);
    fails(&["run", "--prompt", &chunks, "--kv-memory", "1"], 1, "out of blocks");
}

#[test]
fn a_cache_that_is_too_small_ends_with_the_option_that_helps() {
    let ends = |args: &[&str], error: &str, option: &str| {
        fails(args, 1, error);
        let stderr = String::from_utf8(kvc(args).stderr).unwrap();
        let last = stderr.lines().last().unwrap();
        assert!(last.starts_with("hint: ") && last.contains(option), "{stderr}");
    };
    let long = "alba is red . ".repeat(200);
    let (plain, chunked) = (long.clone(), prompt(&[SYSTEM, &long, "alba ?"]));
    for text in [&plain, &chunked] {
        ends(&["run", "--prompt", text, "--kv-memory", "1"], "out of blocks", "--kv-memory MIB");
    }
    let block = ["run", "--prompt", "a", "--block-size", "1024", "--kv-memory"];
    ends(&[&block[..], &["1"]].concat(), "not enough memory", "--kv-memory MIB");
    let sleep = ["--chunk-sleep", "plain", "--chunk-sleep-memory", "1"];
    ends(&[&block[..], &["16"], &sleep].concat(), "not enough memory", "--chunk-sleep-memory MIB");
    let bench = ["bench", "rag", "--requests", "2", "--document-tokens", "300", "--kv-memory", "1"];
    ends(&bench, "out of blocks", "--kv-memory MIB");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("questions.jsonl");
    let question = serde_json::json!({
        "system": SYSTEM, "documents": [long, B], "question": "alba ?", "answer": "red",
    });
    fs::write(&file, question.to_string()).unwrap();
    let eval = ["eval", "--seeds", "1", "--dataset", file.to_str().unwrap(), "--kv-memory", "1"];
    ends(&eval, "out of blocks", "--kv-memory MIB");
    let other = String::from_utf8(kvc(&["run", "--prompt", ""]).stderr).unwrap();
    assert!(!other.contains("hint"), "{other}");
}

#[test]
fn bad_model_directories_are_exit_code_1_and_name_the_file() {
    fails(&["run", "--model", "/no/such/dir", "--prompt", "a"], 1, "/no/such/dir");
    let run = |dir: &tempfile::TempDir, expected: &str| {
        fails(&["run", "--json", "--model", dir.path().to_str().unwrap(), "--prompt", "alba ?"], 1, expected);
    };
    run(&tempfile::tempdir().unwrap(), "config.json");
    run(&broken(|d| edit(d, "config.json", "\"llama\"", "\"gpt2\"")), "gpt2");
    run(&broken(|d| edit(d, "config.json", "\"hidden_size\": 64", "\"hidden_size\": 65")), "shape");
    run(&broken(|d| edit(d, "config.json", "{", "[")), "config.json");
    run(&broken(|d| fs::remove_file(d.join("tokenizer.json")).unwrap()), "tokenizer.json");
    run(&broken(|d| fs::write(d.join("tokenizer.json"), "{}").unwrap()), "tokenizer.json");
    run(&broken(|d| fs::remove_file(d.join("model.safetensors")).unwrap()), "model.safetensors.index.json");
    run(
        &broken(|d| {
            let bytes = fs::read(d.join("model.safetensors")).unwrap();
            fs::write(d.join("model.safetensors"), &bytes[..bytes.len() - 100]).unwrap();
        }),
        "not a valid safetensors file",
    );
    let vocabulary = broken(|d| {
        let text = fs::read_to_string(d.join("tokenizer.json")).unwrap();
        let mut tokenizer: Value = serde_json::from_str(&text).unwrap();
        tokenizer["model"]["vocab"]["Ġalba"] = Value::from(5000);
        fs::write(d.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    });
    run(&vocabulary, "token ID 5000 is outside the vocabulary");
}

#[test]
fn no_end_token_means_that_only_limits_end_an_answer() {
    let dir = broken(|d| {
        let text = fs::read_to_string(d.join("config.json")).unwrap();
        let mut config: Value = serde_json::from_str(&text).unwrap();
        config["eos_token_id"] = Value::Null;
        fs::write(d.join("config.json"), config.to_string()).unwrap();
    });
    let text = prompt(&[SYSTEM, A, B, "cedo ?"]);
    let row = json(&["--model", dir.path().to_str().unwrap(), "--prompt", &text, "--max-new-tokens", "5"]);
    assert_eq!((row["tokens"].as_array().unwrap().len(), &row["finish"]), (5, &Value::from("length")));
}

#[test]
fn the_help_teaches() {
    for (args, expected) in [(&["--help"][..], "SYSTEM ## DOCUMENT"), (&["run", "--help"], "Examples:")] {
        let output = kvc(args);
        assert!(output.status.success() && String::from_utf8_lossy(&output.stdout).contains(expected));
    }
}

#[test]
fn eval_scores_strategies_and_draws() {
    let folder = tempfile::tempdir().unwrap();
    let plot = folder.path().join("accuracy.svg");
    let report = run_json(&[
        "eval",
        "--json",
        "--seeds",
        "2",
        "--questions",
        "3",
        "--strategy",
        "link:2",
        "--strategy",
        "full",
        "--plot",
        plot.to_str().unwrap(),
    ]);
    let scores = report["scores"].as_array().unwrap();
    let mean = |name: &str, kind: &str| {
        let row = scores.iter().find(|s| s["name"] == name && s["kind"] == kind).unwrap();
        row["accuracy"]["mean"].as_f64().unwrap()
    };
    // Full attention, six cells, two strategies in two modes; three kinds of question.
    assert_eq!(scores.len(), (1 + 6 + 4) * 3);
    for kind in ["local", "cross-start", "cross-middle"] {
        assert_eq!(mean("full attention", kind), mean("sequential, alone, full", kind), "{kind}");
    }
    assert_eq!(mean("overlapped, with-system, none", "local"), 1.0);
    assert!(
        mean("sequential, alone, link:2", "cross-start") > mean("sequential, alone, none", "cross-start")
    );
    assert!(scores.iter().all(|s| s["asked"] == 6 && s["accuracy"]["half_width"].is_f64()));
    let svg = std::fs::read_to_string(&plot).unwrap();
    assert!(
        svg.starts_with("<svg")
            && svg.contains("right answers, cross, in middle")
            && svg.contains(">\nlink\n<")
    );
}

#[test]
fn eval_measures_divergence_of_named_arms_and_shows_and_writes_answers() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("answers.jsonl");
    let arms = ["--arm", "sequential, alone, full", "--arm", "sequential, alone, none"];
    let common = ["eval", "--seeds", "1", "--questions", "2", "--measure", "both"];
    let report = run_json(&[&common[..], &arms, &["--json", "--answers", file.to_str().unwrap()]].concat());
    let scores = report["scores"].as_array().unwrap();
    assert_eq!(scores.len(), 3 * 3, "full attention stands before the named arms");
    let nats = |name: &str| {
        let of = scores.iter().filter(|s| s["name"] == name && s["kind"] != "local");
        of.map(|s| s["divergence"]["mean"].as_f64().unwrap()).fold(0.0, f64::max)
    };
    assert!(nats("sequential, alone, full") < 1e-6 && nats("sequential, alone, none") > 0.1);
    let lines = std::fs::read_to_string(&file).unwrap();
    assert_eq!(lines.lines().count(), 1 + 6 * 3, "the settings stand before the answers");
    let first: Value = serde_json::from_str(lines.lines().nth(1).unwrap()).unwrap();
    assert!(first["name"] == "full attention" && first["right"] == true, "{first}");
    let output = kvc(&[&common[..], &arms, &["--show", "1"]].concat());
    let shown = String::from_utf8_lossy(&output.stdout).into_owned();
    for text in [
        "right: ",
        "cross, in middle: ",
        "wrong",
        "divergence",
        "Lost, in points",
        "Beyond: how much further",
    ] {
        assert!(shown.contains(text), "{text}: {shown}");
    }
    fails(&["eval", "--answers", "/nowhere/a.jsonl"], 1, "/nowhere/a.jsonl");
    // Texts that kvc writes, in the chat template, with a separator after each document.
    let texts = [
        "eval",
        "--chat",
        "--separator",
        " .\\n",
        "--texts",
        "3",
        "--seeds",
        "1",
        "--questions",
        "1",
        "--arm",
        "full",
    ];
    let output = kvc(&[&texts[..], &["--show", "1"]].concat());
    let shown = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && shown.contains("reference: In which town"), "{shown}");
    let mixed = kvc(&[&texts[..], &["--show", "1", "--form", "mixed", "--length", "200"]].concat());
    let shown = String::from_utf8_lossy(&mixed.stdout).into_owned();
    let kinds = ["local: ", "comparison: Which ", "reference: "];
    assert!(mixed.status.success() && kinds.iter().all(|kind| shown.contains(kind)), "{shown}");
    assert!(!shown.contains("firm"), "{shown}");
}

#[test]
fn a_plot_that_cannot_be_written_is_refused_before_anything_is_computed() {
    for args in [&["eval"][..], &["bench", "rag"]] {
        let output = kvc(&[args, &["--json", "--plot", "/nowhere/a.svg"]].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(1) && said.contains("/nowhere/a.svg: "), "{said}");
        assert!(output.stdout.is_empty(), "a result would have been shown first");
    }
}

/// Checks every field and method of `ChunkCacheMetrics`, under its name.
fn has_the_seeds_metrics(cache: &Value) {
    let number = |name: &str| cache[name].as_f64().unwrap_or_else(|| panic!("{name} is not in {cache}"));
    for name in ["avg_lookup_time_ms", "avg_reindex_time_ms", "avg_compute_time_ms", "cached_chunks"] {
        assert!(number(name) >= 0.0, "{name}");
    }
    assert_eq!(number("lookup_count"), number("hit_count") + number("miss_count"));
    // Parsed JSON numbers are exact to one unit in the last place.
    let follows = |name: &str, part: &str, whole: &str| {
        assert!((number(name) - number(part) / number(whole)).abs() < 1e-12, "{name}");
    };
    follows("hit_rate", "hit_count", "lookup_count");
    follows("memory_utilization", "used_blocks", "total_blocks");
}

#[test]
fn run_has_the_seeds_metrics() {
    let ask = prompt(&[SYSTEM, A, B, "bora ?"]);
    let answer = json(&["--warm", &prompt(&[SYSTEM, B, A, "cedo ?"]), "--prompt", &ask]);
    let cache = &answer["blocks"]["chunk_cache"];
    has_the_seeds_metrics(cache);
    assert_eq!((&cache["hit_count"], &cache["hit_rate"]), (&2.into(), &0.5.into()));
}

#[test]
fn counts_without_bound_are_refused_with_their_limit() {
    const MOST: &str = "18446744073709551615";
    fails(&["eval", "--seeds", "9223372036854775807"], 2, "100000");
    fails(&["tune", "--seeds", MOST], 2, "100000");
    for count in ["--requests", "--prompt-tokens", "--answer-tokens", "--shared-prefix"] {
        fails(&["bench", "serve", "--size", "1x64", count, MOST], 1, "limit");
    }
    for count in ["--requests", "--documents", "--document-tokens", "--per-request"] {
        fails(&["bench", "rag", "--size", "1x64", count, MOST], 1, "limit");
    }
}

#[test]
fn bench_serve_counts_requests_that_fail_and_answers_that_are_cut_short() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.jsonl");
    let line = |prompt: usize, answer: usize| {
        format!("{{\"at\": 0, \"prompt_tokens\": {prompt}, \"answer_tokens\": {answer}}}\n")
    };
    let name = trace.to_str().unwrap();
    let serve = ["bench", "serve", "--json", "--size", "1x64", "--kv-memory", "1", "--trace", name];
    std::fs::write(&trace, line(9, 4) + &line(100_000, 4) + &line(9, 100_000) + &line(9, 4)).unwrap();
    let report = run_json(&serve);
    assert_eq!(
        (&report["requests"], &report["failed"], &report["shortened"]),
        (&4.into(), &1.into(), &1.into())
    );
    assert_eq!(report["ttft_ms"].as_array().unwrap().len(), 3);
    assert!(report["answer_tokens"].as_u64().unwrap() > 100 + 2 * 4, "{report}");
    assert!(report["first_failure"].as_str().is_some_and(|failure| !failure.is_empty()), "{report}");
    // If no request is answered, there is nothing to report.
    std::fs::write(&trace, line(100_000, 4)).unwrap();
    fails(&serve, 1, "99999");
}

#[test]
fn bench_serve_plays_arrivals_drawn_or_from_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let small = ["--size", "1x64", "--requests", "12", "--prompt-tokens", "40", "--answer-tokens", "6"];
    let plot = path("ttft.svg");
    let fast = ["bench", "serve", "--json", "--rate", "500", "--plot", &plot, "--step-tokens", "32"];
    let report = run_json(&[&fast[..], &small].concat());
    let number = |name: &str| report[name].as_f64().unwrap();
    assert_eq!((number("requests"), report["ttft_ms"].as_array().unwrap().len()), (12.0, 12));
    assert!(number("tokens_per_step") <= 32.0 && number("steps") >= 12.0 * 20.0 / 32.0);
    assert!(number("answer_tokens_per_second") > 0.0 && report["ttft"]["p95"].as_f64().unwrap() > 0.0);
    assert!(std::fs::read_to_string(&plot).unwrap().contains("time to first token"));

    // Every prompt finds the two pinned blocks.
    let kept = ["bench", "serve", "--json", "--shared-prefix", "40", "--pin", "--kv-memory", "1"];
    let report = run_json(&[&kept[..], &small].concat());
    assert!(report["cached_tokens"].as_u64().unwrap() >= 12 * 32, "{report}");
    fails(&["bench", "serve", "--pin"], 2, "--shared-prefix");

    let trace = path("trace.jsonl");
    let line = |at: f64| format!("{{\"at\": {at}, \"prompt_tokens\": 9, \"answer_tokens\": 4}}\n");
    std::fs::write(&trace, line(0.01) + &line(0.0) + "\n" + &line(0.0)).unwrap();
    let from_file = ["bench", "serve", "--size", "1x64", "--trace", &trace];
    let report = run_json(&[&from_file[..], &["--json"]].concat());
    assert_eq!((&report["requests"], &report["answer_tokens"]), (&3.into(), &12.into()));
    let table = kvc(&from_file);
    assert!(String::from_utf8_lossy(&table.stdout).contains("answer tokens per second"));

    std::fs::write(&trace, line(0.0) + "{\"at\": 1}\n").unwrap();
    fails(&from_file, 1, "line 2: missing field `prompt_tokens`");
    std::fs::write(&trace, line(-1.0)).unwrap();
    fails(&from_file, 1, "line 1: at must be a number of seconds");
    fails(&["bench", "serve", "--trace", &path("none")], 1, "cannot read the trace");
    fails(&["bench", "serve", "--rate", "0"], 1, "the rate must be above 0");
    fails(&["bench", "serve", "--trace", &trace, "--rate", "1"], 2, "cannot be used with");
}

#[test]
fn bench_rag_reports_the_required_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let plot = folder.path().join("ttft.svg");
    let small = ["--requests", "30", "--document-tokens", "24"];
    let report =
        run_json(&[&["bench", "rag", "--json", "--plot", plot.to_str().unwrap()][..], &small].concat());
    let workloads = report["workloads"].as_array().unwrap();
    assert_eq!((workloads.len(), report["ttft"].as_array().unwrap().len()), (4, 4));
    for workload in workloads {
        let number = |name: &str| workload[name].as_f64().unwrap();
        assert!(number("any_hit_rate") >= number("document_hit_rate"));
        assert!((0.0..=1.0).contains(&number("alpha")) && (0.0..=1.0).contains(&number("beta")));
        let predicted = 1.0 / (1.0 - number("alpha") * number("beta"));
        assert!((number("predicted_speedup") - predicted).abs() < 1e-9);
        let cache = &workload["chunk_cache"];
        for times in ["lookup_time", "reindex_time", "compute_time"] {
            assert!(cache[times]["count"].as_u64().unwrap() > 0, "{times}");
        }
        has_the_seeds_metrics(cache);
        assert!(cache["avg_compute_time_ms"].as_f64().unwrap() > 0.0);
        assert_eq!(workload["arrivals"].as_array().unwrap().len(), 30);
        // The seed's goals and alarms, each with its measured value.
        for (kind, count) in [("goals", 5), ("alarms", 4)] {
            let goals = workload[kind].as_array().unwrap();
            assert_eq!(goals.len(), count);
            assert!(
                goals.iter().all(|goal| goal["measured"].is_number() && goal["met"].is_boolean()),
                "{goals:?}"
            );
        }
        assert_eq!(workload["goals"][0]["measured"], workload["document_hit_rate"]);
    }
    // The seed's cases: half and a tenth of the documents were used before.
    let any = |i: usize| workloads[i]["any_hit_rate"].as_f64().unwrap();
    assert!(any(2) > 0.7 && any(3) > 0.2, "{} {}", any(2), any(3));
    assert!(std::fs::read_to_string(&plot).unwrap().contains("with reuse"));
    // Sleep changes the cost of documents, not which of them are found.
    let zipf =
        [&["bench", "rag", "--json", "--zipf", "1", "--chunk-sleep", "compressed"][..], &small].concat();
    let asleep = &run_json(&zipf)["workloads"][0];
    assert_eq!(asleep["document_hit_rate"], workloads[0]["document_hit_rate"]);
    let number = |name: &str| asleep["chunk_sleep"][name].as_u64().unwrap();
    assert!(number("pieces") > 0 && number("host_bytes") < number("device_bytes"));
    assert!(asleep["chunk_cache"]["woken"].as_u64().unwrap() > 0);
    assert_eq!(asleep["chunk_cache"]["sleeping_chunks"], number("pieces"));
    assert!(asleep["used_bytes"].as_u64().unwrap() < workloads[0]["used_bytes"].as_u64().unwrap());
    assert_eq!(workloads[0]["chunk_sleep"], Value::Null);
    let table = kvc(&[&["bench", "rag", "--chunk-sleep", "int8"][..], &small].concat());
    assert!(String::from_utf8_lossy(&table.stdout).contains("documents put to sleep / woken"));
    let text = String::from_utf8_lossy(&table.stdout).into_owned();
    for row in
        ["goal: hit rate > 70 %", "goal: reindex time p99 < 10 ms", "alarm unless: lookup time mean < 5 ms"]
    {
        assert!(text.contains(row), "{row}: {text}");
    }
    fails(&["bench", "rag", "--size", "8"], 2, "8x1024");
    fails(&["bench", "rag", "--repetition", "2"], 1, "between 0 and 1");
    fails(&["bench", "rag", "--size", "2x100"], 1, "multiple of 64");
}
