"""Models whose configurations or layers are unusual: which parts of the connector they get, and what is said otherwise."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from fake_engine import ROW, SIZE, Engine, context, model_of, spec_of
from fake_offloading import model_in
from replay import configs
from roomy import Roomy
from test_pressure import nothing_held, prompt

from kvcache.vllm.host import Settings, UnsupportedHostError, geometry
from kvcache.vllm.worker import ChunkWorker

LENGTHS = [20, 30, 40]
# transformers has the number of layers of these models under their own names, and as an attribute.
OWN_NAMES = [
    {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 1},
    {"model_type": "bloom", "n_layer": 1, "hidden_size": 32, "n_head": 1},
    {"model_type": "mpt", "n_layers": 1, "d_model": 32, "n_heads": 1},
    {"model_type": "gptj", "n_layer": 1, "n_embd": 32, "n_head": 1, "rotary_dim": 8},
]


@pytest.mark.parametrize("model", OWN_NAMES, ids=lambda model: model["model_type"])
def test_a_model_with_names_of_its_own_gets_the_tier(model: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, tokens = Engine(monkeypatch, unheard_of=model, prefix_memory=100 * SIZE * ROW), prompt(LENGTHS)
    for name, params in (("plain", {}), ("chunks", {"chunk_lengths": LENGTHS})):
        engine.kv_cache_manager.reset()
        engine.ask(name, tokens, count=5, **params)
        engine.run(50)
        got, said = engine.answers[name]
        assert got == Roomy().answer(tokens, 5, context(0, None, {}), None)
        if params:
            assert "whose keys cannot be moved" in said["chunk_error"] and f'model_type "{model["model_type"]}"' in said["chunk_error"]
        else:
            assert said is None
    # A refused request is an ordinary one.
    assert engine.side.prefixes.tokens_found == (len(tokens) - 1) // SIZE * SIZE and engine.encodes == 0
    assert engine.reset() is True
    engine.run(5)
    nothing_held(engine)


@pytest.mark.parametrize("disk", [False, True])
def test_no_memory_is_allocated_for_chunks_that_cannot_exist(disk: bool, monkeypatch: pytest.MonkeyPatch, tmp_path, caplog) -> None:
    """``host_memory`` is more than any machine has, or less than one block."""
    folder = {"disk_path": str(tmp_path / "disk"), "disk_limit": "8MiB", "disk_loads": "always", "path": str(model_in(tmp_path / "model"))}
    for memory in (1 << 50, 1):
        with caplog.at_level(logging.WARNING):
            engine = Engine(monkeypatch, unheard_of=OWN_NAMES[0], host_memory=memory, prefix_memory=40 * SIZE * ROW, **(folder if disk else {}))
        assert "host_memory is not allocated" in caplog.text
        assert engine.worker._worker.arena is None and engine.side.chunks.shape.num_blocks == 0
        tokens = prompt(LENGTHS)
        for name in ("first", "again"):
            engine.kv_cache_manager.reset()
            engine.ask(name, tokens, count=3)
            engine.run(100)
            assert engine.answers[name][0] == Roomy().answer(tokens, 3, context(0, None, {}), None)
        assert engine.side.prefixes.tokens_found > 0 and engine.side.chunks.counts()[1] == {"chunk_memory_usage_perc": 0.0}
        engine.close()


def test_a_setting_that_a_window_overrules_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def said(windows: tuple[int | None, ...], **settings: object) -> bool:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            Engine(monkeypatch, windows=windows, **settings)
        return "max_chunk_tokens is ignored" in caplog.text

    assert [said(windows, max_chunk_tokens=24) for windows in ((20,), (None, 20), (20, None, 8), (None,), (None, None))] == [True, True, True, False, False]
    assert not said((None, 20)) and not said((None, 20), max_chunks=5)
    assert not Engine(monkeypatch, windows=(20,), unheard_of=OWN_NAMES[0], max_chunk_tokens=24, prefix_memory=1 << 20).encodes
    assert "max_chunk_tokens" not in caplog.text, "there are no chunks"


@pytest.mark.parametrize("recompute", ["link:4", "question:0.5"])
@pytest.mark.parametrize("count", [2, 3])
def test_nothing_is_recomputed_over_several_tables(count: int, recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers see everything, and vLLM has a table of blocks for each group of them all the same."""
    windows = (None,) * count
    engine, tokens, roomy = Engine(monkeypatch, windows=windows), prompt(LENGTHS), Roomy(windows)
    for name, params in (("chosen", {"chunk_recompute": recompute}), ("first", {}), ("again", {})):
        params = {"chunk_lengths": LENGTHS, **params}
        engine.ask(name, tokens, count=4, **params)
        engine.run(50)
        got, said = engine.answers[name]
        is_refused = said == {"chunk_error": "tokens are recomputed only if all layers share one table of blocks; use chunk_recompute none"}
        assert is_refused == (name == "chosen")
        assert got == roomy.answer(tokens, 4, context(0, None, {}), None if is_refused else params)
    nothing_held(engine)


