//! The paths beside chats: completions, models, tokens, control and metrics.

use serde_json::{Value, json};

use crate::client::{call, get, post};
use crate::common::{DOCUMENTS, MODEL, QUESTION, SYSTEM, assert_nothing_is_held, question, reusing, server};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// Returns a prompt that the built-in model answers with one word.
fn prompt() -> String {
    format!("{SYSTEM}{}{}", DOCUMENTS[0].1, QUESTION.0)
}

#[test]
fn a_text_is_continued_whole_and_streamed() {
    let server = server();
    let request = json!({"model": MODEL, "prompt": prompt(), "temperature": 0, "logprobs": 2});
    let whole = post(server.address(), COMPLETIONS, &request).json();
    let choice = &whole["choices"][0];
    assert_eq!(
        (choice["text"].as_str().unwrap().trim(), &choice["finish_reason"]),
        (QUESTION.1, &json!("stop"))
    );
    assert_eq!(whole["object"], "text_completion");
    let logprobs = &choice["logprobs"];
    let joined: String = serde_json::from_value::<Vec<String>>(logprobs["tokens"].clone()).unwrap().concat();
    assert_eq!(joined.trim(), QUESTION.1);
    assert_eq!(logprobs["text_offset"][0], 0);
    assert_eq!(logprobs["top_logprobs"][0].as_object().unwrap().len(), 2);
    let mut stream = request;
    stream["stream"] = json!(true);
    stream["stream_options"] = json!({"include_usage": true});
    let streamed = post(server.address(), COMPLETIONS, &stream);
    let events = streamed.events();
    let texts = events.iter().filter_map(|event| event["choices"][0]["text"].as_str());
    assert_eq!(texts.collect::<String>(), choice["text"]);
    assert_eq!(events.last().unwrap()["usage"]["completion_tokens"], whole["usage"]["completion_tokens"]);
    assert!(streamed.body.ends_with("data: [DONE]\n\n"));
}

#[test]
fn tokens_and_several_prompts_are_continued_in_their_order() {
    let server = server();
    let tokens = post(server.address(), "/tokenize", &json!({"prompt": prompt()})).json()["tokens"].clone();
    let other = format!("{SYSTEM}{}zifu ?", DOCUMENTS[0].1);
    let texts = |answer: &Value| {
        let choices = answer["choices"].as_array().unwrap().iter();
        choices.map(|choice| choice["text"].as_str().unwrap().trim().to_owned()).collect::<Vec<_>>()
    };
    for (given, expected) in [
        (tokens.clone(), vec!["red"]),
        (json!([prompt(), other]), vec!["red", "green"]),
        (json!([tokens, tokens]), vec!["red", "red"]),
    ] {
        let request = json!({"prompt": given, "temperature": 0, "max_tokens": 4});
        let answer = post(server.address(), COMPLETIONS, &request).json();
        assert_eq!(texts(&answer), expected);
        let mut stream = request;
        stream["stream"] = json!(true);
        let events = post(server.address(), COMPLETIONS, &stream).events();
        for (index, expected) in expected.iter().enumerate() {
            let own = events.iter().filter(|event| event["choices"][0]["index"] == index);
            let text: String = own.filter_map(|event| event["choices"][0]["text"].as_str()).collect();
            assert_eq!(text.trim(), *expected);
        }
    }
}

#[test]
fn a_text_without_a_limit_has_sixteen_tokens() {
    let server = server();
    let answer = post(server.address(), COMPLETIONS, &json!({"prompt": "alba", "ignore_eos": true})).json();
    assert_eq!(answer["usage"]["completion_tokens"], 16);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
}

#[test]
fn models_are_listed_by_their_names() {
    let server = server();
    let list = get(server.address(), "/v1/models").json();
    assert_eq!((&list["object"], &list["data"][0]["id"]), (&json!("list"), &json!(MODEL)));
    assert_eq!(list["data"][0]["max_model_len"], 2048);
    assert_eq!(get(server.address(), &format!("/v1/models/{MODEL}")).json()["id"], MODEL);
}

