//! Documents of requests: found again in another order, in every form, and equal to the engine's own answers.

use std::sync::Arc;

use kvchunk::{Recompute, Reuse, ReuseCell};
use kvengine::{PromptTokens, Request, document_text};
use kvmodel::{Message, Role};
use kvserve::{DocumentReuse, Server};
use rstest::rstest;
use serde_json::{Value, json};

use crate::client::{get, post};
use crate::common::{
    DOCUMENTS, QUESTION, SYSTEM, add, assert_nothing_is_held, engine, free_port, question, reuse, reusing,
    server, with,
};

const PATH: &str = "/v1/chat/completions";

fn reversed() -> Vec<Value> {
    DOCUMENTS.iter().rev().map(|(name, text)| json!({"id": name, "text": text})).collect()
}

/// Returns the first token's log-probability, as a fingerprint of everything that was computed.
fn logprob(answer: &Value) -> f64 {
    answer["choices"][0]["logprobs"]["content"][0]["logprob"].as_f64().unwrap_or_else(|| panic!("{answer}"))
}

#[test]
fn documents_in_another_order_are_all_cached_and_the_answer_is_the_engines_own() {
    let server = reusing();
    let asked = json!({"logprobs": true});
    let first = post(server.address(), PATH, &question(asked.clone())).json();
    let sources = |answer: &Value| {
        let parts = answer["kv"]["parts"].as_array().unwrap().clone();
        parts.iter().map(|part| part["source"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(sources(&first), ["computed"; 3]);
    assert_eq!(first["kv"]["parts"][0]["reason"], "new");
    let mut request = question(asked);
    request["documents"] = reversed().into();
    let second = post(server.address(), PATH, &request).json();
    assert_eq!(sources(&second), ["cache"; 3], "{second}");
    let tokens = |name: &str| {
        let parts = second["kv"]["parts"].as_array().unwrap().clone();
        let part = parts.iter().find(|part| part["id"] == name).unwrap_or_else(|| panic!("{second}")).clone();
        part["tokens"].as_u64().unwrap()
    };
    let documents: u64 = DOCUMENTS.iter().map(|(name, _)| tokens(name)).sum();
    let cached = second["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached >= documents, "{cached} of {documents}");
    assert_eq!(second["kv"]["full_attention"], false);
    assert!(second["kv"]["recomputed"].as_u64().unwrap() > 0, "the default recomputes half of the tokens");

    let (mut engine, codec) = engine();
    let messages = [Message::new(Role::System, SYSTEM), Message::new(Role::User, QUESTION.0)];
    let mut texts: Vec<_> = DOCUMENTS.iter().map(|(_, text)| document_text(text)).collect();
    for (answer, turn) in [(&first, false), (&second, true)] {
        if turn {
            texts.reverse();
        }
        let prompt =
            PromptTokens::from_conversation(&codec, &messages, texts.iter().map(AsRef::as_ref)).unwrap();
        let mut own = Request::new(prompt).reusing(&reuse().settings);
        (own.max_new_tokens, own.logprobs) = (8, Some(0));
        let own = engine.generate(&own, &mut ()).unwrap();
        assert_eq!(answer["choices"][0]["message"]["content"], codec.decode(&own.tokens).unwrap());
        assert_eq!(own.prompt_tokens, answer["usage"]["prompt_tokens"]);
        assert_eq!(own.cached_tokens as u64, answer["kv"]["reused"].as_u64().unwrap());
        assert!((f64::from(own.logprobs[0].logprob) - logprob(answer)).abs() < 1e-5);
    }
    assert_nothing_is_held(&server);
}

#[test]
fn without_settings_for_reuse_documents_attend_to_each_other() {
    let server = server();
    let asked = json!({"logprobs": true});
    let first = post(server.address(), PATH, &question(asked.clone())).json();
    assert_eq!((&first["kv"]["full_attention"], &first["kv"]["recomputed"]), (&json!(true), &json!(0)));
    let (mut engine, codec) = engine();
    let messages = [Message::new(Role::System, SYSTEM), Message::new(Role::User, QUESTION.0)];
    let texts = DOCUMENTS.map(|(_, text)| document_text(text));
    let prompt = PromptTokens::from_conversation(&codec, &messages, texts.iter().map(AsRef::as_ref)).unwrap();
    let plain = PromptTokens::Plain(prompt.iter().collect());
    let own = Request { max_new_tokens: 8, logprobs: Some(0), ..Request::new(plain) };
    let own = engine.generate(&own, &mut ()).unwrap();
    assert!((f64::from(own.logprobs[0].logprob) - logprob(&first)).abs() < 1e-5, "full attention");
    // The same prompt is found from its beginning, and so are documents before the first that differs.
    let again = post(server.address(), PATH, &question(asked)).json();
    let sources: Vec<&Value> =
        again["kv"]["parts"].as_array().unwrap().iter().map(|part| &part["source"]).collect();
    assert_eq!(sources, ["cache"; 3], "{again}");
    let mut longer = question(json!({}));
    longer["documents"][1]["text"] = json!(format!("{} diba is tall .", DOCUMENTS[1].1));
    let longer = post(server.address(), PATH, &longer).json();
    let sources: Vec<&Value> =
        longer["kv"]["parts"].as_array().unwrap().iter().map(|part| &part["source"]).collect();
    assert_eq!(sources, ["cache", "partly", "computed"], "{longer}");
    let mut other = question(json!({}));
    other["documents"] = reversed().into();
    let other = post(server.address(), PATH, &other).json();
    assert!(
        other["kv"]["parts"].as_array().unwrap().iter().all(|part| part["source"] == "computed"),
        "{other}"
    );
}

/// Tests the forms in which clients write documents, and those in which a request asks for a cut.
#[rstest]
#[case::strings(json!({"documents": DOCUMENTS.map(|(_, text)| text)}))]
#[case::text(json!({"documents": DOCUMENTS.map(|(_, text)| json!({"text": text}))}))]
#[case::content(json!({"documents": DOCUMENTS.map(|(_, text)| json!({"content": text, "source": 5}))}))]
#[case::cohere(json!({"documents": DOCUMENTS.map(|(name, text)| json!({"id": name, "data": {"snippet": text}}))}))]
#[case::cohere_text(json!({"documents": DOCUMENTS.map(|(name, text)| json!({"id": name, "data": text}))}))]
#[case::separator(json!({"separator": "##", "messages": [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": format!("##{}##{}##{}##{}", DOCUMENTS[0].1, DOCUMENTS[1].1, DOCUMENTS[2].1, QUESTION.0)},
]}))]
#[case::parts(json!({"parts_as_documents": true, "messages": [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": [
        {"type": "text", "text": DOCUMENTS[0].1},
        {"type": "text", "text": DOCUMENTS[1].1},
        {"type": "text", "text": DOCUMENTS[2].1},
        {"type": "text", "text": QUESTION.0},
    ]},
]}))]
#[case::conversation(json!({"documents": DOCUMENTS.map(|(_, text)| text), "messages": [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": QUESTION.0},
    {"role": "assistant", "content": "red"},
    {"role": "user", "content": QUESTION.0},
]}))]
fn a_document_is_found_in_whatever_form_it_comes(#[case] form: Value) {
    let server = reusing();
    let own = post(server.address(), PATH, &question(json!({}))).json();
    let mut request = question(json!({}));
    if form.get("documents").is_none() {
        request.as_object_mut().unwrap().remove("documents");
    }
    for (name, value) in form.as_object().unwrap() {
        request[name] = value.clone();
    }
    let answer = post(server.address(), PATH, &request);
    assert_eq!(answer.status, 200, "{answer:?}");
    let answer = answer.json();
    let parts = answer["kv"]["parts"].as_array().unwrap();
    assert_eq!(parts.len(), 3, "{answer}");
    assert!(parts.iter().all(|part| part["source"] == "cache"), "{answer}");
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
    assert_eq!(text.trim(), own["choices"][0]["message"]["content"].as_str().unwrap().trim());
}

