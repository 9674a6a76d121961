//! Requests of all dialects, drawn at random, and what is checked of their answers.

use bytes::Bytes;
use rand::RngExt as _;
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom as _, SliceRandom as _};
use serde_json::{Value, json};

use crate::served::MODEL;

/// The system prompt.
pub(crate) const SYSTEM: &str = include_str!("../../../../examples/system.txt");

const NAMES: [&str; 13] =
    ["alba", "bora", "cedo", "dilan", "rumi", "zifu", "diba", "nomi", "sifa", "geke", "moda", "vugu", "gafi"];
const VALUES: [&str; 10] =
    ["red", "blue", "gold", "green", "small", "calm", "tall", "young", "purple", "strong"];

/// The number of different documents.
const DOCUMENTS: usize = 60;

/// A way in which clients write requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    Chat,
    Completions,
    Responses,
    Messages,
    Cohere,
}

impl Dialect {
    pub(crate) const ALL: [Self; 5] =
        [Self::Chat, Self::Completions, Self::Responses, Self::Messages, Self::Cohere];

    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Responses => "/v1/responses",
            Self::Messages => "/v1/messages",
            Self::Cohere => "/v2/chat",
        }
    }

    /// Returns true for the data of the event that ends a stream.
    pub(crate) fn ends_with(self, event: &[u8]) -> bool {
        let has = |mark: &str| String::from_utf8_lossy(event).contains(mark);
        match self {
            Self::Chat | Self::Completions => event == b"[DONE]",
            Self::Responses => has("\"response.completed\"") || has("\"response.incomplete\""),
            Self::Messages => has("\"message_stop\""),
            Self::Cohere => has("\"message-end\"") && !has("\"ERROR\""),
        }
    }

    /// Returns the first text of a whole answer.
    pub(crate) fn text(self, answer: &Value) -> Option<&str> {
        match self {
            Self::Chat => &answer["choices"][0]["message"]["content"],
            Self::Completions => &answer["choices"][0]["text"],
            Self::Responses => &answer["output"][0]["content"][0]["text"],
            Self::Messages => &answer["content"][0]["text"],
            Self::Cohere => &answer["message"]["content"][0]["text"],
        }
        .as_str()
    }
}

/// The properties that an answer must have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Must {
    /// Nothing but its form.
    Answer,
    /// JSON of the schema, unless it was cut.
    Schema,
    /// Calls of tools, unless it was cut.
    Calls,
}

/// A request, and what its answer must be.
#[derive(Debug, Clone)]
pub(crate) struct Drawn {
    pub(crate) kind: &'static str,
    pub(crate) dialect: Dialect,
    pub(crate) body: Value,
    pub(crate) streamed: bool,
    pub(crate) must: Must,
}

/// Returns the text of one of the documents, which is always the same.
pub(crate) fn document(number: usize) -> String {
    let fact = |at: usize| {
        let mixed = (number * 7919 + at * 104_729) / 3;
        format!("{} is {} .", NAMES[mixed % NAMES.len()], VALUES[(mixed / 13) % VALUES.len()])
    };
    let lines = 2 + number % 6;
    let line = |line: usize| (0..5).map(|at| fact(line * 5 + at)).collect::<Vec<_>>().join(" ") + "\n";
    (0..lines).map(line).collect()
}

/// Draws a question.
fn question(rng: &mut StdRng) -> String {
    format!("{} ?", NAMES.choose(rng).unwrap_or(&NAMES[0]))
}

/// Draws a request that must be answered.
pub(crate) fn draw(rng: &mut StdRng) -> Drawn {
    let dialect = *Dialect::ALL.choose(rng).unwrap_or(&Dialect::Chat);
    match rng.random_range(0..10) {
        0..=3 => plain(dialect, rng),
        4..=7 => with_documents(dialect, rng),
        8 => with_schema(dialect, rng),
        _ => with_tools(dialect, rng),
    }
}

