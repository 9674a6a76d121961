//! `kvc run --disk`, `kvc warm` and `kvc inspect`: documents that outlive the program.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use common::{A, B, SYSTEM, fails, json, kvc, prompt, run_json};
use serde_json::Value;

#[allow(dead_code, reason = "other suites use the rest")]
mod common;

/// Options for a small folder from which everything is loaded, because the built-in model computes faster than any
/// disk.
fn disk(folder: &Path) -> [String; 6] {
    let folder = folder.to_str().unwrap();
    ["--disk", folder, "--disk-limit", "32MiB", "--disk-loads", "always"].map(str::to_owned)
}

fn missed(answer: &Value) -> Vec<Value> {
    answer["chunks"].as_array().unwrap().iter().map(|chunk| chunk["missed"].clone()).collect()
}

#[test]
fn documents_are_found_by_the_next_start() {
    let folder = tempfile::tempdir().unwrap();
    let kv = folder.path().join("kv");
    let disk = disk(&kv);
    let start = |documents: [&str; 2]| {
        let ask = prompt(&[SYSTEM, documents[0], documents[1], "bora ?"]);
        let options: Vec<&str> = disk.iter().map(String::as_str).collect();
        json(&[&options[..], &["--recompute", "none", "--prompt", &ask]].concat())
    };
    let (first, second) = (start([A, B]), start([B, A]));
    assert_eq!((&first["disk"]["hits"], missed(&first)), (&0.into(), vec!["new".into(); 2]));
    assert!(second["disk"]["hits"].as_u64() >= Some(2) && second["disk"]["misses"] == 0);
    assert_eq!(missed(&second), vec![Value::Null; 2]);
    assert_eq!(first["tokens"], second["tokens"]);
    let hits = second["chunks"].as_array().unwrap().iter().filter(|chunk| chunk["hit"] == true).count();
    assert_eq!(hits, 2);
    let size = fs::metadata(kv.join("records.kvslab")).unwrap().len();
    assert!(size <= 32 << 20 && second["disk"]["limit_bytes"] == size);
}

#[test]
fn without_a_limit_the_folder_keeps_its_size_and_its_documents() {
    let folder = tempfile::tempdir().unwrap();
    let kv = folder.path().join("kv");
    let ask = prompt(&[SYSTEM, A, B, "bora ?"]);
    let start = |limit: &[&str]| {
        let options =
            ["--disk", kv.to_str().unwrap(), "--disk-loads", "always", "--recompute", "none", "-p", &ask];
        json(&[&options[..], limit].concat())
    };
    let first = start(&["--disk-limit", "32MiB"]);
    let second = start(&[]);
    assert_eq!(missed(&second), vec![Value::Null; 2]);
    assert_eq!(first["disk"]["limit_bytes"], second["disk"]["limit_bytes"]);
}

