//! The rules for Prometheus in the documents, whose metrics the server must write.

use std::collections::BTreeSet;
use std::path::PathBuf;

use kvserve::{ApiKeys, ServerConfig};
use serde_json::json;
use yaml_rust2::{Yaml, YamlLoader};

use super::client::call;
use super::common::{free_port, question, reuse, with};

/// Returns the blocks of YAML in a file of `docs/`.
fn blocks(file: &str) -> Vec<String> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(file);
    let text = std::fs::read_to_string(path).unwrap();
    let blocks = text.split("```yaml\n").skip(1);
    blocks.map(|block| block.split_once("\n```").unwrap().0.to_owned()).collect()
}

/// Returns the names of the rules in a block of YAML, each with its expression. Checks that each has the fields of a rule.
fn rules(block: &str) -> Vec<(String, String)> {
    let parsed = YamlLoader::load_from_str(block).unwrap();
    let [document] = &parsed[..] else { panic!("one document: {parsed:?}") };
    let groups = document["groups"].as_vec().unwrap();
    let rules = groups.iter().flat_map(|group| {
        assert!(group["name"].as_str().is_some(), "{group:?}");
        group["rules"].as_vec().unwrap()
    });
    let rule = |rule: &Yaml| {
        for field in rule.as_hash().unwrap().keys().map(|field| field.as_str().unwrap()) {
            assert!(["alert", "expr", "for", "labels", "annotations"].contains(&field), "{field}");
        }
        if let Some(time) = rule["for"].as_str() {
            let number = time.strip_suffix(['s', 'm', 'h']).and_then(|number| number.parse::<u32>().ok());
            assert!(number.is_some(), "{time}");
        }
        (rule["alert"].as_str().unwrap().to_owned(), rule["expr"].as_str().unwrap().to_owned())
    };
    rules.map(rule).collect()
}

/// Returns the names of metrics in an expression: the words that are no function, no number and no time.
fn metrics(expr: &str) -> Vec<&str> {
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || "_:.".contains(letter);
    let mut names = Vec::new();
    let mut rest = expr;
    while let Some(start) = rest.find(is_part) {
        let word = &rest[start..];
        let (word, after) = word.split_at(word.find(|letter| !is_part(letter)).unwrap_or(word.len()));
        if !word.starts_with(|letter: char| letter.is_ascii_digit()) && !after.starts_with('(') {
            names.push(word);
        }
        rest = after;
    }
    names
}

#[test]
fn each_metric_of_the_rules_is_written_by_the_server() {
    let mut keys = ApiKeys::default();
    assert!(keys.add("key-op", "operator"));
    let server = with(Some(reuse()), ServerConfig { keys: Some(keys), ..free_port() });
    let send = |method: &str, path: &str, body: &str| {
        let answer = call(server.address(), method, path, &[("x-api-key", "key-op")], body.as_bytes());
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.body
    };
    let _ = send("POST", "/v1/chat/completions", &question(json!({})).to_string());
    let text = send("GET", "/metrics", "");
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    let written: BTreeSet<&str> = samples.filter_map(|line| line.split(['{', ' ']).next()).collect();
    let all: Vec<(String, String)> = ["serve.md", "monitoring.md"]
        .iter()
        .flat_map(|file| blocks(file))
        .flat_map(|block| rules(&block))
        .collect();
    assert!(all.len() >= 4, "{all:?}");
    let mut alerts = BTreeSet::new();
    for (alert, expr) in &all {
        assert!(alerts.insert(alert), "{alert} twice");
        let names = metrics(expr);
        assert!(!names.is_empty(), "{alert}: {expr}");
        for name in names {
            assert!(written.contains(name), "{alert}: {name} is not in\n{text}");
        }
    }
}

#[test]
fn names_of_metrics_are_found_in_an_expression() {
    let expr = "histogram_quantile(0.99, rate(a_b_bucket[5m])) > 1.5e3 - vllm:running{} / c_total < 0.5";
    assert_eq!(metrics(expr), ["a_b_bucket", "vllm:running", "c_total"]);
}
