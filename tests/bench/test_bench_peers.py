"""Peers: each gives the engine's own tokens where it runs here, and says what is missing where it does not."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from checkpoints import make_pair

from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.bench.contender import Request
from ddtree_trt.bench.peers.base import PeerContext
from ddtree_trt.bench.peers.registry import HELP, check_peer, open_peer
from ddtree_trt.bench.reference import commit_of, forced_acceptance, import_published
from ddtree_trt.bench.runner import run_bench
from ddtree_trt.bench.settings import BenchSettings, Case
from ddtree_trt.errors import DDTreeError, MissingDependency, UsageError

GREEDY = Request(max_tokens=8, temperature=0.0, seed=0, stop_token_ids=(1,))
has_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")


def context(engine: Path, **settings: Any) -> PeerContext:
    return PeerContext(BenchSettings(str(engine), **settings), load_manifest(engine), 1, frozenset())


@pytest.mark.parametrize("spec", ["vllm", "hf=x", "openai", "ddtree-reference=", "tensorrt_llm", ""])
def test_a_peer_that_is_none_is_refused(spec: str) -> None:
    with pytest.raises(UsageError, match=r"known are hf|takes"):
        check_peer(spec)


def test_known_peers_are_listed() -> None:
    assert [check_peer(s)[0] for s in ("hf", "llama-cpp=a", "ddtree-reference=a", "tensorrt-llm=a", "openai=b")] == [
        name.strip().partition("=")[0].rstrip("[") for name in HELP.replace(" or ", ",").split(",")
    ]


@has_torch
def test_transformers_gives_the_engines_tokens(tiny_engine: Path) -> None:
    result = run_bench(
        BenchSettings(str(tiny_engine), methods=("ar",), limit=1, max_tokens=12, warmup_tokens=2, peers=("hf",))
    )
    samples = {s.case: s for s in result.samples}
    assert set(samples) == {"ar", "dflash", "hf:generate", "hf:prompt-lookup"}
    assert {s.output_digest for s in samples.values()} == {samples["ar"].output_digest}
    plain = samples["hf:generate"]
    assert plain.acceptance_lengths == (1,) * plain.decoded_tokens
    assert plain.first_token_s > 0
    assert plain.decode_s > 0
    assert result.parts[0].contenders["hf"]["threads"] == "1"


@has_torch
def test_assisted_generation_runs_with_an_assistant(tiny_engine: Path) -> None:
    target = Path(str(context(tiny_engine).checkpoints().target))
    peer = open_peer("hf", context(tiny_engine, assistant=str(target)))
    assert Case("assisted", peer="hf") in peer.cases
    outcomes = [peer.run(case, [5, 6, 7], GREEDY) for case in peer.cases]
    assert len({o.token_ids for o in outcomes}) == 1
    assisted = outcomes[-1]
    assert max(assisted.acceptance_lengths or (assisted.first_tokens,)) > 1  # its own assistant is always right
    peer.close()


def test_a_peer_runs_the_engines_checkpoints_and_no_others(tiny_engine: Path, tmp_path: Path) -> None:
    target, drafter = make_pair(tmp_path)
    with pytest.raises(UsageError, match="is not what the engine was built from"):
        context(tiny_engine, checkpoint=str(target)).checkpoints()
    with pytest.raises(UsageError, match=r"--drafter .* is not what the engine was built from"):
        context(tiny_engine, drafter=str(drafter)).checkpoints()


@pytest.mark.parametrize(
    ("spec", "module", "message"),
    [
        ("hf", "torch", r"\.\[torch\]"),
        ("tensorrt-llm", "tensorrt_llm", r"\.\[trtllm\]"),
        ("openai=http://localhost", "openai", "pip install openai"),
    ],
)
def test_what_is_not_installed_is_named(
    tiny_engine: Path, monkeypatch: pytest.MonkeyPatch, spec: str, module: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependency, match=message):
        open_peer(spec, context(tiny_engine))


# The published code: a checkout with its file names and signatures, and nothing of its content.

FAKE_DDTREE = """
    from types import SimpleNamespace
    from loguru import logger
    from model import DFlashDraftModel

    def follow_verified_tree(child_maps, posterior):
        return [0], int(posterior[0, 0])

    def maybe_enable_cpp_compact(enabled):
        pass

    def load_cpp_compact_module():
        return None

    def ddtree_generate(**options):
        raise AssertionError("only its signature is looked at")
