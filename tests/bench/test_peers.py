"""Peers: each gives the engine's own tokens where it runs here, and says what is missing where it does not."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from checkpoints import make_drafter, make_pair, make_target
from fake_llama_cpp import FakeLlamaCpp, greedy
from gguf_files import make_gguf

from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.bench.measure import Request
from ddtree_trt.bench.settings import BenchSettings
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.errors import DDTreeError, UsageError
from ddtree_trt.models.families import LLAMA
from workbench.__main__ import main as workbench_main
from workbench.peers import compare, open_peer
from workbench.peers.base import PeerContext, TokenClock

GREEDY = Request(max_tokens=8, temperature=0.0, seed=3, stop_token_ids=(1,))
ANSWER = [5, 6, 7, 8, 9, 10, 11, 12]
NOTHING: dict[str, str | None] = {}
has_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python (extra [peers]) is not installed"
)


def context(engine: Path, **changes: Any) -> PeerContext:
    return PeerContext(engine, load_manifest(engine), 2, **changes)


@pytest.mark.parametrize("spec", ["vllm", "hf=x", "llama-cpp=", "tensorrt_llm", ""])
def test_a_peer_that_is_none_is_refused(tiny_engine: Path, spec: str) -> None:
    with pytest.raises(UsageError, match=r"known are hf|takes"):
        open_peer(spec, context(tiny_engine))


def test_transformers_gives_the_engines_tokens(
    tiny_engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_assisted_generation_runs_with_an_assistant(tiny_engine: Path) -> None:
    target, _ = context(tiny_engine).checkpoints()
    peer = open_peer("hf", context(tiny_engine, assistant=str(target)))
    assert peer.methods[-1] == "assisted"
    outcomes = [peer.run(method, [5, 6, 7], GREEDY) for method in peer.methods]
    assert len({o.token_ids for o in outcomes}) == 1
    assisted = outcomes[-1]
    assert max(assisted.acceptance_lengths or (assisted.first_tokens,)) > 1  # its own assistant is always right
    peer.close()


def test_a_peer_runs_the_engines_checkpoints_and_no_others(tiny_engine: Path, tmp_path: Path) -> None:
    target, drafter = make_pair(tmp_path)
    for option, path in (("checkpoint", target), ("drafter", drafter)):
        with pytest.raises(UsageError, match=f"--{option} .* is not what the engine was built from"):
            context(tiny_engine, **{option: str(path)}).checkpoints()


@pytest.mark.parametrize(
    ("spec", "file", "package", "how"),
    [
        ("tensorrt-llm", "trtllm", "tensorrt_llm", r".\[trtllm\]"),
        ("llama-cpp=a.gguf", "llamacpp", "llama_cpp", r".\[peers\]"),
    ],
)
def test_what_is_not_installed_is_named(
    tiny_engine: Path, monkeypatch: pytest.MonkeyPatch, spec: str, file: str, package: str, how: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"workbench.peers.{file}", raising=False)
    monkeypatch.setattr(sys, "argv", ["workbench", "peers", str(tiny_engine), "--peer", spec])
    with pytest.raises(SystemExit, match=f"this needs the Python package {package}; .*{how}"):
        workbench_main()


def test_a_clock_counts_rounds_and_leaves_the_first_step_out(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 10.5, 10.6, 11.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = TokenClock()
    for tokens in (3, 0, 2, 4):
        clock.arrived(tokens)
    outcome = clock.outcome(range(9))
    assert (outcome.output_tokens, outcome.first_tokens, outcome.acceptance_lengths) == (9, 3, (2, 4))
    assert [outcome.first_token_s, outcome.decode_s] == pytest.approx([0.5, 0.5])


# TensorRT-LLM, as its LLM API is documented; the module is a double, an export's files are real.


class FakeLLM:
    made: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, **options: Any) -> None:
        FakeLLM.made.append(options)

    def generate_async(self, ids: list[int], params: Any, streaming: bool) -> Iterator[Any]:
        assert streaming
        for end in (1, 3, 6):
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=list(range(end)))])

    def shutdown(self) -> None:
        pass


@pytest.fixture
def tensorrt_llm(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What models were made with."""
    record = SimpleNamespace
    api = record(DFlashDecodingConfig=lambda **o: o, KvCacheConfig=lambda **o: o)
    module = record(LLM=FakeLLM, SamplingParams=lambda **o: o, llmapi=api, __version__="9")
    for name, double in (("tensorrt_llm", module), ("tensorrt_llm.llmapi", api)):
        monkeypatch.setitem(sys.modules, name, double)
    monkeypatch.delitem(sys.modules, "workbench.peers.trtllm", raising=False)
    monkeypatch.setattr(FakeLLM, "made", [])
    return FakeLLM.made


