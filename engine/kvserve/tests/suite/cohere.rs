//! `/v2/chat`.

use rstest::rstest;
use serde_json::{Value, json};

use crate::client::post;
use crate::common::{
    DOCUMENTS, MODEL, QUESTION, SYSTEM, add, assert_nothing_is_held, question, reusing, server,
};

const PATH: &str = "/v2/chat";

fn request(more: Value) -> Value {
    let mut request = json!({
        "model": MODEL,
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION.0}],
        "documents": DOCUMENTS.map(|(name, text)| json!({"id": name, "data": {"text": text}})),
        "temperature": 0,
        "max_tokens": 8,
    });
    add(&mut request, more);
    request
}

#[test]
fn an_answer_is_whole_and_streamed_with_the_same_text() {
    let server = reusing();
    let whole = post(server.address(), PATH, &request(json!({}))).json();
    assert_eq!(whole["message"]["content"][0]["text"].as_str().unwrap().trim(), QUESTION.1);
    assert_eq!(
        (&whole["finish_reason"], &whole["message"]["role"]),
        (&json!("COMPLETE"), &json!("assistant"))
    );
    let streamed = post(server.address(), PATH, &request(json!({"stream": true})));
    let events = streamed.events();
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    let names: Vec<&str> = streamed.body.lines().filter_map(|line| line.strip_prefix("event: ")).collect();
    assert_eq!(names, kinds);
    assert_eq!(kinds[..2], ["message-start", "content-start"]);
    assert_eq!(kinds[kinds.len() - 2..], ["content-end", "message-end"]);
    let deltas = events.iter().filter(|event| event["type"] == "content-delta");
    let text: String =
        deltas.map(|event| event["delta"]["message"]["content"]["text"].as_str().unwrap()).collect();
    assert_eq!(json!(text), whole["message"]["content"][0]["text"]);
    let last = &events[events.len() - 1];
    assert_eq!(last["delta"]["finish_reason"], "COMPLETE");
    assert_eq!(last["delta"]["usage"]["tokens"], whole["usage"]["tokens"]);
    assert_eq!(last["delta"]["usage"]["cached_tokens"], last["kv"]["reused"]);
    let sources = last["kv"]["parts"].as_array().unwrap().iter().map(|part| &part["source"]);
    assert!(sources.eq([&json!("cache"); 3]));
    assert_nothing_is_held(&server);
}

#[test]
fn documents_are_those_of_the_other_dialects() {
    let server = reusing();
    let chat = post(server.address(), "/v1/chat/completions", &question(json!({}))).json();
    let answer = post(server.address(), PATH, &request(json!({}))).json();
    assert_eq!(answer["usage"]["tokens"]["input_tokens"], chat["usage"]["prompt_tokens"]);
    let parts = answer["kv"]["parts"].as_array().unwrap();
    assert!(parts.iter().all(|part| part["source"] == "cache"), "{answer}");
    let names: Vec<_> = parts.iter().map(|part| part["id"].as_str().unwrap()).collect();
    assert_eq!(names, DOCUMENTS.map(|(name, _)| name));
}

#[rstest]
#[case::unknown(json!({"temprature": 1}), "temprature")]
#[case::temperature(json!({"temperature": 3}), "temperature")]
#[case::nucleus(json!({"p": 0}), "p is 0")]
#[case::negative(json!({"max_tokens": -1}), "max_tokens")]
#[case::nothing(json!({"max_tokens": 0}), "max_tokens")]
#[case::penalty(json!({"presence_penalty": 2}), "presence_penalty")]
#[case::tools(json!({"tools": [{"type": "function"}]}), "tools")]
#[case::logprobs(json!({"logprobs": true}), "logprobs")]
#[case::stop(json!({"stop_sequences": 5}), "stop_sequences")]
#[case::documents(json!({"documents": [{"id": "a"}]}), "documents[0]")]
#[case::messages(json!({"messages": "alba"}), "messages")]
fn wrong_fields_are_refused_by_name_in_this_dialect(#[case] more: Value, #[case] named: &str) {
    let server = server();
    let refused = post(server.address(), PATH, &request(more));
    assert_eq!(refused.status, 400, "{refused:?}");
    let error = refused.json();
    assert!(error["message"].as_str().unwrap().contains(named), "{error}");
    assert!(!error["id"].as_str().unwrap().is_empty() && error["error"].is_null(), "{error}");
    assert_eq!(post(server.address(), PATH, &request(json!({}))).status, 200, "the server lives on");
}

#[test]
fn other_paths_and_models_are_refused_in_this_dialect() {
    let server = server();
    let refused = post(server.address(), PATH, &request(json!({"model": "command-z"})));
    assert_eq!(refused.status, 404);
    assert!(refused.json()["message"].as_str().unwrap().contains("command-z"));
    let refused = post(server.address(), "/v2/rerank", &json!({}));
    assert!(refused.status == 404 && refused.json()["message"].is_string(), "{refused:?}");
}

#[test]
fn documents_in_messages_and_long_results_of_tools_are_reused() {
    let server = reusing();
    let document = |at: usize| json!({"type": "document", "document": {"id": DOCUMENTS[at].0, "data": {"text": DOCUMENTS[at].1.repeat(4)}}});
    let sources = |results: Value| {
        let mut asked = request(json!({"messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": [{"type": "text", "text": QUESTION.0}]},
            {"role": "assistant", "tool_plan": "search .", "tool_calls": []},
            {"role": "tool", "tool_call_id": "c1", "content": results},
        ]}));
        asked.as_object_mut().unwrap().remove("documents");
        let answer = post(server.address(), PATH, &asked);
        assert_eq!(answer.status, 200, "{answer:?}");
        let parts = answer.json()["kv"]["parts"].as_array().unwrap().clone();
        parts.iter().map(|part| (part["id"].clone(), part["source"].clone())).collect::<Vec<_>>()
    };
    let named = |at: usize, source: &str| (json!(DOCUMENTS[at].0), json!(source));
    assert_eq!(sources(json!([document(0), document(1)])), [named(0, "computed"), named(1, "computed")]);
    assert_eq!(sources(json!([document(1), document(0)])), [named(1, "cache"), named(0, "cache")]);
    // A short result stays where it is.
    assert!(sources(json!([{"type": "document", "document": {"data": "alba is red ."}}])).is_empty());
    assert_nothing_is_held(&server);
}