#[test]
fn warm_documents_are_found_in_any_prompt() {
    let folder = tempfile::tempdir().unwrap();
    let (documents, kv) = (folder.path().join("documents"), folder.path().join("kv"));
    fs::create_dir(&documents).unwrap();
    for (name, text) in [("a.txt", A), ("b.txt", B)] {
        fs::write(documents.join(name), text).unwrap();
    }
    let lines = folder.path().join("more.jsonl");
    fs::write(&lines, "\"dora is green . \"\n\n{\"id\": 7, \"text\": \"elba is old .\"}\n").unwrap();
    let kv_text = kv.to_str().unwrap();
    let warm = |sources: &[&Path]| -> Value {
        let sources: Vec<&str> = sources.iter().map(|path| path.to_str().unwrap()).collect();
        let options = [
            "--disk",
            kv_text,
            "--disk-limit",
            "32MiB",
            "--disk-policy",
            "s3-fifo",
            "--system",
            SYSTEM,
            "--json",
        ];
        let way = ["--chunks", "with-system"];
        run_json(&[&["warm"], &sources[..], &options, &way].concat())
    };
    let first = warm(&[&documents]);
    assert_eq!((&first["documents"], &first["known"], &first["dropped"]), (&2.into(), &0.into(), &0.into()));
    let second = warm(&[&documents, &lines]);
    assert_eq!((&second["documents"], &second["known"]), (&4.into(), &2.into()), "it goes on");
    let options = disk(&kv);
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let [a, b] = ["b.txt", "a.txt"].map(|name| documents.join(name));
    let files = ["--document", a.to_str().unwrap(), "--document", b.to_str().unwrap()];
    let way = ["--system", SYSTEM, "--chunks", "with-system", "-p", "bora ?"];
    let answer = json(&[&options[..], &files, &way].concat());
    assert_eq!(missed(&answer), vec![Value::Null; 2]);
    assert!(answer["disk"]["hits"].as_u64() >= Some(2));
    // Another system prompt needs other keys and values.
    let other = ["--system", "other words", "--chunks", "with-system", "-p", "bora ?"];
    let answer = json(&[&options[..], &files, &other].concat());
    assert_eq!(missed(&answer), vec!["other_context".into(); 2] as Vec<Value>);
    let inspected = run_json(&["inspect", kv_text, "--check", "--json"]);
    assert!(inspected["records"].as_u64() >= Some(6) && inspected["damaged"] == 0, "{inspected}");
    let accounts = &inspected["scopes"][0]["accounts"];
    assert_eq!(
        (accounts.as_array().unwrap().len(), &accounts[0]["account"]),
        (1, &Value::Null),
        "{inspected}"
    );
    assert_eq!(accounts[0]["records"], inspected["records"]);
    let table = String::from_utf8(kvc(&["inspect", kv_text]).stdout).unwrap();
    assert!(table.contains("records in") && table.contains("layers, K"), "{table}");
}

/// Kills `kvc warm` twice, each time when it has stored some more. Returns the report of the run that ends.
fn killed_twice(warm: &[&str], kv: &str) -> Value {
    for killed in 0..2 {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvc"));
        let quiet = command.args(warm).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = quiet.spawn().unwrap();
        while child.try_wait().unwrap().is_none() {
            let inspected = kvc(&["inspect", kv, "--json"]);
            let found = serde_json::from_slice::<Value>(&inspected.stdout).ok();
            if found.is_some_and(|found| found["records"].as_u64() > Some(killed * 100 + 50)) {
                child.kill().unwrap();
            }
        }
        let inspected = run_json(&["inspect", kv, "--check", "--json"]);
        assert_eq!(inspected["damaged"], 0, "{inspected}");
    }
    run_json(warm)
}

#[test]
fn a_killed_warm_continues_where_it_stopped() {
    // On a busy machine, a run may end before it is killed. Then there are more documents.
    for documents in [600, 1200, 2400, 4800] {
        let folder = tempfile::tempdir().unwrap();
        let (lines, kv) = (folder.path().join("all.jsonl"), folder.path().join("kv"));
        let text = |number: usize| format!("{{\"text\": \"{A} this is note {number} of many .\"}}\n");
        fs::write(&lines, (0..documents).map(text).collect::<String>()).unwrap();
        let kv = kv.to_str().unwrap();
        let warm = ["warm", lines.to_str().unwrap(), "--disk", kv, "--disk-limit", "1GiB", "--json"];
        let last = killed_twice(&warm, kv);
        assert_eq!((&last["documents"], &last["dropped"]), (&documents.into(), &0.into()));
        let known = last["known"].as_u64().unwrap();
        if known < documents as u64 {
            assert!(known > 50, "{last}");
            assert_eq!(run_json(&warm)["known"], documents, "nothing is computed again");
            assert_eq!(run_json(&["inspect", kv, "--check", "--json"])["damaged"], 0);
            return;
        }
    }
    panic!("every run ended before it was killed");
}

#[test]
fn warm_documents_are_found_at_the_beginning_of_a_prompt() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b, kv) = (folder.path().join("a.txt"), folder.path().join("b.txt"), folder.path().join("kv"));
    fs::write(&a, A).unwrap();
    fs::write(&b, B).unwrap();
    let [a, b, kv_text] = [&a, &b, &kv].map(|path| path.to_str().unwrap());
    let warmed = run_json(&["warm", a, b, "--disk", kv_text, "--disk-limit", "32MiB", "--json"]);
    assert_eq!(
        (&warmed["documents"], &warmed["known"], &warmed["dropped"]),
        (&2.into(), &0.into(), &0.into())
    );
    let ask = ["--document", b, "--document", a, "-p", "bora ?"];
    let options = disk(&kv);
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let answer = json(&[&options[..], &ask].concat());
    assert_eq!(missed(&answer), vec![Value::Null; 2], "{answer}");
    assert_eq!(answer["tokens"], json(&ask)["tokens"]);
}

