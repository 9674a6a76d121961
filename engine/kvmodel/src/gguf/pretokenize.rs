//! Rules by which byte-pair tokenizers split text before they merge, by the names that GGUF files give (the field
//! `tokenizer.ggml.pre`).

use serde_json::{Value, json};

use super::failure::{GgufFailure, wrong};

/// A way to split text.
struct Splitting {
    names: &'static [&'static str],
    /// Patterns that are applied one after the other. A match is a piece, and so is a gap between matches.
    patterns: &'static [&'static str],
    /// True if a piece that is a token as a whole is kept without applying merges.
    whole: bool,
    /// True if prompts begin with the token for the beginning of a text, unless the file says otherwise.
    begins: bool,
}

/// The parts of a `tokenizer.json` that concern splitting.
pub(super) struct SplitText {
    pub(super) pre_tokenizer: Value,
    pub(super) normalizer: Value,
    /// True if a piece that is a token as a whole is kept without applying merges.
    pub(super) ignore_merges: bool,
    /// True if prompts begin with the token for the beginning of a text, unless the file says otherwise.
    pub(super) begins: bool,
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

const DEEPSEEK_LETTERS: &str = r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\x{1F7D}ᾀ-ᾴᾶ-ᾼ\x{1FBE}ῂ-ῄῆ-ῌῐ-\x{1FD3}ῖ-\x{1FDB}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+";
const DEEPSEEK_SIGNS: &str = r"\s?[!-/:-~！-／：-～‘-‟、。]+";
const JAIS2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}";
const AYA: &str = r"[^\r\n\p{L}\p{N}]?((?=[\p{L}\p{M}])([^a-z]))*((?=[\p{L}\p{M}])([^A-Z]))+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?((?=[\p{L}\p{M}])([^a-z]))+((?=[\p{L}\p{M}])([^A-Z]))*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const EXAONE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+";
/// Digits in groups of three, counted from the end of a number.
const THREES: &str = r"\p{Nd}{1,3}(?=(?:\p{Nd}{3})*(?!\p{Nd}))";
/// Scripts that are written without spaces.
const AFMOE: &str = r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{8C48}-\x{FAFF}\x{3040}-\x{309F}\x{30A0}-\x{30FF}\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}\x{E40}-\x{E7F}\x{E80}-\x{EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+";

const SPLITTINGS: [Splitting; 25] = [
    Splitting {
        names: &["default"],
        patterns: &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
        whole: false,
        begins: false,
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
            "jina-v1-en",
            "jina-v2-code",
            "roberta-bpe",
        ],
        patterns: &[GPT2],
        whole: false,
        begins: false,
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
        begins: false,
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
        begins: true,
    },
    Splitting {
        names: &["smaug-bpe", "dbrx", "chatglm-bpe"],
        patterns: &[LLAMA3],
        whole: false,
        begins: false,
    },
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
        begins: false,
    },
    Splitting { names: &["qwen35"], patterns: &[QWEN35], whole: false, begins: false },
    Splitting {
        names: &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        patterns: &[r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3],
        whole: false,
        begins: false,
    },
    Splitting {
        names: &["deepseek-coder"],
        patterns: &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"(?:(?!\s)[一-龥ࠀ-一가-퟿])+", r"\p{N}"],
        whole: false,
        begins: false,
    },
    Splitting {
        names: &["falcon"],
        patterns: &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"],
        whole: false,
        begins: false,
    },
    Splitting { names: &["tekken"], patterns: &[TEKKEN], whole: true, begins: true },
    Splitting {
        names: &["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"],
        patterns: &[GPT4O],
        whole: false,
        begins: false,
    },
    Splitting {
        names: &["bailingmoe", "bailingmoe2", "llada-moe"],
        patterns: &[BAILING],
        whole: false,
        begins: false,
    },
    Splitting { names: &["seed-coder"], patterns: &[SEED], whole: false, begins: false },
    Splitting {
        names: &["poro-chat", "bloom", "gpt3-finnish"],
        patterns: &[r" ?[^(\s|.,!?…。，、।۔،)]+"],
        whole: false,
        begins: false,
    },
    Splitting {
        names: &["viking"],
        patterns: &[r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"],
        whole: false,
        begins: false,
    },
    Splitting {
        names: &["superbpe"],
        patterns: &[r"\p{N}+", r"(?=(\d{3})+(?!\d))"],
        whole: false,
        begins: false,
    },
    Splitting { names: &["glm4", "glm5", "minicpm5"], patterns: &[LLAMA3], whole: true, begins: false },
    Splitting { names: &["granite-embed-multi-97m"], patterns: &[AYA], whole: true, begins: false },
    Splitting {
        names: &["deepseek-llm"],
        patterns: &[
            r"[\r\n]",
            DEEPSEEK_LETTERS,
            DEEPSEEK_SIGNS,
            r"\s+$",
            r"(?:(?!\s)[一-龥ࠀ-一가-퟿])+",
            r"\p{N}+",
        ],
        whole: false,
        begins: false,
    },
    Splitting { names: &["afmoe"], patterns: &[THREES, AFMOE, DEEPSEEK3], whole: false, begins: false },
    Splitting { names: &["exaone-moe"], patterns: &[EXAONE], whole: false, begins: false },
    Splitting { names: &["jais-2"], patterns: &[JAIS2], whole: false, begins: false },
    Splitting {
        names: &["chameleon"],
        patterns: &[
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            GPT2,
        ],
        whole: false,
        begins: true,
    },
    Splitting {
        names: &["ufakzeka"],
        patterns: &[r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
        whole: false,
        begins: false,
    },
];

/// Returns how a tokenizer splits text, by the name that GGUF files give.
pub(super) fn splitting(name: &str) -> Result<SplitText, GgufFailure> {
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
    Ok(SplitText {
        pre_tokenizer: json!({ "type": "Sequence", "pretokenizers": steps }),
        normalizer,
        ignore_merges: splitting.whole,
        begins: splitting.begins,
    })
}