#[test]
fn nothing_is_cut_that_no_request_asks_to_cut() {
    let server = reusing();
    let text = format!("## Notes ## {} ## {} ## {}", DOCUMENTS[0].1, DOCUMENTS[1].1, QUESTION.0);
    for content in
        [json!(text), json!([{"type": "text", "text": text}, {"type": "text", "text": QUESTION.0}])]
    {
        let request = json!({"messages": [{"role": "user", "content": content}], "max_tokens": 1});
        let answer = post(server.address(), PATH, &request).json();
        assert_eq!(
            (&answer["kv"]["parts"], &answer["kv"]["full_attention"]),
            (&json!([]), &json!(true)),
            "{answer}"
        );
    }
    // A separator that occurs once does not cut either.
    let request =
        json!({"messages": [{"role": "user", "content": "a ## b"}], "max_tokens": 1, "separator": "##"});
    let answer = post(server.address(), PATH, &request).json();
    assert_eq!(answer["kv"]["parts"], json!([]), "{answer}");
}

#[test]
fn documents_stay_cached_while_a_conversation_grows_behind_them() {
    let server = reusing();
    let mut messages = vec![
        json!({"role": "system", "content": SYSTEM}),
        json!({"role": "user", "content": "alba ? bora ? cedo ? dilan ? rumi ? zifu ? diba ? nomi ? alba ? bora ?"}),
    ];
    let mut last = 0;
    for turn in 0..3 {
        let answer = post(server.address(), PATH, &question(json!({"messages": messages}))).json();
        let parts = answer["kv"]["parts"].as_array().unwrap();
        let documents: u64 = parts.iter().map(|part| part["tokens"].as_u64().unwrap()).sum();
        let (reused, prompt) =
            (answer["kv"]["reused"].as_u64().unwrap(), answer["usage"]["prompt_tokens"].as_u64().unwrap());
        assert!(prompt > last);
        if turn > 0 {
            assert!(parts.iter().all(|part| part["source"] == "cache"), "{answer}");
            assert!(reused >= documents, "{answer}");
        }
        last = prompt;
        messages.push(json!({"role": "assistant", "content": answer["choices"][0]["message"]["content"]}));
        messages.push(json!({"role": "user", "content": "sifa ?"}));
    }
}

