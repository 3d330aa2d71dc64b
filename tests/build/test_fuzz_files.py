"""Files of checkpoints and engines made wrong at random: each is built and loaded right, or refused in one line.

Right means: where the numbers of a network are those of the untouched pair, so are the bytes of its graphs; where they
are others, the engine runs. A manifest changes nothing of what the graphs compute.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from checkpoints import make_drafter, make_target
from drafts import marginals
from fuzzing import linked_copy, mutate_json, mutate_weights

from ddtree_trt.artifact.files import DRAFTER_GRAPH, MANIFEST, TARGET_GRAPH, WEIGHTS
from ddtree_trt.artifact.manifest import _body_digest, load_manifest
from ddtree_trt.build.compile import BuildRequest, compile_engine, dry_run
from ddtree_trt.doctor import inspect_engine
from ddtree_trt.errors import DDTreeError
from ddtree_trt.runtime.engines.base import DraftRequest, DrawnFrom
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.text.codec import TextCodec
from ddtree_trt.terminal import printing as terminal

Case = Callable[["Whole", Path, random.Random], bool]
FAST, SLOW = 1, 50  # seeds, of 40 cases of builds and 40 of manifests each
PROMPT = np.array([3, 1, 4, 1, 5, 9, 2, 6])
FILES = (
    *(f"target/{n}.json" for n in ("config", "generation_config", "tokenizer", "tokenizer_config", "hf_quant_config")),
    *("target/special_tokens_map.json", "target/model.safetensors.index.json", "drafter/config.json"),
    *("target/model-00001-of-00002.safetensors", "drafter/model.safetensors"),
)


@dataclasses.dataclass(frozen=True)
class Whole:
    """The untouched pair and its engine."""

    pair: Path
    engine: Path
    said: list[list[int]]  # what the engine says to PROMPT


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    pair = tmp_path_factory.mktemp("whole")
    target = make_target(pair / "target", shards=2)
    make_drafter(pair / "drafter")
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "temperature": 0.6}))
    (target / "special_tokens_map.json").write_text(json.dumps({"eos_token": "t1", "unk_token": "t0"}))
    (target / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": None, "group_size": 16}}))
    (target / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    compile_engine(request(pair, pair / "engine"))
    return Whole(pair, pair / "engine", says(pair / "engine"))


def request(pair: Path, output: Path) -> BuildRequest:
    return BuildRequest(target="mine", checkpoint=pair / "target", drafter=pair / "drafter", output=output, max_batch=2)


def says(directory: Path) -> list[list[int]]:
    """What the engine's networks make of PROMPT: the target's choices, the drafter's best candidates."""
    with closing(open_engine(directory, threads=1)) as engine:
        TextCodec(directory, engine.manifest.chat_template_args).encode("t5 t6")
        limits, slot = engine.manifest.limits, engine.manifest.limits.max_batch - 1
        prompt = PROMPT[: min(limits.prefill_chunk, limits.max_seq_len - 1)]
        choices = engine.prefill(slot, prompt, rows="all", taps=True).choices
        ask = DraftRequest(slot, 7, 2, 3, lambda p, ids, _: DrawnFrom(int(ids[0]), ids, p.astype(np.float64)))
        (draft,) = engine.draft([ask])
        return [choices.tolist(), marginals(draft).token_ids[:, 0].tolist()]


def refused(work: Callable[[], object]) -> bool:
    """Whether the work is refused; then in one line."""
    try:
        work()
    except DDTreeError as error:
        message = str(error)
        assert message and message.isprintable() and len(message) < 1500, message[:2000]
        return True
    return False


def replace(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)  # a link
    path.write_bytes(data)


def one_build(whole: Whole, folder: Path, rng: random.Random) -> bool:
    """Whether a pair with one file made wrong was built; then it is right."""
    pair = folder / "pair"
    for part in ("target", "drafter"):
        linked_copy(whole.pair / part, pair / part)
    name = rng.choice(FILES)
    change = mutate_weights if name.endswith(".safetensors") else lambda data, rng: mutate_json(data.decode(), rng)
    replace(pair / name, change((whole.pair / name).read_bytes(), rng))
    refused(lambda: dry_run(request(pair, folder / "none")).to_dict())
    if refused(lambda: compile_engine(request(pair, folder / "engine"))):
        assert not (folder / "engine").exists()
        return False
    manifest = load_manifest(folder / "engine")
    reference, numbers = load_manifest(whole.engine), ("target_dims", "drafter_dims", "limits")
    unchanged = all(getattr(manifest, n) == getattr(reference, n) for n in numbers)
    if name.endswith(".json") and unchanged:
        for same in (TARGET_GRAPH, DRAFTER_GRAPH, WEIGHTS):
            assert manifest.files[same] == reference.files[same]
    assert all(says(folder / "engine"))
    return True


def one_manifest(whole: Whole, folder: Path, rng: random.Random) -> bool:
    """Whether an engine with another manifest, its digest right, was loaded; then it says the same."""
    engine = linked_copy(whole.engine, folder / "engine")
    text = mutate_json((whole.engine / MANIFEST).read_text(), rng)
    try:
        body = json.loads(text)
        body.pop("digest", None)
        text = json.dumps({**body, "digest": _body_digest(body)}).encode()
    except (ValueError, RecursionError, AttributeError, TypeError):
        pass  # nothing a digest could be right for
    replace(engine / MANIFEST, text)

    def read() -> None:
        inspected = inspect_engine(engine)
        json.dumps(inspected.to_dict())
        terminal.print_engine(inspected)
        assert [part[: len(PROMPT)] for part in says(engine)] == whole.said

    return not refused(read)


def run_cases(case: Case, whole: Whole, folder: Path, seed: int, count: int) -> int:
    """How many of the cases of a seed were accepted."""
    accepted = 0
    for i in range(count):
        rng, place = random.Random(f"{seed}.{i}"), folder / "case"
        try:
            accepted += case(whole, place, rng)
        except BaseException as error:
            raise AssertionError(f"case {seed}.{i} of {case}") from error
        shutil.rmtree(place, ignore_errors=True)
    return accepted


pytestmark = pytest.mark.timeout(1800)  # forty cases of about a second on a busy machine
SEEDS = [*range(FAST), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(FAST, SLOW))]


@pytest.mark.parametrize("seed", SEEDS)
def test_checkpoints(whole: Whole, tmp_path: Path, seed: int) -> None:
    assert 0 < run_cases(one_build, whole, tmp_path, seed, 40) < 40


@pytest.mark.parametrize("seed", SEEDS)
def test_manifests(whole: Whole, tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    assert run_cases(one_manifest, whole, tmp_path, seed, 40) < 40
    shown = capsys.readouterr().out
    assert all(line.isprintable() for line in shown.splitlines()) and "\x1b" not in shown
