"""Exports for other engines: names are those of a release, files say the engine's pair, and `bench` reads them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from checkpoints import make_pair
from typer.testing import CliRunner

from ddtree_trt.artifact.manifest import CheckpointIdentity, Manifest, load_manifest
from ddtree_trt.bench.peers.base import PeerContext
from ddtree_trt.bench.peers.registry import open_peer
from ddtree_trt.bench.settings import BenchSettings
from ddtree_trt.cli import app
from ddtree_trt.errors import BuildError, DDTreeError, UsageError
from ddtree_trt.peerconfig.export import RECORD, START, export_pair
from ddtree_trt.peerconfig.pair import Model, ServedPair
from ddtree_trt.peerconfig.peer import CONFIG, PLAIN_CONFIG, Peer
from ddtree_trt.peerconfig.registry import PEERS
from ddtree_trt.peerconfig.trtllm import TRTLLM

NAMES = Path(__file__).parents[1] / "fixtures" / "peers"  # copied from a release of each engine; each file says where
PROGRAMS = {"trtllm": "trtllm-serve", "vllm": "vllm", "sglang": "python3"}
each_peer = pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)

PUBLISHED = ServedPair(
    name="qwen3-8b",
    target=Model("Qwen/Qwen3-8B", "b968826d9c46dd6066d109eabc6255188de91218"),
    drafter=Model("z-lab/Qwen3-8B-DFlash-b16", "0123456789012345678901234567890123456789"),
    draft_length=15,
    features=(),
    dtype="bfloat16",
    max_seq_len=4096,
    max_batch=4,
    chat_template_args={"enable_thinking": False},
)
LOCAL = replace(PUBLISHED, target=Model("/checkpoints/target"), drafter=Model("/checkpoints/drafter"))


def copied_names(peer: Peer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((NAMES / f"{peer.name}.json").read_text())
    return found


def unknown_names(settings: Mapping[str, Any], known: Mapping[str, Any]) -> list[str]:
    """Names in a configuration that the release does not have, and values that are not among its own."""
    nested = [item for value in settings.values() if isinstance(value, dict) for item in value.items()]
    wrong = [name for name in settings if name not in known["options"]]
    wrong += [name for name, _ in nested if name not in known["speculative"]]
    values = [*settings.items(), *nested]
    return wrong + [f"{n}: {v}" for n, v in values if n in known["values"] and v not in known["values"][n]]


@each_peer
@pytest.mark.parametrize(
    "pair", [PUBLISHED, replace(PUBLISHED, target=Model("/t"), drafter=Model("/d"))], ids=["hub", ""]
)
def test_every_name_is_one_of_the_release(peer: Peer, pair: ServedPair) -> None:
    known = copied_names(peer)
    assert peer.release == known["release"]
    settings = peer.settings(pair)
    assert unknown_names(settings, known) == []
    assert set(peer.speculative) <= set(known["options"])
    assert set(known["values"]) <= {*settings, *(n for v in settings.values() if isinstance(v, dict) for n in v)}


def test_a_wrong_name_is_found() -> None:
    known = copied_names(TRTLLM)
    wrong = {"max_seq_length": 1, "speculative_config": {"decoding_type": "DDTree", "draft_len": 3}}
    assert unknown_names(wrong, known) == ["max_seq_length", "draft_len", "decoding_type: DDTree"]


@each_peer
def test_the_file_says_the_pair_its_limits_and_the_chain(peer: Peer) -> None:
    expected: dict[str, dict[str, Any]] = {
        "trtllm": {
            "revision": PUBLISHED.target.revision,
            "dtype": "bfloat16",
            "max_seq_len": 4096,
            "max_batch_size": 4,
            "speculative_config": {
                "decoding_type": "DFlash",
                "max_draft_len": 15,
                "speculative_model": "z-lab/Qwen3-8B-DFlash-b16",
            },
        },
        "vllm": {
            "model": "Qwen/Qwen3-8B",
            "revision": PUBLISHED.target.revision,
            "dtype": "bfloat16",
            "max-model-len": 4096,
            "max-num-seqs": 4,
            "speculative-config": {
                "method": "dflash",
                "model": "z-lab/Qwen3-8B-DFlash-b16",
                "revision": PUBLISHED.drafter.revision,
                "num_speculative_tokens": 15,
            },
        },
        "sglang": {
            "model-path": "Qwen/Qwen3-8B",
            "revision": PUBLISHED.target.revision,
            "dtype": "bfloat16",
            "context-length": 4096,
            "max-running-requests": 4,
            "speculative-algorithm": "DFLASH",
            "speculative-draft-model-path": "z-lab/Qwen3-8B-DFlash-b16",
            "speculative-draft-model-revision": PUBLISHED.drafter.revision,
            "speculative-num-draft-tokens": 16,
        },
    }
    assert peer.settings(PUBLISHED) == expected[peer.name]
    # TensorRT-LLM is given its target as an argument; the others have it in their file.
    assert ("Qwen/Qwen3-8B" in peer.command(PUBLISHED)) == (peer.name == "trtllm")
    # What a configuration cannot say is in its notes.
    assert bool(peer.notes(PUBLISHED)[1:]) == (peer.name == "trtllm")


@each_peer
def test_what_is_written_starts_the_other_engine(peer: Peer, tiny_engine: Path, tmp_path: Path) -> None:
    """The script runs, in whatever folder, what stands in for the engine: a program that prints its arguments."""
    directory = tmp_path / "with space"
    result = CliRunner().invoke(app, [f"export-{peer.name}", str(tiny_engine), str(directory)])
    assert result.exit_code == 0, result.output
    assert {path.name for path in directory.iterdir()} == {CONFIG, PLAIN_CONFIG, START, "README.md", RECORD}
    written = yaml.safe_load((directory / CONFIG).read_text())
    plain = yaml.safe_load((directory / PLAIN_CONFIG).read_text())
    assert unknown_names(written, copied_names(peer)) == []
    assert plain and plain == {k: v for k, v in written.items() if not k.startswith("speculative")}
    programs = tmp_path / "programs"
    programs.mkdir()
    program = programs / PROGRAMS[peer.name]
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$PWD" "$@"\n')
    program.chmod(0o755)

    def started(*arguments: str) -> list[str]:
        environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
        run = subprocess.run(
            ["sh", str(directory / START), *arguments], env=environment, capture_output=True, text=True, check=True
        )
        return run.stdout.splitlines()

    where, *words = started("--host", "0.0.0.0")
    assert where == str(directory)
    assert words[-6:] == ["--config", CONFIG, "--port", "8000", "--host", "0.0.0.0"]
    target = str(load_target(tiny_engine))
    assert target in {*words, written.get("model"), written.get("model-path")}
    assert started(PLAIN_CONFIG)[-4:] == ["--config", PLAIN_CONFIG, "--port", "8000"]


def load_target(engine: Path) -> Path:
    import ddtree_trt

    return Path(ddtree_trt.__file__).parent / "assets" / load_manifest(engine).target.name


@pytest.fixture
def changed(tiny_engine: Path, tmp_path: Path) -> Callable[..., Path]:
    """An engine directory that has only a manifest: the tiny engine's with other values."""

    def change(**values: Any) -> Path:
        directory = tmp_path / "changed"
        directory.mkdir(exist_ok=True)
        (directory / "manifest.json").write_text(replace(load_manifest(tiny_engine), **values).to_json())
        return directory

    return change


