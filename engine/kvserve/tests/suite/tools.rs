//! Tools of `/v1/chat/completions`.

use rstest::rstest;
use serde_json::{Value, json};

use crate::client::{Answer, post};
use crate::common::{MODEL, assert_nothing_is_held, server};
use crate::tooled::{CALL_TOKEN, PLAIN, TAGGED, assert_paint, merged, paint, with_template};

const PATH: &str = "/v1/chat/completions";

/// Returns a request with tools, and with other fields.
fn request(more: Value) -> Value {
    let wait = json!({"type": "object", "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}},
        "additionalProperties": false});
    let request = json!({
        "model": MODEL,
        "messages": [{"role": "user", "content": "alba ?"}],
        "tools": [
            {"type": "function", "function": {"name": "paint", "description": "Paints.", "parameters": paint(), "strict": true}},
            {"type": "function", "function": {"name": "wait", "parameters": wait}},
        ],
        "temperature": 1.2,
        "max_tokens": 600,
        "seed": 3,
    });
    merged(request, more)
}

/// Returns the name and the arguments of each call.
fn calls(message: &Value) -> Vec<(String, Value)> {
    let mut ids = Vec::new();
    let mut call = |call: &Value| {
        let id = call["id"].as_str().unwrap().to_owned();
        assert!(id.starts_with("call_") && !ids.contains(&id), "{call}");
        ids.push(id);
        assert_eq!(call["type"], "function");
        let arguments = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
        (call["function"]["name"].as_str().unwrap().to_owned(), arguments)
    };
    message["tool_calls"].as_array().unwrap_or_else(|| panic!("{message}")).iter().map(&mut call).collect()
}

/// Joins the deltas of a streamed answer to a message, as clients do.
fn joined(answer: &Answer) -> (Value, Value) {
    let (mut text, mut calls, mut reason) = (String::new(), Vec::<Value>::new(), Value::Null);
    for event in answer.events() {
        let choice = &event["choices"][0];
        text += choice["delta"]["content"].as_str().unwrap_or_default();
        for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            assert_eq!(call["index"], calls.len(), "each call comes at once");
            calls.push(call.clone());
        }
        if choice["finish_reason"].is_string() {
            reason = choice["finish_reason"].clone();
        }
    }
    (json!({"content": text, "tool_calls": calls}), reason)
}

fn assert_calls_fit(calls: &[(String, Value)]) {
    for (name, arguments) in calls {
        match name.as_str() {
            "paint" => assert_paint(arguments),
            name => assert!(name == "wait" && arguments.is_object(), "{name}: {arguments}"),
        }
    }
}

#[rstest]
#[case::tagged(TAGGED)]
#[case::json(PLAIN)]
fn an_answer_can_be_forced_to_call_tools(#[case] template: &str) {
    let server = with_template(template);
    for choice in [json!("required"), json!({"type": "function", "function": {"name": "paint"}})] {
        for several in [true, false] {
            let mut asked = request(json!({"tool_choice": choice, "parallel_tool_calls": several}));
            let whole = post(server.address(), PATH, &asked);
            assert_eq!(whole.status, 200, "{whole:?}");
            let whole = whole.json()["choices"][0].clone();
            assert_eq!(
                (&whole["finish_reason"], &whole["message"]["content"]),
                (&json!("tool_calls"), &Value::Null)
            );
            let made = calls(&whole["message"]);
            assert_calls_fit(&made);
            assert!(several || made.len() == 1, "{whole}");
            assert!(choice == "required" || made.iter().all(|(name, _)| name == "paint"), "{whole}");
            asked["stream"] = json!(true);
            let streamed = post(server.address(), PATH, &asked);
            let (message, reason) = joined(&streamed);
            assert_eq!((calls(&message), &message["content"]), (made, &json!("")), "the same seed");
            assert_eq!(reason, "tool_calls");
        }
    }
    assert_nothing_is_held(&server);
}

