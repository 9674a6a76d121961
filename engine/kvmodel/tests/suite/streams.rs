//! Text streams: the pieces of an answer add up to its text, every stop string is found, and a token costs the
//! same however long the answer is. Compared with decoding the whole answer at once.

use kvmodel::{TextCodec, TextStream};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use rstest::rstest;
use serde_json::{Value, json};

/// Tokens of all kinds of vocabularies: byte tokens, halves of characters, words with the marks of several
/// tokenizers for spaces and ends of words, and words that clean-up changes.
const TOKENS: [&str; 34] = [
    "<s>", "<0x0A>", "<0x41>", "<0xC3>", "<0xA9>", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "<0xFF>", "▁",
    "▁▁", "▁stop", "▁x", "stop", "st", "op", "a", "b", "é", "Ã", "©", "ðŁĺ", "Ģ", "ÿ", "Ġa", ".", ",",
    "##ing", "n't", "'s", "do not", "a</w>", "|",
];

/// The decoder of Llama's and Mistral's tokenizers.
fn byte_fallback() -> Value {
    json!({ "type": "Sequence", "decoders": [
        { "type": "Replace", "pattern": { "String": "▁" }, "content": " " }, { "type": "ByteFallback" },
        { "type": "Fuse" }, { "type": "Strip", "content": " ", "start": 1, "stop": 0 } ] })
}

fn byte_level() -> Value {
    json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false })
}

fn codec(decoder: &Value) -> TextCodec {
    let vocabulary: serde_json::Map<String, Value> =
        TOKENS.iter().zip(0..).map(|(token, id)| ((*token).to_owned(), id.into())).collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [{ "id": 0, "content": "<s>", "special": true, "normalized": false, "single_word": false,
            "lstrip": false, "rstrip": false }],
        "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": decoder,
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocabulary, "merges": [] },
    });
    TextCodec::from_bytes(tokenizer.to_string().as_bytes(), None).unwrap()
}

/// Returns the IDs of tokens.
fn ids(tokens: &[&str]) -> Vec<u32> {
    tokens.iter().map(|token| TOKENS.iter().position(|known| known == token).unwrap() as u32).collect()
}

/// Streams tokens up to a stop string. Returns the text, and true if the stream stopped. Checks that the pieces
/// are this text.
fn streamed(codec: &TextCodec, tokens: &[u32], stop: &[String]) -> (String, bool) {
    let mut stream = TextStream::new(codec, stop.iter().cloned()).unwrap();
    let mut pieces = String::new();
    for &token in tokens {
        pieces += stream.push(token).unwrap();
    }
    pieces += stream.rest().unwrap();
    let stopped = stream.is_stopped();
    assert_eq!(stream.finish().unwrap(), pieces, "{tokens:?} up to {stop:?}");
    (pieces, stopped)
}

/// Returns the text before the stop string that ends first, and true if there is one.
fn cut<'a>(text: &'a str, stop: &[String]) -> (&'a str, bool) {
    let ends = stop.iter().filter_map(|stop| text.find(stop.as_str()).map(|at| (at + stop.len(), at)));
    ends.min().map_or((text, false), |(_, at)| (&text[..at], true))
}

/// Returns a random part of a text, of one to six characters.
fn part(text: &str, rng: &mut StdRng) -> String {
    let characters: Vec<char> = text.chars().collect();
    let start = rng.random_range(0..characters.len());
    characters[start..].iter().take(rng.random_range(1..7)).collect()
}

#[rstest]
#[case::byte_fallback(byte_fallback())]
#[case::byte_fallback_without_strip(json!({ "type": "Sequence", "decoders": [
    { "type": "Replace", "pattern": { "String": "▁" }, "content": " " }, { "type": "ByteFallback" },
    { "type": "Fuse" } ] }))]
#[case::byte_level(byte_level())]
#[case::byte_level_behind_a_step(json!({ "type": "Sequence", "decoders": [
    { "type": "Replace", "pattern": { "String": "▁" }, "content": "Ġ" }, byte_level(),
    { "type": "Strip", "content": " ", "start": 2, "stop": 0 } ] }))]
