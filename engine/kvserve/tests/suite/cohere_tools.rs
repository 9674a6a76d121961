//! Tools and JSON of `/v2/chat`.

use rstest::rstest;
use serde_json::{Value, json};

use crate::client::post;
use crate::common::{MODEL, assert_nothing_is_held, server};
use crate::tooled::{PLAIN, TAGGED, assert_paint, merged, paint, with_template};

const PATH: &str = "/v2/chat";

/// Returns a request with a tool, and with other fields.
fn request(more: Value) -> Value {
    let function = json!({"name": "paint", "description": "Paints.", "parameters": paint()});
    let request = json!({
        "model": MODEL,
        "messages": [{"role": "user", "content": "alba ?"}],
        "tools": [{"type": "function", "function": function}],
        // Up to sixteen calls have room.
        "max_tokens": 1600,
        "seed": 2,
    });
    merged(request, more)
}

#[rstest]
#[case::tagged(TAGGED)]
#[case::json(PLAIN)]
fn an_answer_can_be_forced_to_call_tools(#[case] template: &str) {
    let server = with_template(template);
    let asked = request(json!({"tool_choice": "REQUIRED"}));
    let whole = post(server.address(), PATH, &asked);
    assert_eq!(whole.status, 200, "{whole:?}");
    let whole = whole.json();
    assert_eq!((&whole["finish_reason"], whole["message"].get("content")), (&json!("TOOL_CALL"), None));
    let calls = whole["message"]["tool_calls"].as_array().unwrap();
    for call in calls {
        assert_eq!((&call["type"], &call["function"]["name"]), (&json!("function"), &json!("paint")));
        assert_paint(&serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap());
    }
    let events = post(server.address(), PATH, &merged(asked, json!({"stream": true}))).events();
    let of = |kind: &str| events.iter().filter(|event| event["type"] == kind).cloned().collect::<Vec<_>>();
    let (begun, deltas) = (of("tool-call-start"), of("tool-call-delta"));
    assert_eq!([begun.len(), deltas.len(), of("tool-call-end").len()], [calls.len(); 3]);
    for (number, call) in calls.iter().enumerate() {
        assert_eq!((&begun[number]["index"], &deltas[number]["index"]), (&json!(number), &json!(number)));
        let begun = &begun[number]["delta"]["message"]["tool_calls"];
        assert_eq!(
            (&begun["function"]["name"], &begun["function"]["arguments"]),
            (&json!("paint"), &json!(""))
        );
        let arguments = &deltas[number]["delta"]["message"]["tool_calls"]["function"]["arguments"];
        assert_eq!(arguments, &call["function"]["arguments"], "the same seed");
    }
    assert_eq!(
        (of("content-start").len(), &of("message-end")[0]["delta"]["finish_reason"]),
        (0, &json!("TOOL_CALL"))
    );
    assert_nothing_is_held(&server);
}

#[test]
fn tools_are_in_the_prompt_unless_none_may_be_called() {
    let server = with_template(TAGGED);
    let tokens = |more: Value| {
        let answer = post(server.address(), PATH, &merged(request(json!({"max_tokens": 1})), more)).json();
        assert_eq!(answer["message"]["content"].as_array().unwrap().len(), 1, "{answer}");
        answer["usage"]["tokens"]["input_tokens"].as_u64().unwrap()
    };
    let (with, without) = (tokens(json!({})), tokens(json!({"tool_choice": "NONE"})));
    assert!(with > without + 50, "{with} and {without}");
    assert_eq!(tokens(json!({"tools": []})), without);
}

#[rstest]
#[case::second_version(json!({"type": "json_object", "json_schema": paint()}))]
#[case::first_version(json!({"type": "json_object", "schema": paint()}))]
#[case::null(json!({"type": "json_object", "json_schema": null, "schema": paint()}))]
fn an_answer_matches_its_schema(#[case] format: Value) {
    let server = server();
    let asked = request(json!({"tools": null, "response_format": format}));
    let whole = post(server.address(), PATH, &asked);
    assert_eq!(whole.status, 200, "{whole:?}");
    assert_paint(
        &serde_json::from_str(whole.json()["message"]["content"][0]["text"].as_str().unwrap()).unwrap(),
    );
    assert_nothing_is_held(&server);
}

