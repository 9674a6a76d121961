//! Fields of a file that this crate does not use.

use super::fields::Header;

/// Fields that do not change an answer: sizes that follow from tensors, and tokens that prompts never contain
/// on their own.
const HARMLESS: [&str; 18] = [
    "vocab_size",
    "tensor_data_layout",
    "rope.scaling.finetuned",
    "attention.value_length",
    "add_eos_token",
    "add_sep_token",
    "bos_token_id",
    "cls_token_id",
    "mask_token_id",
    "padding_token_id",
    "seperator_token_id",
    "token_type_count",
    "fim_pre_token_id",
    "fim_suf_token_id",
    "fim_mid_token_id",
    "prefix_token_id",
    "suffix_token_id",
    "middle_token_id",
];

/// Returns a sentence for the fields of the architecture and the tokenizer that nobody has read, or `None` if
/// there are none. Fields of the tokenizer do not count if another file replaces it.
pub(super) fn unused(header: &Header, architecture: &str, own_tokenizer: bool) -> Option<String> {
    let model = format!("{architecture}.");
    let matters = |name: &&str| {
        let rest = name
            .strip_prefix(&model)
            .or_else(|| name.strip_prefix("tokenizer.ggml.").filter(|_| own_tokenizer));
        rest.is_some_and(|rest| !HARMLESS.contains(&rest))
    };
    let mut names: Vec<&str> = header.unread().filter(matters).collect();
    names.sort_unstable();
    (!names.is_empty()).then(|| format!("these fields of the file are not used: {}", names.join(", ")))
}