#[test]
fn texts_become_tokens_and_texts_again() {
    let server = server();
    let text = "alba is red .";
    let tokens =
        post(server.address(), "/tokenize", &json!({"prompt": text, "return_token_strs": true})).json();
    assert_eq!(tokens["count"].as_u64().unwrap() as usize, tokens["tokens"].as_array().unwrap().len());
    let joined: String =
        serde_json::from_value::<Vec<String>>(tokens["token_strs"].clone()).unwrap().concat();
    assert_eq!(joined.trim(), text);
    let back = post(server.address(), "/detokenize", &json!({"tokens": tokens["tokens"]})).json();
    assert_eq!(back["prompt"].as_str().unwrap().trim(), text);
    let chat = json!({"messages": [{"role": "user", "content": text}]});
    assert_eq!(post(server.address(), "/tokenize", &chat).json()["tokens"], tokens["tokens"]);
    let asked = question(json!({}));
    let with = json!({"messages": asked["messages"], "documents": asked["documents"]});
    let usage = post(server.address(), CHAT, &asked).json()["usage"]["prompt_tokens"].clone();
    assert_eq!(post(server.address(), "/tokenize", &with).json()["count"], usage);
    for (path, wrong) in [
        ("/tokenize", json!({})),
        ("/tokenize", json!({"prompt": "a", "messages": []})),
        ("/detokenize", json!({"tokens": [1_000_000]})),
        ("/detokenize", json!({"tokens": [-1]})),
    ] {
        assert_eq!(post(server.address(), path, &wrong).status, 400, "{wrong}");
    }
}

#[test]
fn health_and_version_need_nothing() {
    let server = server();
    assert_eq!(get(server.address(), "/health").status, 200);
    assert_eq!(get(server.address(), "/version").json()["version"], env!("CARGO_PKG_VERSION"));
}

/// Returns the value of a metric.
fn metric(text: &str, name: &str) -> f64 {
    let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name} in {text}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn metrics_count_what_was_answered() {
    let server = reusing();
    let before = get(server.address(), "/metrics");
    assert!(before.header("content-type").unwrap().starts_with("application/openmetrics-text"));
    assert!(before.body.ends_with("# EOF\n") && before.body.matches("# EOF").count() == 1);
    let mut tokens = 0.0;
    for _ in 0..2 {
        let answer = post(server.address(), CHAT, &question(json!({}))).json();
        tokens += answer["usage"]["completion_tokens"].as_f64().unwrap();
    }
    let text = get(server.address(), "/metrics").body;
    let label = "{model_name=\"tiny-rag\"}";
    assert_eq!(metric(&text, &format!("vllm:generation_tokens_total{label}")), tokens);
    assert_eq!(metric(&text, &format!("vllm:time_to_first_token_seconds_count{label}")), 2.0);
    assert_eq!(metric(&text, &format!("vllm:e2e_request_latency_seconds_count{label}")), 2.0);
    assert_eq!(metric(&text, &format!("vllm:request_queue_time_seconds_count{label}")), 2.0);
    assert_eq!(metric(&text, &format!("vllm:inter_token_latency_seconds_count{label}")), tokens - 2.0);
    assert_eq!(metric(&text, &format!("vllm:num_requests_running{label}")), 0.0);
    assert_eq!(metric(&text, &format!("kvserve:requests{label}")), 0.0);
    assert_eq!(
        metric(&text, "vllm:request_success_total{model_name=\"tiny-rag\",finished_reason=\"stop\"}"),
        2.0
    );
    assert!(metric(&text, &format!("vllm:prompt_tokens_cached_total{label}")) > 0.0);
    assert!(metric(&text, &format!("kvserve:prompt_tokens_recomputed_total{label}")) > 0.0);
    // Tokens are counted, in whole blocks of sixteen.
    for name in ["queries", "hits"] {
        let tokens = metric(&text, &format!("vllm:prefix_cache_{name}_total{label}"));
        assert!(tokens > 0.0 && tokens % 16.0 == 0.0, "{name}: {tokens}");
    }
    // Three documents were found the second time.
    assert!(metric(&text, "kvchunk_hits_total") >= 3.0);
    assert!(metric(&text, "kvcore_pool_size_blocks{pool=\"main\"}") > 0.0);
}