#[rstest]
#[case::name(json!({"tools": [{"type": "function", "function": {}}]}), "tools[0].function.name must be a string")]
#[case::kind(json!({"tools": [{"type": "connector"}]}), "tools[0].type: tools of the type \"connector\"")]
#[case::choice(json!({"tool_choice": "AUTO"}), "must be \"REQUIRED\" or \"NONE\"")]
#[case::nothing(json!({"tools": [], "tool_choice": "REQUIRED"}), "there are no tools")]
#[case::format(json!({"response_format": {"type": "json_schema"}}), "use text or json_object")]
#[case::schema(json!({"response_format": {"type": "json_object", "json_schema": 5}}), "response_format.json_schema must be")]
#[case::impossible(json!({"tools": [], "response_format": {"type": "json_object", "schema": {"type": "colour"}}}), "response_format: the constraint")]
fn malformed_tools_and_schemas_are_named(#[case] more: Value, #[case] words: &str) {
    let server = with_template(TAGGED);
    let answer = post(server.address(), PATH, &request(more));
    assert_eq!(answer.status, 400, "{answer:?}");
    assert!(answer.json()["message"].as_str().unwrap().contains(words), "{answer:?}");
    assert_nothing_is_held(&server);
}

/// The second turn of Cohere's guide to tools: a plan, a call, and its result as a document.
#[rstest]
#[case::text(json!([{"type": "document", "document": {"data": "{\"alba\": \"red\"}"}}]))]
#[case::fields(json!([{"type": "document", "document": {"id": "r1", "data": {"text": "alba is red ."}}}]))]
#[case::mixed(json!([{"type": "text", "text": "one result"}, {"type": "document", "document": {"data": "alba is red ."}}]))]
#[case::string(json!("alba is red ."))]
fn results_of_tools_come_in_the_form_of_the_guide(#[case] content: Value) {
    let server = with_template(TAGGED);
    let call = json!({"id": "c1", "type": "function", "function": {"name": "paint", "arguments": "{\"colour\": \"red\", \"coats\": 1}"}});
    let turn = |content: Value| {
        let messages = json!([
            {"role": "user", "content": "alba ?"},
            {"role": "assistant", "tool_plan": "paint it .", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": content},
        ]);
        post(server.address(), PATH, &request(json!({"messages": messages, "max_tokens": 1})))
    };
    let answer = turn(content);
    assert_eq!(answer.status, 200, "{answer:?}");
    let tokens =
        |answer: &crate::client::Answer| answer.json()["usage"]["tokens"]["input_tokens"].as_u64().unwrap();
    // The result is in the prompt.
    assert!(tokens(&answer) > tokens(&turn(json!(""))) + 2, "{answer:?}");
    assert_nothing_is_held(&server);
}

#[test]
fn plans_and_thoughts_are_read_and_other_parts_are_refused_by_place() {
    let server = with_template(TAGGED);
    let asked = |answer: Value| {
        let messages =
            json!([{"role": "user", "content": "alba ?"}, answer, {"role": "user", "content": "bora ?"}]);
        post(server.address(), PATH, &request(json!({"messages": messages, "tools": null, "max_tokens": 1})))
    };
    let tokens = |answer: Value| {
        let answer = asked(answer);
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()["usage"]["tokens"]["input_tokens"].as_u64().unwrap()
    };
    let said = json!({"type": "text", "text": "red"});
    let thinks = json!({"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, said]});
    assert_eq!(tokens(thinks), tokens(json!({"role": "assistant", "content": "red"})));
    assert_eq!(
        tokens(json!({"role": "assistant", "tool_plan": "a plan"})),
        tokens(json!({"role": "assistant", "content": "a plan"}))
    );
    for (part, words) in [
        (json!({"type": "image_url", "image_url": "a"}), "image_url"),
        (json!({"type": "thinking"}), "messages[1].content[0]"),
        (
            json!({"type": "document", "document": {"data": {"title": "a"}}}),
            "messages[1].content[0] has no text",
        ),
    ] {
        let refused = asked(json!({"role": "assistant", "content": [part]}));
        assert!(refused.status == 400 && refused.body.contains(words), "{refused:?}");
    }
}