#[test]
fn a_disk_is_examined_and_left_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().to_str().unwrap();
    let found = run_json(&["doctor", text, "--json"]);
    assert!(found["way"].as_str().is_some_and(|way| !way.is_empty()), "{found}");
    assert!(found["write"].as_f64() > Some(0.0) && found["read"].as_f64() > Some(0.0), "{found}");
    let table = String::from_utf8(kvc(&["doctor", text]).stdout).unwrap();
    assert!(table.contains(found["way"].as_str().unwrap()), "{table}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    fails(&["doctor", folder.path().join("none/none").to_str().unwrap()], 1, "is not a folder");
}

#[test]
fn wrong_folders_sizes_and_documents_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "x").unwrap();
    let (file, empty) = (file.to_str().unwrap(), folder.path().join("empty"));
    fs::create_dir(&empty).unwrap();
    let (lines, empty) = (folder.path().join("lines.jsonl"), empty.to_str().unwrap());
    let folder = folder.path().to_str().unwrap();
    fails(&["run", "--disk", file, "-p", "x"], 1, "is not a folder");
    fails(&["run", "--disk", folder, "--disk-limit", "100KiB", "-p", "x"], 1, "at least");
    fails(&["run", "--disk", folder, "--disk-limit", "ten", "-p", "x"], 2, "50GiB");
    fails(&["run", "--disk-limit", "1GiB", "-p", "x"], 2, "--disk");
    fails(&["run", "--disk-policy", "tiny-lfu", "-p", "x"], 2, "--disk");
    fails(&["run", "--disk", folder, "--disk-policy", "random", "-p", "x"], 2, "s3-fifo");
    fails(&["run", "--disk", folder, "--cache", "grouped", "-p", "x"], 1, "paged cache");
    fails(&["inspect", empty], 1, "contains no slab");
    fails(&["warm", empty, "--disk", folder], 1, "contains no documents");
    for (text, said) in [
        ("\"good\"\n{", "line 2"),
        ("{\"body\": 1}", "a field `text`"),
        ("\" \"", "empty"),
        ("\n", "contains no documents"),
    ] {
        fs::write(&lines, text).unwrap();
        fails(&["warm", lines.to_str().unwrap(), "--disk", folder], 1, said);
    }
}

#[test]
fn a_prompt_is_kept_in_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("prompt.kv");
    let ask = |more: &[&str]| {
        let prompt = prompt(&[SYSTEM, A, B, "bora ?"]);
        let options = ["--prompt-cache", file.to_str().unwrap(), "--recompute", "none", "--prompt", &prompt];
        json(&[&options, more].concat())
    };
    let (first, second) = (ask(&[]), ask(&[]));
    let [saved, restored] = [&first["prompt_cache"]["saved"], &second["prompt_cache"]["restored"]];
    assert_eq!(
        (&first["prompt_cache"]["restored"]["tokens"], &saved["tokens"]),
        (&0.into(), &restored["tokens"])
    );
    assert_eq!((missed(&second), &second["tokens"]), (vec![Value::Null; 2], &first["tokens"]));
    // With other settings, the prompt is computed, and the file replaced.
    let other = ask(&["--dtype", "bf16"]);
    assert_eq!(
        (&other["prompt_cache"]["restored"]["tokens"], missed(&other)),
        (&0.into(), vec!["new".into(); 2])
    );
    assert_eq!(missed(&ask(&["--dtype", "bf16"])), vec![Value::Null; 2]);
    // So is a damaged one.
    let mut bytes = fs::read(&file).unwrap();
    let end = bytes.len() - 5000;
    bytes[end] ^= 1;
    fs::write(&file, bytes).unwrap();
    assert_eq!(ask(&["--dtype", "bf16"])["tokens"], other["tokens"]);
    assert_eq!(missed(&ask(&["--dtype", "bf16"])), vec![Value::Null; 2]);
    // A first page that is damaged is replaced, too.
    fs::write(&file, [&b"KVRECORD"[..], &[0; 5000]].concat()).unwrap();
    assert_eq!(ask(&["--dtype", "bf16"])["tokens"], other["tokens"]);
    assert_eq!(missed(&ask(&["--dtype", "bf16"])), vec![Value::Null; 2]);
    // An answer that cannot be saved is an answer.
    let nowhere = folder.path().join("none/prompt.kv");
    let answer = json(&["--prompt-cache", nowhere.to_str().unwrap(), "-p", "alba is red . alba ?"]);
    assert!(
        answer["prompt_cache"].is_null() && answer["tokens"].as_array().is_some_and(|all| !all.is_empty())
    );
    // A text is never replaced.
    let text = "notes that somebody has written";
    fs::write(&file, text).unwrap();
    fails(&["run", "--prompt-cache", file.to_str().unwrap(), "-p", "x"], 1, "contains no records");
    assert_eq!(fs::read_to_string(&file).unwrap(), text);
    fails(&["run", "--prompt-cache", folder.path().to_str().unwrap(), "-p", "x"], 1, "not a regular file");
    fails(&["run", "--prompt-cache", "x", "--no-chunk-cache", "-p", "x"], 2, "--no-chunk-cache");
}

