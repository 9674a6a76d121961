"""Trains rows of keys and values that stand in for decoys, by self-distillation on the processor.

A document is computed behind M trained rows, which the question never sees, as with `behind:N`
(docs/decoys.md). The student answers from documents that were computed this way, apart from one another. The
teacher is the same model under full attention. The loss is the divergence of the student's next tokens from the
teacher's, along the teacher's answers; only the rows learn. KV Packet (arXiv 2604.13226) trains tokens around a
document in the same way.

    cargo run --release -p kvcli -- eval --form mixed --texts 4 --first-seed 5000 --seeds 20 --questions 40 \\
        --kind local --save-questions train.jsonl
    cargo run --release -p kvcli -- eval --form firms --texts 4 --questions 40 --kind local \\
        --save-questions firms.jsonl
    python train.py --model MODEL --questions train.jsonl --state state.pt --evaluate firms.jsonl

The model is a folder in Hugging Face's format, with a chat template. The state is saved every few steps, and a
later call continues from it. Needs torch and transformers.
"""

import argparse
import json
import pathlib
import re
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

ANSWER = 16  # tokens of the teacher's answers
ROOM = 32  # tokens of an answer that is graded


def rotated(keys, positions, model):
    """Rotates keys by a number of positions each; `keys` is [batch, heads, tokens, head_dim]."""
    cos, sin = model.model.rotary_emb(keys, positions)
    half = keys.shape[-1] // 2
    turned = torch.cat((-keys[..., half:], keys[..., :half]), -1)
    return keys * cos[:, None] + turned * sin[:, None]


def cache_of(layers):
    cache = DynamicCache()
    for number, (keys, values) in enumerate(layers):
        cache.update(keys, values, number)
    return cache


def layers_of(cache):
    return [(layer.keys, layer.values) for layer in cache.layers]


class Lab:
    """A model, its tokenizer, and prompts in the form that `kvc eval --chat` uses."""

    def __init__(self, folder):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
        self.ends = {self.tokenizer.eos_token_id}
        marked = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": "\x01"}], tokenize=False, add_generation_prompt=True
        )
        self.before, self.after = marked.split("\x01")

    def ids(self, text):
        return self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids

    def parts(self, question):
        system = self.ids(f"{self.before}{question['system']}\n\n")
        documents = [self.ids(f"{text}\n\n") for text in question["documents"]]
        return system, documents, self.ids(question["question"] + self.after)

    def run(self, ids, past, positions=None):
        return self.model(input_ids=ids, past_key_values=past, position_ids=positions, use_cache=True)

    @torch.no_grad()
    def greedy(self, logits, past, count):
        """Continues greedily. Returns the tokens, and the logits that each was chosen from."""
        tokens, rows = [], []
        while len(tokens) < count:
            rows.append(logits[0, -1])
            tokens.append(int(rows[-1].argmax()))
            if tokens[-1] in self.ends:
                break
            logits = self.run(torch.tensor([[tokens[-1]]]), past).logits
        return tokens, torch.stack(rows)

    @torch.no_grad()
    def full(self, parts, count):
        system, documents, question = parts
        past = DynamicCache()
        logits = self.run(torch.cat((system, *documents, question), 1), past).logits
        return self.greedy(logits, past, count)

    def apart(self, parts, rows):
        """Computes each document behind `rows`, a list with keys (at position 0) and values of each layer, or
        nothing. Returns the cache that the question sees."""
        system, documents, _ = parts
        with torch.no_grad():
            past = DynamicCache()
            self.run(system, past)
            first = layers_of(past)
        start, count = system.shape[1], rows[0][0].shape[2] if rows else 0
        longest = max(document.shape[1] for document in documents)
        padded = torch.stack([torch.nn.functional.pad(document[0], (0, longest - document.shape[1])) for document in documents])
        many = len(documents)
        seen = []
        for number, (keys, values) in enumerate(first):
            if rows:
                moved = rotated(rows[number][0], torch.full((1, count), start), self.model)
                keys, values = torch.cat((keys, moved), 2), torch.cat((values, rows[number][1]), 2)
            seen.append((keys.expand(many, -1, -1, -1), values.expand(many, -1, -1, -1)))
        computed = cache_of(seen)
        self.run(padded, computed, torch.arange(start + count, start + count + longest)[None].expand(many, -1))
        kept = [[keys] for keys, _ in first], [[values] for _, values in first]
        at = start
        for document, ids in enumerate(documents):
            length = ids.shape[1]
            for number, (keys, values) in enumerate(layers_of(computed)):
                rows_of = slice(start + count, start + count + length)
                by = torch.full((1, length), at - start - count)
                kept[0][number].append(rotated(keys[document : document + 1, :, rows_of], by, self.model))
                kept[1][number].append(values[document : document + 1, :, rows_of])
            at += length
        return cache_of([(torch.cat(keys, 2), torch.cat(values, 2)) for keys, values in zip(*kept)])

    @torch.no_grad()
    def decoys(self, texts, system):
        """Returns the rows of decoys as `apart` expects them, computed behind a system prompt."""
        ids = torch.cat([self.ids(f"{text}\n\n") for text in texts], 1)
        past = DynamicCache()
        self.run(torch.cat((system, ids), 1), past)
        start, count = system.shape[1], ids.shape[1]
        back = torch.full((1, count), -start)
        return [(rotated(k[:, :, start:], back, self.model), v[:, :, start:]) for k, v in layers_of(past)]