def test_tensorrt_llm_runs_both_methods_cold(tiny_engine: Path, tensorrt_llm: list[dict[str, Any]]) -> None:
    peer = open_peer("tensorrt-llm", context(tiny_engine))
    assert peer.methods == ["ar", "dflash"]
    plain, speculative = list(tensorrt_llm)
    assert "speculative_config" not in plain
    assert speculative["speculative_config"]["max_draft_len"] == load_manifest(tiny_engine).drafting.dims.draft_length
    assert plain["kv_cache_config"]["enable_block_reuse"] is False and plain["max_batch_size"] == 1
    outcome = peer.run("dflash", [1, 2], GREEDY)
    assert (outcome.token_ids, outcome.acceptance_lengths) == (tuple(range(6)), (2, 3))
    peer.close()


# llama.cpp, as its C interface is called; the library itself where it is installed.


@pytest.fixture
def llama_cpp(tiny_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeLlamaCpp:
    """The files that it knows are in `tmp_path`."""
    fake = FakeLlamaCpp(load_manifest(tiny_engine).target_dims)
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    monkeypatch.delitem(sys.modules, "workbench.peers.llamacpp", raising=False)
    for name in ("a.gguf", "f32.gguf", "short.gguf", "wide.gguf", "broken.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    return fake


def test_it_runs_token_ids_cold_and_greedily(tiny_engine: Path, tmp_path: Path, llama_cpp: FakeLlamaCpp) -> None:
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
    assert peer.describe()["features"] == "CPU : AVX2 = 1"
    sampled = [peer.run(method, [3], replace(never, temperature=9.0, seed=seed)).token_ids for seed in (1, 2, 1)]
    assert sampled[0] == sampled[2] != sampled[1]
    almost = replace(never, temperature=0.01)
    assert peer.run(method, [3, 4], almost).token_ids == outcome.token_ids
    peer.close()
    assert llama_cpp.opened == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short.gguf", r"vocabulary \(.*, 3\), the engine's target \(.*give the GGUF file of the same model"),
        ("wide.gguf", "give the GGUF file of the same model"),
        ("absent.gguf", r"absent\.gguf' is no file"),
        ("broken.gguf", r"cannot load .*broken\.gguf"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    tiny_engine: Path, tmp_path: Path, llama_cpp: FakeLlamaCpp, name: str, message: str
) -> None:
    with pytest.raises(DDTreeError, match=message) as refused:
        open_peer(f"llama-cpp={tmp_path / name}", context(tiny_engine))
    assert isinstance(refused.value, UsageError) != (name == "broken.gguf")
    assert llama_cpp.opened == []


def test_two_peers_of_one_name_are_refused(tiny_engine: Path, tmp_path: Path, llama_cpp: FakeLlamaCpp) -> None:
    peers = [f"llama-cpp={tmp_path / name}" for name in ("f32.gguf", "a.gguf", "a.gguf")]
    with pytest.raises(UsageError, match="two peers are called llama-cpp:Q8_0"):
        compare(BenchSettings(engine=str(tiny_engine), methods=("ar",), limit=1, max_tokens=4), peers, NOTHING, None)
    assert llama_cpp.opened == []


@has_llama_cpp
def test_the_library_gives_the_engines_tokens(tmp_path: Path) -> None:
    """A random Llama target from one file, in both; and sequences that share its passes are as they are alone."""
    sizes: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96}
    target = make_target(tmp_path / "target", family=LLAMA, **sizes)
    drafter = make_drafter(tmp_path / "drafter", family=LLAMA, **sizes)
    file = make_gguf(target, tmp_path / "target.gguf", metadata={"general.file_type": 0})
    compile_engine(BuildRequest(target="mine", checkpoint=file, drafter=drafter, output=tmp_path / "engine"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"token_ids": ids}) + "\n" for ids in ([3, 7, 30], [11, 5, 90, 2], [40])))
    settings = BenchSettings(str(tmp_path / "engine"), methods=("ar",), prompts=(str(prompts),), max_tokens=16)
    compare(settings, [f"llama-cpp={file}"], NOTHING, tmp_path / "r.json")
    samples = json.loads((tmp_path / "r.json").read_text())["samples"]
    outputs = {(s["case"], s["prompt"]): s["outcome"]["token_ids"] for s in samples}
    assert {case for case, _ in outputs} == {"ar", "dflash", "llama-cpp:F32"}
    assert all(tokens == outputs["ar", prompt] for (_, prompt), tokens in outputs.items())
