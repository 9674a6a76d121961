//! Limits how much the steps of a `tokenizer.json` may lengthen a text.
//!
//! Each `Replace` may double a text, so that a few dozen of them in a damaged or hostile file would need more
//! memory than there is. An allocation that fails ends the process, so the growth is checked before.

use serde::Deserialize;
use serde_json::Value;

use crate::error::{Error, Result};

/// The largest factor by which the steps of one kind may lengthen a text together. Published tokenizers reach 12.
const MOST: f64 = 4096.0;

/// The steps of a tokenizer, by their kind.
#[derive(Deserialize)]
struct Steps {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    decoder: Value,
}

/// Checks the steps of a `tokenizer.json`.
///
/// # Errors
/// Returns [`Error::Tokenizer`] if steps of one kind may lengthen a text too much. A file that is not JSON is
/// left to its reader.
pub(super) fn check(bytes: &[u8]) -> Result<()> {
    let Ok(Steps { normalizer, pre_tokenizer, decoder }) = serde_json::from_slice(bytes) else {
        return Ok(());
    };
    for (kind, steps) in [("normalizer", normalizer), ("pre_tokenizer", pre_tokenizer), ("decoder", decoder)]
    {
        let growth = growth(&steps);
        if growth > MOST {
            return Err(Error::Tokenizer(format!(
                "the steps of the {kind} may make a text {growth:.0} times as long (at most {MOST:.0}); the file is damaged \
                 or contradicts itself: download it again"
            )));
        }
    }
    Ok(())
}

/// Returns the largest factor by which a step may lengthen a text.
fn growth(step: &Value) -> f64 {
    let text = |name: &str| step.get(name).and_then(Value::as_str).map_or(0, str::len) as f64;
    match step.get("type").and_then(Value::as_str) {
        Some("Sequence") => {
            let lists = ["normalizers", "pretokenizers", "decoders"];
            let steps = lists.iter().filter_map(|name| step.get(name)?.as_array()).flatten();
            steps.map(growth).product()
        }
        Some("Replace") => {
            // An expression may match a single byte, or nothing.
            let replaced = step.pointer("/pattern/String").and_then(Value::as_str).map_or(1, str::len);
            (text("content") / replaced.max(1) as f64).max(1.0)
        }
        Some("Prepend") => 1.0 + text("prepend"),
        _ => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn files_that_would_grow_texts_without_a_bound_are_refused() {
        let double = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
        let regex = json!({"type": "Replace", "pattern": {"Regex": "x?"}, "content": "aaaa"});
        let prepend = json!({"type": "Prepend", "prepend": "aaaaaaa"});
        let of = |list: &str, steps: Vec<Value>| json!({"type": "Sequence", list: steps});
        let nested = of("normalizers", vec![of("normalizers", vec![double.clone(); 7]); 2]);
        for (file, refused) in [
            (json!({"normalizer": of("normalizers", vec![double.clone(); 34])}), true),
            (json!({"decoder": of("decoders", vec![double.clone(); 13])}), true),
            (json!({"normalizer": of("normalizers", vec![regex; 7])}), true),
            (json!({"normalizer": of("normalizers", vec![prepend; 5])}), true),
            (json!({"normalizer": nested}), true),
            (json!({"normalizer": of("normalizers", vec![double; 12])}), false),
            (json!({"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}}), false),
            (json!({"normalizer": null, "decoder": {"type": "ByteLevel"}}), false),
            (json!({}), false),
        ] {
            let checked = check(file.to_string().as_bytes());
            assert_eq!(checked.is_err(), refused, "{file}: {checked:?}");
        }
        assert!(check(b"no JSON").is_ok());
    }
}