@pytest.mark.parametrize("hashed", [4, 2, 1])
def test_a_router_is_not_left_without_events_in_silence(hashed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(Engine, "hash_block_size", hashed, raising=False)
    warning = f"vLLM hashes blocks of {hashed} tokens (hash_block_size), and its blocks have {SIZE} tokens"
    for has_events, tier in ((False, 100), (True, 0), (True, 100)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            engine = Engine(monkeypatch, has_events=has_events, prefix_memory=tier * SIZE * ROW)
        # Without a tier, or without events, there is nothing to be said.
        assert (warning in caplog.text) == (has_events and tier > 0)
        engine.ask("one", prompt(LENGTHS))
        engine.run(50)
        assert list(engine.connector.take_events()) == []


def configured(layers: int, **changes: object) -> tuple[object, object]:
    """Returns the configurations of a rank that has the caches of two layers, of a model with ``layers`` layers."""
    model, names = model_of((None,))
    told = [{"layers": ["layer.0", "layer.1"], "spec": spec_of(None)}]
    config, caches = configs({"model": {**model, "num_hidden_layers": layers}, "max_model_len": 64, "extra_config": {}, "groups": told, "num_blocks": 8}, 1)
    for name, value in changes.items():
        setattr(config, name, value)
    return config, caches


SHARED = {"layer.2": "layer.0", "layer.3": "layer.1"}


@pytest.mark.parametrize(
    ("layers", "changes", "advice"),
    [
        (4, {}, "use a model in which each layer has keys and values of its own"),
        (4, {"compilation_config": SHARED}, "2 layers use the keys and values of other layers"),
        (4, {"parallel_config": SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=2)}, "--pipeline-parallel-size 1"),
        (1, {"speculative_config": object()}, "without --speculative-config"),
    ],
)
def test_a_rank_that_lacks_layers_says_which_case_it_is(layers: int, changes: dict, advice: str) -> None:
    config, caches = configured(layers, **{name: value for name, value in changes.items() if value is not SHARED})
    if SHARED in changes.values():
        layer = {name: SimpleNamespace(isa="vec", kv_sharing_target_layer_name=target) for name, target in SHARED.items()}
        config.compilation_config.static_forward_context.update(layer)
    with pytest.raises(UnsupportedHostError, match=f"2 layers, and the model has {layers} layers: .*{advice}") as raised:
        ChunkWorker(config, geometry(config, caches, Settings()))
    # Only the case at hand is named.
    assert sum(word in str(raised.value) for word in ("pipelines", "draft models", "of other layers")) == (advice != "" and "each layer" not in advice)


def test_a_rank_with_all_layers_is_served() -> None:
    config, caches = configured(2)
    assert ChunkWorker(config, geometry(config, caches, Settings())).layers == ["layer.0", "layer.1"]
