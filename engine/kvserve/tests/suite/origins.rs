//! Servers without keys and web pages: a page of another site can neither control nor read them.

use kvserve::{ApiKeys, ServerConfig};
use serde_json::json;

use crate::client::{Client, call};
use crate::common::{free_port, server, with};

#[test]
fn pages_of_others_cannot_use_a_server_without_keys() {
    let server = server();
    let foreign = [("origin", "https://example.com")];
    for (method, path) in [
        ("POST", "/reset_prefix_cache"),
        ("POST", "/sleep"),
        ("POST", "/wake_up"),
        ("GET", "/overview"),
        ("GET", "/v1/models"),
        ("DELETE", "/v1/documents/a"),
        ("POST", "/v1/messages"),
    ] {
        let answer = call(server.address(), method, path, &foreign, b"");
        assert_eq!(answer.status, 403, "{path}: {answer:?}");
        assert!(answer.body.contains("https://example.com"), "{answer:?}");
    }
    let awake = call(server.address(), "GET", "/is_sleeping", &[], b"").json();
    assert_eq!(awake["is_sleeping"], false);
    // The server's own page may.
    assert_eq!(
        call(server.address(), "POST", "/reset_prefix_cache", &[("origin", "http://localhost")], b"").status,
        200
    );
    // A name that leads to this machine without being its own.
    let mut client = Client::new(server.address());
    client.send(b"GET /overview HTTP/1.1\r\nhost: rebound.example\r\n\r\n");
    let answer = client.answer();
    assert_eq!((answer.status, &answer.json()["error"]["type"]), (403, &json!("permission_error")));
}

#[test]
fn with_keys_the_key_decides() {
    let mut keys = ApiKeys::default();
    keys.add("key", "operator");
    let server = with(None, ServerConfig { keys: Some(keys), ..free_port() });
    let foreign = ("origin", "https://example.com");
    assert_eq!(
        call(server.address(), "GET", "/v1/models", &[foreign, ("x-api-key", "key")], b"").status,
        200
    );
    assert_eq!(call(server.address(), "GET", "/v1/models", &[foreign], b"").status, 401);
}
