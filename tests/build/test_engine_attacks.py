"""What builds and engines withstand: edited manifests, links and paths that lead elsewhere."""

import json
import os
import random
import shlex
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import edit_json, make_drafter, make_target
from drafts import marginals
from fuzzing import linked_copy, mutate_json, mutate_weights

from ddtree_trt import LLM, AsyncLLM
from ddtree_trt.artifact.files import DRAFTER_GRAPH, MANIFEST, TARGET_GRAPH, WEIGHTS
from ddtree_trt.artifact.manifest import _body_digest, load_manifest
from ddtree_trt.artifact.verify import rebuild_command
from ddtree_trt.build.compile import BuildRequest, compile_engine, dry_run
from ddtree_trt.doctor import inspect_engine
from ddtree_trt.errors import ArtifactError, DDTreeError
from ddtree_trt.runtime import core
from ddtree_trt.runtime.engines.base import DraftRequest, DrawnFrom
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.engines.onnxruntime.engine import OrtEngine
from ddtree_trt.runtime.text.codec import TextCodec
from ddtree_trt.terminal import printing as terminal


@pytest.fixture
def engine(built: Path, tmp_path: Path) -> Path:
    return shutil.copytree(built, tmp_path / "engine")


def refusal(engine: Path) -> str:
    """The line with which opening an engine is refused."""
    with pytest.raises(DDTreeError) as caught:
        open_engine(engine)
    message = str(caught.value)
    assert message.isprintable() and len(message) < 1000
    return message


def sign(engine: Path, **changes: Any) -> None:
    """Change a manifest, down to its digest: `limits__max_batch=0` is a field of a record."""
    body = json.loads((engine / MANIFEST).read_text())
    del body["digest"]
    for place, value in changes.items():
        *records, name = place.split("__")
        holder = body
        for record in records:
            holder = holder[record]
        holder[name] = value
    (engine / MANIFEST).write_text(json.dumps({**body, "digest": _body_digest(body)}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_dims__num_kv_heads": 4}, "cache is"),
        ({"target_dims__head_dim": 32}, "cache is"),
        ({"limits__max_seq_len": 200}, "cache is"),
        ({"drafter_dims__num_layers": 1}, "cache is"),
        ({"drafter_dims__block_size": 5}, "token_ids is"),
        ({"drafter_dims__tap_layers": [0]}, "taps is"),
    ],
)
def test_manifests_of_other_graphs(engine: Path, changes: dict[str, Any], message: str) -> None:
    sign(engine, **changes)
    assert message in refusal(engine)