"""
FAKE_MODEL = """
    from datasets import load_dataset, Features, Sequence, Value

    class DFlashDraftModel:
        pass
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "published"
    files = {
        "ddtree.py": FAKE_DDTREE,
        "dflash.py": "def dflash_generate(**options): ...",
        "model/__init__.py": "from .dflash import DFlashDraftModel",
        "model/dflash.py": FAKE_MODEL,
    }
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(textwrap.dedent(text))
    git = ["git", "-C", str(path), "-c", "user.name=n", "-c", "user.email=e@x"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    before = set(sys.modules)
    yield path
    for name in set(sys.modules) - before:
        if name in ("ddtree", "dflash") or name.split(".")[0] == "model":
            del sys.modules[name]


@has_torch
def test_a_checkout_is_imported_without_what_it_does_not_need(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    absent = ("loguru", "datasets")
    for name in absent:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in absent else find(name, *a))
    published = import_published(checkout)
    assert published.ddtree.DFlashDraftModel is not None
    assert not {"loguru", "datasets"} & set(sys.modules)
    assert str(checkout) not in sys.path


@has_torch
def test_another_module_of_the_same_name_is_noticed(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = ModuleType("model")
    stranger.__file__ = "/elsewhere/model.py"
    stranger.DFlashDraftModel = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "model", stranger)
    with pytest.raises(UsageError, match=r"loaded from /elsewhere/model\.py"):
        import_published(checkout)


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no ddtree\.py; get one with: git clone"):
        import_published(tmp_path)


def test_an_edited_checkout_is_refused(checkout: Path) -> None:
    assert len(commit_of(checkout)) == 40
    (checkout / "dflash.py").write_text("changed = True\n")
    with pytest.raises(UsageError, match="unmodified checkout"):
        commit_of(checkout)


@has_torch
def test_the_published_walk_is_forced_as_ours_is(checkout: Path) -> None:
    import torch

    published = import_published(checkout)
    children = [{3: 1, 1: 5}, {1: 2, 2: 3}, {3: 4}, {}, {}, {}]  # root -> 1 -> {2 -> 4, 3}, root -> 5
    posterior = torch.tensor([[9, 9, 3, 9, 9, 9]])
    original = published.ddtree.follow_verified_tree
    with forced_acceptance(published, 3, frozenset({0})):
        assert published.ddtree.follow_verified_tree(children, posterior) == (
            [0, 1, 2],
            1,
        )  # 3 has a child, 0 is banned
    assert published.ddtree.follow_verified_tree is original


# TensorRT-LLM, as its LLM API is documented.


class FakeLLM:
    made: list[dict[str, Any]] = []  # noqa: RUF012

    def __init__(self, **options: Any) -> None:
        FakeLLM.made.append(options)
        self.closed = False

    def generate_async(self, ids: list[int], params: Any, streaming: bool) -> Iterator[Any]:
        assert streaming
        for end in (1, 3, 6):
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=list(range(end)))])

    def shutdown(self) -> None:
        self.closed = True


def test_tensorrt_llm_runs_both_methods_cold(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = SimpleNamespace
    llmapi = record(DFlashDecodingConfig=lambda **o: ("dflash", o), KvCacheConfig=lambda **o: ("kv", o))
    module = record(LLM=FakeLLM, SamplingParams=lambda **o: o, llmapi=llmapi, __version__="9")
    monkeypatch.setitem(sys.modules, "tensorrt_llm", module)
    FakeLLM.made.clear()
    peer = open_peer("tensorrt-llm", context(tiny_engine))
    assert [c.label for c in peer.cases] == ["tensorrt-llm:ar", "tensorrt-llm:dflash"]
    plain, speculative = FakeLLM.made
    assert "speculative_config" not in plain
    assert (
        speculative["speculative_config"][1]["max_draft_len"] == load_manifest(tiny_engine).drafting.dims.draft_length
    )
    assert plain["kv_cache_config"][1]["enable_block_reuse"] is False
    outcome = peer.run(peer.cases[1], [1, 2], GREEDY)
    assert outcome.token_ids == tuple(range(6))
    assert outcome.acceptance_lengths == (2, 3)
    peer.close()


# An OpenAI-compatible server.


class _Handler(BaseHTTPRequestHandler):
    asked: list[dict[str, Any]] = []  # noqa: RUF012
    usage = True

    def do_GET(self) -> None:
        self._answer(json.dumps({"object": "list", "data": [{"id": "box-model", "object": "model"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        _Handler.asked.append(body)
        parts: list[dict[str, Any]] = [
            {"choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in ("one ", "two")
        ]
        if _Handler.usage:
            parts.append({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 7, "total_tokens": 9}})
        base = {"id": "x", "object": "text_completion", "created": 0, "model": "box-model"}
        events = "".join(f"data: {json.dumps({**base, **part})}\n\n" for part in parts)
        self._answer(events + "data: [DONE]\n\n", "text/event-stream")

    def _answer(self, text: str, kind: str = "application/json") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    _Handler.asked.clear()
    _Handler.usage = True
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_is_asked_for_token_ids_and_counts_by_its_usage(tiny_engine: Path, url: str) -> None:
    pytest.importorskip("openai")
    peer = open_peer(f"openai={url}", context(tiny_engine))
    (case,) = peer.cases
    assert Case.parse(case.label) == case
    outcome = peer.run(case, [4, 5], GREEDY)
    assert (outcome.output_tokens, outcome.text, outcome.acceptance_lengths) == (7, "one two", None)
    (body,) = _Handler.asked
    assert (body["model"], body["prompt"], body["max_tokens"], body["temperature"]) == ("box-model", [4, 5], 8, 0.0)
    assert peer.describe()["url"] == f"{url}/v1"
    _Handler.usage = False
    with pytest.raises(DDTreeError, match="streams no usage"):
        peer.run(case, [4, 5], GREEDY)
    peer.close()


def test_a_server_that_is_not_there_is_named(tiny_engine: Path) -> None:
    pytest.importorskip("openai")
    with pytest.raises(UsageError, match="takes a URL"):
        open_peer("openai=localhost:8000", context(tiny_engine))
    with pytest.raises(DDTreeError, match="is the server up"):
        open_peer("openai=http://127.0.0.1:9", context(tiny_engine))
