//! Tools and JSON of `/v1/responses`.

use rstest::rstest;
use serde_json::{Value, json};

use crate::client::post;
use crate::common::{MODEL, assert_nothing_is_held, server};
use crate::tooled::{PLAIN, TAGGED, assert_paint, merged, paint, with_template};

const PATH: &str = "/v1/responses";

/// Returns a request with tools, and with other fields.
fn request(more: Value) -> Value {
    let request = json!({
        "model": MODEL,
        "input": "alba ?",
        "tools": [
            {"type": "function", "name": "paint", "description": "Paints.", "parameters": paint(), "strict": true},
            {"type": "function", "name": "wait", "parameters": {"type": "object", "properties": {}, "additionalProperties": false}, "strict": null},
        ],
        "max_output_tokens": 600,
        "temperature": 1.2,
    });
    merged(request, more)
}

/// Checks the items that are calls of the tool `paint`, and returns their number.
fn assert_calls(items: &Value) -> usize {
    let items = items.as_array().unwrap();
    for item in items {
        assert_eq!(
            (&item["type"], &item["name"], &item["status"]),
            (&json!("function_call"), &json!("paint"), &json!("completed"))
        );
        assert!(
            item["id"].as_str().unwrap().starts_with("fc_")
                && item["call_id"].as_str().unwrap().starts_with("call_")
        );
        assert_paint(&serde_json::from_str(item["arguments"].as_str().unwrap()).unwrap());
    }
    items.len()
}

#[rstest]
#[case::tagged(TAGGED)]
#[case::json(PLAIN)]
fn an_answer_can_be_forced_to_call_functions(#[case] template: &str) {
    let server = with_template(template);
    let choice = json!({"type": "function", "name": "paint"});
    let asked = request(json!({"tool_choice": choice, "parallel_tool_calls": false}));
    let whole = post(server.address(), PATH, &asked);
    assert_eq!(whole.status, 200, "{whole:?}");
    let whole = whole.json();
    assert_eq!(assert_calls(&whole["output"]), 1);
    assert_eq!((&whole["status"], &whole["tool_choice"]), (&json!("completed"), &choice));
    assert_eq!((&whole["tools"], &whole["parallel_tool_calls"]), (&asked["tools"], &json!(false)));

    let events = post(server.address(), PATH, &merged(asked, json!({"stream": true}))).events();
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(
        kinds,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed"
        ]
    );
    let item = &events[5]["item"];
    assert_eq!(assert_calls(&events[6]["response"]["output"]), 1);
    assert_eq!((&events[6]["response"]["output"][0], &events[2]["item"]["arguments"]), (item, &json!("")));
    assert_eq!((&events[3]["delta"], &events[4]["arguments"]), (&item["arguments"], &item["arguments"]));
    for event in &events[3..5] {
        assert_eq!((&event["item_id"], &event["output_index"]), (&item["id"], &json!(0)));
    }
    let several = post(
        server.address(),
        PATH,
        &request(json!({"tool_choice": "required", "parallel_tool_calls": false})),
    )
    .json();
    assert!(
        several["output"].as_array().unwrap().iter().all(|item| item["type"] == "function_call"),
        "{several}"
    );
    assert_nothing_is_held(&server);
}

#[test]
fn the_models_text_is_a_message_and_tools_are_in_the_prompt() {
    let server = with_template(TAGGED);
    let whole = post(server.address(), PATH, &request(json!({"max_output_tokens": 3}))).json();
    assert_eq!(
        (whole["output"].as_array().unwrap().len(), &whole["output"][0]["type"]),
        (1, &json!("message"))
    );
    let none =
        post(server.address(), PATH, &request(json!({"tool_choice": "none", "max_output_tokens": 3}))).json();
    assert!(none["usage"]["input_tokens"].as_u64() < whole["usage"]["input_tokens"].as_u64());
}

