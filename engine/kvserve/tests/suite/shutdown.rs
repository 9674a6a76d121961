//! The end of a server: answers finish, or end with a reason.

use std::thread;
use std::time::Duration;

use kvserve::{Limits, ServedModel, Server, ServerConfig};
use serde_json::json;

use crate::client::{Client, get};
use crate::common::{MODEL, engine, free_port, question, server, with};

const CHAT: &str = "/v1/chat/completions";

/// Starts a streamed answer and reads its first chunks.
fn begun(server: &Server, tokens: usize) -> Client {
    let request = question(json!({"ignore_eos": true, "max_tokens": tokens, "stream": true}));
    let mut client = Client::new(server.address());
    client.request("POST", CHAT, &[], request.to_string().as_bytes());
    assert_eq!(client.head().0, 200);
    client.chunk().unwrap();
    client.chunk().unwrap();
    client
}

/// Reads a stream to its end.
fn rest(client: &mut Client) -> String {
    let mut rest = Vec::new();
    while let Some(chunk) = client.chunk() {
        rest.extend(chunk);
    }
    String::from_utf8(rest).unwrap()
}

#[test]
fn running_answers_finish_and_new_connections_are_refused() {
    let server = server();
    let address = server.address();
    let mut client = begun(&server, 400);
    let ending = thread::spawn(move || server.shut_down());
    let text = rest(&mut client);
    assert!(text.contains("\"finish_reason\":\"length\"") && text.ends_with("data: [DONE]\n\n"), "{text}");
    assert!(client.is_closed(), "the connection ends with the answer");
    ending.join().unwrap();
    assert!(std::net::TcpStream::connect(address).is_err());
}

#[test]
fn answers_that_take_too_long_end_with_a_reason() {
    let limits = Limits { shutdown_time: Duration::from_millis(50), ..Limits::default() };
    let server = with(None, ServerConfig { limits, ..free_port() });
    let mut client = begun(&server, 2000);
    let ending = thread::spawn(move || server.shut_down());
    let text = rest(&mut client);
    assert!(text.contains("the server is shutting down"), "{text}");
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    ending.join().unwrap();
}

#[test]
fn a_dropped_server_ends_at_once() {
    // A server that waited for its answers would wait for hours.
    let limits = Limits { shutdown_time: Duration::from_secs(10_000), ..Limits::default() };
    let server = with(None, ServerConfig { limits, ..free_port() });
    let mut client = begun(&server, 2000);
    drop(server);
    assert!(rest(&mut client).contains("the server is shutting down"));
}

#[test]
fn idle_connections_do_not_delay_the_end() {
    let long = Duration::from_secs(10_000);
    let limits = Limits { shutdown_time: long, receive_time: long, ..Limits::default() };
    let server = with(None, ServerConfig { limits, ..free_port() });
    let mut idle = Client::new(server.address());
    let mut used = Client::new(server.address());
    used.request("GET", "/version", &[], b"");
    assert_eq!(used.answer().status, 200);
    server.shut_down();
    assert!(idle.is_closed() && used.is_closed());
}

#[test]
fn an_address_in_use_and_impossible_limits_are_errors() {
    let server = server();
    let start = |config: ServerConfig, names: Vec<String>| {
        let (engine, codec) = engine();
        Server::start(ServedModel { engine, codec, names, reuse: None }, config).unwrap_err().to_string()
    };
    let names = || vec![MODEL.to_owned()];
    let taken = start(ServerConfig { address: server.address(), ..free_port() }, names());
    assert!(taken.contains("cannot listen on 127.0.0.1") && taken.contains("--port"), "{taken}");
    let none = Limits { requests: 0, ..Limits::default() };
    assert!(
        start(ServerConfig { limits: none, ..free_port() }, names()).contains("the limit on requests is 0")
    );
    assert!(start(free_port(), Vec::new()).contains("no name"));
    assert_eq!(get(server.address(), "/health").status, 200);
}
