"""The comparison with llama.cpp: what it times, and that both do the same work."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_llama_cpp import FakeLlamaCpp, greedy

from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.errors import UsageError
from workbench.__main__ import main as workbench_main
from workbench.anchors import rate, theirs
from workbench.peers.base import PeerContext


@pytest.fixture
def library(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> FakeLlamaCpp:
    fake = FakeLlamaCpp(load_manifest(tiny_engine).target_dims)
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    monkeypatch.delitem(sys.modules, "workbench.peers.llamacpp", raising=False)
    return fake


def test_sequences_are_timed_while_all_of_them_run() -> None:
    """The second begins at 2 s and the first ends at 5 s: 3 and 4 tokens between."""
    turn = [[1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 3.0, 3.0, 4.0, 4.0, 6.0]]
    assert rate([turn], whole=False) == 7 / 3
    assert rate([turn, [[2.0]]], whole=True) == 12 / 8
    with pytest.raises(UsageError, match="ended before the last one began"):
        rate([[[1.0, 2.0], [2.0, 3.0]]], whole=False)


def test_llama_cpp_is_led_and_keeps_what_is_common(tiny_engine: Path, tmp_path: Path, library: FakeLlamaCpp) -> None:
    """Its choices are its own: all agree along its own answers, and none along others. Two sequences of one pass end at
    different lengths, and a turn computes what the one before has not."""
    from workbench.peers.llamacpp import LlamaCpp

    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    manifest = load_manifest(tiny_engine)
    vocab = manifest.target_dims.vocab_size
    model = LlamaCpp(tmp_path / "a.gguf", manifest, 2, sequences=2, length=32)

    def own(prompt: list[int], tokens: int) -> tuple[list[int], list[int]]:
        ids = list(prompt)
        for _ in range(tokens):
            ids.append(greedy(ids, vocab))
        return prompt, ids[len(prompt) :]

    held: list[list[int]] = [[], []]
    first = [own([5, 6, 7], 4), own([8], 2)]
    times, agreed = theirs(model, held, first)
    assert (library.passes, agreed) == ([4, 2, 1, 1], 6) and [len(t) for t in times] == [4, 2]
    prompt, answer = first[0]
    second = [own([*prompt, *answer[:2], 9, 9], 2), own([8], 1)]
    library.passes.clear()
    _, agreed = theirs(model, held, second)
    assert (library.passes, agreed) == ([2 + 1, 1], 3)
    wrong = [(second[0][0], [(token + 1) % vocab for token in second[0][1]]), own([1], 1)]
    assert theirs(model, held, wrong)[1] == 1
    model.close()
    assert library.opened == []


def run_command(monkeypatch: pytest.MonkeyPatch, *words: Any) -> Any:
    monkeypatch.setattr(sys, "argv", ["workbench", "anchors", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        workbench_main()
    return ended.value.code


def test_the_command(
    tiny_engine: Path, tmp_path: Path, library: FakeLlamaCpp, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(PeerContext, "checkpoints", lambda self: (tmp_path / "model.gguf", tmp_path))
    words = "--pasts 40 --sequences 3 --turns 2 --tokens 40 --repeats 2".split()
    assert run_command(monkeypatch, tiny_engine, *words, "--json", tmp_path / "r.json") == 0
    shown = capsys.readouterr().out
    assert "gave other tokens" not in shown and library.opened == []
    kept = json.loads((tmp_path / "r.json").read_text())
    assert list(kept["works"]) == ["past 40", "3 sequences", "chat of 2 turns"]
    for name, work in kept["works"].items():
        assert f"| {name} " in shown
        assert {case: len(rates) for case, rates in work["tokens_per_s"].items()} == {
            "llama.cpp": 2,
            "ar": 2,
            "auto": 2,
        }
        assert all(rate > 0 for rates in work["tokens_per_s"].values() for rate in rates)
    assert [shape.n_seq_max for shape in library.shapes] == [1, 3, 1]
    assert {shape.n_threads for shape in library.shapes} == {kept["environment"]["engine"]["threads"]}
    assert library.passes[:40] == [40] + [1] * 39


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--sequences 999", "--sequences 999 is more than the engine's max_batch .* build it with --max-batch 999"),
        ("--turns 99 --sequences 1", "too short for --turns 99.*give more --prompts"),
    ],
)
def test_what_cannot_be_compared(
    tiny_engine: Path, tmp_path: Path, library: FakeLlamaCpp, monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "Hello"}\n')
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(PeerContext, "checkpoints", lambda self: (tmp_path / "model.gguf", tmp_path))
    refused = run_command(monkeypatch, tiny_engine, "--prompts", tmp_path / "p.jsonl", *words.split())
    assert re.search(message, refused) and "\n" not in refused
