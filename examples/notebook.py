# %% [markdown]
# # Documents in any order
# A notebook as a script: editors show each `# %%` as a cell. To run all of it, install the wheel `kvcache` and call
# `python examples/notebook.py` from the root of the repository.

# %%
import itertools
import pathlib

import kvcache

documents = [path.read_text().strip() for path in sorted(pathlib.Path("examples/documents").glob("*.txt"))]
system = pathlib.Path("examples/system.txt").read_text().strip()
llm = kvcache.LLM("models/tiny-rag", chunk_cache_config=kvcache.ChunkCacheConfig(memory_share=0.5))

# %% [markdown]
# Every order of the documents is another prompt. A prefix cache finds only the system prompt; here, everything but the question is found.

# %%
orders = list(itertools.permutations(documents))[:8]
answers = llm.generate(["##".join([system, *order, "alba ?"]) for order in orders[:1]])
answers += llm.generate(["##".join([system, *order, "alba ?"]) for order in orders[1:]])
print(f"{'answer':>10} {'found':>6} {'of':>4} {'first token':>12}")
for answer in answers:
    print(f"{answer.text.strip():>10} {answer.num_cached_tokens:6} {answer.num_prompt_tokens:4} {answer.ttft * 1e3:9.2f} ms")
assert len({answer.text for answer in answers}) == 1

# %% [markdown]
# The counts of the cache: each document was computed once.

# %%
stats = llm.get_chunk_cache_stats()
print(f"hit rate {stats.hit_rate:.0%}, {stats.used_blocks} of {stats.total_blocks} blocks, {stats.insertions} documents stored")
assert stats.insertions == len(documents)

# %% [markdown]
# Documents that were computed separately have not seen each other. By default, the half of their tokens that the question attends to most
# is recomputed: answers that need several documents then come close to ordinary attention's.

# %%
careful = kvcache.LLM("models/tiny-rag")
question = "##".join([system, *documents, "alba ?"])
(answer,) = careful.generate(question)
(again,) = careful.generate("##".join([system, *reversed(documents), "alba ?"]))
print(f"{again.text.strip()}: {again.num_recomputed_tokens} tokens recomputed, {again.num_cached_tokens} found")
