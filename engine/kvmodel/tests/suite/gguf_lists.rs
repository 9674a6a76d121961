//! The memory that headers of GGUF files take before they are refused: about as much as the file.

use std::io::Write;

use allocation_counter::measure;
use kvmodel::{ModelDirectory, WeightFormat};
use rstest::rstest;

use crate::gguf::{Field, byte_tokens, converted, counted, list, load, text, whole};
use crate::gguf_tokenizers::with_tokens;

const SIZE: usize = 64 << 20;

/// Returns a list that takes `SIZE` bytes, without copies of its elements.
fn large(kind: u32, element: &[u8]) -> Field {
    let count = SIZE / element.len();
    let mut bytes = Vec::with_capacity(SIZE + 12);
    bytes.extend(kind.to_le_bytes());
    bytes.extend((count as u64).to_le_bytes());
    bytes.extend(element.repeat(count));
    (9, bytes)
}

/// Loads a file with one more field, and returns the error and the largest number of bytes in use.
fn refused(name: &str, field: Field) -> (String, u64) {
    let place = tempfile::tempdir().unwrap();
    let mut draft = converted("llama");
    draft.set(name, field);
    let path = draft.write(place.path());
    drop(draft);
    let mut said = String::new();
    let used = measure(|| {
        said = ModelDirectory::load(&path, WeightFormat::F32, &mut |_, _| ())
            .map(drop)
            .map_or_else(|error| error.to_string(), |()| "loaded".to_owned());
    });
    (said, used.bytes_max)
}

#[rstest]
#[case::bytes("tokenizer.ggml.token_type", large(0, &[1]), "token_type\" has 67108864 elements, more than 4194304")]
#[case::numbers("tokenizer.ggml.token_type", large(5, &[1, 0, 0, 0]), "has 16777216 elements, more than 4194304")]
#[case::reals("tokenizer.ggml.scores", large(6, &[0, 0, 128, 63]), "loaded")]
#[case::empty_strings("tokenizer.ggml.tokens", large(8, &counted("")), "has 8388608 elements, more than 4194304")]
#[case::short_strings("tokenizer.ggml.merges", large(8, &counted("a b")), "has 6100805 elements, more than 4194304")]
#[case::unused("general.of_others", large(7, &[1]), "loaded")]
fn a_list_takes_about_as_much_memory_as_in_the_file(
    #[case] name: &str,
    #[case] field: Field,
    #[case] expected: &str,
) {
    let (said, used) = refused(name, field);
    assert!(said.contains(expected), "{said}");
    assert!(used < 5 * SIZE as u64 / 2, "{used} bytes for a list of {SIZE}");
}

#[test]
fn lists_still_have_their_elements() {
    let place = tempfile::tempdir().unwrap();
    for (name, field, expected) in [
        ("tokenizer.ggml.token_type", list(8, [counted("a")]), "not a list of whole numbers"),
        ("tokenizer.ggml.token_type", list(7, [vec![1]]), "not a list of whole numbers"),
        ("tokenizer.ggml.token_type", list(10, [vec![255; 8]]), "not a list of whole numbers"),
        ("tokenizer.ggml.token_type", list(5, []), "has 0 entries for"),
        ("tokenizer.ggml.token_type", list(8, []), "has 0 entries for"),
        ("tokenizer.ggml.tokens", list(5, [vec![0; 4]]), "not a list of strings"),
        ("tokenizer.ggml.tokens", (9, [9u32.to_le_bytes(), [0; 4], [0; 4]].concat()), "is a list of lists"),
        ("tokenizer.ggml.tokens", (9, [13u32.to_le_bytes(), [0; 4], [0; 4]].concat()), "has type 13"),
        (
            "tokenizer.ggml.tokens",
            (9, [10u32.to_le_bytes(), [255; 4], [255; 4]].concat()),
            "has 18446744073709551615",
        ),
    ] {
        let mut draft = converted("llama");
        draft.set(name, field);
        let error = load(&draft.write(place.path())).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[rstest]
#[case::fields(0, 65_537, "65537 fields, more than 65536")]
#[case::tensors(u64::MAX, 1, "18446744073709551615 tensors, more than 65536")]
fn more_entries_than_any_model_has_are_refused(
    #[case] tensors: u64,
    #[case] fields: u64,
    #[case] expected: &str,
) {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("model.gguf");
    let mut file = std::io::BufWriter::new(std::fs::File::create(&path).unwrap());
    file.write_all(
        &[&b"GGUF"[..], &3u32.to_le_bytes(), &tensors.to_le_bytes(), &fields.to_le_bytes()].concat(),
    )
    .unwrap();
    for number in 0..fields {
        file.write_all(&[counted(&number.to_string()), vec![0, 0, 0, 0, 1]].concat()).unwrap();
    }
    file.into_inner().unwrap();
    let error = load(&path).unwrap_err().to_string();
    assert!(error.contains(expected), "{error}");
}

/// Every place where a token could be divided is tried, so the time grows with the square of its length.
#[test]
fn a_token_that_is_too_long_to_divide_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let mut draft = converted("llama");
    draft.set("tokenizer.ggml.model", text("llama"));
    draft.set(
        "tokenizer.ggml.tokens",
        list(8, ["a".to_owned(), "b".repeat(1025)].map(|token| counted(&token))),
    );
    draft.set("tokenizer.ggml.token_type", list(5, [[1, 0, 0, 0], [1, 0, 0, 0]].map(Vec::from)));
    draft.set("tokenizer.ggml.scores", list(6, [[0; 4], [0; 4]].map(Vec::from)));
    draft.set("tokenizer.ggml.bos_token_id", whole(0));
    let error = load(&draft.write(place.path())).unwrap_err().to_string();
    assert!(error.contains("token 1 of \"tokenizer.ggml.tokens\" has 1025 bytes, more than 1024"), "{error}");
}

/// The memory to load a vocabulary grows with its size, not with the square of its size: 8 times as many tokens take 8
/// times as much memory and as many allocations, or 64 times if something is made for each pair of tokens.
#[test]
fn the_memory_to_load_a_vocabulary_grows_with_its_size() {
    let loaded = |tokens: usize| {
        let place = tempfile::tempdir().unwrap();
        let mut names = byte_tokens();
        names.extend((0..tokens).map(|number| format!("w{number}")));
        let path = with_tokens(names.iter().map(String::as_str)).write(place.path());
        let mut loaded = None;
        let used = measure(|| loaded = Some(load(&path).unwrap()));
        assert_eq!(loaded.unwrap().codec.encode("w", false).unwrap().len(), 1);
        [used.count_total, used.bytes_total]
    };
    let (few, many) = (loaded(25_000), loaded(200_000));
    assert!(
        few.iter().zip(&many).all(|(few, many)| many < &(16 * few)),
        "{few:?} allocations and bytes for 25,000 tokens, {many:?} for 200,000"
    );
}
