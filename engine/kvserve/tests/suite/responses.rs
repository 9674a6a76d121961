//! `/v1/responses`.

use rstest::rstest;
use serde_json::{Value, json};

use crate::client::post;
use crate::common::{
    DOCUMENTS, MODEL, QUESTION, SYSTEM, add, assert_nothing_is_held, question, reusing, server,
};

const PATH: &str = "/v1/responses";

fn request(more: Value) -> Value {
    let mut request = json!({
        "model": MODEL,
        "instructions": SYSTEM,
        "input": QUESTION.0,
        "documents": DOCUMENTS.map(|(name, text)| json!({"id": name, "text": text})),
        "temperature": 0,
        "max_output_tokens": 8,
    });
    add(&mut request, more);
    request
}

fn text(response: &Value) -> &str {
    response["output"][0]["content"][0]["text"].as_str().unwrap_or_else(|| panic!("{response}"))
}

#[test]
fn a_response_is_whole_and_streamed_with_the_same_text() {
    let server = reusing();
    let whole =
        post(server.address(), PATH, &request(json!({"metadata": {"a": "b"}, "top_logprobs": 2}))).json();
    assert_eq!((&whole["object"], &whole["status"]), (&json!("response"), &json!("completed")));
    assert_eq!(text(&whole).trim(), QUESTION.1);
    assert_eq!((&whole["store"], &whole["metadata"]["a"]), (&json!(false), &json!("b")));
    let logprobs = &whole["output"][0]["content"][0]["logprobs"];
    assert_eq!(logprobs[0]["top_logprobs"].as_array().unwrap().len(), 2);

    let streamed = post(server.address(), PATH, &request(json!({"stream": true})));
    let events = streamed.events();
    let names: Vec<&str> = streamed.body.lines().filter_map(|line| line.strip_prefix("event: ")).collect();
    assert_eq!(names, events.iter().map(|event| event["type"].as_str().unwrap()).collect::<Vec<_>>());
    assert_eq!(
        names[..4],
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added"
        ]
    );
    assert_eq!(
        names[names.len() - 4..],
        [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed"
        ]
    );
    let numbers: Vec<u64> = events.iter().map(|event| event["sequence_number"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (0..events.len() as u64).collect::<Vec<_>>());
    let deltas = events.iter().filter_map(|event| event["delta"].as_str());
    assert_eq!(deltas.collect::<String>(), text(&whole));
    let last = &events.last().unwrap()["response"];
    assert_eq!(text(last), text(&whole));
    assert_eq!(last["usage"]["output_tokens"], whole["usage"]["output_tokens"]);
    let cached = last["usage"]["input_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached > 80, "{last}");
    assert!(last["kv"]["parts"].as_array().unwrap().iter().all(|part| part["source"] == "cache"), "{last}");
    assert_nothing_is_held(&server);
}

#[test]
fn items_are_the_conversation_that_chats_have() {
    let server = reusing();
    let chat = question(json!({"messages": [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "bora ?"},
        {"role": "assistant", "content": "small"},
        {"role": "user", "content": [{"type": "text", "text": QUESTION.0}]},
    ]}));
    let chat = post(server.address(), "/v1/chat/completions", &chat).json();
    let items = json!([
        {"role": "user", "content": "bora ?"},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "message", "id": "m", "status": "completed", "role": "assistant",
         "content": [{"type": "output_text", "text": "small", "annotations": []}]},
        {"role": "user", "content": [{"type": "input_text", "text": QUESTION.0}]},
    ]);
    let response = post(server.address(), PATH, &request(json!({"input": items}))).json();
    assert_eq!(response["usage"]["input_tokens"], chat["usage"]["prompt_tokens"]);
    assert_eq!(text(&response), chat["choices"][0]["message"]["content"].as_str().unwrap());
    let calls = json!([
        {"role": "user", "content": QUESTION.0},
        {"type": "function_call", "call_id": "c", "name": "search", "arguments": "{\"query\": \"alba\"}"},
        {"type": "function_call_output", "call_id": "c", "output": "red"},
    ]);
    let response = post(server.address(), PATH, &request(json!({"input": calls})));
    assert_eq!(response.status, 200, "{response:?}");
}

#[test]
fn a_cut_response_is_incomplete() {
    let server = server();
    let response =
        post(server.address(), PATH, &request(json!({"max_output_tokens": 1, "input": "alba"}))).json();
    if response["status"] == "incomplete" {
        assert_eq!(response["incomplete_details"]["reason"], "max_output_tokens");
    }
    let long = json!({"input": "alba is", "instructions": null, "documents": [], "max_output_tokens": 1, "stream": true});
    let events = post(server.address(), PATH, &request(long)).events();
    assert_eq!(events.last().unwrap()["type"], "response.incomplete");
}

#[rstest]
#[case(json!({"previous_response_id": "resp_1"}), "previous_response_id", "send the whole conversation")]
#[case(json!({"conversation": "conv_1"}), "conversation", "send the whole conversation")]
#[case(json!({"background": true}), "background", "not supported yet")]
#[case(json!({"prompt": {"id": "a"}}), "prompt", "not supported yet")]
#[case(json!({"truncation": "auto"}), "truncation", "never cut")]
#[case(json!({"max_output_tokens": 0}), "max_output_tokens", "at least 1")]
#[case(json!({"temperature": 3}), "temperature", "from 0 to 2")]
#[case(json!({"input": 5}), "input", "must be a string or a list")]
#[case(json!({"input": []}), "input", "input is an empty list")]
#[case(json!({"input": [{"type": "item_reference", "id": "a"}]}), "input[0].type", "not supported")]
#[case(json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}), "input[0].content[0].type", "input_text")]
#[case(json!({"input": [{"role": "wizard", "content": "a"}]}), "input", "wizard")]
#[case(json!({"messages": []}), "messages", "unknown parameter")]
fn a_wrong_request_is_refused_by_name(#[case] more: Value, #[case] param: &str, #[case] words: &str) {
    let server = server();
    let answer = post(server.address(), PATH, &request(more));
    assert_eq!(answer.status, 400, "{answer:?}");
    let error = &answer.json()["error"];
    assert_eq!(error["param"], param, "{error}");
    assert!(error["message"].as_str().unwrap().contains(words), "{error}");
    assert_nothing_is_held(&server);
}
