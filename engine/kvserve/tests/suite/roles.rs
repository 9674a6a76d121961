//! The role `developer`, which most chat templates do not know.

use serde_json::{Value, json};

use crate::client::post;
use crate::common::assert_nothing_is_held;
use crate::tooled::with_template;

/// A template like those of Qwen: it writes the roles that it knows, and leaves out the others.
const KNOWN: &str = "{% for m in messages %}{% if m.role == 'system' %} alba is {{ m.content }}{% elif m.role == 'user' %} {{ m.content }}{% endif %}{% endfor %}";

/// A template that knows the role.
const DEVELOPER: &str = "{% for m in messages %}{% if m.role == 'developer' %} {{ m.content }} {{ m.content }}{% else %} {{ m.content }}{% endif %}{% endfor %}";

/// Returns the numbers of prompt tokens with the instructions under some role, in chats and in responses.
fn tokens(template: &str, role: &str) -> [u64; 2] {
    let server = with_template(template);
    let messages = json!([{"role": role, "content": "red red red"}, {"role": "user", "content": "alba ?"}]);
    let of = |path: &str, request: Value, field: &str| {
        let answer = post(server.address(), path, &request);
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()["usage"][field].as_u64().unwrap()
    };
    let counts = [
        of("/v1/chat/completions", json!({"messages": messages, "max_tokens": 1}), "prompt_tokens"),
        of("/v1/responses", json!({"input": messages, "max_output_tokens": 1}), "input_tokens"),
    ];
    assert_nothing_is_held(&server);
    counts
}

#[test]
fn instructions_of_developers_are_the_systems_unless_the_template_knows_them() {
    assert_eq!(tokens(KNOWN, "developer"), tokens(KNOWN, "system"));
    let (developer, system) = (tokens(DEVELOPER, "developer"), tokens(DEVELOPER, "system"));
    assert!(developer[0] > system[0] && developer[1] > system[1], "{developer:?} {system:?}");
}
