//! Requests that get no answer: the right status in the right form, and a server that lives on.

use std::time::Duration;

use kvserve::Limits;
use rstest::rstest;
use serde_json::{Value, json};

use crate::client::{Answer, Client, call, get, post};
use crate::common::{assert_nothing_is_held, free_port, question, server, with};

const CHAT: &str = "/v1/chat/completions";

fn assert_refused(answer: &Answer, status: u16, param: Option<&str>, words: &str) {
    assert_eq!(answer.status, status, "{answer:?}");
    let error = &answer.json()["error"];
    assert_eq!(error["param"].as_str(), param, "{error}");
    assert!(error["message"].as_str().unwrap().contains(words), "{error}");
    assert!(error["type"].is_string() && error.get("code").is_some(), "{error}");
}

#[rstest]
#[case::unknown(json!({"temprature": 1}), Some("temprature"), "unknown parameter: \"temprature\"")]
#[case::unknown_within(json!({"stream_options": {"usage": true}}), Some("stream_options.usage"), "unknown parameter")]
#[case::type_of_number(json!({"max_tokens": "ten"}), Some("max_tokens"), "expected a whole number, 0 or more")]
#[case::negative(json!({"max_tokens": -1}), Some("max_tokens"), "integer `-1`")]
#[case::none(json!({"max_tokens": 0}), Some("max_tokens"), "at least 1")]
#[case::none_in_the_newer_field(json!({"max_completion_tokens": 0, "max_tokens": 5}), Some("max_completion_tokens"), "max_completion_tokens is 0")]
#[case::huge(json!({"max_tokens": 1e30}), Some("max_tokens"), "expected a whole number")]
#[case::fraction(json!({"n": 1.5}), Some("n"), "expected a whole number")]
#[case::no_answers(json!({"n": 0}), Some("n"), "at least 1")]
#[case::many_answers(json!({"n": 1000}), Some("n"), "limit of 128")]
#[case::too_many_at_once(json!({"n": 18_446_744_073_709_551_615_u64}), Some("n"), "limit of 128")]
#[case::cold(json!({"temperature": -0.1}), Some("temperature"), "from 0 to 2")]
#[case::hot(json!({"temperature": 2.1}), Some("temperature"), "from 0 to 2")]
#[case::hottest(json!({"temperature": 1e39}), Some("temperature"), "from 0 to 2")]
#[case::truth(json!({"temperature": true}), Some("temperature"), "expected a number")]
#[case::top_p(json!({"top_p": 0}), Some("top_p"), "more than 0 and at most 1")]
#[case::top_k(json!({"top_k": -2}), Some("top_k"), "at least 1")]
#[case::min_p(json!({"min_p": 1.5}), Some("min_p"), "from 0 to 1")]
#[case::presence(json!({"presence_penalty": 3}), Some("presence_penalty"), "from -2 to 2")]
#[case::frequency(json!({"frequency_penalty": -3}), Some("frequency_penalty"), "from -2 to 2")]
#[case::repetition(json!({"repetition_penalty": 0}), Some("repetition_penalty"), "more than 0")]
#[case::bias_value(json!({"logit_bias": {"5": 101}}), Some("logit_bias.5"), "from -100 to 100")]
#[case::bias_token(json!({"logit_bias": {"red": 1}}), Some("logit_bias.red"), "not the number of a token")]
#[case::bias_vocabulary(json!({"logit_bias": {"99999999": 1}}), None, "vocabulary")]
#[case::stop_empty(json!({"stop": ""}), Some("stop"), "empty string")]
#[case::stop_type(json!({"stop": [5]}), Some("stop"), "a list of strings")]
#[case::stop_many(json!({"stop": vec!["a"; 17]}), Some("stop"), "up to 16")]
#[case::top_logprobs(json!({"logprobs": true, "top_logprobs": 21}), Some("top_logprobs"), "at most 20")]
#[case::top_alone(json!({"top_logprobs": 2}), Some("top_logprobs"), "needs logprobs")]
#[case::salt(json!({"cache_salt": ""}), Some("cache_salt"), "1 to 256 bytes")]
#[case::audio(json!({"modalities": ["text", "audio"]}), Some("modalities"), "not supported yet")]
#[case::store(json!({"store": true}), Some("store"), "not supported yet")]
#[case::no_messages(json!({"messages": []}), Some("messages"), "the list is empty")]
#[case::messages_type(json!({"messages": "hello"}), Some("messages"), "must be a JSON list")]
#[case::role(json!({"messages": [{"role": "wizard", "content": "a"}]}), Some("messages"), "\"wizard\"")]
#[case::image(json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "a"}]}]}), Some("messages"), "image_url")]
#[case::unanswerable(json!({"messages": [{"role": "system", "content": "a"}]}), Some("messages"), "role system")]
#[case::variables(json!({"chat_template_kwargs": [1]}), Some("chat_template_kwargs"), "an object")]
#[case::variable(json!({"chat_template_kwargs": {"messages": []}}), None, "the conversation itself")]
#[case::wrong_type(json!({"stream": "yes"}), Some("stream"), "expected true or false")]
fn a_wrong_field_is_named(#[case] more: Value, #[case] param: Option<&str>, #[case] words: &str) {
    let server = server();
    let answer = post(server.address(), CHAT, &question(more));
    assert_refused(&answer, 400, param, words);
    assert_nothing_is_held(&server);
    assert_eq!(post(server.address(), CHAT, &question(json!({}))).status, 200, "the server lives on");
}

