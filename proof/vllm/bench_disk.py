"""Measures the time to first token inside vLLM on a CPU, for documents that an earlier process has stored on a disk.

    python bench_disk.py MODEL [--documents 5] [--tokens 512] [--folder FOLDER]

Processes run one after another: one stores the documents, one finds them on the disk, and one has no disk and
computes everything. Each asks the same questions, with the documents in another order in each round. The answers of the
second process must be those of a fourth one, which computes the same chunks without a disk. The first request of each
process counts, and the best one of the full prefills. In the second process, host memory and vLLM's own cache are emptied
before each round.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from bench_prefix import ENGINE

SYSTEM, QUESTION, ANSWER = 40, 24, 8
ROWS = ("stored", "found", "chunks without a disk", "full prefill")


def measure(row: str, args: argparse.Namespace) -> dict[str, object]:
    """Measures one row in this process."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    disk = {"disk_path": args.folder, "disk_limit": "2GiB"} if row in ROWS[:2] else {}
    has_chunks = row != "full prefill"
    llm = LLM(
        model=args.model,
        **ENGINE,
        kv_transfer_config=KVTransferConfig(
            kv_connector="ChunkConnector",
            kv_connector_module_path="kvcache.vllm",
            kv_role="kv_both",
            kv_connector_extra_config={"host_memory": "512MiB", **disk},
        )
        if has_chunks
        else None,
    )
    draw = random.Random(1)

    def text(count: int) -> list[int]:
        return [draw.randrange(5, 40_000) for _ in range(count)]

    system, documents = text(SYSTEM), [text(args.tokens) for _ in range(args.documents)]
    rounds = [(draw.sample(range(args.documents), args.documents), text(QUESTION)) for _ in range(args.rounds)]
    warm = text(64)
    llm.generate([{"prompt_token_ids": warm}], SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)
    seconds, answers, said = [], [], []
    for order, question in rounds:
        parts = [system, *(documents[number] for number in order)]
        tokens = [token for part in parts for token in part] + question
        if row == "found":
            forget(llm)
        elif row == "full prefill":
            llm.reset_prefix_cache()
        extra = {"kv_transfer_params": {"chunk_lengths": [len(part) for part in parts]}} if has_chunks else None
        for count in (1, ANSWER):
            sampling = SamplingParams(temperature=0.0, max_tokens=count, detokenize=False, ignore_eos=True, extra_args=extra)
            began = time.perf_counter()
            (out,) = llm.generate([{"prompt_token_ids": tokens}], [sampling], use_tqdm=False)
            if count == 1:
                seconds.append(time.perf_counter() - began)
                said.append(out.kv_transfer_params)
        answers.append(list(out.outputs[0].token_ids))
    usage = {}
    if disk:
        store = get_kv_transfer_group()._worker.disk
        until = time.monotonic() + 60
        while store.is_busy() and time.monotonic() < until:
            time.sleep(0.01)
        store.slab.flush(deadline=60)
        usage = store.usage()
    llm.llm_engine.engine_core.shutdown()
    return {"seconds": seconds, "answers": answers, "said": said, "usage": usage}


def forget(llm) -> None:
    """Empties vLLM's own cache and the host memory, but not the disk."""
    llm.reset_prefix_cache()
    llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler.chunks.cache.clear_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--documents", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="the folder for the records; a temporary one by default")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row is not None:
        print("ROW " + json.dumps(measure(args.row, args)), flush=True)
        return
    found: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for row in ROWS:
            command = [sys.executable, __file__, args.model, "--documents", str(args.documents), "--tokens", str(args.tokens)]
            command += ["--rounds", str(args.rounds), "--folder", args.folder or temporary, "--row", row]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            lines = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
            if done.returncode or not lines:
                raise SystemExit(f"{row}: vLLM ended with status {done.returncode}")
            found[row] = json.loads(lines[-1][4:])
    full = min(found["full prefill"]["seconds"])
    for row, one in found.items():
        first, best = one["seconds"][0], min(one["seconds"])
        print(f"{row:24} {first * 1e3:8.0f} ms  {full / first:6.1f} times as fast as a full prefill  (best {best * 1e3:.0f} ms)  {one['usage']}")
    wrong = [row for row in ("stored", "found") if found[row]["answers"] != found["chunks without a disk"]["answers"]]
    missed = [said for said in found["found"]["said"] if said is None or said["chunk_tokens_computed"]]
    print(json.dumps({"model": args.model, "tokens": args.documents * args.tokens, "rows": found}))
    ratio = full / found["found"]["seconds"][0]
    if wrong or missed:
        raise SystemExit(f"other answers than without a disk: {wrong}; documents that were not found: {missed}")
    if ratio < 5:
        raise SystemExit(f"documents on the disk are answered only {ratio:.1f} times as fast as a full prefill")


if __name__ == "__main__":
    main()
