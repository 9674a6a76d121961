//! Chat templates: published ones with parts exchanged, and programs made of random statements.

use std::sync::LazyLock;

use kvmodel::{Message, TextCodec, Variable};
use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use serde_json::{Value, json};

use crate::tokenizers::{WORDS, spoiled};
use crate::{Note, Outcome};

/// Published templates, and conversations for them.
static GOLDENS: LazyLock<Value> = LazyLock::new(|| {
    let text = include_str!("../../../../engine/kvmodel/tests/goldens/chat_templates.json");
    serde_json::from_str(text).unwrap_or_default()
});

/// Expressions with known values.
static EXPRESSIONS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let text = include_str!("../../../../engine/kvmodel/tests/goldens/jinja_expressions.json");
    let goldens: Value = serde_json::from_str(text).unwrap_or_default();
    let list = goldens["expressions"].as_array().cloned().unwrap_or_default();
    list.iter().filter_map(|entry| entry["expression"].as_str().map(str::to_owned)).collect()
});

const ATOMS: [&str; 22] = [
    "x",
    "ns.x",
    "messages",
    "messages[0]",
    "messages[0].content",
    "tools",
    "1",
    "0",
    "-1",
    "1e308",
    "9999999999999999999",
    "'a'",
    "''",
    "[]",
    "[1,2]",
    "{}",
    "{'a': 1}",
    "none",
    "true",
    "undefined",
    "loop.index",
    "range(9)",
];
const FILTERS: [&str; 39] = [
    "safe",
    "e",
    "title",
    "select",
    "first | first",
    "int(base=0)",
    "truncate(9)",
    "max",
    "length",
    "first",
    "last",
    "upper",
    "trim",
    "tojson",
    "tojson(indent=4)",
    "join(',')",
    "list",
    "reverse",
    "sort",
    "map('upper')",
    "map(attribute='content')",
    "selectattr('role')",
    "string",
    "int",
    "float",
    "replace('a', 'bb')",
    "items",
    "dictsort",
    "unique",
    "batch(2)",
    "slice(3)",
    "indent(4)",
    "center(99)",
    "format(1)",
    "wordcount",
    "urlencode",
    "groupby('role')",
    "default('d')",
    "round(2)",
];
const OPERATORS: [&str; 16] =
    ["+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "and", "or", "in", "not in", "is", "if x else"];
const CALLS: [&str; 19] = [
    ".keys()",
    ".values()",
    ".casefold()",
    ".title()",
    ".isdigit()",
    ".split()",
    ".strip()",
    ".upper()",
    ".replace('a','b')",
    ".items()",
    ".append(x)",
    ".format(1)",
    ".join(messages)",
    "[0]",
    "[1:]",
    "[::-1]",
    ".content",
    ".zfill(99)",
    ".ljust(1000)",
];

fn expression(rng: &mut StdRng, depth: usize) -> String {
    if depth == 0 {
        return (*ATOMS.choose(rng).unwrap_or(&"x")).to_owned();
    }
    let inner = expression(rng, depth - 1);
    match rng.random_range(0..9) {
        0 => format!("({inner})"),
        1 | 2 => format!("{inner}|{}", FILTERS.choose(rng).unwrap_or(&"list")),
        3 | 4 => {
            let other = expression(rng, depth - 1);
            format!("({inner} {} {other})", OPERATORS.choose(rng).unwrap_or(&"+"))
        }
        5 => format!("({inner}){}", CALLS.choose(rng).unwrap_or(&"[0]")),
        6 => format!("[{inner}, {inner}]"),
        7 => format!("{{'k': {inner}}}"),
        _ => EXPRESSIONS.choose(rng).cloned().unwrap_or(inner),
    }
}

fn statements(rng: &mut StdRng, depth: usize) -> String {
    let mut text = String::new();
    for _ in 0..rng.random_range(1..4) {
        let inside = if depth == 0 { "t".to_owned() } else { statements(rng, depth - 1) };
        let size = rng.random_range(0..4);
        let value = expression(rng, size);
        let statement = match rng.random_range(0..12) {
            0 => format!("{{% set x = {value} %}}"),
            1 => format!("{{% set ns.x = {value} %}}"),
            2 => format!("{{% set ns = namespace(x={value}) %}}"),
            3 => format!("{{% for m in {value} %}}{inside}{{% endfor %}}"),
            4 => format!("{{% for m in messages recursive %}}{inside}{{{{ loop(messages) }}}}{{% endfor %}}"),
            5 => format!("{{% if {value} %}}{inside}{{% else %}}{inside}{{% endif %}}"),
            6 => format!("{{% macro f(x) %}}{inside}{{{{ f(x) }}}}{{% endmacro %}}{{{{ f({value}) }}}}"),
            7 => format!("{{% set x %}}{inside}{{% endset %}}"),
            8 => format!("{{% filter upper %}}{inside}{{% endfilter %}}"),
            9 => format!(
                "{{% macro g(x) %}}{{{{ caller(x) }}}}{{{{ varargs }}}}{{% endmacro %}}{{% call(y) g({value}, 1) %}}{inside}{{% endcall %}}"
            ),
            10 => "{% set ns.x = [ns.x] | map('first') %}{{ ns.x | list }}".to_owned(),
            _ => format!("{{{{ {value} }}}}"),
        };
        text.push_str(&statement);
    }
    text
}

/// Returns a template of up to about the largest size: several published ones, with statements between them, or one
/// statement around many.
fn long(rng: &mut StdRng) -> String {
    /// A little more than the largest size of a template, in bytes.
    const LARGEST: usize = 132 << 10;
    let most = rng.random_range(1..LARGEST);
    let list = GOLDENS["templates"].as_array().cloned().unwrap_or_default();
    let mut text = String::new();
    while text.len() < most {
        let depth = rng.random_range(0..3);
        match list.choose(rng).and_then(|entry| entry["template"].as_str()) {
            Some(published) if rng.random_bool(0.5) => text.push_str(published),
            _ => text.push_str(&statements(rng, depth)),
        }
    }
    match rng.random_range(0..4) {
        0 => format!(
            "{{% macro g() %}}{text}{{% endmacro %}}{{% for i in range(99) %}}{{{{ g() }}}}{{% endfor %}}"
        ),
        1 => format!("{{% for i in range(99) %}}{{% macro g() %}}{text}{{% endmacro %}}{{% endfor %}}"),
        2 => format!("{{% set x %}}{text}{{% endset %}}{{{{ x | upper | reverse | replace('', x) }}}}"),
        _ => text,
    }
}

fn template(rng: &mut StdRng) -> String {
    let published = GOLDENS["templates"].as_array().and_then(|list| list.choose(rng));
    let published = published.and_then(|entry| entry["template"].as_str()).unwrap_or_default();
    match rng.random_range(0..4) {
        3 => long(rng),
        0 => String::from_utf8_lossy(&spoiled(rng, published.as_bytes())).into_owned(),
        1 => {
            let cuts: Vec<usize> = published.char_indices().map(|(at, _)| at).collect();
            let (before, after) = published.split_at(cuts.choose(rng).copied().unwrap_or(0));
            let depth = rng.random_range(0..3);
            format!("{before}{}{after}", statements(rng, depth))
        }
        _ => {
            let depth = rng.random_range(0..4);
            statements(rng, depth)
        }
    }
}

/// Renders a template for a conversation, with tools and other variables.
pub(crate) fn case(rng: &mut StdRng, note: &Note) -> Outcome {
    let source = template(rng);
    note.write(source.as_bytes());
    let config = json!({ "bos_token": "<s>", "eos_token": "</s>", "chat_template": source }).to_string();
    let Ok(codec) = TextCodec::from_bytes(WORDS.as_bytes(), Some(config.as_bytes())) else { return Ok(()) };
    let conversations = GOLDENS["conversations"].as_array();
    let conversation = conversations.and_then(|list| list.choose(rng)).cloned().unwrap_or_default();
    let messages = Message::list(&conversation.to_string()).map_err(|error| format!("messages: {error}"))?;
    let tools = Variable::from_json(
        r#"[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]"#,
    )
    .map_err(|error| error.to_string())?;
    let codec = codec
        .with_variables([("tools".to_owned(), tools), ("x".to_owned(), Variable::Text("a b".to_owned()))])
        .map_err(|error| error.to_string())?;
    // A template may be wrong, and must then be refused with an error.
    let _ = codec.conversation(&messages);
    Ok(())
}