#[test]
fn a_later_turn_finds_the_conversation_behind_the_same_documents() {
    let plain = || {
        let settings =
            Reuse { recompute: Recompute::Link { tokens: 4 }, ..Reuse::plain(ReuseCell::default()) };
        with(Some(DocumentReuse { settings, decoys: Arc::default() }), free_port())
    };
    let server = plain();
    let first = "alba ? bora ? cedo ? dilan ? rumi ? zifu ? diba ? nomi ? alba ? bora ?";
    let mut messages =
        vec![json!({"role": "system", "content": SYSTEM}), json!({"role": "user", "content": first})];
    let ask = |server: &Server, messages: &[Value], more: Value| {
        let mut request = question(json!({"messages": messages, "logprobs": true}));
        add(&mut request, more);
        post(server.address(), PATH, &request).json()
    };
    let reused =
        |answer: &Value| answer["kv"]["question"]["reused"].as_u64().unwrap_or_else(|| panic!("{answer}"));
    let before = ask(&server, &messages, json!({}));
    assert_eq!(reused(&before), 0);
    messages.push(json!({"role": "assistant", "content": before["choices"][0]["message"]["content"]}));
    messages.push(json!({"role": "user", "content": "sifa ?"}));
    // Behind other documents, or with another salt, nothing of it is found.
    for more in [
        json!({"documents": reversed()}),
        json!({"cache_salt": "x"}),
        json!({"documents": ["alba is red ."]}),
    ] {
        assert_eq!(reused(&ask(&server, &messages, more.clone())), 0, "{more}");
    }
    let answer = ask(&server, &messages, json!({}));
    let old = before["kv"]["question"]["tokens"].as_u64().unwrap();
    assert!(reused(&answer) >= old / 16 * 16 && reused(&answer) > 0, "{old}: {answer}");
    let parts = answer["kv"]["parts"].as_array().unwrap();
    let documents: u64 = parts.iter().map(|part| part["tokens"].as_u64().unwrap()).sum();
    let total = answer["usage"]["prompt_tokens"].as_u64().unwrap();
    let system = total - documents - answer["kv"]["question"]["tokens"].as_u64().unwrap();
    let found = system + documents + reused(&answer);
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], found, "{answer}");
    assert_eq!((&answer["kv"]["reused"], &answer["kv"]["computed"]), (&json!(found), &json!(total - found)));
    let fresh = ask(&plain(), &messages, json!({}));
    assert_eq!(reused(&fresh), 0);
    let text = |answer: &Value| answer["choices"][0]["message"]["content"].clone();
    assert_eq!(text(&answer), text(&fresh));
    assert!((logprob(&answer) - logprob(&fresh)).abs() < 1e-6, "{answer} and {fresh}");
    let recent = get(server.address(), "/overview").json()["recent"][0]["segments"].clone();
    let drawn = recent.as_array().unwrap_or_else(|| panic!("{recent}")).last().unwrap();
    assert_eq!((&drawn["kind"], &drawn["found"]), (&json!("question"), &json!(reused(&answer))), "{recent}");
    assert_nothing_is_held(&server);
}

