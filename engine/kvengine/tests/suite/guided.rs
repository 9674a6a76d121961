//! Answers that match JSON schemas, expressions and grammars, from a model that knows nothing of them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvbackend_cpu::CpuBackend;
use kvengine::{
    AnswerConstraint, AnswerForm, AnswerGuide, Engine, EngineConfig, FinishReason, Generation, NextTokens,
    PromptTokens, Request, Sampling, Scheduling,
};
use kvmodel::{
    AnswerPart, ForcedCalls, Model, ModelConfig, TextCodec, ToolCallFormat, ToolCallParser, WeightFormat,
    Weights,
};
use rstest::rstest;
use serde_json::{Value, json};

use crate::crowd::{Read, answer_all};

/// The end token.
const END: u32 = 300;

/// A tokenizer with a token for each byte, some tokens of several bytes, and an end token.
fn codec() -> TextCodec {
    let printable = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut others = 0x100..;
    let letter = |byte: u32| if printable(byte) { byte } else { others.next().unwrap() };
    let letters: Vec<char> = (0..256).map(letter).map(|c| char::from_u32(c).unwrap()).collect();
    let of = |text: &str| text.bytes().map(|byte| letters[usize::from(byte)]).collect::<String>();
    let words =
        ["{\"", "\":", "\",\"", "true", "fal", "12", "é", "]}", "\": \"", " red", "null,", "name\"", "}}"];
    let tokens = letters.iter().map(char::to_string).chain(words.map(of));
    let vocabulary: serde_json::Map<String, Value> =
        tokens.zip(0..).map(|(token, id)| (token, id.into())).collect();
    let bytes =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
    let end = json!({ "id": END, "content": "<end>", "special": true, "normalized": false, "single_word": false,
        "lstrip": false, "rstrip": false });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [end], "normalizer": null,
        "post_processor": null, "pre_tokenizer": bytes, "decoder": bytes,
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary, "merges": [] },
    });
    TextCodec::from_bytes(tokenizer.to_string().as_bytes(), None).unwrap()
}

fn model(eos: &[u32]) -> Model {
    let config = ModelConfig { vocab_size: 320, eos: eos.to_vec(), ..ModelConfig::benchmark(1, 64).unwrap() };
    Model::new(config, Weights::random(1), WeightFormat::Stored).unwrap()
}

fn engine(blocks: usize) -> Engine {
    let scheduling = Scheduling { watermark: 0, ..Scheduling::default() };
    let mut config =
        EngineConfig { block_size: 4, scheduling, kv_memory: Some(1 << 20), ..EngineConfig::default() };
    let probe = Engine::new(model(&[END]), CpuBackend::new(), b"t", &config).unwrap();
    config.kv_memory = Some((1 << 20) / probe.cache().arena().layout().shape().num_blocks * blocks);
    Engine::new(model(&[END]), CpuBackend::new(), b"t", &config).unwrap()
}

fn guide(eos: &[u32]) -> AnswerGuide {
    AnswerGuide::new(&codec(), model(eos).config()).unwrap()
}

fn compiled(form: &AnswerForm) -> Arc<dyn AnswerConstraint> {
    guide(&[END]).constraint(form).unwrap()
}

fn request(constraint: Option<Arc<dyn AnswerConstraint>>, seed: u64) -> Request {
    let sampling = Sampling { temperature: 1.5, seed, ..Sampling::default() };
    let prompt = (0..7 + seed as u32 % 9).map(|i| 65 + i).collect();
    Request { constraint, sampling, max_new_tokens: 160, ..Request::new(PromptTokens::Plain(prompt)) }
}

fn text(generation: &Generation) -> String {
    codec().decode(&generation.tokens).unwrap()
}

