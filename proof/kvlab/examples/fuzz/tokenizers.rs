//! Tokenizers: real files with bytes changed, cut off or repeated, and with values of JSON exchanged. They encode
//! and decode texts, and stream random tokens.

use kvmodel::{TextCodec, TextStream};
use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use serde_json::{Value, json};

use crate::{Note, Outcome};

/// A tokenizer with whole words as tokens.
pub(crate) const WORDS: &str = include_str!("../../../../engine/kvmodel/tests/words.json");
/// The built-in model's tokenizer, with merges of bytes.
const BYTES: &str = include_str!("../../../../models/tiny-rag/tokenizer.json");

const TEXTS: [&str; 6] =
    ["", "a b c", "who owns the garden ?", "  \n\t e\u{301}\u{FFFD}💬 ", "<|end|><s>", "\u{0}\u{7f}\u{2028}"];

/// Returns a text with a few changes of bytes: other bits, parts removed, repeated or exchanged.
pub(crate) fn spoiled(rng: &mut StdRng, text: &[u8]) -> Vec<u8> {
    let mut bytes = text.to_vec();
    for _ in 0..rng.random_range(1..6) {
        if bytes.is_empty() {
            break;
        }
        let (from, len) = (rng.random_range(0..bytes.len()), rng.random_range(1..40));
        let part = from..(from + len).min(bytes.len());
        match rng.random_range(0..6) {
            0 => bytes[from] ^= 1 << rng.random_range(0..8),
            1 => bytes[from] = *b"{}[]\",:0-9e\\".choose(rng).unwrap_or(&b'0'),
            2 => drop(bytes.drain(part)),
            3 => {
                let copy = bytes[part.clone()].to_vec();
                let copies = rng.random_range(1..200);
                bytes.splice(part, copy.repeat(copies));
            }
            4 if rng.random_bool(0.2) => bytes.truncate(from),
            _ => {
                let at = rng.random_range(0..bytes.len());
                let copy = bytes[part].to_vec();
                bytes.splice(at..at, copy);
            }
        }
    }
    bytes
}

/// Returns the number of values in a JSON value.
fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(count).sum::<usize>(),
        Value::Object(fields) => fields.values().map(count).sum(),
        _ => 0,
    }
}

/// Returns the `n`-th value in a JSON value, counted from the outside.
fn nth<'a>(value: &'a mut Value, n: &mut usize) -> Option<&'a mut Value> {
    if *n == 0 {
        return Some(value);
    }
    *n -= 1;
    match value {
        Value::Array(items) => items.iter_mut().find_map(|item| nth(item, n)),
        Value::Object(fields) => fields.values_mut().find_map(|field| nth(field, n)),
        _ => None,
    }
}

/// Other kinds of models, normalizers and pre-tokenizers, and values that no field expects.
fn odd(rng: &mut StdRng) -> Value {
    let values = [
        json!(null),
        json!(-1),
        json!(u64::MAX),
        json!(1e300),
        json!(""),
        json!("a"),
        json!([]),
        json!({}),
        json!(true),
        json!({ "type": "Unigram", "vocab": [["a", 0.0], ["b", -1e308]], "unk_id": 9, "byte_fallback": true }),
        json!({ "type": "WordPiece", "vocab": { "a": 0 }, "unk_token": "?", "continuing_subword_prefix": "##", "max_input_chars_per_word": 0 }),
        json!({ "type": "BPE", "vocab": { "a": 0, "b": 7 }, "merges": [["a", "b"]], "unk_token": "z", "fuse_unk": true, "byte_fallback": true }),
        json!({ "type": "Split", "pattern": { "Regex": "(a+)+$" }, "behavior": "Removed", "invert": true }),
        json!({ "type": "Split", "pattern": { "Regex": "[" }, "behavior": "Isolated", "invert": false }),
        json!({ "type": "FixedLength", "length": 0 }),
        json!({ "type": "Precompiled", "precompiled_charsmap": "AAAA" }),
        json!({ "type": "Replace", "pattern": { "String": "" }, "content": "xx" }),
        json!({ "type": "Replace", "pattern": { "Regex": "" }, "content": "y" }),
        json!({ "type": "Prepend", "prepend": "" }),
        json!({ "type": "Sequence", "normalizers": [], "pretokenizers": [], "decoders": [], "processors": [] }),
        json!({ "type": "NFKC" }),
        json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true }),
        json!({ "type": "Strip", "content": "", "start": u64::MAX, "stop": 3, "strip_left": true, "strip_right": false }),
        json!({ "type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": true }),
        json!({ "type": "TemplateProcessing", "single": [{ "SpecialToken": { "id": "z", "type_id": 0 } }], "pair": [], "special_tokens": {} }),
        json!([{ "id": 4_000_000_000_u32, "content": "", "special": true, "single_word": true, "lstrip": true, "rstrip": true, "normalized": true }]),
    ];
    values.choose(rng).cloned().unwrap_or_default()
}