#[rstest]
#[case::nothing(json!({"max_tokens": 3}), Some("prompt"), "missing parameter")]
#[case::kind(json!({"prompt": 5}), Some("prompt"), "must be a string")]
#[case::no_prompts(json!({"prompt": []}), Some("prompt"), "empty list")]
#[case::negative_token(json!({"prompt": [1, -1]}), Some("prompt"), "each token")]
#[case::huge_token(json!({"prompt": [4_294_967_295_u32]}), None, "vocabulary")]
#[case::mixed(json!({"prompt": ["a", 5]}), Some("prompt"), "each prompt")]
#[case::many(json!({"prompt": vec!["a"; 65]}), Some("prompt"), "limit of 64")]
#[case::empty(json!({"prompt": ""}), None, "the prompt is empty")]
#[case::echo(json!({"prompt": "a", "echo": true}), Some("echo"), "not supported yet")]
#[case::suffix(json!({"prompt": "a", "suffix": "b"}), Some("suffix"), "not supported yet")]
#[case::best_of(json!({"prompt": "a", "best_of": 2}), Some("best_of"), "not supported yet")]
#[case::logprobs(json!({"prompt": "a", "logprobs": 50}), Some("logprobs"), "at most 20")]
#[case::documents(json!({"prompt": [5], "documents": ["a"]}), Some("documents"), "a prompt of tokens")]
fn a_wrong_completion_is_named(#[case] request: Value, #[case] param: Option<&str>, #[case] words: &str) {
    let server = server();
    assert_refused(&post(server.address(), "/v1/completions", &request), 400, param, words);
    assert_nothing_is_held(&server);
}

#[rstest]
#[case(b"{", "not valid JSON")]
#[case(b"", "not valid JSON")]
#[case(b"[1, 2", "not valid JSON")]
#[case(b"{\"messages\": [}", "line 1 column 15")]
#[case(b"{} {}", "missing parameter")]
#[case(b"{\"messages\": \"\xff\xfe\"}", "not UTF-8 at byte 14")]
#[case(b"null", "invalid type")]
#[case(b"5", "invalid type")]
fn what_is_not_json_is_refused_with_its_place(#[case] body: &[u8], #[case] words: &str) {
    let server = server();
    let answer = call(server.address(), "POST", CHAT, &[], body);
    assert_eq!(answer.status, 400, "{answer:?}");
    assert!(answer.json()["error"]["message"].as_str().unwrap().contains(words), "{answer:?}");
}