/// Returns true if a value matches a schema of the kinds that these tests use, by the words of JSON Schema.
fn matches(schema: &Value, value: &Value) -> bool {
    let number = |name: &str| schema.get(name).and_then(Value::as_f64);
    if let Some(options) = schema.get("anyOf").and_then(Value::as_array) {
        return options.iter().any(|option| matches(option, value));
    }
    if let Some(options) = schema.get("enum").and_then(Value::as_array) {
        return options.contains(value);
    }
    match schema["type"].as_str() {
        Some("object") => value.as_object().is_some_and(|fields| {
            let required = schema["required"].as_array().into_iter().flatten();
            let known = schema["properties"].as_object().unwrap();
            required.clone().all(|name| fields.contains_key(name.as_str().unwrap()))
                && fields
                    .iter()
                    .all(|(name, field)| known.get(name).is_some_and(|known| matches(known, field)))
        }),
        Some("array") => value.as_array().is_some_and(|items| {
            items.iter().all(|item| matches(&schema["items"], item))
                && number("minItems").is_none_or(|least| items.len() as f64 >= least)
                && number("maxItems").is_none_or(|most| items.len() as f64 <= most)
        }),
        Some("string") => value.as_str().is_some_and(|text| {
            number("maxLength").is_none_or(|most| text.chars().count() as f64 <= most)
                && number("minLength").is_none_or(|least| text.chars().count() as f64 >= least)
        }),
        Some("integer") => value.as_f64().is_some_and(|value| {
            value.fract() == 0.0
                && number("minimum").is_none_or(|least| value >= least)
                && number("maximum").is_none_or(|most| value <= most)
        }),
        Some("boolean") => value.is_boolean(),
        Some("null") => value.is_null(),
        other => panic!("the test does not know {other:?}"),
    }
}

fn schemas() -> Vec<Value> {
    let text = |most: usize| json!({"type": "string", "maxLength": most});
    let object = |fields: Value, required: Value| json!({"type": "object", "properties": fields, "required": required, "additionalProperties": false});
    vec![
        object(
            json!({"name": text(8), "age": {"type": "integer", "minimum": 0, "maximum": 150}}),
            json!(["name", "age"]),
        ),
        json!({"type": "array", "items": {"enum": ["red", "blue", 7, null]}, "minItems": 2, "maxItems": 4}),
        object(json!({"a": {"type": "boolean"}, "é": {"anyOf": [{"type": "null"}, text(3)]}}), json!(["é"])),
        json!({"anyOf": [{"type": "integer", "minimum": -5, "maximum": 5}, {"type": "string", "minLength": 2, "maxLength": 4}]}),
        object(
            json!({"inner": object(json!({"list": {"type": "array", "items": text(2), "maxItems": 3}}), json!(["list"]))}),
            json!(["inner"]),
        ),
    ]
}

#[rstest]
#[case::roomy(4000)]
#[case::preempted(140)]
fn sampled_answers_match_their_schemas_in_every_batch(#[case] blocks: usize) {
    let schemas = schemas();
    let compiled: Vec<_> =
        schemas.iter().map(|schema| compiled(&AnswerForm::JsonSchema(schema.clone()))).collect();
    let requests: Vec<Request> = (0..30)
        .map(|i| {
            let constraint = (i % 6 < 5).then(|| Arc::clone(&compiled[i % 6]));
            Request { samples: 1 + i % 3, ..request(constraint, i as u64) }
        })
        .collect();
    let mut engine = engine(blocks);
    let (last, reads) = answer_all(&mut engine, &requests);
    assert_eq!(last.preemptions > 0, blocks < 1000, "{last:?}");
    let (mut whole, mut cut) = (0, 0);
    for (i, read) in reads.iter().enumerate().filter(|(i, _)| i % 6 < 5) {
        for sample in read.samples() {
            let text = text(&sample);
            if sample.finish == FinishReason::Length {
                cut += 1;
                continue;
            }
            let value: Value =
                serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text:?}: {error}"));
            assert!(matches(&schemas[i % 6], &value), "{text} for {}", schemas[i % 6]);
            whole += 1;
        }
    }
    assert!(whole > 35, "{whole} whole answers, {cut} cut off");
    assert!(engine.check_invariants().is_ok());
}

