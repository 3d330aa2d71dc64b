"""Offline runs in one process: their answers are the engine's own, and an interrupted one is gone on with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from offline_requests import ROWS, by_generate, requests_file, texts
from pacing import wait_for

from ddtree_trt.cli import app
from ddtree_trt.errors import EngineError, UsageError
from ddtree_trt.replicas import offline
from ddtree_trt.replicas.engine_app import EngineApp
from ddtree_trt.replicas.offline import map_prompts


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return requests_file(tmp_path_factory.mktemp("requests"))


@pytest.fixture(scope="module")
def expected(tiny_engine: Path, source: Path) -> list[tuple[str, str]]:
    return by_generate(tiny_engine, source)


def test_answers_are_those_of_the_engine_alone(
    tiny_engine: Path, source: Path, expected: list[tuple[str, str]], tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    stages: list[tuple[str, int, int]] = []
    result = map_prompts(tiny_engine, source, output, progress=lambda *stage: stages.append(stage))
    assert texts(output) == expected
    assert stages == [("parts", done, 4) for done in (1, 2, 3, 4)]
    assert (result.rows, result.refused, result.resumed) == (ROWS, 1, 0)
    assert 0 < result.completion_tokens <= 6 * ROWS


def test_a_run_that_an_engine_s_failure_ended_is_gone_on_with(
    tiny_engine: Path, source: Path, expected: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    respond, answered = EngineApp.answer, list[Any]()

    async def failing(self: EngineApp, call: Any) -> tuple[int, bytes]:
        if len(answered) >= 60:
            return 500, b'{"error": {"message": "the engine stopped"}}'
        answered.append(call)
        return await respond(self, call)

    monkeypatch.setattr(offline, "PARTS_AT_A_TIME", 1)
    with monkeypatch.context() as patch:
        patch.setattr(EngineApp, "answer", failing)
        with pytest.raises(EngineError, match="the engine stopped"):
            map_prompts(tiny_engine, source, output)
    assert not output.exists()
    changed = tmp_path / "changed.jsonl"
    changed.write_text(source.read_text().replace("drawers", "boxes"))
    with pytest.raises(UsageError, match="another requests"):
        map_prompts(tiny_engine, changed, output)
    result = map_prompts(tiny_engine, source, output)
    assert (result.rows, result.refused, result.resumed) == (ROWS, 1, 32)
    assert texts(output) == expected


def test_a_killed_run_is_gone_on_with_by_the_same_command(
    tiny_engine: Path, source: Path, expected: list[tuple[str, str]], tmp_path: Path
) -> None:
    """Killed as soon as one part is there: no answer is lost, and none is there twice."""
    output = tmp_path / "out.jsonl"
    arguments = ["run-batch", str(tiny_engine), "-i", str(source), "-o", str(output)]
    parts = tmp_path / "out.jsonl.parts"
    process = subprocess.Popen([sys.executable, "-m", "ddtree_trt.cli", *arguments], env=os.environ)
    wait_for(lambda: any(parts.glob("0*.jsonl")) or process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with pytest.raises(SystemExit) as ended:
        if output.exists():  # it was quicker
            raise SystemExit(0)
        app(arguments)
    assert not ended.value.code
    assert texts(output) == expected
    assert not parts.exists()