def test_memory_that_is_not_there(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = refusing(MemoryError("cannot have 8.00 PiB"))
    monkeypatch.setattr("ddtree_trt.runtime.engines.onnxruntime.network.np.zeros", refused)
    assert "did not get it (cannot have 8.00 PiB); rebuild with a smaller --max-batch" in refusal(engine)


def refusing(error: Exception) -> Callable[..., None]:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise error

    return refuse


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[OrtEngine]:
    """The engines that were closed."""
    closed: list[OrtEngine] = []
    close = OrtEngine.close

    def record(engine: OrtEngine) -> None:
        closed.append(engine)
        close(engine)

    monkeypatch.setattr(OrtEngine, "close", record)
    return closed


@pytest.mark.parametrize(
    ("text", "memory"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore", True),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_first_passes_that_fail(
    engine: Path, monkeypatch: pytest.MonkeyPatch, closed: list[OrtEngine], text: str, memory: bool
) -> None:
    """For want of memory with what to do about it; another failure stays itself."""
    monkeypatch.setattr(OrtEngine, "warm_up", refusing(RuntimeError(text)))
    words = r"needs about .* GB of memory and did not get it .*--max-batch" if memory else "illegal memory access"
    with pytest.raises(ArtifactError if memory else RuntimeError, match=words) as refused:
        open_engine(engine, warm=True)
    assert text.splitlines()[0] in str(refused.value) and "More" not in str(refused.value)
    assert len(closed) == 1


@pytest.mark.parametrize(("made", "part"), [(LLM, "TextCodec"), (AsyncLLM, "RequestMaker"), (LLM, "Scheduler")])
def test_what_cannot_be_made_closes_its_engine(
    engine: Path, monkeypatch: pytest.MonkeyPatch, closed: list[OrtEngine], made: Any, part: str
) -> None:
    monkeypatch.setattr(core, part, refusing(ValueError("refused")))
    with pytest.raises(ValueError, match="refused"):
        made(engine)
    assert len(closed) == 1


def test_strings_of_a_manifest_are_escaped_and_quoted(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nasty = "a\x1b[2J\rb\u202e\n$(x)"
    sign(engine, target__name=nasty, product_version=nasty, toolchain={nasty: nasty}, chat_template_args={nasty: nasty})
    terminal.print_engine(inspect_engine(engine))
    shown = capsys.readouterr().out
    assert all(line.isprintable() for line in shown.splitlines()) and "\\x1b[2J" in shown
    command = rebuild_command(Path("a b/$(touch x)"), load_manifest(engine))
    assert command.isprintable()
    words = shlex.split(command)
    assert words[words.index("--output") + 1] == "a b/$(touch x)" and words[-1] == "--force"
    terminal.print_error(f"cannot read {nasty}")
    assert capsys.readouterr().err == "error: cannot read a\\x1b[2J b\\u202e $(x)\n"


def test_links_in_an_engine_are_only_as_good_as_what_they_lead_to(engine: Path, tmp_path: Path) -> None:
    text, weights = engine / "tokenizer.json", engine / WEIGHTS
    text.symlink_to(text.rename(tmp_path / "moved"))
    open_engine(engine).close()
    (tmp_path / "other").write_bytes(bytes(weights.stat().st_size))
    for place, words in ((tmp_path / "other", "is damaged: its sha256 differs"), (Path("/dev/zero"), "is missing")):
        weights.unlink()
        weights.symlink_to(place)
        assert f"{WEIGHTS} {words}" in refusal(engine)
    weights.unlink()
    os.mkfifo(weights)  # nobody will ever write to it
    assert f"{WEIGHTS} is missing" in refusal(engine)


def test_no_file_is_opened_before_all_are_verified(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    monkeypatch.setattr("ddtree_trt.runtime.engines.load.load_backend", lambda *args: opened.append(args))
    for name in load_manifest(engine).files:
        whole = (engine / name).read_bytes()
        (engine / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert f"{name} is damaged" in refusal(engine)
        (engine / name).write_bytes(whole)
    assert not opened


def test_code_that_comes_with_a_checkpoint_never_runs(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, drafter = pair
    marker = tmp_path / "ran"
    code = f"open({str(marker)!r}, 'w').close()\nclass Config: pass\nTokenizer = Model = Config\n"
    for place in pair:
        (place / "code.py").write_text(code)
        edit_json(place / "config.json", auto_map={"AutoConfig": "code.Config", "AutoModel": "code.Model"})
    edit_json(target / "tokenizer_config.json", auto_map={"AutoTokenizer": ["code.Tokenizer", "code.Tokenizer"]})
    engine = tmp_path / "engine"
    compile_engine(BuildRequest(target="mine", checkpoint=target, drafter=drafter, output=engine))
    TextCodec(engine, {}).encode("t5")
    open_engine(engine).close()
    assert not marker.exists() and not (engine / "code.py").exists()


# Files made wrong at random: each is built and loaded right, or refused in one line. Right means: where the numbers of
# a network are those of the untouched pair, so are the bytes of its graphs; where they are others, the engine runs


PROMPT = np.array([3, 1, 4, 1, 5, 9, 2, 6])
FILES = (
    *(f"target/{n}.json" for n in ("config", "generation_config", "tokenizer", "tokenizer_config", "hf_quant_config")),
    *("target/special_tokens_map.json", "target/model.safetensors.index.json", "drafter/config.json"),
    *("target/model-00001-of-00002.safetensors", "drafter/model.safetensors"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The untouched pair, and its engine."""
    pair = tmp_path_factory.mktemp("whole")
    target = make_target(pair / "target", shards=2)
    make_drafter(pair / "drafter")
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "temperature": 0.6}))
    (target / "special_tokens_map.json").write_text(json.dumps({"eos_token": "t1", "unk_token": "t0"}))
    (target / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": None, "group_size": 16}}))
    (target / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    compile_engine(request(pair, pair / "engine"))
    return pair


def request(pair: Path, output: Path) -> BuildRequest:
    return BuildRequest(target="mine", checkpoint=pair / "target", drafter=pair / "drafter", output=output, max_batch=2)


def runs(directory: Path) -> bool:
    """Whether the engine's networks make something of PROMPT."""
    with closing(open_engine(directory, threads=1)) as engine:
        TextCodec(directory, engine.manifest.chat_template_args).encode("t5 t6")
        limits, slot = engine.manifest.limits, engine.manifest.limits.max_batch - 1
        prompt = PROMPT[: min(limits.prefill_chunk, limits.max_seq_len - 1)]
        choices = engine.prefill(slot, prompt, rows="all", taps=True).choices
        ask = DraftRequest(slot, 7, 2, 3, lambda p, ids, _: DrawnFrom(int(ids[0]), ids, p.astype(np.float64)))
        (draft,) = engine.draft([ask])
        return bool(len(choices) and len(marginals(draft).token_ids))


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


def one_build(whole: Path, folder: Path, rng: random.Random) -> bool:
    """Whether a pair with one file made wrong was built; then it is right."""
    pair = folder / "pair"
    for part in ("target", "drafter"):
        linked_copy(whole / part, pair / part)
    name = rng.choice(FILES)
    change = mutate_weights if name.endswith(".safetensors") else lambda data, rng: mutate_json(data.decode(), rng)
    replace(pair / name, change((whole / name).read_bytes(), rng))
    refused(lambda: dry_run(request(pair, folder / "none")).to_dict())
    if refused(lambda: compile_engine(request(pair, folder / "engine"))):
        assert not (folder / "engine").exists()
        return False
    manifest = load_manifest(folder / "engine")
    reference, numbers = load_manifest(whole / "engine"), ("target_dims", "drafter_dims", "limits")
    unchanged = all(getattr(manifest, n) == getattr(reference, n) for n in numbers)
    if name.endswith(".json") and unchanged:
        for same in (TARGET_GRAPH, DRAFTER_GRAPH, WEIGHTS):
            assert manifest.files[same] == reference.files[same]
    assert runs(folder / "engine")
    return True


@pytest.mark.parametrize("count", [12, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])])
def test_files_made_wrong_at_random(whole: Path, tmp_path: Path, count: int) -> None:
    accepted = 0
    for i in range(count):
        place = tmp_path / "case"
        try:
            accepted += one_build(whole, place, random.Random(i))
        except BaseException as error:
            raise AssertionError(f"case {i}") from error
        shutil.rmtree(place, ignore_errors=True)
    assert 0 < accepted < count