#[rstest]
#[case::expression(AnswerForm::Regex("(red|blue|é{1,3}) [0-9]{2,4}".to_owned()))]
#[case::grammar(AnswerForm::Lark("start: \"(\" inner \")\" \ninner: /[a-c]{1,3}/ | start".to_owned()))]
fn answers_match_expressions_and_grammars(#[case] form: AnswerForm) {
    let requests: Vec<Request> = (0..20).map(|seed| request(Some(compiled(&form)), seed)).collect();
    let (_, reads) = answer_all(&mut engine(4000), &requests);
    let mut ended = 0;
    for sample in reads.iter().flat_map(Read::samples) {
        let text = text(&sample);
        if sample.finish == FinishReason::Length {
            continue;
        }
        ended += 1;
        if let AnswerForm::Regex(_) = form {
            let (word, digits) = text.split_once(' ').unwrap();
            let count = digits.bytes().filter(u8::is_ascii_digit).count();
            assert!(["red", "blue", "é", "éé", "ééé"].contains(&word), "{text:?}");
            assert!((2..=4).contains(&count) && count == digits.len(), "{text:?}");
        } else {
            let inner = text.trim_start_matches('(').trim_end_matches(')');
            let depth = text.len() - text.trim_start_matches('(').len();
            assert!((1..=3).contains(&inner.len()) && inner.bytes().all(|c| (b'a'..=b'c').contains(&c)));
            assert_eq!(text, format!("{}{inner}{}", "(".repeat(depth), ")".repeat(depth)));
        }
    }
    assert!(ended > 12, "{ended}");
}

#[test]
fn json_objects_are_json_and_may_be_cut() {
    let requests: Vec<Request> =
        (0..8).map(|seed| request(Some(compiled(&AnswerForm::JsonObject)), seed)).collect();
    let (_, reads) = answer_all(&mut engine(4000), &requests);
    for sample in reads.iter().flat_map(Read::samples) {
        let text = text(&sample);
        assert!(text.starts_with('{'), "{text}");
        let parsed = serde_json::from_str::<Value>(&text);
        match sample.finish {
            FinishReason::Length => {
                assert!(parsed.is_ok_and(|v| v.is_object()) || sample.tokens.len() == 160);
            }
            // A number may have more digits than the parser reads.
            _ => assert!(
                parsed.map_or_else(|e| e.to_string().contains("out of range"), |v| v.is_object()),
                "{text}"
            ),
        }
    }
}

#[test]
fn a_model_without_end_tokens_ends_where_nothing_may_follow() {
    let constraint = guide(&[]).constraint(&AnswerForm::Regex("[ab]{3}".to_owned())).unwrap();
    let config = EngineConfig::default();
    let mut engine = Engine::new(model(&[]), CpuBackend::new(), b"t", &config).unwrap();
    let answer = engine.generate(&request(Some(constraint), 1), &mut ()).unwrap();
    assert_eq!((text(&answer).len(), answer.finish), (3, FinishReason::Stop));
}

