//! Two thousand registered documents, ten megabytes of text: five of them are found in each prompt, wherever they stand.

use std::fmt::Write as _;

use kvbackend_cpu::CpuBackend;
use kvengine::{Engine, EngineConfig};
use kvmodel::{Model, ModelConfig, WeightFormat, Weights};
use kvserve::{ServedModel, Server};
use serde_json::{Value, json};

use crate::client::Client;
use crate::common::{MODEL, assert_only_used_documents_are_held, free_port, loaded, reuse, small};

const DOCUMENTS: usize = 2000;
const BYTES: usize = 5000;

/// A model with room for long prompts, whose answers mean nothing.
fn roomy() -> Server {
    let codec = loaded().codec;
    let config =
        ModelConfig { vocab_size: 1037, max_positions: 1 << 14, ..ModelConfig::benchmark(1, 64).unwrap() };
    let model = Model::new(config, Weights::random(1), WeightFormat::Stored).unwrap();
    let config = EngineConfig { kv_memory: Some(64 << 20), ..small() };
    let engine = Engine::new(model, CpuBackend::new(), codec.digest(), &config).unwrap();
    let model = ServedModel { engine, codec, names: vec![MODEL.to_owned()], reuse: Some(reuse()) };
    Server::start(model, free_port()).unwrap()
}

/// Words that follow from a seed. A third of the documents begin alike.
fn text(seed: usize) -> String {
    let mut text = if seed.is_multiple_of(3) { "alba is red . ".repeat(20) } else { String::new() };
    let mut state = seed as u64 + 1;
    while text.len() < BYTES {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let colour = ["red", "blue", "green", "white"][(state >> 40) as usize % 4];
        write!(text, "alba is {colour} . {} ", state >> 44 & 7).unwrap();
    }
    text
}

fn send(client: &mut Client, method: &str, path: &str, body: &Value) -> Value {
    client.request(method, path, &[], body.to_string().as_bytes());
    let answer = client.answer();
    assert!(answer.status < 300, "{answer:?}");
    answer.json()
}

/// Asks with documents and text between them. Returns the IDs and the lengths of those that were found.
fn found(client: &mut Client, texts: &[&str], between: &str) -> Vec<(String, usize)> {
    let pasted = format!("{between}{}{between} ?", texts.join(between));
    let request = json!({
        "messages": [{"role": "system", "content": "alba is red ."}, {"role": "user", "content": pasted}],
        "max_tokens": 1,
    });
    let answer = send(client, "POST", "/v1/chat/completions", &request);
    let parts = answer["kv"]["parts"].as_array().unwrap();
    // Text between documents is a part without an ID.
    let registered = parts.iter().filter(|part| part["span"].is_array());
    let length =
        |part: &Value| (part["span"][1].as_u64().unwrap() - part["span"][0].as_u64().unwrap()) as usize;
    registered.map(|part| (part["id"].as_str().unwrap().to_owned(), length(part))).collect()
}

#[test]
fn five_of_two_thousand_documents_are_found_in_any_order_and_place() {
    let server = roomy();
    let client = &mut Client::new(server.address());
    let texts: Vec<String> = (0..DOCUMENTS).map(text).collect();
    for (number, text) in texts.iter().enumerate() {
        send(client, "PUT", &format!("/v1/documents/{number}"), &json!({"text": text}));
    }
    let listed = send(client, "GET", "/v1/documents", &json!({}));
    let bytes = texts.iter().map(String::len).sum::<usize>() as u64;
    assert!(bytes > 10_000_000 && listed["bytes"].as_u64().unwrap() >= bytes);
    for (round, between) in ["", " ", "\n\n", " alba ? "].into_iter().cycle().take(8).enumerate() {
        let chosen: [usize; 5] = std::array::from_fn(|at| (round * 331 + at * at * 397 + 7) % DOCUMENTS);
        let asked: Vec<&str> = chosen.iter().map(|&number| &*texts[number]).collect();
        let expected: Vec<_> =
            chosen.iter().map(|&number| (number.to_string(), texts[number].len())).collect();
        assert_eq!(found(client, &asked, between), expected, "{between:?}");
        // A byte of the third one differs.
        let changed = asked[2].replacen("blue", "bluE", 1);
        let asked = [asked[0], asked[1], &changed, asked[3], asked[4]];
        let mut expected = expected;
        expected.remove(2);
        assert_eq!(found(client, &asked, between), expected, "{between:?}");
    }
    drop(texts);
    assert_only_used_documents_are_held(&server);
}
