"""Peers: each gives the engine's own tokens where it runs here, and says what is missing where it does not."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_pair
from fake_llama_cpp import FakeLlamaCpp, greedy

from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.bench.measure import Request
from ddtree_trt.bench.settings import BenchSettings
from ddtree_trt.errors import UsageError
from workbench.__main__ import main as workbench_main
from workbench.anchors import rate
from workbench.peers import compare, open_peer
from workbench.peers.base import PeerContext

GREEDY = Request(max_tokens=8, temperature=0.0, seed=3, stop_token_ids=(1,))
NOTHING: dict[str, str | None] = {}


def context(engine: Path, **changes: Any) -> PeerContext:
    return PeerContext(engine, load_manifest(engine), 2, **changes)


@pytest.mark.parametrize("spec", ["vllm", "hf=x", "llama-cpp=", "tensorrt_llm", ""])
def test_a_peer_that_is_none_is_refused(tiny_engine: Path, spec: str) -> None:
    with pytest.raises(UsageError, match=r"known are hf|takes"):
        open_peer(spec, context(tiny_engine))


def test_transformers_gives_the_tokens(tiny_engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = BenchSettings(str(tiny_engine), methods=("ar",), limit=1, max_tokens=12)
    compare(settings, ["hf"], NOTHING, tmp_path / "r.json")
    kept = json.loads((tmp_path / "r.json").read_text())
    outcomes = {s["case"]: s["outcome"] for s in kept["samples"]}
    assert set(outcomes) == {"ar", "dflash", "hf:generate", "hf:prompt-lookup"}
    assert all(o["token_ids"] == outcomes["ar"]["token_ids"] for o in outcomes.values())
    plain = outcomes["hf:generate"]
    assert plain["acceptance_lengths"] == [1] * (plain["output_tokens"] - 1)
    assert plain["first_token_s"] > 0 and plain["decode_s"] > 0
    assert kept["environment"]["peers"]["hf"]["threads"] == "1"
    assert "| hf:generate " in capsys.readouterr().out


def test_a_peer_runs_the_engines_checkpoints_and_no_others(tiny_engine: Path, tmp_path: Path) -> None:
    target, drafter = make_pair(tmp_path)
    for option, path in (("checkpoint", target), ("drafter", drafter)):
        with pytest.raises(UsageError, match=f"--{option} .* is not what the engine was built from"):
            context(tiny_engine, **{option: str(path)}).checkpoints()


def test_what_is_not_installed_is_named(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for spec, file, package in (("tensorrt-llm", "trtllm", "tensorrt_llm"), ("llama-cpp=a", "llamacpp", "llama_cpp")):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(sys.modules, f"workbench.peers.{file}", raising=False)
        monkeypatch.setattr(sys, "argv", ["workbench", "peers", str(tiny_engine), "--peer", spec])
        with pytest.raises(SystemExit, match=f"this needs the Python package {package}; "):
            workbench_main()


@pytest.fixture
def llama_cpp(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> FakeLlamaCpp:
    fake = FakeLlamaCpp(load_manifest(tiny_engine).target_dims)
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    monkeypatch.delitem(sys.modules, "workbench.peers.llamacpp", raising=False)
    return fake


def test_it_runs_token_ids_cold_and_greedily(tiny_engine: Path, tmp_path: Path, llama_cpp: FakeLlamaCpp) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    peer = open_peer(f"llama-cpp={tmp_path / 'a.gguf'}", context(tiny_engine))
    (method,) = peer.methods
    answer, vocab = [3, 4], llama_cpp.dims.vocab_size
    for _ in range(8):
        answer.append(greedy(answer, vocab))
    never = replace(GREEDY, stop_token_ids=())
    outcome = peer.run(method, [3, 4], never)
    assert method == "Q8_0" and llama_cpp.passes == [2] + [1] * 7
    assert llama_cpp.shapes[0].n_threads == 2 and outcome.acceptance_lengths == (1,) * 7
    assert outcome.token_ids == tuple(answer[2:]) == peer.run(method, [3, 4], never).token_ids, "from an empty cache"
    assert peer.run(method, [3, 4], replace(GREEDY, stop_token_ids=(answer[4],))).token_ids == tuple(answer[2:5])
    sampled = [peer.run(method, [3], replace(never, temperature=9.0, seed=seed)).token_ids for seed in (1, 2, 1)]
    assert sampled[0] == sampled[2] != sampled[1]
    peer.close()
    assert llama_cpp.opened == []


def test_sequences_are_timed_while_all_of_them_run() -> None:
    """The second begins at 2 s and the first ends at 5 s: 3 and 4 tokens between."""
    turn = [[1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 3.0, 3.0, 4.0, 4.0, 6.0]]
    assert rate([turn], whole=False) == 7 / 3
    assert rate([turn, [[2.0]]], whole=True) == 12 / 8
    with pytest.raises(UsageError, match="ended before the last one began"):
        rate([[[1.0, 2.0], [2.0, 3.0]]], whole=False)


def run_command(monkeypatch: pytest.MonkeyPatch, *words: Any) -> Any:
    monkeypatch.setattr(sys, "argv", ["workbench", "anchors", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        workbench_main()
    return ended.value.code


def test_the_command(
    tiny_engine: Path, tmp_path: Path, llama_cpp: FakeLlamaCpp, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(PeerContext, "checkpoints", lambda self: (tmp_path / "model.gguf", tmp_path))
    words = "--pasts 40 --sequences 3 --turns 2 --tokens 40 --repeats 2".split()
    assert run_command(monkeypatch, tiny_engine, *words, "--json", tmp_path / "r.json") == 0
    shown = capsys.readouterr().out
    assert "gave other tokens" not in shown and llama_cpp.opened == []
    kept = json.loads((tmp_path / "r.json").read_text())
    assert list(kept["works"]) == ["past 40", "3 sequences", "chat of 2 turns"]
    for name, work in kept["works"].items():
        assert f"| {name} " in shown
        assert {case: len(rates) for case, rates in work["tokens_per_s"].items()} == dict.fromkeys(
            ("llama.cpp", "ar", "auto"), 2
        )
    assert [shape.n_seq_max for shape in llama_cpp.shapes] == [1, 3, 1]
    assert {shape.n_threads for shape in llama_cpp.shapes} == {kept["environment"]["engine"]["threads"]}
    assert llama_cpp.passes[:40] == [40] + [1] * 39
    refused = run_command(monkeypatch, tiny_engine, "--sequences", "999")
    assert re.search("--sequences 999 is more than the engine's max_batch .* build it with --max-batch 999", refused)
