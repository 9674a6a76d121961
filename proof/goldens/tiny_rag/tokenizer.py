"""Builds the tokenizer of tiny-rag: byte-level BPE in which every word of the world is one token.

Any UTF-8 text encodes: words outside the world fall back to pieces and single bytes. Text is lowercased, and
runs of white space become one space, so a line break inside a document does not change its tokens. Decoding
therefore returns normalised text.
"""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from world import NAMES, SYSTEM_WORDS, VALUES

END = "<|end|>"


def build() -> Tokenizer:
    """Builds the tokenizer. Every run gives the same result, because the corpus and the trainer are
    deterministic.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        # Decision: docs/decisions/tools.md#tiny-rag-collapses-white-space
        [normalizers.Lowercase(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    words = sorted(set(NAMES + VALUES + SYSTEM_WORDS + ["is", "same", ".", "?", ",", "!"]))
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator([f" {word}" for word in words], trainer)
    for word in words:
        assert len(tokenizer.encode(word).ids) == 1, word
    return tokenizer