#[test]
fn the_next_turn_of_a_conversation_continues_from_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("prompt.kv");
    let ask = |prompt: &str| {
        let options =
            ["--prompt-cache", file.to_str().unwrap(), "--block-size", "4", "--max-new-tokens", "12", "-p"];
        json(&[&options[..], &[prompt]].concat())
    };
    let prompt = "alba is red . bora is blue . dora is green . alba ?";
    let first = ask(prompt);
    let next = ask(&format!("{prompt} {} . bora ?", first["text"].as_str().unwrap().trim()));
    let cached = next["cached_tokens"].as_u64().unwrap();
    assert!(cached >= first["prompt_tokens"].as_u64().unwrap() / 4 * 4, "{next}");
}

#[test]
fn the_command_of_the_readme_finds_its_documents_at_the_next_start() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let readme = fs::read_to_string(root.join("README.md")).unwrap();
    let line =
        readme.lines().find_map(|line| line.strip_prefix("cargo run --release -p kvcli -- run ")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    fs::write(path("a.txt"), A).unwrap();
    fs::write(path("b.txt"), B).unwrap();
    let model = root.join("models/tiny-rag").to_str().unwrap().to_owned();
    let given = line.split(' ').map(|word| match word.trim_matches('"') {
        "MODEL.gguf" => model.clone(),
        "QUESTION" => "bora ?".to_owned(),
        name @ ("a.txt" | "b.txt" | "kv") => path(name),
        word => word.to_owned(),
    });
    // The test has less room. The built-in model computes faster than any disk, and its template adds nothing.
    let more = ["--disk-limit", "32MiB", "--disk-loads", "always", "--system", SYSTEM].map(str::to_owned);
    let options: Vec<String> = given.chain(more).collect();
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let (first, second) = (json(&options), json(&options));
    assert_eq!((&first["disk"]["hits"], &second["disk"]["misses"]), (&0.into(), &0.into()));
    assert_eq!((missed(&second), &second["tokens"]), (vec![Value::Null; 2], &first["tokens"]));
}

#[test]
fn bench_rag_measures_a_slow_disk_that_finds_prompts_and_stores_them() {
    let folder = tempfile::tempdir().unwrap();
    let kv = folder.path().to_str().unwrap();
    let small = ["--requests", "2", "--document-tokens", "32", "--disk-limit", "64MiB"];
    let report = run_json(&[&["bench", "rag", "--json", "--disk", kv][..], &small].concat());
    let rows = report["ttft"].as_array().unwrap();
    let of_disk: Vec<&Value> =
        rows.iter().filter(|row| row["what"].as_str().unwrap().contains("disk")).collect();
    assert_eq!(of_disk.len(), 10, "{rows:?}");
    assert!(of_disk.iter().all(|row| row["took"].is_object() && row["target"].is_object()));
    let last = of_disk[9];
    assert_eq!(last["what"], "stored on a disk of 5 MB/s");
    assert_eq!(last["limit"], "computed without a disk");
    assert_eq!(last["target"]["times-as-long"], 1.1);
}
