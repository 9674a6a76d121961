//! Requests that ask for much memory or time, and clients that do not read.

use std::time::Duration;

use kvserve::{Limits, ServerConfig};
use rstest::rstest;
use serde_json::{Value, json};

use crate::client::{Client, get, post};
use crate::common::{assert_nothing_is_held, free_port, question, reusing, server, with};

const CHAT: &str = "/v1/chat/completions";

#[test]
fn bodies_share_a_limited_memory_and_small_requests_have_room() {
    let limits = Limits { body_bytes: 1 << 20, ..Limits::default() };
    let server = with(None, ServerConfig { limits, ..free_port() });
    let size = (1 << 20) - 1;
    let begun = |_| {
        let mut client = Client::new(server.address());
        let head = format!(
            "POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n\r\n"
        );
        client.send(head.as_bytes());
        client.send(&vec![b' '; size - 1]);
        client
    };
    let text = "a".repeat(size - 200);
    let large = json!({"messages": [{"role": "user", "content": text}], "max_tokens": 1});
    // They all keep the server waiting for their last byte. Some of them may be refused, so more come.
    let mut waiting: Vec<Client> = (0..70).map(begun).collect();
    let refused = (0..300).any(|i| {
        waiting.push(begun(i));
        post(server.address(), CHAT, &large).status == 429
    });
    assert!(refused, "the memory has no limit");
    assert_eq!(post(server.address(), CHAT, &question(json!({}))).status, 200, "small requests go on");
    drop(waiting);
    let room = (0..400).any(|_| {
        std::thread::sleep(Duration::from_millis(5));
        post(server.address(), CHAT, &large).status != 429
    });
    assert!(room, "memory is given back");
    assert_nothing_is_held(&server);
}

#[rstest]
#[case::variables(json!({"chat_template_kwargs": {"x": vec![0; 1_100_000]}}))]
#[case::messages(json!({"messages": vec![0; 1_100_000]}))]
#[case::metadata(json!({"metadata": vec![0; 1_100_000]}))]
fn a_body_of_too_many_values_is_refused(#[case] more: Value) {
    let server = server();
    let answer = post(server.address(), CHAT, &question(more));
    assert_eq!(answer.status, 413, "{}", answer.body);
    assert!(answer.body.contains("values, and the limit is"), "{}", answer.body);
}

#[rstest]
#[case::stop(json!({"stop": ["a".repeat(257)]}), "stop", "more than 256 bytes")]
#[case::id(json!({"documents": [{"id": "a".repeat(257), "text": "b"}]}), "documents[0].id", "up to 256")]
#[case::many(json!({"documents": vec!["a"; 3000]}), "", "3000 documents")]
#[case::separated(json!({"documents": [], "separator": "#", "messages": [{"role": "user", "content": "#a".repeat(3000)}]}), "", "2999 documents")]
#[case::answers_first(json!({"n": 1000, "messages": [{"role": "user", "content": "alba is red . ".repeat(3000)}]}), "n", "limit of 128")]
#[case::kwargs_tools(json!({"chat_template_kwargs": {"tools": []}}), "chat_template_kwargs.tools", "field of the request")]
#[case::kwargs_documents(json!({"chat_template_kwargs": {"documents": []}}), "chat_template_kwargs.documents", "field of the request")]
#[case::kwargs_prompt(json!({"chat_template_kwargs": {"add_generation_prompt": false}}), "chat_template_kwargs.add_generation_prompt", "field of the request")]
fn what_would_be_multiplied_is_limited(#[case] more: Value, #[case] param: &str, #[case] words: &str) {
    let server = server();
    let answer = post(server.address(), CHAT, &question(more));
    assert_eq!(answer.status, 400, "{}", answer.body);
    let error = &answer.json()["error"];
    assert_eq!(error["param"].as_str().unwrap_or_default(), param, "{error}");
    assert!(error["message"].as_str().unwrap().contains(words), "{error}");
    assert_nothing_is_held(&server);
}

#[test]
fn an_answer_that_is_not_read_ends_with_an_error_or_a_closed_connection() {
    let limits = Limits { send_time: Duration::from_millis(200), ..Limits::default() };
    let server = with(None, ServerConfig { limits, ..free_port() });
    let mut client = Client::new(server.address());
    let more = json!({"ignore_eos": true, "max_tokens": 1900, "n": 8, "logprobs": true, "top_logprobs": 20, "stream": true});
    client.request("POST", CHAT, &[], question(more).to_string().as_bytes());
    assert_eq!(client.head().0, 200);
    let gone = (0..6000).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        get(server.address(), "/metrics").body.contains("kvserve:requests{model_name=\"tiny-rag\"} 0.0")
    });
    assert!(gone, "the request holds its place");
    let text = String::from_utf8(client.rest()).unwrap();
    let ends = text.matches("\"finish_reason\":\"length\"").count();
    assert!(ends < 8, "the answer was not longer than what the system keeps for a slow reader");
    assert!(!text.contains("[DONE]") || text.contains("read too slowly"), "a part of an answer looks whole");
    // The next step frees the blocks.
    let freed = (0..2000).any(|_| {
        std::thread::sleep(Duration::from_millis(1));
        let counts = server.with_engine(|engine| engine.report().main.unwrap()).unwrap();
        counts.mutable + counts.shared == 0
    });
    assert!(freed, "the request holds blocks");
    assert_nothing_is_held(&server);
}

/// As many as the process may have at both ends, up to ten thousand. The soak has all of them, with their clients in a
/// process of their own.
#[test]
fn idle_connections_leave_room_for_answers() {
    // A server raises the limit of the process.
    let server = reusing();
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(40_000);
    let many = (usize::try_from(limit).unwrap_or(40_000).saturating_sub(1500) / 2).min(10_000);
    if many == 0 {
        println!("SKIPPED: {limit} open files leave no room for idle connections");
        return;
    }
    let idle: Vec<std::net::TcpStream> =
        (0..many).map(|_| std::net::TcpStream::connect(server.address()).unwrap()).collect();
    let answer = post(server.address(), CHAT, &question(json!({})));
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(idle.len(), many);
    drop(idle);
    assert_eq!(post(server.address(), CHAT, &question(json!({}))).status, 200);
    assert_nothing_is_held(&server);
}
