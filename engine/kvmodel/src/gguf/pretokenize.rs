//! How byte-pair tokenizers split text before they merge, by the names that GGUF files give (the field
//! `tokenizer.ggml.pre`).

use serde_json::{Value, json};

use super::failure::{GgufFailure, wrong};

/// A way to split text.
struct Splitting {
    names: &'static [&'static str],
    /// Patterns that are applied one after the other. A match is a piece, and so is a gap between matches.
    patterns: &'static [&'static str],
    /// True if a piece that is a token as a whole is kept without applying merges. Prompts then begin with
    /// the token for the beginning of a text, unless the file says otherwise.
    whole: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
// As in llama.cpp, a letter outside ASCII counts as both upper and lower case.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))*((?=[\p{L}])([^A-Z]))+|[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))+((?=[\p{L}])([^A-Z]))*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))*((?=[\p{L}])([^A-Z]))+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))+((?=[\p{L}])([^A-Z]))*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const BAILING: &str =
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";
const SEED: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";

const SPLITTINGS: [Splitting; 17] = [
    Splitting {
        names: &["default"],
        patterns: &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
        whole: false,
    },
    Splitting {
        names: &[
            "gpt-2",
            "phi-2",
            "jina-es",
            "jina-de",
            "gigachat",
            "jina-v2-es",
            "jina-v2-de",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
        ],
        patterns: &[GPT2],
        whole: false,
    },
    Splitting {
        names: &[
            "smollm",
            "starcoder",
            "refact",
            "codeshell",
            "command-r",
            "exaone",
            "minerva-7b",
            "mellum2",
        ],
        patterns: &[r"\p{N}", GPT2],
        whole: false,
    },
    Splitting {
        names: &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
        ],
        patterns: &[LLAMA3],
        whole: true,
    },
    Splitting { names: &["smaug-bpe", "dbrx", "glm4", "chatglm-bpe"], patterns: &[LLAMA3], whole: false },
    Splitting {
        names: &[
            "qwen2",
            "deepseek-r1-qwen",
            "kormo",
            "f2llmv2",
            "megrez",
            "stablelm2",
            "hunyuan",
            "solar-open",
            "grok-2",
        ],
        patterns: &[QWEN2],
        whole: false,
    },
    Splitting { names: &["qwen35"], patterns: &[QWEN35], whole: false },
    Splitting {
        names: &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        patterns: &[r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3],
        whole: false,
    },
    Splitting {
        names: &["deepseek-coder"],
        patterns: &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"(?:(?!\s)[一-龥ࠀ-一가-퟿])+", r"\p{N}"],
        whole: false,
    },
    Splitting {
        names: &["falcon"],
        patterns: &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"],
        whole: false,
    },
    Splitting { names: &["tekken"], patterns: &[TEKKEN], whole: true },
    Splitting {
        names: &["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"],
        patterns: &[GPT4O],
        whole: false,
    },
    Splitting { names: &["bailingmoe", "bailingmoe2", "llada-moe"], patterns: &[BAILING], whole: false },
    Splitting { names: &["seed-coder"], patterns: &[SEED], whole: false },
    Splitting {
        names: &["poro-chat", "bloom", "gpt3-finnish"],
        patterns: &[r" ?[^(\s|.,!?…。，、।۔،)]+"],
        whole: false,
    },
    Splitting {
        names: &["viking"], patterns: &[r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"], whole: false
    },
    Splitting { names: &["superbpe"], patterns: &[r"\p{N}+", r"(?=(\d{3})+(?!\d))"], whole: false },
];

/// Returns the pre-tokenizer, the normalizer, and true if a piece that is a token as a whole is kept.
pub(super) fn pre_tokenizer(name: &str) -> Result<(Value, Value, bool), GgufFailure> {
    let Some(splitting) = SPLITTINGS.iter().find(|splitting| splitting.names.contains(&name)) else {
        let names: Vec<&str> = SPLITTINGS.iter().flat_map(|splitting| splitting.names).copied().collect();
        return wrong(format!(
            "field \"tokenizer.ggml.pre\" is {name:?} (supported: {}); put the model's tokenizer.json into the file's \
             folder",
            names.join(", ")
        ));
    };
    let split = |pattern: &&str| json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false });
    let bytes =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
    let steps: Vec<Value> = splitting.patterns.iter().map(split).chain([bytes]).collect();
    let normalizer = if name == "qwen2" { json!({ "type": "NFC" }) } else { Value::Null };
    Ok((json!({ "type": "Sequence", "pretokenizers": steps }), normalizer, splitting.whole))
}
