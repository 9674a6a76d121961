"""Writes kvmodel's goldens for chunks that are computed behind decoys or in slots, by Hugging Face transformers.

    pip install torch==2.13.0 transformers==5.19.0 safetensors numpy
    python proof/goldens/models/decoys.py engine/kvmodel/tests/goldens

Needs the models that make.py has written to the same folder. Writes `decoys.safetensors` next to each, in float32
on the CPU with eager attention:

    decoy0..decoy4                          token IDs of the decoys; the prompt's other parts are in golden.safetensors
    overlapped_behind, absolute_behind      logits of the question under an explicit mask: decoys see the system prompt
                                            and earlier decoys; chunks see the system prompt, three decoys and themselves;
                                            the question sees everything except the decoys. The positions are those of a
                                            prompt whose system prompt ends with the three decoys
    sequential_behind_two_phase             chunks at overlapped positions, their cached keys rotated to the sequential
                                            positions of a prompt without decoys, then the question
    overlapped_slots, absolute_slots,       the same, but the chunks see three, four and five decoys. Overlapped chunks
    sequential_slots_two_phase              start right after the decoys that they see; absolute positions are those of a
                                            prompt whose system prompt ends with all five decoys
    error_f16.NAME, error_int8:4.NAME, …    the reference's own error in each row of the question if transformers caches
                                            keys and values in that format (see make.py)
    error_f16_unrotated.NAME, …             the same with keys rounded before their rotation
"""

from __future__ import annotations

import pathlib
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import DynamicCache
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3

import make
from rounding import FORMATS, Rounded, before_rotation

MODELS = ("llama", "qwen2", "qwen3", "mistral", "deepseek-v3", "gemma3")
# The lengths of the decoys.
LENGTHS = (6, 3, 5, 4, 2)
# How many decoys each chunk sees.
SEEN = dict(behind=(3, 3, 3), slots=(3, 4, 5))


def loaded(name):
    """Returns the model that make.py drew. Drawing it again takes the same seed, and the file confirms it."""
    cls, config = make.MODELS[name]
    torch.manual_seed(1000 + list(make.MODELS).index(name))
    config._attn_implementation = "eager"
    model = cls(config).eval().float()
    make.randomise(model)
    return model


def cells(mode, name, model, prompt, seen):
    """Returns a function for each cell of a mode, which computes the question's logits, optionally with a cache."""
    system, decoys, chunks, question = prompt
    # The decoys have the positions and the mask of a longer system prompt, but the question does not see them, and a
    # chunk sees only the first ones.
    parts = [system + sum(decoys, []), *chunks, question]
    flat, asked = [t for p in parts for t in p], -len(question)
    ends = [len(system) + sum(map(len, decoys[:n])) for n in seen]

    def masked(parts, with_system, ordinary=make.mask_of):
        mask = ordinary(parts, with_system)
        mask[asked:, len(system):len(parts[0])] = False
        row = len(parts[0])
        for chunk, end in zip(chunks, ends):
            mask[row:row + len(chunk), end:len(parts[0])] = False
            row += len(chunk)
        return mask

    def stored(*_):
        out = list(range(len(parts[0])))
        for chunk, end in zip(chunks, ends):
            out += range(end, end + len(chunk))
        start = len(parts[0]) + max(map(len, chunks))
        return out + list(range(start, start + len(question)))

    def one_pass(positions, cache=None):
        model.model.rotary_emb = make.rotary_of(name, model.config)
        return make.logits(model, flat, positions, masked(parts, True), cache=cache)[asked:]

    def used(parts, overlapped, ordinary=make.positions_of):
        # The decoys keep their positions, and everything after them takes the positions of a prompt without decoys.
        out, gap = ordinary(parts, overlapped), len(parts[0]) - len(system)
        return [at if row < len(parts[0]) else at - gap for row, at in enumerate(out)]

    def two_phases(cache=None):
        ordinary = make.mask_of, make.stored_positions, make.positions_of
        make.mask_of, make.stored_positions, make.positions_of = masked, stored, used
        try:
            return make.two_phase(name, model, parts, DynamicCache() if cache is None else cache)[asked:]
        finally:
            make.mask_of, make.stored_positions, make.positions_of = ordinary

    return {
        f"overlapped_{mode}": lambda cache=None: one_pass(stored(), cache),
        f"absolute_{mode}": lambda cache=None: one_pass(make.positions_of(parts, False), cache),
        f"sequential_{mode}_two_phase": two_phases,
    }


def main():
    out = pathlib.Path(sys.argv[1])
    modeling_llama.apply_rotary_pos_emb = modeling_phi3.apply_rotary_pos_emb
    for index, name in enumerate(MODELS):
        if len(sys.argv) > 2 and name not in sys.argv[2:]:
            continue
        model, golden = loaded(name), load_file(out / name / "golden.safetensors")
        for key, value in make.checkpoint(model, model.config).items():
            assert torch.equal(value, load_file(out / name / "model.safetensors")[key]), f"{name}: {key} differs"
        system, *chunks, question = [
            golden[key].tolist() for key in ("system", "chunk0", "chunk1", "chunk2", "question")]
        generator = torch.Generator().manual_seed(100 + index)
        decoys = [torch.randint(0, model.config.vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]
        run = {}
        for mode, seen in SEEN.items():
            run |= cells(mode, name, model, [system, decoys[:max(seen)], chunks, question], seen)
        exact = {cell: compute() for cell, compute in run.items()}
        results = dict(exact)
        interleaved = getattr(model.config, "rope_interleave", False)

        def errors(word, rounded, **how):
            for cell, compute in run.items():
                cache = Rounded(rounded, latent=name.startswith("deepseek"), interleaved=interleaved, **how)
                results[f"error_{word}.{cell}"] = (compute(cache) - exact[cell]).abs().amax(dim=-1)

        for word, rounded in FORMATS.items():
            errors(word, rounded)
            with before_rotation(model, rounded):
                errors(f"{word}_unrotated", rounded, unrotated=True)
        for i, decoy in enumerate(decoys):
            results[f"decoy{i}"] = torch.tensor(decoy, dtype=torch.int32)
        save_file({key: value.contiguous() for key, value in results.items()}, str(out / name / "decoys.safetensors"),
                  metadata={"torch": torch.__version__, "transformers": transformers.__version__})
        seen = (exact["overlapped_behind"] - golden["overlapped_with_system"]).abs().max().item()
        print(name, "difference from chunks without decoys", seen)


if __name__ == "__main__":
    main()