#[rstest]
#[case(AnswerForm::Regex("a(b".to_owned()), "")]
#[case(AnswerForm::Regex("(".repeat(100_000) + "a" + &")".repeat(100_000)), "maximum number of nested parentheses")]
#[case(AnswerForm::Lark(format!("start: {}\"a\"{}", "(".repeat(300), ")".repeat(300))), "too deeply nested")]
#[case(AnswerForm::Regex("a".repeat(2 << 20)), "the limit is 1048576")]
#[case(AnswerForm::Lark("start: nothing".to_owned()), "nothing")]
#[case(AnswerForm::JsonSchema(json!({"type": "string", "enum": []})), "nsatisfiable")]
#[case(AnswerForm::JsonSchema(json!({"allOf": [{"type": "string"}, {"type": "integer"}]})), "nsatisfiable")]
#[case(AnswerForm::JsonSchema(json!({"type": "integer", "minimum": 5, "maximum": 4})), "")]
#[case(AnswerForm::JsonSchema(json!({"$ref": "#/$defs/missing"})), "missing")]
#[case(AnswerForm::JsonSchema(json!({"$ref": "https://example.org/schema"})), "")]
#[case(AnswerForm::JsonSchema(json!([1, 2])), "a JSON object")]
#[case(AnswerForm::JsonSchema(json!({"type": "colour"})), "colour")]
#[case(AnswerForm::JsonSchema(json!({"not": {"type": "null"}})), "not")]
fn forms_that_no_answer_can_have_are_refused_with_a_reason(#[case] form: AnswerForm, #[case] words: &str) {
    let error = guide(&[END]).constraint(&form).unwrap_err().to_string();
    assert!(error.starts_with("the constraint on the answer: ") && error.contains(words), "{error}");
    assert!(error.len() < 900 && !error.contains("<state>"), "{error}");
}

#[test]
fn an_answer_that_the_vocabulary_cannot_spell_ends_with_an_error() {
    let bytes =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "post_processor": null, "pre_tokenizer": bytes, "decoder": bytes,
        "model": { "type": "BPE", "vocab": {"a": 0, "b": 1, "ba": 3}, "merges": [] },
    });
    let codec = TextCodec::from_bytes(tokenizer.to_string().as_bytes(), None).unwrap();
    let guide = AnswerGuide::new(&codec, model(&[7]).config()).unwrap();
    let constraint = guide.constraint(&AnswerForm::Regex("a(ba)?c?d|b".to_owned())).unwrap();
    let mut state = constraint.start().unwrap();
    let tokens = |next: NextTokens| match next {
        NextTokens::OneOf(mask) => mask.tokens().collect::<Vec<_>>(),
        NextTokens::Complete => vec![],
    };
    assert_eq!(tokens(state.next().unwrap()), [0, 1]);
    let mut other = state.fork();
    state.accept(0).unwrap();
    assert_eq!(tokens(state.next().unwrap()), [1, 3]);
    state.accept(3).unwrap();
    let error = state.next().unwrap_err().to_string();
    assert!(error.contains("no token of this model continues the answer"), "{error}");
    other.accept(1).unwrap();
    assert_eq!(other.next().unwrap(), NextTokens::Complete, "the end alone may follow");
}

#[rstest]
fn forced_answers_are_calls_of_the_tools_and_nothing_else(
    #[values(
        ToolCallFormat::Tagged,
        ToolCallFormat::Mistral,
        ToolCallFormat::DeepSeek,
        ToolCallFormat::Json
    )]
    format: ToolCallFormat,
    #[values(None, Some("paint"))] only: Option<&str>,
    #[values(false, true)] several: bool,
) {
    let colour = json!({"enum": ["red", "blue"]});
    let paint = json!({
        "type": "object", "properties": {"colour": {"$ref": "#/$defs/colour"}, "coats": {"type": "integer", "minimum": 1, "maximum": 3}},
        "required": ["colour", "coats"], "additionalProperties": false, "$defs": {"colour": colour},
    });
    let tools = [
        json!({"type": "function", "function": {"name": "paint", "description": "Paints.", "parameters": paint}}),
        json!({"name": "wait"}),
        json!({"type": "function", "function": {"name": "measure", "parameters": {
            "type": "object", "properties": {"again": {"$ref": "#"}}, "additionalProperties": false }}}),
    ];
    let forced = ForcedCalls::new(format, &tools, only, several).unwrap();
    let constraint = compiled(&AnswerForm::Lark(forced.grammar.clone()));
    let requests: Vec<Request> = (0..12)
        .map(|seed| Request { max_new_tokens: 400, ..request(Some(Arc::clone(&constraint)), seed) })
        .collect();
    let (_, reads) = answer_all(&mut engine(4000), &requests);
    let (mut ended, mut calls) = (0, 0);
    for sample in reads.iter().flat_map(Read::samples) {
        if sample.finish == FinishReason::Length {
            continue;
        }
        ended += 1;
        let text = text(&sample);
        let mut parser = ToolCallParser::new(forced.format);
        let mut parts = parser.push(&text);
        parts.extend(parser.finish());
        assert!(!parts.is_empty() && (several || parts.len() == 1), "{text}");
        for part in parts {
            let AnswerPart::Call(call) = part else { panic!("{part:?} in {text}") };
            let arguments: Value = serde_json::from_str(&call.arguments).unwrap();
            assert!(only.is_none_or(|only| only == call.name), "{text}");
            match call.name.as_str() {
                "paint" => {
                    assert!(["red", "blue"].contains(&arguments["colour"].as_str().unwrap()), "{text}");
                    assert!((1..=3).contains(&arguments["coats"].as_i64().unwrap()), "{text}");
                }
                "wait" => assert!(arguments.is_object()),
                name => assert_eq!(name, "measure"),
            }
            calls += 1;
        }
    }
    assert!(ended > 5 && calls >= ended, "{ended} ended, {calls} calls");
}