#[case::clean_up(json!({ "type": "WordPiece", "prefix": "##", "cleanup": true }))]
#[case::metaspace(json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true }))]
#[case::ends_of_words(json!({ "type": "BPEDecoder", "suffix": "</w>" }))]
#[case::repeated_tokens(json!({ "type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": true }))]
#[case::replaced_after_joining(json!({ "type": "Sequence", "decoders": [ { "type": "Fuse" },
    { "type": "Replace", "pattern": { "String": "stop" }, "content": "" } ] }))]
#[case::none(Value::Null)]
fn the_pieces_are_the_whole_text_up_to_the_first_stop_string(#[case] decoder: Value) {
    let codec = codec(&decoder);
    let mut rng = StdRng::seed_from_u64(5);
    let all: Vec<u32> = (0..TOKENS.len() as u32).collect();
    let mut stops = 0;
    for _ in 0..1500 {
        // A few tokens make repetitions and long runs likely.
        let few: Vec<u32> = all.sample(&mut rng, 5).copied().collect();
        let from = if rng.random_bool(0.5) { &few } else { &all };
        let tokens: Vec<u32> =
            (0..rng.random_range(1..40)).map(|_| *from.choose(&mut rng).unwrap()).collect();
        let whole = codec.decode(&tokens).unwrap();
        assert_eq!(streamed(&codec, &tokens, &[]), (whole.clone(), false), "{tokens:?}");
        if whole.is_empty() {
            continue;
        }
        let stop = [part(&whole, &mut rng), part(&whole, &mut rng), "nothing says this".to_owned()];
        let (text, stopped) = cut(&whole, &stop);
        assert_eq!(streamed(&codec, &tokens, &stop), (text.to_owned(), stopped), "{tokens:?} up to {stop:?}");
        stops += usize::from(stopped);
    }
    assert!(stops > 1000, "{stops}");
}

#[test]
fn a_stop_string_behind_bytes_that_are_no_text_is_found() {
    let codec = codec(&byte_fallback());
    let stop = ["stop".to_owned()];
    for (tokens, text) in [
        (&["<0x0A>", "<0xC3>", "▁stop", "▁x"][..], "\u{FFFD}\u{FFFD} "),
        (&["<0x41>", "<0x41>", "<0xFF>", "st", "op", "▁x"], "\u{FFFD}\u{FFFD}\u{FFFD}"),
        (&["<0x0A>", "<s>", "<0xC3>", "<0xA9>", "stop"], "\né"),
        (&["a", "<0xF0>", "<0x9F>", "▁", "stop", "<0x98>"], "a\u{FFFD}\u{FFFD} "),
    ] {
        assert_eq!(streamed(&codec, &ids(tokens), &stop), (text.to_owned(), true), "{tokens:?}");
    }
}

#[test]
fn bytes_are_given_out_once_they_can_no_longer_change() {
    let codec = codec(&byte_fallback());
    let mut stream = TextStream::new(&codec, []).unwrap();
    let mut push = |token| stream.push(ids(&[token])[0]).unwrap().to_owned();
    assert_eq!([push("<0x0A>"), push("<0xC3>"), push("<0xA9>"), push("a")], ["", "", "", "\néa"]);
    assert_eq!([push("<0x41>"), push("<0xFF>"), push("b")], ["", "", "\u{FFFD}\u{FFFD}b"]);
}

#[test]
fn a_token_costs_the_same_however_long_the_answer_is() {
    for (decoder, tokens) in [
        (byte_fallback(), &["▁stop", "a", "<0x41>"][..]),
        (byte_fallback(), &["<0xFF>"]),
        (byte_level(), &["Ã", "©", "a"]),
        (byte_level(), &["ÿ"]),
        (json!({ "type": "WordPiece", "prefix": "##", "cleanup": true }), &["a", "##ing", "."]),
    ] {
        let codec = codec(&decoder);
        let tokens: Vec<u32> = ids(tokens).into_iter().cycle().take(32_000).collect();
        // The bytes that are allocated count the work: decoding everything after each token takes 64 times as many for
        // eight times as many tokens.
        let allocated = |tokens: &[u32]| {
            let mut text = String::new();
            let stop = ["nobody says this".to_owned()];
            let used = allocation_counter::measure(|| text = streamed(&codec, tokens, &stop).0);
            assert_eq!(text, codec.decode(tokens).unwrap());
            used.bytes_total
        };
        let (few, all) = (allocated(&tokens[..4000]), allocated(&tokens));
        assert!(all < 16 * few, "{few} bytes for 4,000 tokens, {all} for 32,000");
    }
}