def words(text):
    return re.findall(r"\w+", text.lower())


def right(question, answer):
    """Grades an answer as `kvc eval` does, for the graders of local questions."""
    wanted = question["answer"]
    if question.get("grader") == "numbers":
        numbers = [re.findall(r"\d+(?:\.\d+)?", text.replace(",", "")) for text in (answer, wanted)]
        return bool(numbers[0]) and float(numbers[0][0]) == float(numbers[1][0])
    given, wanted = words(answer), words(wanted)
    return any(given[i : i + len(wanted)] == wanted for i in range(len(given)))


def evaluate(lab, questions, arms):
    """Asks every arm every question. Prints how many answers of each are right, and the pairs."""
    grades = {name: [] for name in ["full attention", *arms]}
    for question in questions:
        parts = lab.parts(question)
        answers = {"full attention": lab.full(parts, ROOM)[0]}
        for name, rows in arms.items():
            with torch.no_grad():
                past = lab.apart(parts, rows(parts) if rows else None)
                logits = lab.run(parts[2], past).logits
            answers[name] = lab.greedy(logits, past, ROOM)[0]
        for name, tokens in answers.items():
            grades[name].append(right(question, lab.tokenizer.decode(tokens, skip_special_tokens=True)))
    full = grades["full attention"]
    for name, given in grades.items():
        lost = sum(f and not g for f, g in zip(full, given))
        gained = sum(g and not f for f, g in zip(full, given))
        print(f"{name}: {sum(given)} of {len(given)} right, lost {lost}, gained {gained}", flush=True)
    return {name: sum(given) for name, given in grades.items()}


def train(lab, questions, args, decoys):
    """Trains the rows, from the state if there is one. They start as the rows of decoys, thinned out."""
    state = pathlib.Path(args.state)
    saved = torch.load(state) if state.exists() else None
    if saved is None:
        rows = lab.decoys(decoys, lab.parts(questions[0])[0])
        every = torch.linspace(0, rows[0][0].shape[2] - 1, args.rows).round().long()
        rows = [(k[:, :, every].clone(), v[:, :, every].clone()) for k, v in rows]
    else:
        rows = saved["rows"]
    learned = [tensor.requires_grad_(True) for pair in rows for tensor in pair]
    optimizer = torch.optim.Adam(learned, lr=args.rate)
    step, curve = 0, []
    if saved is not None:
        optimizer.load_state_dict(saved["optimizer"])
        step, curve = saved["step"], saved["curve"]
    while step < args.steps:
        total, before = 0.0, time.time()
        for number in range(args.batch):
            parts = lab.parts(questions[(step * args.batch + number) % len(questions)])
            tokens, teacher = lab.full(parts, ANSWER)
            past = lab.apart(parts, rows)
            ids = torch.cat((parts[2], torch.tensor([tokens[:-1]], dtype=torch.long)), 1)
            student = lab.run(ids, past).logits[0, -len(tokens) :]
            loss = torch.nn.functional.kl_div(
                student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="batchmean"
            )
            (loss / args.batch).backward()
            total += float(loss.detach()) / args.batch
        for group in optimizer.param_groups:
            group["lr"] = args.rate * min(1.0, (step + 1) / 10)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        curve.append(total)
        recent = sum(curve[-10:]) / len(curve[-10:])
        print(f"step {step}: divergence {total:.3f}, of ten steps {recent:.3f}, {time.time() - before:.0f} s", flush=True)
        if step % 5 == 0 or step == args.steps:
            torch.save({"rows": rows, "optimizer": optimizer.state_dict(), "step": step, "curve": curve}, state)
    return [(keys.detach(), values.detach()) for keys, values in rows]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--questions", help="questions to train on, one JSON object per line")
    parser.add_argument("--state", default="rows.pt")
    parser.add_argument("--rows", type=int, default=16, help="the number of rows per layer")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4, help="questions per step")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--decoys", help="a folder of decoys: the rows' start, and an arm of the evaluation")
    parser.add_argument("--evaluate", action="append", default=[], help="questions to evaluate, may be repeated")
    parser.add_argument("--count", type=int, default=40, help="the number of questions to evaluate")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    lab = Lab(args.model)
    read = lambda path: [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]
    decoys = [path.read_text() for path in sorted(pathlib.Path(args.decoys).iterdir())] if args.decoys else []
    arms = {"nothing in front": None}
    for count in (3, 7):
        if len(decoys) >= count:
            arms[f"behind {count} decoys"] = lambda parts, count=count: lab.decoys(decoys[:count], parts[0])
    if args.questions:
        trained = train(lab, read(args.questions), args, decoys[:3])
        arms[f"behind {args.rows} trained rows"] = lambda parts: trained
    for path in args.evaluate:
        print(path)
        evaluate(lab, read(path)[: args.count], arms)


if __name__ == "__main__":
    main()
