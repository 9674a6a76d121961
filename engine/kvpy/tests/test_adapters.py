"""Adapters: two of them share nothing, and neither do two versions of one."""

from __future__ import annotations

import os
import pathlib
from types import SimpleNamespace

import pytest
from fake_engine import ROW, SIZE, Engine, context
from roomy import Roomy
from test_pressure import prompt

ROOMY = Roomy()
LENGTHS = [20, 30, 40]


class Adapters:
    """An engine with two adapters, ``a`` and ``b``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path) -> None:
        self.engine = Engine(monkeypatch, lora=object(), prefix_memory=256 * SIZE * ROW)
        self.folder, self.asked = folder, 0
        for name in ("a", "b"):
            (folder / name).mkdir()
            (folder / name / "adapter_model.safetensors").write_bytes(b"0" * 64)
            (folder / name / "adapter_config.json").write_text("{}")
        self.engine.adapters = {"a": 0, "b": 0}

    def adapter(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(lora_name=name, lora_path=str(self.folder / name), lora_int_id=1 + (name == "b"))

    def ask(self, name: str | None, params: dict | None) -> int:
        """Asks, and checks the answer. Returns how many tokens of it were found."""
        tokens, asked = prompt(LENGTHS), f"{self.asked}"
        self.asked += 1
        before = self.engine.side.prefixes.tokens_found
        self.engine.ask(asked, tokens, adapter=self.adapter(name) if name else None, **(params or {}))
        self.engine.run(50)
        got, said = self.engine.answers[asked]
        right = ROOMY.answer(tokens, len(got), context(0, name, self.engine.adapters), params)
        assert got == right, f"the answer is of another adapter than {name}"
        return said["chunk_tokens_reused"] if params else self.engine.side.prefixes.tokens_found - before


def rewrite(folder: pathlib.Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"1" * 64)


def rewrite_with_the_old_time(folder: pathlib.Path) -> None:
    file = folder / "adapter_model.safetensors"
    before = file.stat()
    file.write_bytes(b"1" * 64)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def another_config(folder: pathlib.Path) -> None:
    (folder / "adapter_config.json").write_text('{"lora_alpha": 8}')


def one_more_file(folder: pathlib.Path) -> None:
    (folder / "new_embeddings.safetensors").write_bytes(b"")


def exchanged(folder: pathlib.Path) -> None:
    folder.rename(folder.with_name("before"))
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"0" * 64)
    (folder / "adapter_config.json").write_text("{}")


@pytest.mark.parametrize("params", [{"chunk_lengths": LENGTHS}, {"chunk_lengths": LENGTHS, "chunk_mode": "with-system"}, None])
@pytest.mark.parametrize("change", [rewrite, rewrite_with_the_old_time, another_config, one_more_file, exchanged])
def test_an_adapter_that_is_reloaded_in_place_finds_nothing_of_the_old_one(
    params: dict | None, change: object, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    adapters = Adapters(monkeypatch, tmp_path)
    adapters.ask("a", params)
    adapters.engine.kv_cache_manager.reset()
    assert adapters.ask("a", params) > 0
    change(tmp_path / "a")  # type: ignore[operator]
    adapters.engine.adapters["a"] += 1
    # vLLM itself still has blocks under the adapter's name.
    assert adapters.ask("a", params) == 0
    adapters.engine.kv_cache_manager.reset()
    assert adapters.ask("a", params) > 0


def test_adapters_share_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    for params in ({"chunk_lengths": LENGTHS}, None):
        adapters = Adapters(monkeypatch, tmp_path / str(bool(params)) if (tmp_path / str(bool(params))).mkdir() is None else tmp_path)
        assert [adapters.ask(name, params) for name in ("a", "b", None)] == [0, 0, 0]


def test_an_adapter_that_is_not_a_local_folder_keeps_its_chunks(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    adapters = Adapters(monkeypatch, tmp_path)
    adapters.folder = pathlib.Path("someone")
    adapters.ask("a", {"chunk_lengths": LENGTHS})
    assert adapters.ask("a", {"chunk_lengths": LENGTHS}) == 90