#[test]
fn a_call_of_the_models_own_will_is_found_and_is_no_text() {
    let server = with_template(TAGGED);
    // The bias makes the model write a call with each token.
    let bias = json!({"logit_bias": {CALL_TOKEN.to_string(): 100}, "max_tokens": 2, "temperature": 0});
    let willing = |more: Value| merged(request(bias.clone()), more);
    let wait = ("wait".to_owned(), json!({"a": 1}));
    for (more, number) in
        [(json!({}), 2), (json!({"parallel_tool_calls": false}), 1), (json!({"tool_choice": "auto"}), 2)]
    {
        let mut asked = willing(more);
        let whole = post(server.address(), PATH, &asked).json();
        let message = &whole["choices"][0]["message"];
        assert_eq!(calls(message), vec![wait.clone(); number], "{whole}");
        assert_eq!(message["content"], Value::Null);
        // Two tokens are all that it may have, so it was cut, unless it ended behind its only call.
        let reason = if number == 1 { "tool_calls" } else { "length" };
        assert_eq!(whole["choices"][0]["finish_reason"], reason);
        asked["stream"] = json!(true);
        let (message, ended) = joined(&post(server.address(), PATH, &asked));
        assert_eq!((calls(&message).len(), ended), (number, json!(reason)));
    }
    // Without tools, the same text is text.
    for more in [json!({"tool_choice": "none"}), json!({"tools": []}), json!({"tools": null})] {
        let whole = post(server.address(), PATH, &willing(more)).json();
        let message = &whole["choices"][0]["message"];
        assert!(message["content"].as_str().unwrap().contains("<tool_call>"), "{whole}");
        assert!(message.get("tool_calls").is_none(), "{whole}");
    }
    assert_nothing_is_held(&server);
}

#[test]
fn each_of_several_answers_has_its_own_calls() {
    let server = with_template(TAGGED);
    let asked = request(json!({"tool_choice": "required", "parallel_tool_calls": false, "n": 6}));
    let whole = post(server.address(), PATH, &asked).json();
    let choices = whole["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 6);
    for choice in choices {
        assert_calls_fit(&calls(&choice["message"]));
    }
    assert!(
        choices.iter().any(|choice| calls(&choice["message"]) != calls(&choices[0]["message"])),
        "{whole}"
    );
    assert_nothing_is_held(&server);
}

#[test]
fn a_call_that_is_cut_off_is_neither_a_call_nor_text() {
    let server = with_template(TAGGED);
    for most in [1, 5, 20] {
        let mut asked = request(json!({"tool_choice": "required", "max_tokens": most}));
        let choice = post(server.address(), PATH, &asked).json()["choices"][0].clone();
        assert_eq!((&choice["finish_reason"], &choice["message"]["content"]), (&json!("length"), &json!("")));
        asked["stream"] = json!(true);
        let (message, _) = joined(&post(server.address(), PATH, &asked));
        assert_eq!(message, json!({"content": "", "tool_calls": []}));
    }
}

#[test]
fn tools_and_a_schema_give_calls_or_json() {
    let server = with_template(TAGGED);
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "paint", "schema": paint(), "strict": true}});
    let (mut called, mut said) = (0, 0);
    for seed in 0..24 {
        let asked = request(json!({"response_format": format, "seed": seed, "temperature": 1.9}));
        let choice = post(server.address(), PATH, &asked).json()["choices"][0].clone();
        if choice["finish_reason"] == "tool_calls" {
            assert_calls_fit(&calls(&choice["message"]));
            called += 1;
        } else if choice["finish_reason"] == "stop" {
            assert_paint(&serde_json::from_str(choice["message"]["content"].as_str().unwrap()).unwrap());
            said += 1;
        }
    }
    assert!(called + said > 20 && said > 0, "{called} calls, {said} texts");
}