#[test]
fn calls_of_one_turn_are_one_message() {
    let server = with_template(TAGGED);
    let call =
        |name: &str| json!({"type": "function_call", "call_id": name, "name": name, "arguments": "{}"});
    let output = |name: &str| json!({"type": "function_call_output", "call_id": name, "output": "done"});
    let items = json!([
        {"role": "user", "content": "alba ?"},
        {"role": "assistant", "content": "See."}, call("paint"), call("wait"), output("paint"), output("wait"),
    ]);
    let tools = json!([{"type": "function", "name": "paint", "description": "Paints.", "parameters": paint()}, {"type": "function", "name": "wait", "parameters": null}]);
    let asked = json!({"input": items, "tools": tools, "max_output_tokens": 1});
    let response = post(server.address(), PATH, &request(asked)).json();
    let function =
        |name: &str| json!({"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}});
    let result = |name: &str| json!({"role": "tool", "tool_call_id": name, "content": "done"});
    let parameters = json!({"type": "object", "properties": {}});
    let chat = json!({
        "messages": [
            {"role": "user", "content": "alba ?"},
            {"role": "assistant", "content": "See.", "tool_calls": [function("paint"), function("wait")]},
            result("paint"), result("wait"),
        ],
        "tools": [
            {"type": "function", "function": {"name": "paint", "description": "Paints.", "parameters": paint()}},
            {"type": "function", "function": {"name": "wait", "parameters": parameters}},
        ],
        "max_tokens": 1,
    });
    let chat = post(server.address(), "/v1/chat/completions", &chat).json();
    assert_eq!(response["usage"]["input_tokens"], chat["usage"]["prompt_tokens"], "{response} {chat}");
    // All of the prompt's whole blocks are found, so that it is the same.
    let tokens = chat["usage"]["prompt_tokens"].as_u64().unwrap();
    let cached = chat["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached + 16 >= tokens, "{cached} of {tokens}");
}

#[test]
fn a_response_matches_its_schema() {
    let server = server();
    for format in [
        json!({"type": "json_schema", "name": "paint", "schema": paint(), "strict": true}),
        json!({"type": "json_schema", "name": "paint", "schema": paint()}),
    ] {
        let asked = merged(request(json!({"text": {"format": format}})), json!({"tools": []}));
        let whole = post(server.address(), PATH, &asked);
        assert_eq!(whole.status, 200, "{whole:?}");
        let whole = whole.json();
        assert_paint(
            &serde_json::from_str(whole["output"][0]["content"][0]["text"].as_str().unwrap()).unwrap(),
        );
        assert_eq!(whole["text"]["format"], format);
    }
    let object = json!({"text": {"format": {"type": "json_object"}}, "tools": null, "max_output_tokens": 5});
    let whole = post(server.address(), PATH, &request(object)).json();
    assert!(whole["output"][0]["content"][0]["text"].as_str().unwrap().starts_with('{'), "{whole}");
}

#[rstest]
#[case::kind(json!({"tools": [{"type": "web_search"}]}), "tools[0].type", "not supported")]
#[case::nested(json!({"tools": [{"type": "function", "function": {"name": "a"}}]}), "tools[0].function", "unknown parameter")]
#[case::name(json!({"tools": [{"type": "function"}]}), "tools[0].name", "1 to 128 letters")]
#[case::choice(json!({"tool_choice": {"type": "function", "name": "b"}}), "tool_choice", "no tool with this name")]
#[case::text(json!({"text": "json"}), "text", "must be an object")]
#[case::reasoning(json!({"reasoning": "high"}), "reasoning", "must be an object")]
#[case::choice_kind(json!({"tool_choice": {"type": "mcp"}}), "tool_choice.type", "not supported")]
#[case::allowed_mode(json!({"tool_choice": {"type": "allowed_tools", "tools": []}}), "tool_choice.mode", "auto or required")]
#[case::allowed_none(json!({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}), "tool_choice.tools", "with names")]
#[case::allowed_unknown(json!({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "b"}]}}), "tool_choice", "no tool with this name")]
#[case::schema(json!({"text": {"format": {"type": "json_schema"}}}), "text.format.schema", "a JSON schema")]
#[case::format(json!({"text": {"format": {"type": "grammar"}}}), "text.format.type", "use text")]
#[case::impossible(json!({"tools": [], "text": {"format": {"type": "json_schema", "schema": {"type": "colour"}}}}), "text.format", "the constraint")]
fn malformed_functions_and_schemas_are_named(#[case] more: Value, #[case] param: &str, #[case] words: &str) {
    let server = with_template(TAGGED);
    let answer = post(server.address(), PATH, &request(more));
    assert_eq!(answer.status, 400, "{answer:?}");
    let error = &answer.json()["error"];
    assert_eq!(error["param"], param, "{error}");
    assert!(error["message"].as_str().unwrap().contains(words), "{error}");
    assert_nothing_is_held(&server);
}

#[test]
fn calls_may_be_limited_to_some_of_the_functions() {
    let server = with_template(TAGGED);
    let allowed = |mode: &str, name: &str| json!({"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name}]});
    for seed in 0..3 {
        let asked = request(json!({"tool_choice": allowed("required", "paint"), "user": format!("{seed}")}));
        let whole = post(server.address(), PATH, &asked).json();
        assert!(assert_calls(&whole["output"]) > 0, "{whole}");
    }
    // The model does not know the others.
    let tokens = |choice: Value| {
        let asked = request(json!({"tool_choice": choice, "max_output_tokens": 1}));
        let whole = post(server.address(), PATH, &asked).json();
        whole["usage"]["input_tokens"].as_u64().unwrap_or_else(|| panic!("{whole}"))
    };
    assert!(tokens(allowed("auto", "paint")) < tokens(json!("auto")));
}
