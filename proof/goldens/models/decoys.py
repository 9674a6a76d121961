"""Writes kvmodel's goldens for chunks that are computed behind decoys, by Hugging Face transformers.

    pip install torch==2.13.0 transformers==5.19.0 safetensors numpy
    python proof/goldens/models/decoys.py engine/kvmodel/tests/goldens

Needs the models that make.py has written to the same folder. Writes `decoys.safetensors` next to each, in float32
on the CPU with eager attention:

    decoy0..decoy2                          token IDs of three decoys; the prompt's other parts are in golden.safetensors
    overlapped_behind, absolute_behind      logits of the question under an explicit mask: decoys see the system prompt
                                            and earlier decoys; chunks see the system prompt, the decoys and themselves;
                                            the question sees everything except the decoys. The positions are those of a
                                            prompt whose system prompt ends with the decoys
    sequential_behind_two_phase             chunks at overlapped positions, their cached keys rotated to sequential
                                            ones, then the question
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

MODELS = ("llama", "qwen2", "qwen3", "mistral", "deepseek-v3")
# The lengths of the decoys.
LENGTHS = (6, 3, 5)
# Cells computed in one pass: whether positions overlap.
SINGLE = dict(overlapped_behind=True, absolute_behind=False)


def loaded(name):
    """Returns the model that make.py drew. Drawing it again takes the same seed, and the file confirms it."""
    cls, config = make.MODELS[name]
    torch.manual_seed(1000 + list(make.MODELS).index(name))
    config._attn_implementation = "eager"
    model = cls(config).eval().float()
    make.randomise(model)
    return model


def main():
    out = pathlib.Path(sys.argv[1])
    modeling_llama.apply_rotary_pos_emb = modeling_phi3.apply_rotary_pos_emb
    for index, name in enumerate(MODELS):
        model, golden = loaded(name), load_file(out / name / "golden.safetensors")
        for key, value in make.checkpoint(model, model.config).items():
            assert torch.equal(value, load_file(out / name / "model.safetensors")[key]), f"{name}: {key} differs"
        system, *chunks, question = [
            golden[key].tolist() for key in ("system", "chunk0", "chunk1", "chunk2", "question")]
        generator = torch.Generator().manual_seed(100 + index)
        decoys = [torch.randint(0, model.config.vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]
        hidden = slice(len(system), len(system) + sum(LENGTHS))
        # The decoys have the positions and the mask of a longer system prompt, but the question does not see them.
        parts = [system + sum(decoys, []), *chunks, question]
        flat, asked = [t for p in parts for t in p], -len(question)

        def masked(ordinary=make.mask_of):
            mask = ordinary(parts, True)
            mask[asked:, hidden] = False
            return mask

        def one_pass(overlapped, cache=None):
            model.model.rotary_emb = make.rotary_of(name, model.config)
            return make.logits(model, flat, make.positions_of(parts, overlapped), masked(), cache=cache)[asked:]

        def two_phases(cache):
            ordinary, make.mask_of = make.mask_of, lambda parts, with_system: masked(ordinary)
            try:
                return make.two_phase(name, model, parts, cache)[asked:]
            finally:
                make.mask_of = ordinary

        run = {cell: lambda cache=None, overlapped=overlapped: one_pass(overlapped, cache)
               for cell, overlapped in SINGLE.items()}
        run["sequential_behind_two_phase"] = lambda cache=None: two_phases(DynamicCache() if cache is None else cache)
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
