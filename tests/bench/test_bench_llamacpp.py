"""llama.cpp as a peer: the protocol with llama-cpp-python, and its tokens where that is installed."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checkpoints import make_drafter, make_target
from gguf_files import make_gguf

from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.bench.contender import Request
from ddtree_trt.bench.peers.base import PeerContext
from ddtree_trt.bench.peers.llamacpp import DRAFT_TOKENS
from ddtree_trt.bench.peers.registry import check_peer, open_peer
from ddtree_trt.bench.runner import run_bench
from ddtree_trt.bench.settings import BenchSettings, Case
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.errors import DDTreeError, MissingDependency, UsageError
from ddtree_trt.models.families import LLAMA
from ddtree_trt.runtime.text.codec import TextCodec

has_library = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python (extra [peers]) is not installed"
)
GREEDY = Request(max_tokens=7, temperature=0.0, seed=3, stop_token_ids=(1,))
ANSWER = [5, 6, 7, 8, 9, 10, 11, 12]


class FakeLlama:
    """llama-cpp-python's `Llama` whose greedy answer is ANSWER; a draft model's tokens are verified as it does."""

    made: list[FakeLlama] = []  # noqa: RUF012
    vocabulary, layers, width = 0, 0, 0
    codec: TextCodec

    def __init__(self, path: str, **options: Any) -> None:
        if Path(path).read_bytes() == b"broken":
            raise ValueError(f"Failed to load model from file: {path}")
        self.path, self.options, self.resets, self.closed = path, options, 0, False
        self.seed, self.asked = -1, ([0], {"temp": -1.0})
        self.n_threads = options["n_threads"]
        self.metadata = {"general.file_type": "7"}
        self.model = self
        FakeLlama.made.append(self)

    def n_vocab(self) -> int:
        return 3 if self.path.endswith("short.gguf") else FakeLlama.vocabulary

    def n_embd(self) -> int:
        return FakeLlama.width + self.path.endswith("wide.gguf")

    def detokenize(self, tokens: list[int], special: bool) -> bytes:
        assert special
        other = self.path.endswith("other.gguf")
        return b"?" if other else FakeLlama.codec.decode(tokens, skip_special_tokens=False).encode()

    def reset(self) -> None:
        self.resets += 1

    def set_seed(self, seed: int) -> None:
        self.seed = seed

    def generate(self, tokens: Sequence[int], **sampling: float) -> Iterator[int]:
        self.asked = (list(tokens), sampling)
        draft: Callable[[Any], Any] | None = self.options["draft_model"]
        given, done = list(tokens), [t for t in tokens if t in ANSWER]
        while len(done) < len(ANSWER):
            drafts = draft(np.array(given)).tolist() if draft and done else []
            for token in [*drafts, None]:
                right = ANSWER[len(done)]
                done, given = [*done, right], [*given, right]
                yield right
                if token != right or len(done) == len(ANSWER):
                    break

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def library(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the package, and a folder of files that it loads."""
    manifest = load_manifest(tiny_engine)
    dims = manifest.target_dims
    module = SimpleNamespace(
        Llama=FakeLlama, LLAMA_FTYPE_ALL_F32=0, LLAMA_FTYPE_MOSTLY_Q8_0=7, __version__="0.3.36",
        llama_model_n_layer=lambda model: FakeLlama.layers,
        llama_print_system_info=lambda: b"CPU : AVX2 = 1 | AVX512 = 0 | ",
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    monkeypatch.setattr(FakeLlama, "vocabulary", dims.vocab_size)
    monkeypatch.setattr(FakeLlama, "layers", dims.num_layers)
    monkeypatch.setattr(FakeLlama, "width", dims.hidden_size)
    monkeypatch.setattr(FakeLlama, "codec", TextCodec(tiny_engine, {}), raising=False)
    monkeypatch.setattr(FakeLlama, "made", [])
    return tiny_engine


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], Path]:
    def write(name: str) -> Path:
        path = tmp_path / name
        path.write_bytes(b"broken" if name == "broken.gguf" else b"GGUF")
        return path

    return write


def context(engine: Path, **settings: Any) -> PeerContext:
    return PeerContext(BenchSettings(str(engine), **settings), load_manifest(engine), 2, frozenset())