#[test]
fn tools_that_cannot_be_forced_are_refused() {
    let refused = |tools: &[Value], only: Option<&str>| {
        ForcedCalls::new(ToolCallFormat::Tagged, tools, only, true).unwrap_err().to_string()
    };
    assert!(refused(&[], None).contains("no tools"));
    assert!(refused(&[json!({"name": "a"})], Some("b")).contains("no tool named \"b\""));
    assert!(refused(&[json!({"name": "a"}), json!({"function": {}})], None).contains("tool 2 has no name"));
    assert!(refused(&[json!({"name": "a", "parameters": []})], None).contains("no JSON schema"));
    // A name with signs of JSON and of the grammar stays a name.
    let odd = json!({"name": "a\"/}\n%json"});
    let forced = ForcedCalls::new(ToolCallFormat::Tagged, &[odd], None, false).unwrap();
    let mut state = compiled(&AnswerForm::Lark(forced.grammar)).start().unwrap();
    assert!(matches!(state.next().unwrap(), NextTokens::OneOf(_)));
}

#[test]
fn deep_forms_are_compiled() {
    let nested = (0..45).fold(json!({"type": "null"}), |inner, _| json!({"type": "array", "items": inner}));
    let forms = [
        AnswerForm::Lark(format!("start: {}\"a\"{}", "(".repeat(25), ")".repeat(25))),
        AnswerForm::Lark(format!("start: %json {{\"enum\": [\"{}\"]}}", ":( ".repeat(200))),
        AnswerForm::Regex("(".repeat(200) + "a" + &")".repeat(200)),
        AnswerForm::JsonSchema(json!({"type": "object", "properties": {"a": nested}})),
        AnswerForm::JsonSchema(json!({"enum": [":(".repeat(300)]})),
    ];
    for form in forms {
        let mut state = compiled(&form).start().unwrap();
        assert!(matches!(state.next().unwrap(), NextTokens::OneOf(_)));
    }
}