def export(engine: Path, directory: Path, peer: Peer = TRTLLM, **options: Any) -> ServedPair:
    return export_pair(peer, engine, directory, **{"checkpoint": None, "drafter": None, **options})


def test_a_pair_of_the_hub_is_named_by_its_commits(changed: Callable[..., Path], tmp_path: Path) -> None:
    identity = CheckpointIdentity("Qwen/Qwen3-8B", "b968826", "0" * 64)
    pair = export(changed(target=identity, drafter=replace(identity, name="z-lab/d")), tmp_path / "out")
    assert (pair.target, pair.drafter) == (Model("Qwen/Qwen3-8B", "b968826"), Model("z-lab/d", "b968826"))
    assert "hf download z-lab/d --revision b968826" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("backend", "precision", "dtype"),
    [
        ("onnxruntime", "fp32", "auto"),
        ("onnxruntime", "int8", "auto"),
        ("torch", "bf16", "bfloat16"),
        ("torch", "fp16", "float16"),
    ],
)
def test_the_type_is_the_engines_if_attention_kernels_have_it(
    changed: Callable[..., Path], tmp_path: Path, backend: str, precision: str, dtype: str
) -> None:
    export(changed(backend=backend, precision=precision), tmp_path / "out")
    assert yaml.safe_load((tmp_path / "out" / CONFIG).read_text())["dtype"] == dtype


def test_the_chat_templates_arguments_are_said(changed: Callable[..., Path], tmp_path: Path) -> None:
    export(changed(chat_template_args={"enable_thinking": False}), tmp_path / "out")
    assert '"chat_template_kwargs": {"enable_thinking": false}' in (tmp_path / "out" / "README.md").read_text()


def test_a_local_checkpoint_must_be_given_and_be_the_same(
    changed: Callable[..., Path], tiny_engine: Path, tmp_path: Path
) -> None:
    ours = load_manifest(tiny_engine).target
    engine = changed(target=replace(ours, name="mine", revision="local"))
    with pytest.raises(UsageError, match=r"built from a local directory called 'mine'.*give it as --checkpoint DIR"):
        export(engine, tmp_path / "out")
    other, _ = make_pair(tmp_path)
    with pytest.raises(UsageError, match="is not what the engine was built from"):
        export(engine, tmp_path / "out", checkpoint=str(other))
    assert not (tmp_path / "out").exists()
    pair = export(engine, tmp_path / "out", checkpoint=str(load_target(tiny_engine)))
    assert pair.target == Model(str(load_target(tiny_engine)))


def gguf(manifest: Manifest) -> dict[str, Any]:
    return {"target": replace(manifest.target, name="llm/model.Q8_0.gguf")}