#[test]
fn deep_json_is_refused() {
    let server = server();
    let deep = format!("{{\"messages\": {}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    let answer = call(server.address(), "POST", CHAT, &[], deep.as_bytes());
    assert_refused(&answer, 400, None, "recursion limit");
}

#[test]
fn another_content_type_is_refused() {
    let server = server();
    let answer = call(server.address(), "POST", CHAT, &[("content-type", "text/plain")], b"{}");
    assert_refused(&answer, 400, None, "content-type: application/json");
}

#[test]
fn another_model_and_another_path_do_not_exist() {
    let server = server();
    let answer = post(server.address(), CHAT, &question(json!({"model": "gpt-5"})));
    assert_refused(&answer, 404, Some("model"), "\"gpt-5\" does not exist");
    assert_eq!(answer.json()["error"]["code"], "model_not_found");
    assert_refused(&get(server.address(), "/v1/models/gpt-5"), 404, Some("model"), "does not exist");
    assert_refused(&get(server.address(), "/v3/chat"), 404, None, "there is no GET /v3/chat");
    assert_refused(&get(server.address(), CHAT), 405, None, "does not accept GET");
    assert_refused(&post(server.address(), "/v1/models", &json!({})), 405, None, "does not accept POST");
}

#[test]
fn a_prompt_past_the_context_is_refused() {
    let server = server();
    let long = "alba is red . ".repeat(2000);
    let chat = json!({"messages": [{"role": "user", "content": long}]});
    let answer = post(server.address(), CHAT, &chat);
    assert_eq!(answer.status, 400);
    assert_eq!(answer.json()["error"]["code"], "context_length_exceeded", "{answer:?}");
    let answer = post(server.address(), "/v1/completions", &json!({"prompt": vec![5; 2048]}));
    assert_eq!(answer.json()["error"]["code"], "context_length_exceeded", "{answer:?}");
    // An answer has as much room as is left.
    let answer = post(
        server.address(),
        "/v1/completions",
        &json!({"prompt": vec![5; 2040], "max_tokens": 1_000_000, "ignore_eos": true}),
    );
    assert_eq!(answer.json()["choices"][0]["finish_reason"], "length", "{answer:?}");
    assert_nothing_is_held(&server);
}

#[test]
fn a_body_over_the_limit_is_refused_before_it_is_there() {
    let limits = Limits { body_bytes: 1000, ..Limits::default() };
    let server = with(None, kvserve::ServerConfig { limits, ..free_port() });
    let long = json!({"messages": [{"role": "user", "content": "a".repeat(5000)}]});
    assert_refused(&post(server.address(), CHAT, &long), 413, None, "limit of 1000 bytes");
    // A client that announces a huge body and sends it slowly is refused at the limit.
    let mut client = Client::new(server.address());
    client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 99999999999\r\n\r\n");
    client.send(&[b'a'; 2000]);
    assert_refused(&client.answer(), 413, None, "limit of 1000 bytes");
    let exact = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1});
    assert_eq!(post(server.address(), CHAT, &exact).status, 200);
}

#[test]
fn slow_clients_are_closed_and_do_not_hold_up_others() {
    let limits = Limits { receive_time: Duration::from_millis(300), ..Limits::default() };
    let server = with(None, kvserve::ServerConfig { limits, ..free_port() });
    let mut idle = Client::new(server.address());
    let mut head = Client::new(server.address());
    head.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n");
    let mut body = Client::new(server.address());
    body.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{");
    assert_eq!(post(server.address(), CHAT, &question(json!({}))).status, 200, "others are answered");
    let late = body.answer();
    assert_refused(&late, 408, None, "did not arrive within 300ms");
    assert!(idle.is_closed() && head.is_closed());
    assert_nothing_is_held(&server);
}

#[test]
fn more_requests_than_the_limit_are_told_to_wait() {
    let limits = Limits { requests: 2, ..Limits::default() };
    let server = with(None, kvserve::ServerConfig { limits, ..free_port() });
    let long = question(json!({"ignore_eos": true, "max_tokens": 1800, "stream": true}));
    let mut running: Vec<Client> = (0..2)
        .map(|_| {
            let mut client = Client::new(server.address());
            client.request("POST", CHAT, &[], long.to_string().as_bytes());
            assert_eq!(client.head().0, 200);
            client
        })
        .collect();
    let answer = post(server.address(), CHAT, &question(json!({})));
    assert_refused(&answer, 429, None, "try again later");
    assert_eq!(answer.header("retry-after"), Some("1"));
    running.clear();
    let again = (0..400).find(|_| {
        std::thread::sleep(Duration::from_millis(5));
        post(server.address(), CHAT, &question(json!({}))).status == 200
    });
    assert!(again.is_some(), "places are given back");
}

#[test]
fn an_answer_that_takes_too_long_ends() {
    let limits = Limits { answer_time: Some(Duration::from_millis(30)), ..Limits::default() };
    let server = with(None, kvserve::ServerConfig { limits, ..free_port() });
    let long =
        |stream: bool| question(json!({"ignore_eos": true, "max_tokens": 1900, "n": 8, "stream": stream}));
    let late = post(server.address(), CHAT, &long(false));
    assert_refused(&late, 408, None, "longer than the server's limit");
    assert_eq!(late.header("x-should-retry"), Some("false"), "clients repeat requests after this status");
    let streamed = post(server.address(), CHAT, &long(true));
    assert_eq!(streamed.status, 200);
    let last = streamed.events().pop().unwrap();
    assert_eq!(last["error"]["type"], "timeout_error", "{last}");
    assert!(streamed.body.ends_with("data: [DONE]\n\n"));
    assert_nothing_is_held(&server);
}

#[test]
fn bytes_that_are_not_http_close_the_connection() {
    let server = server();
    let mut client = Client::new(server.address());
    client.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n");
    // The server may say that the request is bad before it closes.
    let said = String::from_utf8(client.rest()).unwrap();
    assert!(said.is_empty() || said.starts_with("HTTP/1.1 400"), "{said}");
    assert!(client.is_closed());
    assert_eq!(post(server.address(), CHAT, &question(json!({}))).status, 200);
}