/// Returns a request in a dialect: a question behind a system prompt.
pub(crate) fn asked(dialect: Dialect, question: &str, most: usize) -> Value {
    let message = json!({"role": "user", "content": question});
    let system = json!({"role": "system", "content": SYSTEM});
    match dialect {
        Dialect::Chat | Dialect::Cohere => {
            json!({"model": MODEL, "messages": [system, message], "max_tokens": most})
        }
        Dialect::Completions => {
            json!({"model": MODEL, "prompt": format!("{SYSTEM}{question}"), "max_tokens": most})
        }
        Dialect::Responses => {
            json!({"model": MODEL, "instructions": SYSTEM, "input": question, "max_output_tokens": most})
        }
        Dialect::Messages => {
            json!({"model": MODEL, "system": SYSTEM, "messages": [message], "max_tokens": most})
        }
    }
}

/// Adds documents in the given order to a request.
pub(crate) fn add_documents(dialect: Dialect, body: &mut Value, numbers: &[usize]) {
    let given = |&number: &usize| json!({"id": format!("d{number}"), "text": document(number)});
    match dialect {
        Dialect::Chat | Dialect::Completions | Dialect::Responses => {
            body["documents"] = numbers.iter().map(given).collect();
        }
        Dialect::Cohere => {
            let nested =
                |number: &usize| json!({"id": format!("d{number}"), "data": {"text": document(*number)}});
            body["documents"] = numbers.iter().map(nested).collect();
        }
        Dialect::Messages => {
            let block = |number: &usize| {
                let source = json!({"type": "text", "media_type": "text/plain", "data": document(*number)});
                json!({"type": "document", "source": source})
            };
            let question = body["messages"][0]["content"].take();
            let blocks = numbers.iter().map(block).chain([json!({"type": "text", "text": question})]);
            body["messages"][0]["content"] = blocks.collect();
        }
    }
}

fn drawn(kind: &'static str, dialect: Dialect, mut body: Value, must: Must, rng: &mut StdRng) -> Drawn {
    let streamed = rng.random_bool(0.5);
    if streamed {
        body["stream"] = json!(true);
    }
    Drawn { kind, dialect, body, streamed, must }
}

fn plain(dialect: Dialect, rng: &mut StdRng) -> Drawn {
    let most = rng.random_range(1..60);
    let mut body = asked(dialect, &question(rng), most);
    settings(dialect, &mut body, rng);
    let kind = match dialect {
        Dialect::Chat => "chats",
        Dialect::Completions => "completions",
        Dialect::Responses => "responses",
        Dialect::Messages => "messages",
        Dialect::Cohere => "Cohere's chats",
    };
    drawn(kind, dialect, body, Must::Answer, rng)
}

/// Draws settings that a dialect has.
fn settings(dialect: Dialect, body: &mut Value, rng: &mut StdRng) {
    body["temperature"] = json!(*[0.0, 0.7, 1.0].choose(rng).unwrap_or(&0.0));
    if !matches!(dialect, Dialect::Chat | Dialect::Completions) {
        return;
    }
    let mut maybe = |name: &str, value: Value| {
        if rng.random_bool(0.2) {
            body[name] = value;
        }
    };
    maybe("ignore_eos", json!(true));
    maybe("n", json!(2));
    maybe("seed", json!(5));
    maybe("stop", json!(["red", " is"]));
    maybe("frequency_penalty", json!(0.5));
    maybe("logit_bias", json!({"7": -5}));
    maybe("priority", json!(-1));
    maybe("prompt_cache_key", json!("soak"));
    maybe("logprobs", if dialect == Dialect::Chat { json!(true) } else { json!(3) });
    if rng.random_bool(0.3) {
        body["cache_salt"] = json!(format!("salt {}", rng.random_range(0..3)));
    }
}

fn with_documents(dialect: Dialect, rng: &mut StdRng) -> Drawn {
    let mut numbers: Vec<usize> = (0..DOCUMENTS).collect();
    // Some documents are asked for more often than others, and in every order.
    numbers.truncate(if rng.random_bool(0.7) { 8 } else { DOCUMENTS });
    numbers.shuffle(rng);
    numbers.truncate(rng.random_range(1..5));
    let mut body = asked(dialect, &question(rng), rng.random_range(1..30));
    add_documents(dialect, &mut body, &numbers);
    if matches!(dialect, Dialect::Chat | Dialect::Completions) && rng.random_bool(0.3) {
        body["cache_salt"] = json!(format!("salt {}", rng.random_range(0..3)));
    }
    drawn("with documents", dialect, body, Must::Answer, rng)
}

