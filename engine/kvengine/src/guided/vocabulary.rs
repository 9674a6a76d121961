//! The vocabulary as the grammar library needs it: a tree over the bytes of all tokens.

use std::sync::Arc;

use toktrie::{ApproximateTokEnv, INVALID_TOKEN, TokEnv, TokRxInfo, TokTrie};

/// Returns the vocabulary of a model with the bytes of its tokenizer's tokens. Tokens without bytes are in no answer
/// that obeys a grammar, except for end tokens.
pub(super) fn environment(mut bytes: Vec<Vec<u8>>, vocabulary: usize, ends: &[u32]) -> TokEnv {
    // A model may have rows for tokens that its tokenizer does not have, and the other way round.
    bytes.resize(vocabulary, Vec::new());
    // The engine takes an end token for the end, whatever its text is.
    for &end in ends {
        bytes[end as usize].clear();
    }
    for word in &mut bytes {
        // The library takes this byte for the mark of a special token. No text in UTF-8 contains it.
        if word.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER) {
            word.clear();
        }
    }
    let end = ends.first().copied().unwrap_or(INVALID_TOKEN);
    let mut trie = TokTrie::from(&TokRxInfo::new(vocabulary as u32, end), &bytes);
    if !ends.is_empty() {
        trie = trie.with_eos_tokens(ends);
    }
    Arc::new(ApproximateTokEnv::new(trie))
}