def test_it_runs_token_ids_cold_and_greedily(library: Path, file: Callable[[str], Path]) -> None:
    peer = open_peer(f"llama-cpp={file('a.gguf')}", context(library))
    (case,) = peer.cases
    assert case.label == "llama-cpp:Q8_0" and Case.parse(case.label) == case
    outcome = peer.run(case, [3, 4], GREEDY)
    (model,) = FakeLlama.made
    assert model.asked == ([3, 4], {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temp": 0.0})
    assert (model.resets, model.seed) == (1, 3)
    assert (model.options["n_threads"], model.options["n_threads_batch"]) == (2, 2)
    assert model.options["n_gpu_layers"] == 0
    assert outcome.token_ids == tuple(ANSWER[:7])
    assert outcome.acceptance_lengths == (1,) * 6
    assert peer.run(case, [3, 4], replace(GREEDY, stop_token_ids=(7,))).token_ids == (5, 6, 7)
    assert peer.run(case, [3, 4], replace(GREEDY, temperature=0.7)).output_tokens == 7
    assert model.asked[1]["temp"] == 0.7
    assert peer.describe()["features"] == "CPU : AVX2 = 1"
    peer.close()
    assert FakeLlama.made[0].closed


def test_rounds_of_a_draft_model(library: Path, file: Callable[[str], Path]) -> None:
    """The second file is always right: after the prompt's token come rounds of its drafts and one more."""
    peer = open_peer(f"llama-cpp={file('a.gguf')},{file('b.gguf')}", context(library))
    assert [case.method for case in peer.cases] == ["Q8_0", "Q8_0-draft"]
    outcome = peer.run(peer.cases[1], [3], GREEDY)
    assert outcome.token_ids == tuple(ANSWER[:7])
    assert outcome.first_tokens == 1 and outcome.acceptance_lengths == (DRAFT_TOKENS + 1, 1)
    plain, drafter, whole = FakeLlama.made
    assert (plain.resets, drafter.resets, whole.resets) == (0, 1, 1)
    assert peer.run(peer.cases[0], [3], GREEDY).token_ids == outcome.token_ids
    assert peer.describe()["draft tokens"] == str(DRAFT_TOKENS)
    peer.close()
    assert all(model.closed for model in FakeLlama.made)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("short.gguf",), "has a vocabulary of 3 tokens, the engine"),
        (("other.gguf",), r"token 0 is '\?' in .* the same tokenizer"),
        (("wide.gguf",), "give the GGUF file of the same model"),
        (("a.gguf", "short.gguf"), r"short\.gguf has a vocabulary"),
        (("a.gguf", "b.gguf", "c.gguf"), r"takes MODEL\.gguf or MODEL\.gguf,DRAFT\.gguf"),
        (("a.gguf", ""), r"takes MODEL\.gguf"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    library: Path, file: Callable[[str], Path], names: tuple[str, ...], message: str
) -> None:
    value = ",".join(str(file(name)) if name else "" for name in names)
    with pytest.raises(UsageError, match=message):
        open_peer(f"llama-cpp={value}", context(library))
    assert all(model.closed for model in FakeLlama.made)


def test_missing_and_broken_files_are_named(library: Path, file: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.gguf is no file"):
        open_peer(f"llama-cpp={tmp_path / 'absent.gguf'}", context(library))
    with pytest.raises(DDTreeError, match=r"cannot load .*broken\.gguf: Failed to load"):
        open_peer(f"llama-cpp={file('broken.gguf')}", context(library))
    with pytest.raises(UsageError, match=r"llama-cpp takes llama-cpp=MODEL\.gguf"):
        check_peer("llama-cpp")
    with pytest.raises(UsageError, match="random weights"):
        open_peer(f"llama-cpp={file('a.gguf')}", context(library, random_weights=True))


def test_the_package_is_asked_for(
    tiny_engine: Path, file: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(MissingDependency, match=r"llama-cpp-python .*\.\[peers\]"):
        open_peer(f"llama-cpp={file('a.gguf')}", context(tiny_engine))


def test_two_peers_of_one_name_are_refused(library: Path, file: Callable[[str], Path]) -> None:
    peers = (f"llama-cpp={file('a.gguf')}", f"llama-cpp={file('b.gguf')}")
    with pytest.raises(UsageError, match="two peers are called llama-cpp:Q8_0"):
        run_bench(BenchSettings(str(library), methods=("ar",), limit=1, max_tokens=4, peers=peers))


@has_library
def test_the_library_gives_the_engines_tokens(tmp_path: Path) -> None:
    """A random Llama target from one file, in both; its draft model is another random one, which changes nothing."""
    sizes: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96}
    target = make_target(tmp_path / "target", family=LLAMA, **sizes)
    drafter = make_drafter(tmp_path / "drafter", family=LLAMA, **sizes)
    small = make_gguf(make_target(tmp_path / "small", family=LLAMA, seed=1, num_layers=1, **sizes), tmp_path / "s.gguf")
    file = make_gguf(target, tmp_path / "target.gguf", metadata={"general.file_type": 0})
    compile_engine(BuildRequest(target="mine", checkpoint=file, drafter=drafter, output=tmp_path / "engine"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"token_ids": ids}) + "\n" for ids in ([3, 7, 30], [11, 5, 90, 2], [40])))
    run: dict[str, Any] = {"methods": ("ar",), "prompts": (str(prompts),), "max_tokens": 16, "warmup_tokens": 2}
    settings = BenchSettings(str(tmp_path / "engine"), peers=(f"llama-cpp={file},{small}",), **run)
    result = run_bench(settings)
    samples = {(s.case, s.prompt): s for s in result.samples}
    assert {case for case, _ in samples} == {"ar", "dflash", "llama-cpp:F32", "llama-cpp:F32-draft"}
    for (_, prompt), sample in samples.items():
        assert sample.output_digest == samples["ar", prompt].output_digest
    assert result.parts[0].contenders[settings.peers[0]]["threads"]