#[test]
fn documents_without_anything_before_them_are_found_in_any_order() {
    let server = reusing();
    let (mut engine, codec) = engine();
    // The template of the model writes nothing in front of the first message.
    let chat = json!({"messages": [{"role": "user", "content": QUESTION.0}]});
    for (path, form, template) in
        [(PATH, chat, true), ("/v1/completions", json!({"prompt": QUESTION.0}), false)]
    {
        let mut texts: Vec<_> = DOCUMENTS.iter().map(|(_, text)| document_text(text)).collect();
        for turn in ["first", "reversed"] {
            let mut request = form.clone();
            add(
                &mut request,
                json!({"documents": texts, "temperature": 0, "max_tokens": 4, "cache_salt": path}),
            );
            let answer = post(server.address(), path, &request).json();
            let source = if turn == "first" { "computed" } else { "cache" };
            let parts = answer["kv"]["parts"].as_array().unwrap_or_else(|| panic!("{answer}"));
            assert_eq!(parts.len(), 3, "{answer}");
            assert!(parts.iter().all(|part| part["source"] == source), "{path}, {turn}: {answer}");
            assert_eq!(
                (&answer["kv"]["not_reused"], &answer["kv"]["full_attention"]),
                (&Value::Null, &json!(false))
            );
            let parts = texts.iter().map(AsRef::as_ref);
            let prompt = if template {
                let messages = [Message::new(Role::User, QUESTION.0)];
                PromptTokens::conversation_around(&codec, &messages, (0, 0), parts).unwrap()
            } else {
                PromptTokens::from_parts(&codec, "", parts, QUESTION.0, true).unwrap()
            };
            let own = Request { max_new_tokens: 4, ..Request::new(prompt).reusing(&reuse().settings) };
            let own = engine.generate(&own, &mut ()).unwrap();
            assert_eq!(answer["usage"]["prompt_tokens"], own.prompt_tokens, "{answer}");
            let text = if template {
                &answer["choices"][0]["message"]["content"]
            } else {
                &answer["choices"][0]["text"]
            };
            assert_eq!(*text, codec.decode(&own.tokens).unwrap(), "{path}, {turn}: {answer}");
            texts.reverse();
        }
    }
    let recent = get(server.address(), "/overview").json()["recent"][0]["segments"].clone();
    let documents = recent
        .as_array()
        .unwrap_or_else(|| panic!("{recent}"))
        .iter()
        .filter(|part| part["kind"] == "document");
    assert!(
        documents.clone().count() == 3 && documents.clone().all(|part| part["found"] == part["tokens"]),
        "{recent}"
    );
    assert_nothing_is_held(&server);
}