#[test]
fn times_begin_when_a_request_arrives() {
    let server = server();
    // The engine is busy until long after the request was sent.
    let (release, released) = std::sync::mpsc::channel::<()>();
    let mut client = crate::client::Client::new(server.address());
    let asked = std::thread::scope(|scope| {
        let held = scope.spawn(|| server.with_engine(move |_| released.recv().is_ok()));
        std::thread::sleep(std::time::Duration::from_millis(200));
        client.request("POST", CHAT, &[], question(json!({})).to_string().as_bytes());
        std::thread::sleep(std::time::Duration::from_millis(600));
        release.send(()).unwrap();
        assert_eq!(held.join().unwrap(), Some(true));
        client.answer().json()
    });
    let ms = |name: &str| asked["kv"][name].as_f64().unwrap();
    assert!(ms("queue_ms") > 50.0 && ms("ttft_ms") >= ms("queue_ms"), "{asked}");
    let text = get(server.address(), "/metrics").body;
    let sum = "vllm:time_to_first_token_seconds_sum{model_name=\"tiny-rag\"}";
    assert!((metric(&text, sum) * 1e3 / ms("ttft_ms") - 1.0).abs() < 0.05, "{text}");
}

#[test]
fn a_sleeping_server_says_so_and_finds_documents_after_it_wakes() {
    let server = reusing();
    assert_eq!(post(server.address(), CHAT, &question(json!({}))).status, 200);
    let slept = call(server.address(), "POST", "/sleep", &[], b"").json();
    assert!(slept["released_bytes"].as_u64().unwrap() > 0, "{slept}");
    assert_eq!(get(server.address(), "/is_sleeping").json()["is_sleeping"], true);
    assert_eq!(get(server.address(), "/health").status, 200);
    let answer = post(server.address(), CHAT, &question(json!({})));
    assert_eq!(answer.status, 503);
    assert!(answer.json()["error"]["message"].as_str().unwrap().contains("/wake_up"), "{answer:?}");
    assert_eq!(call(server.address(), "POST", "/wake_up", &[], b"").json()["was_asleep"], true);
    let answer = post(server.address(), CHAT, &question(json!({}))).json();
    assert!(
        answer["kv"]["parts"].as_array().unwrap().iter().all(|part| part["source"] == "cache"),
        "{answer}"
    );
    assert_nothing_is_held(&server);
}

#[test]
fn a_server_that_answers_does_not_fall_asleep() {
    let server = reusing();
    let long = question(json!({"ignore_eos": true, "max_tokens": 1500, "stream": true}));
    let mut client = crate::client::Client::new(server.address());
    client.request("POST", CHAT, &[], long.to_string().as_bytes());
    assert_eq!(client.head().0, 200);
    client.chunk().unwrap();
    client.chunk().unwrap();
    let answer = call(server.address(), "POST", "/sleep", &[], b"");
    assert_eq!(answer.status, 409, "{answer:?}");
    assert_eq!(get(server.address(), "/is_sleeping").json()["is_sleeping"], false);
}

#[test]
fn a_reset_forgets_prefixes_and_documents() {
    let server = reusing();
    let sources = || {
        let answer = post(server.address(), CHAT, &question(json!({}))).json();
        let parts = answer["kv"]["parts"].as_array().unwrap().clone();
        parts.into_iter().map(|part| part["source"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(sources(), ["computed"; 3]);
    assert_eq!(sources(), ["cache"; 3]);
    let reset = call(server.address(), "POST", "/reset_prefix_cache", &[], b"").json();
    assert!(reset["freed_blocks"].as_u64().unwrap() > 0, "{reset}");
    let counts = server.with_engine(|engine| engine.report()).unwrap();
    assert_eq!((counts.main.unwrap().cached, counts.chunks.unwrap().cached), (0, 0));
    assert_eq!(sources(), ["computed"; 3]);
    assert_nothing_is_held(&server);
}

#[test]
fn a_request_has_a_name_that_the_client_may_give() {
    let server = server();
    let given = call(server.address(), "GET", "/version", &[("x-request-id", "abc-1")], b"");
    assert_eq!(given.header("x-request-id"), Some("abc-1"));
    for wrong in ["a b", "ü", ""] {
        let own = call(server.address(), "GET", "/version", &[("x-request-id", wrong)], b"");
        assert!(own.header("x-request-id").unwrap().starts_with("req-"), "{wrong:?}");
    }
}