/// Nested, repeated, wide and self-referring forms.
#[test]
fn hostile_forms_are_refused_or_compiled_within_bounds() {
    let nested = |depth: usize| {
        (0..depth).fold(json!({"type": "string"}), |inner, _| {
            Value::Object(
                [("type".to_owned(), json!("array")), ("items".to_owned(), inner)].into_iter().collect(),
            )
        })
    };
    let doubling: Value = (0..40)
        .map(|i| {
            let next = format!("#/$defs/d{}", i + 1);
            (format!("d{i}"), json!({"type": "array", "items": {"anyOf": [{"$ref": next}, {"$ref": next}]}}))
        })
        .chain([("d40".to_owned(), json!({"type": "null"}))])
        .collect::<serde_json::Map<String, Value>>()
        .into();
    let many: Vec<String> = (0..30_000).map(|i| format!("option {}", i * i)).collect();
    let forms = [
        ("nested", AnswerForm::JsonSchema(nested(45))),
        ("deeply nested", AnswerForm::JsonSchema(nested(20_000))),
        ("doubling", AnswerForm::JsonSchema(json!({"$ref": "#/$defs/d0", "$defs": doubling}))),
        ("many options", AnswerForm::JsonSchema(json!({"enum": many}))),
        (
            "repeated",
            AnswerForm::JsonSchema(json!({"type": "string", "pattern": "^(a{1,900}b{1,900}){1,900}$"})),
        ),
        (
            "long",
            AnswerForm::JsonSchema(json!({"type": "string", "minLength": 900_000, "maxLength": 1_000_000})),
        ),
        ("itself", AnswerForm::JsonSchema(json!({"$ref": "#"}))),
        ("ambiguous", AnswerForm::Regex("(a|aa)*(a|aa)*(a|aa)*b".to_owned())),
        ("cubed", AnswerForm::Regex("((a{1,50}){1,50}){1,50}".to_owned())),
        ("left-recursive", AnswerForm::Lark("start: start start | \"a\"".to_owned())),
    ];
    let guide = guide(&[END]);
    for (what, form) in &forms {
        let begun = Instant::now();
        let constraint = guide.constraint(form);
        assert!(*what != "deeply nested" || constraint.is_err());
        if let Ok(constraint) = constraint {
            let next = constraint.start().unwrap().next();
            assert!(next.is_ok() || next.is_err_and(|error| !error.to_string().is_empty()), "{what}");
        }
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?} for {what}", begun.elapsed());
        eprintln!("{:?} for {what}", begun.elapsed());
    }
    // Freeing a nested value calls itself for each level.
    std::mem::forget(forms);
}

/// Returns a schema that refers to a part of itself, which refers to the next one, and so on.
fn chain(links: usize, link: impl Fn(Value) -> Value) -> Value {
    let parts: serde_json::Map<String, Value> = (0..links)
        .map(|i| (format!("a{i}"), link(json!({"$ref": format!("#/$defs/a{}", i + 1)}))))
        .chain([(format!("a{links}"), json!({"type": "null"}))])
        .collect();
    json!({"$ref": "#/$defs/a0", "$defs": parts})
}

#[rstest]
#[case::bare(|next| next)]
#[case::all(|next| json!({"allOf": [next]}))]
#[case::any(|next| json!({"anyOf": [next, {"type": "null"}]}))]
#[case::one(|next| json!({"oneOf": [{"type": "string"}, next]}))]
#[case::items(|next| json!({"type": "array", "items": next}))]
#[case::first(|next| json!({"type": "array", "prefixItems": [next]}))]
#[case::property(|next| json!({"type": "object", "properties": {"a": next}, "required": ["a"]}))]
#[case::more(|next| json!({"type": "object", "additionalProperties": next}))]
#[case::pattern(|next| json!({"type": "object", "patternProperties": {"^a$": next}}))]
fn a_chain_of_references_is_refused_or_has_enough_stack(#[case] link: fn(Value) -> Value) {
    let guide = guide(&[END]);
    let error = guide.constraint(&AnswerForm::JsonSchema(chain(20_000, link))).unwrap_err();
    assert!(error.to_string().contains("use fewer references"), "{error}");
    // The longest chain that is compiled.
    let compiles = |links: usize| match guide.constraint(&AnswerForm::JsonSchema(chain(links, link))) {
        Err(error) => !error.to_string().contains("use fewer references"),
        Ok(_) => true,
    };
    let is_small = |links: &usize| AnswerForm::check_schema(&chain(*links, link)).is_ok();
    let longest = (0..4001).step_by(50).rev().find(is_small);
    assert!(longest.is_some_and(|links| links > 500 && compiles(links)), "{longest:?}");
}