#[test]
fn any_character_may_stand_in_a_message() {
    let server = reusing();
    // The first character that marks a place in a conversation.
    let content = format!("\u{f8fe} {}", QUESTION.0);
    let messages = json!([{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]);
    let answer = post(server.address(), PATH, &question(json!({"messages": messages}))).json();
    assert_eq!(answer["kv"]["parts"].as_array().unwrap().len(), 3, "{answer}");
    assert_eq!((&answer["kv"]["not_reused"], &answer["kv"]["full_attention"]), (&Value::Null, &json!(false)));
}

#[test]
fn a_raw_text_has_documents_too() {
    let server = reusing();
    let text = format!("{SYSTEM}##{}##{}##{}", DOCUMENTS[0].1, DOCUMENTS[1].1, QUESTION.0);
    let request = json!({"prompt": text, "separator": "##", "temperature": 0});
    let first = post(server.address(), "/v1/completions", &request).json();
    assert_eq!(first["choices"][0]["text"].as_str().unwrap().trim(), QUESTION.1, "{first}");
    let swapped = format!("{SYSTEM}##{}##{}##{}", DOCUMENTS[1].1, DOCUMENTS[0].1, QUESTION.0);
    let second = post(
        server.address(),
        "/v1/completions",
        &json!({"prompt": swapped, "separator": "##", "temperature": 0}),
    )
    .json();
    assert!(
        second["kv"]["parts"].as_array().unwrap().iter().all(|part| part["source"] == "cache"),
        "{second}"
    );
    assert_eq!(second["choices"][0]["text"], first["choices"][0]["text"]);
}

#[rstest]
#[case(json!({"documents": ["a", ""]}), "documents[1]", "is empty")]
#[case(json!({"documents": [" \n "]}), "documents[0]", "is empty")]
#[case(json!({"documents": "a"}), "documents", "must be a list")]
#[case(json!({"documents": [5]}), "documents[0]", "has no text")]
#[case(json!({"documents": ["a", {"title": "b"}]}), "documents[1]", "has no text")]
#[case(json!({"documents": [{"text": ["a"]}]}), "documents[0]", "has no text")]
#[case(json!({"separator": "##"}), "separator", "not both")]
#[case(json!({"documents": [], "separator": ""}), "separator", "empty")]
#[case(json!({"messages": [{"role": "tool", "content": "a"}]}), "documents", "no message is the user's")]
fn wrong_documents_are_refused_by_name(#[case] more: Value, #[case] param: &str, #[case] reason: &str) {
    let server = reusing();
    let answer = post(server.address(), PATH, &question(more));
    assert_eq!(answer.status, 400, "{answer:?}");
    let error = &answer.json()["error"];
    assert_eq!(error["param"], param, "{error}");
    assert!(error["message"].as_str().unwrap().contains(reason), "{error}");
    assert_nothing_is_held(&server);
}

#[test]
fn documents_may_repeat_and_contain_each_other() {
    let server = reusing();
    let long = format!("{}{}", DOCUMENTS[0].1, DOCUMENTS[1].1);
    let given = json!([DOCUMENTS[0].1, long, DOCUMENTS[0].1, "alba", DOCUMENTS[1].1, DOCUMENTS[1].1]);
    for turn in 0..2 {
        let answer = post(server.address(), PATH, &question(json!({"documents": given}))).json();
        let parts = answer["kv"]["parts"].as_array().unwrap();
        assert_eq!(parts.len(), 6, "{answer}");
        let cached = parts.iter().filter(|part| part["source"] == "cache").count();
        // Of equal documents, all but the first are found the first time, too.
        assert_eq!(cached, if turn == 0 { 2 } else { 6 }, "{answer}");
    }
    assert_nothing_is_held(&server);
}

/// Pieces without line breaks at their ends show whether something is added.
#[test]
fn a_separator_cuts_as_on_the_command_line() {
    let server = reusing();
    let (mut engine, codec) = engine();
    let text = format!("{SYSTEM} ## alba is red . ## bora is small . ## {}", QUESTION.0);
    let prompt = PromptTokens::split_chat(&codec, &text, "##").unwrap();
    let mut own = Request::new(prompt).reusing(&reuse().settings);
    (own.max_new_tokens, own.logprobs) = (4, Some(0));
    let own = engine.generate(&own, &mut ()).unwrap();
    let request = json!({
        "messages": [{"role": "user", "content": text}], "separator": "##", "temperature": 0, "max_tokens": 4,
        "logprobs": true,
    });
    let answer = post(server.address(), PATH, &request).json();
    assert_eq!(answer["usage"]["prompt_tokens"], own.prompt_tokens, "{answer}");
    assert_eq!(answer["kv"]["parts"].as_array().unwrap().len(), 2, "{answer}");
    assert_eq!(answer["choices"][0]["message"]["content"], codec.decode(&own.tokens).unwrap());
    assert!((f64::from(own.logprobs[0].logprob) - logprob(&answer)).abs() < 1e-5);
    // The parts of a text are the text.
    let separated = json!({"prompt": text, "separator": " ## ", "max_tokens": 1});
    let tokens: usize =
        text.split(" ## ").enumerate().map(|(i, piece)| codec.encode(piece, i == 0).unwrap().len()).sum();
    let answer = post(server.address(), "/v1/completions", &separated).json();
    assert_eq!(answer["usage"]["prompt_tokens"], tokens, "{answer}");
}