def autoregressive(manifest: Manifest) -> dict[str, Any]:
    return {"drafter_kind": "autoregressive", "drafter_dims": manifest.target_dims}


def markov(manifest: Manifest) -> dict[str, Any]:
    return {"drafter_dims": replace(manifest.drafting.dims, markov_rank=8)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (gguf, r"model\.Q8_0\.gguf is a GGUF file"),
        (autoregressive, "has an autoregressive drafter; exports are for DFlash drafters"),
        (markov, r"has markov_rank, which DFlash of TensorRT-LLM 1\.4\.0rc1 is not known to compute"),
    ],
)
def test_what_the_other_engine_cannot_run_is_refused(
    changed: Callable[..., Path],
    tiny_engine: Path,
    tmp_path: Path,
    values: Callable[[Manifest], dict[str, Any]],
    message: str,
) -> None:
    with pytest.raises(UsageError, match=message):
        export(changed(**values(load_manifest(tiny_engine))), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_only_an_export_is_replaced_and_only_by_force(tiny_engine: Path, tmp_path: Path) -> None:
    export(tiny_engine, tmp_path / "out")
    (tmp_path / "out" / CONFIG).write_text("max_seq_len: 7\n")
    with pytest.raises(BuildError, match="give --force to replace it"):
        export(tiny_engine, tmp_path / "out")
    assert (tmp_path / "out" / CONFIG).read_text() == "max_seq_len: 7\n"
    export(tiny_engine, tmp_path / "out", force=True)
    assert "max_seq_len: 2048" in (tmp_path / "out" / CONFIG).read_text()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").touch()
    with pytest.raises(BuildError, match="was not written by ddtree-trt"):
        export(tiny_engine, tmp_path / "notes", force=True)


# `bench --peer tensorrt-llm=DIR`; the module is a double, the files are real.


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the double of TensorRT-LLM was made with."""
    models: list[dict[str, Any]] = []
    api = SimpleNamespace(DFlashDecodingConfig=lambda **o: o, KvCacheConfig=lambda **o: o)
    double = SimpleNamespace(LLM=lambda **o: models.append(o), llmapi=api, __version__="1.4.0rc1")
    monkeypatch.setitem(sys.modules, "tensorrt_llm", double)
    return models


def context(engine: Path) -> PeerContext:
    return PeerContext(BenchSettings(str(engine)), load_manifest(engine), 1, frozenset())


def test_bench_runs_what_the_file_says(tiny_engine: Path, tmp_path: Path, made: list[dict[str, Any]]) -> None:
    out = tmp_path / "out"
    export(tiny_engine, out)
    peer = open_peer(f"tensorrt-llm={out}", context(tiny_engine))
    assert [case.label for case in peer.cases] == ["tensorrt-llm:ar", "tensorrt-llm:dflash"]
    from_file = list(made)
    made.clear()
    open_peer("tensorrt-llm", context(tiny_engine))
    assert made == from_file, "without a directory it is what an export would say"
    for settings in from_file:
        assert unknown_names({k: v for k, v in settings.items() if k not in ("backend", "kv_cache_config")},
                             copied_names(TRTLLM)) == []  # fmt: skip
        assert set(settings["kv_cache_config"]) <= set(copied_names(TRTLLM)["cache"])
        assert settings["max_batch_size"] == 1
    made.clear()
    config = out / CONFIG
    config.write_text(config.read_text().replace("max_draft_len: 15", "max_draft_len: 7"))
    open_peer(f"tensorrt-llm={out}", context(tiny_engine))
    assert made[1]["speculative_config"]["max_draft_len"] == 7, "an edited file is used as it is"


def of_another_pair(out: Path) -> None:
    record = json.loads((out / RECORD).read_text())
    (out / RECORD).write_text(json.dumps({**record, "target_sha256": "0" * 64}))


def of_another_engine(out: Path) -> None:
    record = json.loads((out / RECORD).read_text())
    (out / RECORD).write_text(json.dumps({**record, "peer": "vllm"}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda out: (out / RECORD).unlink(), "has no export.json; write it with: ddtree-trt export-trtllm"),
        (lambda out: (out / RECORD).write_text("{}"), "export.json"),
        (of_another_pair, "of another target than that of the engine 'tiny'"),
        (of_another_engine, "is an export for vllm"),
        (lambda out: (out / CONFIG).write_text("a: [1"), "cannot be read as YAML"),
        (lambda out: (out / CONFIG).write_text("just words"), "one setting a line"),
        (lambda out: (out / PLAIN_CONFIG).unlink(), "cannot be read as YAML"),
    ],
)
def test_an_export_that_is_none_is_refused(
    tiny_engine: Path, tmp_path: Path, made: list[dict[str, Any]], damage: Callable[[Path], None], message: str
) -> None:
    out = tmp_path / "out"
    export(tiny_engine, out)
    damage(out)
    with pytest.raises(DDTreeError, match=message) as error:
        open_peer(f"tensorrt-llm={out}", context(tiny_engine))
    assert "\n" not in str(error.value)
    assert made == []
