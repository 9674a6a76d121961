//! Tools and JSON of `/v1/messages`.

use rstest::rstest;
use serde_json::{Value, json};

use crate::client::post;
use crate::common::{MODEL, assert_nothing_is_held, server};
use crate::tooled::{PLAIN, TAGGED, assert_paint, merged, paint, with_template};

const PATH: &str = "/v1/messages";

/// Returns a request with tools, and with other fields.
fn request(more: Value) -> Value {
    let request = json!({
        "model": MODEL,
        "messages": [{"role": "user", "content": "alba ?"}],
        "tools": [
            {"name": "paint", "description": "Paints.", "input_schema": paint(), "cache_control": {"type": "ephemeral"}},
            {"type": "custom", "name": "wait", "input_schema": {"type": "object", "properties": {}, "additionalProperties": false}},
        ],
        "max_tokens": 600,
    });
    merged(request, more)
}

/// Checks the blocks that are calls of the tool `paint`, and returns their number.
fn assert_calls(blocks: &Value) -> usize {
    let blocks = blocks.as_array().unwrap();
    for block in blocks {
        assert_eq!((&block["type"], &block["name"]), (&json!("tool_use"), &json!("paint")), "{block}");
        assert!(block["id"].as_str().unwrap().starts_with("toolu_"));
        assert_paint(&block["input"]);
    }
    blocks.len()
}

#[rstest]
#[case::tagged(TAGGED)]
#[case::json(PLAIN)]
fn an_answer_can_be_forced_to_use_tools(#[case] template: &str) {
    let server = with_template(template);
    let choice = json!({"type": "tool", "name": "paint", "disable_parallel_tool_use": true});
    let asked = request(json!({"tool_choice": choice}));
    let whole = post(server.address(), PATH, &asked);
    assert_eq!(whole.status, 200, "{whole:?}");
    let whole = whole.json();
    assert_eq!((assert_calls(&whole["content"]), &whole["stop_reason"]), (1, &json!("tool_use")));

    let events = post(server.address(), PATH, &merged(asked, json!({"stream": true}))).events();
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(
        kinds,
        [
            "message_start",
            "ping",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop"
        ]
    );
    let (mut block, delta) = (events[2]["content_block"].clone(), &events[3]["delta"]);
    assert_eq!((&block["input"], &delta["type"]), (&json!({}), &json!("input_json_delta")));
    block["input"] = serde_json::from_str(delta["partial_json"].as_str().unwrap()).unwrap();
    assert_eq!(assert_calls(&json!([block])), 1);
    assert_eq!(events[5]["delta"]["stop_reason"], "tool_use");
    let any = post(
        server.address(),
        PATH,
        &request(json!({"tool_choice": {"type": "any", "disable_parallel_tool_use": true}})),
    )
    .json();
    assert!(any["content"].as_array().unwrap().iter().all(|block| block["type"] == "tool_use"), "{any}");
    assert_nothing_is_held(&server);
}

#[test]
fn the_models_own_text_is_a_block_and_tools_are_in_the_prompt() {
    let server = with_template(TAGGED);
    let count = |more: Value| {
        let mut asked = request(more);
        asked.as_object_mut().unwrap().remove("max_tokens");
        post(server.address(), "/v1/messages/count_tokens", &asked).json()["input_tokens"].as_u64().unwrap()
    };
    let (with, without) = (count(json!({})), count(json!({"tool_choice": {"type": "none"}})));
    assert!(with > without + 50, "{with} and {without}");
    for (choice, expected) in [("auto", with), ("none", without)] {
        let asked = request(json!({"tool_choice": {"type": choice}, "max_tokens": 3}));
        let whole = post(server.address(), PATH, &asked).json();
        assert_eq!(
            (whole["content"].as_array().unwrap().len(), &whole["content"][0]["type"]),
            (1, &json!("text"))
        );
        let usage = &whole["usage"];
        let names = ["input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"];
        assert_eq!(names.iter().map(|name| usage[name].as_u64().unwrap()).sum::<u64>(), expected);
    }
    // The history of calls and results is the one of chats.
    let history = json!([
        {"role": "user", "content": "alba ?"},
        {"role": "assistant", "content": [{"type": "text", "text": "See."},
            {"type": "tool_use", "id": "toolu_1", "name": "wait", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "done"}]},
    ]);
    assert!(count(json!({"messages": history})) > with);
}

#[rstest]
#[case::format(json!({"output_format": {"type": "json_schema", "schema": paint()}}))]
#[case::config(json!({"output_config": {"format": {"type": "json_schema", "schema": paint()}, "effort": "low"}}))]
#[case::null(json!({"output_format": null, "output_config": {"format": {"type": "json_schema", "schema": paint()}}}))]
fn a_message_matches_its_schema(#[case] more: Value) {
    let server = server();
    let asked = merged(request(json!({"tools": []})), more);
    let whole = post(server.address(), PATH, &asked);
    assert_eq!(whole.status, 200, "{whole:?}");
    let whole = whole.json();
    assert_paint(&serde_json::from_str(whole["content"][0]["text"].as_str().unwrap()).unwrap());
    let events = post(server.address(), PATH, &merged(asked, json!({"stream": true}))).events();
    let text: String = events.iter().filter_map(|event| event["delta"]["text"].as_str()).collect();
    assert_paint(&serde_json::from_str(&text).unwrap());
    assert_nothing_is_held(&server);
}

#[rstest]
#[case::kind(json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}), "tools[0].type: tools of the type")]
#[case::nested(json!({"tools": [{"function": {"name": "a"}}]}), "tools[0].function: unknown parameter")]
#[case::name(json!({"tools": [{"input_schema": {}}]}), "tools[0].name must be a string")]
#[case::schema(json!({"tools": [{"name": "a", "input_schema": "b"}]}), "tools[0].input_schema must be a JSON schema")]
#[case::choice(json!({"tool_choice": {"type": "tool", "name": "b"}}), "tool_choice names \"b\"")]
#[case::choice_kind(json!({"tool_choice": {"type": "required"}}), "use auto, any, tool or none")]
#[case::choice_word(json!({"tool_choice": "any"}), "an object with a type")]
#[case::choice_name(json!({"tool_choice": {"type": "tool"}}), "tool_choice.name must be the name of a tool")]
#[case::parallel(json!({"tool_choice": {"type": "any", "disable_parallel_tool_use": 1}}), "must be true or false")]
#[case::format(json!({"output_format": {"type": "json_object"}}), "use json_schema")]
#[case::no_schema(json!({"output_config": {"format": {"type": "json_schema"}}}), "output_config.format.schema must be")]
#[case::impossible(json!({"tools": [], "output_format": {"type": "json_schema", "schema": {"type": "colour"}}}), "output_format: the constraint")]
fn malformed_tools_and_schemas_are_named(#[case] more: Value, #[case] words: &str) {
    let server = with_template(TAGGED);
    let answer = post(server.address(), PATH, &request(more));
    assert_eq!(answer.status, 400, "{answer:?}");
    let error = &answer.json()["error"];
    assert_eq!(error["type"], "invalid_request_error");
    assert!(error["message"].as_str().unwrap().contains(words), "{error}");
    assert_nothing_is_held(&server);
}
