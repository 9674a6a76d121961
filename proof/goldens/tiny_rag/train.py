"""Trains models/tiny-rag from scratch. models/tiny-rag/README.md gives versions, time and accuracy.

    python proof/goldens/tiny_rag/train.py --out models/tiny-rag --threads 2

Phase A learns to look up facts under full attention. Phase B adds the conditions of chunk reuse: masks under
which a document sees only itself (or the system prompt and itself), and sequential and overlapped positions,
as in block-attention fine-tuning (Sun et al., 2024). Phase C lengthens the prompts, and phase D puts all
kinds of system prompts before them. The loss is on answers only.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import random
import time

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import tokenizer as tok
import world
from model import CONFIG, Llama

CELLS = {
    # name: (chunks see the system prompt, chunks see each other, overlapped positions)
    "full": (True, True, False),
    "overlapped/with-system": (True, False, True),
    "overlapped/alone": (False, False, True),
    "sequential/alone": (False, False, False),
    "sequential/with-system": (True, False, False),
}


class Encoder:
    """Encodes parts of text with a cache, because the world has few distinct sentences per word."""

    def __init__(self, tokenizer):
        self.tokenizer, self.cache = tokenizer, {}

    def __call__(self, text: str) -> list[int]:
        out = []
        for word in text.split(" "):
            ids = self.cache.get(word)
            if ids is None:
                ids = self.cache[word] = self.tokenizer.encode(word).ids
            out += ids
        return out


def sample(rng, encode, end, cell, n_docs, facts, p_same, n_questions, repeat=False,
           system=world.system_text):
    """One training sequence: tokens, segment ids, positions and the answer targets."""
    _, full, overlapped = CELLS[cell]
    docs = world.documents(rng, n_docs, facts, p_same)
    stop, mark = rng.choice([" .", " .", "."]), rng.choice([" ?", " ?", "?"])
    parts = [encode(system(rng))] + [encode(world.document_text(d, stop)) for d in docs]
    askable = [f for d in docs for f in d if full or f.kind != "cross"]
    rng.shuffle(askable)
    # References are rarer than stated facts, so ask about them half of the time.
    if rng.random() < 0.5:
        askable.sort(key=lambda f: f.kind == "stated")
    asked = askable[:n_questions]
    rng.shuffle(asked)
    if repeat:
        asked = rng.choices(asked, k=n_questions)
    tokens, segment, position, target = [], [], [], []
    start = len(parts[0])
    longest = max(len(p) for p in parts[1:])
    at = 0
    for i, part in enumerate(parts):
        base = at if (i == 0 or not overlapped) else start
        tokens += part
        segment += [i] * len(part)
        position += range(base, base + len(part))
        target += [-1] * len(part)
        at += len(part)
    at = start + longest if overlapped else at
    for f in asked:
        question, answer = encode(f.name + mark), encode(f.value) + [end]
        piece = question + answer
        tokens += piece
        segment += [len(parts)] * len(piece)
        position += range(at, at + len(piece))
        target += [-1] * (len(question) - 1) + answer + [-1]
        at += len(piece)
    return tokens, segment, position, target, len(parts), [f.kind for f in asked]


def batch(rng, encode, end, cell, size, **kw):
    rows = [sample(rng, encode, end, cell, **kw) for _ in range(size)]
    n = max(len(r[0]) for r in rows)
    tokens, segment = np.zeros((size, n), np.int64), np.full((size, n), -9, np.int64)
    position, target = np.zeros((size, n), np.int64), np.full((size, n), -1, np.int64)
    question = np.zeros((size, 1), np.int64)
    for i, (t, s, p, y, q, _) in enumerate(rows):
        tokens[i, : len(t)], segment[i, : len(t)] = t, s
        position[i, : len(t)], target[i, : len(t)] = p, y
        question[i] = q
    sees_system, full, _ = CELLS[cell]
    mask = np.tril(np.ones((n, n), bool))[None]
    if not full:
        same = segment[:, :, None] == segment[:, None, :]
        asks = (segment == question)[:, :, None]
        allowed = same | asks
        if sees_system:
            allowed |= (segment == 0)[:, None, :]
        mask = mask & allowed
    else:
        mask = np.broadcast_to(mask, (size, n, n))
    mask = mask | np.eye(n, dtype=bool)[None]
    t = torch.from_numpy
    return t(tokens), t(position), t(np.ascontiguousarray(mask))[:, None], t(target), [r[5] for r in rows]


def accuracy(model, encode, end, cell, seed, count=200, **kw):
    """Returns the share of right answers by kind, for documents outside the training set."""
    rng = random.Random(seed)
    right, total = {}, {}
    with torch.no_grad():
        for _ in range(count // 50):
            tokens, position, mask, target, kinds = batch(rng, encode, end, cell, 50, **kw)
            best = model.logits(model.hidden(tokens, position, mask)).argmax(-1)
            for row in range(50):
                at = [i for i, y in enumerate(target[row].tolist()) if y >= 0 and y != end]
                for i, kind in zip(at, kinds[row]):
                    total[kind] = total.get(kind, 0) + 1
                    right[kind] = right.get(kind, 0) + int(best[row, i] == target[row, i])
    return {k: round(right[k] / total[k], 4) for k in sorted(total)}


MIX = [("full", 0.34), ("overlapped/with-system", 0.24), ("overlapped/alone", 0.16),
       ("sequential/alone", 0.16), ("sequential/with-system", 0.10)]


LEVELS = [(1, 1), (1, 3), (2, 5), (4, 8)]


# Decision: docs/decisions/tools.md#tiny-rag-is-trained-with-a-hint
class Hint(torch.nn.Module):
    """An auxiliary loss of phase A: the states after the first layer must predict the two previous tokens.

    A look-up needs "which name comes before this value" and then "which value has this name". The second step
    gives no gradient before the first exists, so training on answers alone keeps guessing for thousands of
    steps. With this hint, it does so for six hundred.
    """

    def __init__(self, model):
        super().__init__()
        hidden = model.c["hidden_size"]
        self.heads = torch.nn.ModuleList(torch.nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        model.layers[0].register_forward_hook(lambda _module, _input, output: setattr(self, "seen", output))

    def loss(self, model, tokens):
        seen = F.rms_norm(self.seen, self.seen.shape[-1:])
        return sum(
            F.cross_entropy(model.logits(head(seen[:, back:])).flatten(0, 1), tokens[:, :-back].flatten())
            for back, head in enumerate(self.heads, start=1)
        )


def plan(step, args, rng, level):
    """Returns the batch to draw at `step`: the cell, and the size and shape of the documents.

    Phase A increases the prompt length in steps, because looking up one of few facts carries over to many.
    """
    if step < args.phase_a:
        low, high = LEVELS[level]
        return "full", 64, dict(
            n_docs=rng.randint(low, high), facts=(3, 4), p_same=0.05 * level, n_questions=8, repeat=level < 2)
    cell = rng.choices([c for c, _ in MIX], [w for _, w in MIX])[0]
    if step < args.phase_b or rng.random() < 0.6:
        n_docs, facts = rng.randint(1, 8), rng.choice([(2, 4), (4, 4), (3, 6)])
    else:
        n_docs, facts = rng.choice([(rng.randint(8, 12), (3, 6)), (rng.randint(2, 5), (8, 14)), (rng.randint(12, 20), (3, 5))])
    size = max(12, min(96, 10_000 // (n_docs * sum(facts) * 2 + 40)))
    system = world.any_system_text if step >= args.phase_c else world.system_text
    return cell, size, dict(n_docs=n_docs, facts=facts, p_same=0.18, n_questions=10, system=system)


def export(model, tokenizer, out, end):
    """Writes a Hugging Face directory and checks it against transformers' own model."""
    import transformers

    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    (out / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tok.END, "clean_up_tokenization_spaces": False,
         "chat_template": template}, indent=2) + "\n")
    config = dict(architectures=["LlamaForCausalLM"], model_type="llama", **model.c, rope_scaling=None,
                  hidden_act="silu", attention_bias=False, mlp_bias=False, tie_word_embeddings=True,
                  bos_token_id=None, eos_token_id=end, torch_dtype="float32", initializer_range=0.05)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "world.json").write_text(json.dumps({"names": world.NAMES, "values": world.VALUES}) + "\n")
    state = {f"model.{k}": v.detach().clone().contiguous() for k, v in model.state_dict().items()}
    save_file(state, str(out / "model.safetensors"), metadata={"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids = torch.randint(0, model.c["vocab_size"], (1, 48))
    mask = torch.tril(torch.ones(48, 48, dtype=torch.bool))[None, None]
    with torch.no_grad():
        ours = model.logits(model.hidden(ids, torch.arange(48)[None], mask))
        gap = (theirs(ids).logits - ours).abs().max().item()
    print(f"largest difference to transformers {transformers.__version__}: {gap:.2e}", flush=True)
    assert gap < 1e-3


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--out", type=pathlib.Path, required=True)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--phase-a", type=int, default=1500)
    p.add_argument("--phase-b", type=int, default=2700)
    p.add_argument("--phase-c", type=int, default=4500)
    p.add_argument("--steps", type=int, default=5000)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--resume", type=pathlib.Path, help="checkpoint written by an earlier run")
    p.add_argument("--checkpoint", type=pathlib.Path, default=pathlib.Path("target/tiny-rag.pt"))
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    tokenizer = tok.build()
    end = tokenizer.token_to_id(tok.END)
    encode = Encoder(tokenizer)
    model = Llama({**CONFIG, "vocab_size": tokenizer.get_vocab_size()})
    print("vocab", model.c["vocab_size"], "parameters", sum(p.numel() for p in model.parameters()), flush=True)
    hint = Hint(model)
    decay = [p for p in [*model.parameters(), *hint.parameters()] if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}],
                            lr=args.lr, betas=(0.9, 0.98))
    first, level = 0, 0
    if args.resume:
        state = torch.load(args.resume, weights_only=False)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        first, level = state["step"], state["level"]
        rng.seed(args.seed * 1_000_003 + first)
    began, seen, hit, running, recent = time.time(), 0, 0, [], 0.0
    for step in range(first, args.steps):
        warm = min(1.0, (step + 1) / 200)
        cool = 0.5 * (1 + math.cos(math.pi * step / args.phase_c)) if step < args.phase_c else 0.1
        if step == args.phase_c:
            rng.seed(args.seed * 1_000_003 + step)  # a run resumed here continues as if it had never stopped
        for group in opt.param_groups:
            group["lr"] = args.lr * warm * (0.02 + 0.98 * cool)
        cell, size, shape = plan(step, args, rng, level)
        tokens, position, mask, target, _ = batch(rng, encode, end, cell, size, **shape)
        logits = model.logits(model.hidden(tokens, position, mask)[target >= 0])
        want = target[target >= 0]
        loss = F.cross_entropy(logits, want)
        opt.zero_grad(set_to_none=True)
        (loss + 0.3 * hint.loss(model, tokens) if step < args.phase_a else loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        real = want != end
        hit += (logits.argmax(-1) == want)[real].sum().item()
        seen += real.sum().item()
        running.append(loss.item())
        recent = 0.95 * recent + 0.05 * (logits.argmax(-1) == want)[real].float().mean().item()
        if recent > 0.9 and level + 1 < len(LEVELS):
            level, recent = level + 1, 0.0
            print(f"step {step + 1}: level {level}: prompts of {LEVELS[level]} documents", flush=True)
        if (step + 1) % 100 == 0:
            print(f"step {step + 1} loss {sum(running) / len(running):.4f} answers {hit / seen:.4f} "
                  f"{time.time() - began:.0f} s", flush=True)
            seen, hit, running = 0, 0, []
        if (step + 1) % 500 == 0 or step + 1 == args.steps:
            torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "step": step + 1, "level": level}, args.checkpoint)
            if step + 1 >= args.phase_a:
                for c in CELLS:
                    print("  ", c, accuracy(model, encode, end, c, 99, n_docs=6, facts=(4, 4), p_same=0.15,
                                            n_questions=8), flush=True)
    export(model, tokenizer, args.out, end)
    print(f"{time.time() - began:.0f} s, torch {torch.__version__}, {args.threads} threads", flush=True)


if __name__ == "__main__":
    main()
