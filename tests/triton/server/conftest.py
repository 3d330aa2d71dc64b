"""One server for all tests of this directory: `make test-triton` runs them in an environment that has one.

In the normal test run nothing here is collected, because the server wheel needs an environment of its own.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT))  # behind what is installed: the checkout has no native module for this environment
if importlib.util.find_spec("pytriton") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from ddtree_trt import LLM
    from ddtree_trt.triton.export import export_triton
    from tools.triton_server import TritonServer


@pytest.fixture(scope="session")
def repository(tiny_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each layout, and two that cannot be loaded."""
    directory = tmp_path_factory.mktemp("models")
    export_triton(tiny_engine, directory, "tiny")
    export_triton(tiny_engine, directory, "tiny-vllm", layout="vllm", link=True)
    damaged = export_triton(tiny_engine, directory, "damaged")
    weights = bytearray((damaged / "1" / "engine" / "weights.bin").read_bytes())
    weights[len(weights) // 2] ^= 1
    (damaged / "1" / "engine" / "weights.bin").write_bytes(weights)
    other = export_triton(tiny_engine, directory, "other-version", link=True)
    config = (other / "config.pbtxt").read_text()
    key = 'key: "ddtree_trt_version"\n  value: { string_value: "'
    assert key in config
    (other / "config.pbtxt").write_text(config.replace(key, key + "99."))
    return directory


@pytest.fixture(scope="session")
def server(repository: Path) -> Iterator[TritonServer]:
    """The server; the run fails if it is dead at the end or does not stop cleanly."""
    with TritonServer(repository) as running:
        yield running
        assert running.alive


@pytest.fixture(scope="session")
def llm(tiny_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The truth: the same engine without a server."""
    directory = shutil.copytree(tiny_engine, tmp_path_factory.mktemp("reference") / "tiny")
    with LLM(directory) as reference:
        yield reference


@pytest.fixture(scope="session")
def prompts(llm: LLM) -> list[str]:
    lines = (ROOT / "ddtree_trt" / "assets" / "tiny" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        llm.tokenizer.apply_chat_template(
            [{"role": "user", "content": json.loads(line)["prompt"]}],
            tokenize=False,
            add_generation_prompt=True,
            **llm.engine.manifest.chat_template_args,
        )
        for line in lines[:: max(1, len(lines) // 6)]
    ]


@pytest.fixture(params=["tiny", "tiny-vllm"])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)