/// Returns a schema of an object with a colour and a small number.
fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}, "coats": {"type": "integer", "minimum": 1, "maximum": 3}},
        "required": ["colour", "coats"],
        "additionalProperties": false,
    })
}

/// Returns true for a value of that schema.
pub(crate) fn fits_schema(value: &Value) -> bool {
    ["red", "blue"].iter().any(|colour| value["colour"] == **colour)
        && value["coats"].as_u64().is_some_and(|coats| (1..=3).contains(&coats))
}

fn with_schema(dialect: Dialect, rng: &mut StdRng) -> Drawn {
    let mut body = asked(dialect, &question(rng), 200);
    let named = json!({"name": "paint", "schema": schema(), "strict": true});
    match dialect {
        Dialect::Chat | Dialect::Completions => {
            body["response_format"] = json!({"type": "json_schema", "json_schema": named});
        }
        Dialect::Responses => {
            body["text"] = json!({"format": {"type": "json_schema", "name": "paint", "schema": schema()}});
        }
        Dialect::Messages => body["output_format"] = json!({"type": "json_schema", "schema": schema()}),
        Dialect::Cohere => body["response_format"] = json!({"type": "json_object", "schema": schema()}),
    }
    drawn("with a schema", dialect, body, Must::Schema, rng)
}

fn with_tools(dialect: Dialect, rng: &mut StdRng) -> Drawn {
    let dialect = if dialect == Dialect::Completions { Dialect::Chat } else { dialect };
    let mut body = asked(dialect, &question(rng), 300);
    let function = json!({"name": "paint", "description": "Paints.", "parameters": schema()});
    let (tools, choice) = match dialect {
        Dialect::Responses => (
            json!([{"type": "function", "name": "paint", "parameters": schema(), "strict": true}]),
            json!("required"),
        ),
        Dialect::Messages => (json!([{"name": "paint", "input_schema": schema()}]), json!({"type": "any"})),
        Dialect::Cohere => (json!([{"type": "function", "function": function}]), json!("REQUIRED")),
        Dialect::Chat | Dialect::Completions => {
            (json!([{"type": "function", "function": function}]), json!("required"))
        }
    };
    body["tools"] = tools;
    let must = if rng.random_bool(0.7) { Must::Calls } else { Must::Answer };
    if must == Must::Calls {
        body["tool_choice"] = choice;
    } else {
        // The model decides, and may write as much as it likes.
        let most = if dialect == Dialect::Responses { "max_output_tokens" } else { "max_tokens" };
        body[most] = json!(20);
    }
    drawn("with tools", dialect, body, must, rng)
}

/// Draws a request that must be refused: its method, path, body and status.
pub(crate) fn malformed(rng: &mut StdRng) -> (&'static str, &'static str, Bytes, u16) {
    let dialect = *Dialect::ALL.choose(rng).unwrap_or(&Dialect::Chat);
    let valid = || asked(dialect, "alba ?", 5);
    let with = |name: &str, value: Value| {
        let mut body = valid();
        body[name] = value;
        Bytes::from(body.to_string())
    };
    let path = dialect.path();
    match rng.random_range(0..10) {
        0 => ("POST", path, Bytes::from_static(b"{"), 400),
        1 => ("POST", path, Bytes::from_static(b"{\"model\": \"\xff\xfe\"}"), 400),
        2 => ("POST", path, with("no_such_field", json!(1)), 400),
        3 => ("POST", path, with("model", json!("no-such-model")), 404),
        4 => ("POST", path, with("temperature", json!("warm")), 400),
        5 => ("POST", path, Bytes::from(asked(dialect, &"alba is red . ".repeat(1000), 5).to_string()), 400),
        6 => ("POST", path, Bytes::from(vec![b' '; (1 << 20) + 1]), 413),
        7 => ("POST", "/v1/no/such/path", Bytes::from_static(b"{}"), 404),
        8 => ("DELETE", path, Bytes::new(), 405),
        _ => ("POST", path, Bytes::from(format!("{}{}", "[".repeat(50_000), "]".repeat(50_000))), 400),
    }
}