fn tokenizer(rng: &mut StdRng) -> Vec<u8> {
    let base = *[WORDS, BYTES].choose(rng).unwrap_or(&WORDS);
    if rng.random_bool(0.4) {
        return spoiled(rng, base.as_bytes());
    }
    let mut file: Value = serde_json::from_str(base).unwrap_or_default();
    for _ in 0..rng.random_range(1..4) {
        // Most values are entries of the vocabulary, so fields near the outside are drawn more often.
        let most = if rng.random_bool(0.8) { 60 } else { count(&file) };
        let mut n = rng.random_range(1..most.max(2));
        let value = odd(rng);
        if let Some(place) = nth(&mut file, &mut n) {
            *place = value;
        }
    }
    let parts = ["model", "normalizer", "pre_tokenizer", "decoder", "post_processor", "added_tokens"];
    if rng.random_bool(0.5) {
        file[*parts.choose(rng).unwrap_or(&"model")] = odd(rng);
    }
    file.to_string().into_bytes()
}

/// Loads a tokenizer, and encodes and decodes texts.
pub(crate) fn case(rng: &mut StdRng, note: &Note) -> Outcome {
    let file = tokenizer(rng);
    note.write(&file);
    let Ok(codec) = TextCodec::from_bytes(&file, None) else { return Ok(()) };
    let random =
        serde_json::from_slice::<Value>(&file).is_ok_and(|file| file["model"]["dropout"].is_number());
    for text in TEXTS {
        for special in [false, true] {
            // A tokenizer may refuse a text. A panic of the library is an error as well.
            let Ok(tokens) = codec.encode(text, special) else { continue };
            let _ = codec.decode(&tokens);
            // The same text has the same tokens, unless `dropout` chooses at random.
            let again = codec.encode(text, special).map_err(|error| error.to_string())?;
            if again != tokens && !random {
                return Err(format!("{text:?} has the tokens {tokens:?}, then {again:?}"));
            }
        }
    }
    let _ = codec.decode(&[0, 1, u32::MAX]);
    (0..4).try_for_each(|_| stream(rng, &codec))
}

/// Streams random tokens, up to a stop string in half of the cases. The pieces must be the whole text up to the stop
/// string, and a text that can be decoded at once can be streamed.
fn stream(rng: &mut StdRng, codec: &TextCodec) -> Outcome {
    let vocabulary = rng.random_range(1..700);
    let tokens: Vec<u32> = (0..rng.random_range(0..60)).map(|_| rng.random_range(0..vocabulary)).collect();
    let Ok(whole) = codec.decode(&tokens) else { return Ok(()) };
    let characters: Vec<char> = whole.chars().collect();
    let stop: Vec<String> = if characters.is_empty() || rng.random_bool(0.5) {
        Vec::new()
    } else {
        let start = rng.random_range(0..characters.len());
        vec![characters[start..].iter().take(rng.random_range(1..5)).collect()]
    };
    let failed = |error: kvmodel::Error| format!("{tokens:?} up to {stop:?}: {error}");
    let mut stream = TextStream::new(codec, stop.iter().cloned()).map_err(failed)?;
    let mut pieces = String::new();
    for &token in &tokens {
        pieces += stream.push(token).map_err(failed)?;
    }
    pieces += stream.rest().map_err(failed)?;
    let stopped = stream.is_stopped();
    let text = stream.finish().map_err(failed)?;
    let expected = stop.first().and_then(|stop| whole.find(stop.as_str())).map_or(&*whole, |at| &whole[..at]);
    if pieces != expected || text != pieces || stopped == stop.is_empty() {
        return Err(format!(
            "{tokens:?} up to {stop:?}: pieces {pieces:?}, text {text:?}, expected {expected:?}"
        ));
    }
    Ok(())
}