#[test]
fn the_template_gets_tools_calls_and_their_results() {
    let server = with_template(TAGGED);
    let tokens = |more: Value| {
        let asked = merged(request(json!({"max_tokens": 1})), more);
        let answer = post(server.address(), PATH, &asked);
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    let (with, without) = (tokens(json!({})), tokens(json!({"tool_choice": "none"})));
    assert!(with > without + 50, "{with} and {without}");
    let call =
        json!({"id": "call_1", "type": "function", "function": {"name": "wait", "arguments": "{\"a\": 1}"}});
    let history = json!([
        {"role": "user", "content": "alba ?"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]);
    assert!(tokens(json!({"messages": history})) > with);
}

fn function(more: Value) -> Value {
    json!({"tools": [{"type": "function", "function": more}]})
}

#[rstest]
#[case::kind(json!({"tools": [{"type": "web_search"}]}), "tools[0].type", "\"web_search\" are not supported")]
#[case::no_kind(json!({"tools": [{"function": {"name": "a"}}]}), "tools[0].type", "must be \"function\"")]
#[case::no_list(json!({"tools": {"a": 1}}), "tools", "must be a list")]
#[case::no_object(json!({"tools": [5]}), "tools[0]", "must be an object")]
#[case::no_function(json!({"tools": [{"type": "function"}]}), "tools[0].function", "must be an object")]
#[case::no_name(function(json!({"parameters": {}})), "tools[0].function.name", "1 to 128 letters")]
#[case::empty_name(function(json!({"name": ""})), "tools[0].function.name", "1 to 128 letters")]
#[case::odd_name(function(json!({"name": "a\"b"})), "tools[0].function.name", "1 to 128 letters")]
#[case::long_name(function(json!({"name": "a".repeat(129)})), "tools[0].function.name", "1 to 128 letters")]
#[case::description(function(json!({"name": "a", "description": 5})), "tools[0].function.description", "a string")]
#[case::schema(function(json!({"name": "a", "parameters": [1]})), "tools[0].function.parameters", "a JSON schema")]
#[case::misspelt(function(json!({"name": "a", "paramters": {}})), "tools[0].function.paramters", "unknown parameter")]
#[case::many(json!({"tools": vec![json!({"type": "function", "function": {"name": "a"}}); 129]}), "tools", "limit of 128")]
#[case::twice(json!({"tools": vec![json!({"type": "function", "function": {"name": "a"}}); 2]}), "tools[1]", "two tools have the name \"a\"")]
#[case::choice(json!({"tool_choice": "maybe"}), "tool_choice", "use none, auto, required")]
#[case::choice_kind(json!({"tool_choice": {"type": "custom"}}), "tool_choice.type", "\"custom\" is not supported")]
#[case::choice_name(json!({"tool_choice": {"type": "function"}}), "tool_choice.function.name", "the name of a tool")]
#[case::choice_unknown(json!({"tool_choice": {"type": "function", "function": {"name": "b"}}}), "tool_choice", "no tool with this name")]
#[case::choice_number(json!({"tool_choice": 5}), "tool_choice.type", "an object with a type")]
#[case::nothing_to_call(json!({"tool_choice": "required", "tools": []}), "tool_choice", "there are no tools")]
#[case::keyword(json!({"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "object", "properties": {"b": {"not": {}}}}}}]}), "tools", "the constraint")]
#[case::end(json!({"tool_choice": "required", "ignore_eos": true}), "", "the constraint")]
#[case::old(json!({"functions": [{"name": "a"}]}), "functions", "not supported yet; send tools")]
fn malformed_tools_are_named(#[case] more: Value, #[case] param: &str, #[case] words: &str) {
    let server = with_template(TAGGED);
    let answer = post(server.address(), PATH, &request(more));
    assert_eq!(answer.status, 400, "{answer:?}");
    let error = &answer.json()["error"];
    assert_eq!(error["param"].as_str().unwrap_or_default(), param, "{error}");
    assert!(error["message"].as_str().unwrap().contains(words), "{error}");
    assert_nothing_is_held(&server);
    assert_eq!(
        post(server.address(), PATH, &request(json!({"max_tokens": 1}))).status,
        200,
        "the server lives on"
    );
}

#[test]
fn a_model_whose_template_writes_no_tools_gets_none() {
    let server = server();
    for more in [json!({}), json!({"tool_choice": "required"}), json!({"tool_choice": "auto"})] {
        let answer = post(server.address(), PATH, &request(more));
        let error = &answer.json()["error"];
        assert_eq!((answer.status, &error["param"]), (400, &json!("tools")), "{error}");
        assert!(error["message"].as_str().unwrap().contains("does not write tools"), "{error}");
    }
    for more in [json!({"tool_choice": "none"}), json!({"tools": []})] {
        assert_eq!(post(server.address(), PATH, &request(more)).status, 200);
    }
}

#[test]
fn calls_may_be_limited_to_some_of_the_tools() {
    let server = with_template(TAGGED);
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}, "additionalProperties": false}}});
    let named = |name: &str| json!({"type": "function", "function": {"name": name}});
    let choice = json!({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("b"), named("c")]}});
    for seed in 0..6 {
        let asked = json!({
            "messages": [{"role": "user", "content": "alba ?"}], "tools": [tool("a"), tool("b"), tool("c")],
            "tool_choice": choice, "seed": seed, "temperature": 1.8, "max_tokens": 1500,
        });
        let answer = post(server.address(), "/v1/chat/completions", &asked).json();
        let calls = answer["choices"][0]["message"]["tool_calls"]
            .as_array()
            .unwrap_or_else(|| panic!("{answer}"))
            .clone();
        let names = calls.iter().map(|call| call["function"]["name"].as_str().unwrap());
        assert!(names.into_iter().all(|name| ["b", "c"].contains(&name)), "{answer}");
    }
    assert_nothing_is_held(&server);
}
