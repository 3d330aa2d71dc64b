"""Offline runs in one process: what a file of requests is, answers that are the engine's own, and interrupted runs."""

import asyncio
import errno
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli
from offline_requests import ROWS, by_generate, requests_file, texts
from pacing import wait_for

from ddtree_trt.errors import DDTreeError, EngineError, UsageError
from ddtree_trt.replicas import offline
from ddtree_trt.replicas.offline import OfflineResult, map_prompts, read_requests


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return requests_file(tmp_path_factory.mktemp("requests"))


@pytest.fixture(scope="module")
def expected(tiny_engine: Path, source: Path) -> list[tuple[str, str]]:
    return by_generate(tiny_engine, source)


def test_answers_are_those_of_the_engine_alone(
    tiny_engine: Path, source: Path, expected: list[tuple[str, str]], tmp_path: Path
) -> None:
    output = tmp_path / "new" / "out.jsonl"
    stages: list[tuple[str, int, int]] = []
    result = map_prompts(tiny_engine, source, output, progress=lambda *stage: stages.append(stage))
    assert texts(output) == expected
    assert stages == [("requests", done, ROWS) for done in range(1, ROWS + 1)]
    assert (result.rows, result.refused, result.resumed) == (ROWS, 1, 0)
    assert 0 < result.completion_tokens <= 6 * ROWS
    assert os.listdir(output.parent) == ["out.jsonl"]
    with pytest.raises(UsageError, match="is there already"):
        map_prompts(tiny_engine, source, output)


def test_a_run_that_an_engine_s_failure_ended_is_gone_on_with(
    tiny_engine: Path, source: Path, expected: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by another one, and not by two; a line that was not finished is answered again."""
    output, part = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"
    answer, asked = offline._Engine.answer, list[Any]()

    async def failing(self: Any, request: Any) -> Any:
        asked.append(request)
        if len(asked) > 60:
            raise EngineError("the engine stopped")
        return await answer(self, request)

    with monkeypatch.context() as patch:
        patch.setattr(offline._Engine, "answer", failing)
        with pytest.raises(EngineError, match="the engine stopped"):
            map_prompts(tiny_engine, source, output)
    assert not output.exists()
    whole = part.read_bytes().splitlines(keepends=True)
    assert 30 < len(whole) <= 61, "what was answered is kept"
    for line in (b"mine\n", b"5\n", whole[0] + b'{"id": 1}\n'):  # of somebody else, or damaged
        part.write_bytes(line)
        with pytest.raises(UsageError, match="is damaged at byte"):
            map_prompts(tiny_engine, source, output)
        assert part.read_bytes() == line
    part.write_bytes(b"".join(whole)[:-5])
    changed = tmp_path / "changed.jsonl"
    changed.write_text(source.read_text().replace("drawers", "boxes"))
    with pytest.raises(UsageError, match=r"another requests .*; go on with that one, or remove the file"):
        map_prompts(tiny_engine, changed, output)
    with pytest.raises(UsageError, match=r"another seed \(0, here 7\); go on with that one"):
        map_prompts(tiny_engine, source, output, seed=7)
    twice: list[str] = []

    def second_run(*_: Any) -> None:
        if not twice:
            with pytest.raises(UsageError, match="another run writes") as refused:
                map_prompts(tiny_engine, source, output)
            twice.append(str(refused.value))

    result = map_prompts(tiny_engine, source, output, progress=second_run)
    assert twice and (result.rows, result.refused, result.resumed) == (ROWS, 1, len(whole) - 2)
    assert texts(output) == expected


def test_a_killed_run_is_gone_on_with_by_the_same_command(
    tiny_engine: Path, source: Path, expected: list[tuple[str, str]], tmp_path: Path, cli: Cli
) -> None:
    """Killed as soon as an answer is there: none is lost, and none is there twice."""
    output, part = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"
    arguments = ["run-batch", str(tiny_engine), "-i", str(source), "-o", str(output)]
    process = subprocess.Popen([sys.executable, "-m", "ddtree_trt.cli", *arguments], env=os.environ)
    wait_for(lambda: (part.exists() and part.read_bytes().count(b"\n") > 1) or process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if not output.exists():  # it was quicker
        code, out, error = cli(*arguments)
        assert code == 0 and f"{ROWS} answers (" in out and "by an earlier run" in out, error
    assert texts(output) == expected and not part.exists()


def test_a_full_disk_is_said_in_one_line_and_run_goes_on_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When an answer is written, and when the output is."""
    output = tmp_path / "out.jsonl"
    row = {"custom_id": "a", "response": {"status_code": 400, "body": {"error": "né\u2028"}}}

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    answers = offline._Answers(output, {"run": 1})
    writes: list[tuple[Any, Any, str, Any]] = [
        (lambda: answers.append(row), answers, "_file", io.FileIO("/dev/full", "w")),
        (lambda: answers.finish(["a"], 0), os, "fsync", full),
    ]
    for write, owner, name, value in writes:
        with monkeypatch.context() as patch, pytest.raises(DDTreeError) as caught:
            patch.setattr(owner, name, value)
            write()
        assert str(caught.value) == (
            f"cannot write {output}: No space left on device; free some space, then the same command goes on with what "
            "is there"
        )
        assert caught.value.exit_code == 1 and not output.exists()
        result = write()
    answers.close()
    assert result == OfflineResult(1, 1, 0, 0) and json.loads(output.read_text(encoding="utf-8")) == row


def test_a_run_overwrites_neither_its_requests_nor_answers(tiny_engine: Path, tmp_path: Path) -> None:
    output, part = tmp_path / "out", tmp_path / "out.part"
    for name in ("out", "out.part", "out.tmp"):
        (path := tmp_path / name).write_text('{"prompt": "a", "max_tokens": 2}')
        with pytest.raises(UsageError, match=r"is what .*out is written by; choose another --output-file"):
            map_prompts(tiny_engine, path, output)
        path.unlink()
    part.write_text('{"engine": "another, which came to no answer"}\n')
    offline._Answers(output, {"engine": "this"})
    assert json.loads(part.read_text()) == {"engine": "this"}


def test_a_place_that_cannot_be_written_is_said_without_talk_of_space(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DDTreeError, match=r"(Not a directory|File exists); choose another --output-file$"):
        offline._Answers(tmp_path / "file" / "out.jsonl", {"run": 1})


def test_a_parser_s_name_reaches_the_engine(tiny_engine: Path, tmp_path: Path, cli: Cli) -> None:
    question = [{"role": "user", "content": "There are 8 trays with 41 plates."}]
    words = ("run-batch", tiny_engine, "-i", written(tmp_path, {"messages": question, "max_tokens": 5}))
    assert cli(*words, "-o", tmp_path / "out.jsonl", "--reasoning-parser", "deepseek_r1")[0] == 0
    (row,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    message = row["response"]["body"]["choices"][0]["message"]
    assert message["reasoning_content"] and message["content"] is None


def written(folder: Path, *lines: object) -> Path:
    path = folder / "requests.jsonl"
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines), encoding="utf-8")
    return path


def test_bodies_alone_and_lines_of_batch_files(tmp_path: Path) -> None:
    whole = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x\u2028y", "seed": 3}}
    chat = {"messages": [{"role": "user", "content": "hi"}], "custom_id": "b"}
    found = read_requests(written(tmp_path, whole, "", chat, {"prompt": "z"}), seed=0)
    assert [(r.custom_id, r.url) for r in found] == [
        ("a", "/v1/completions"),
        ("b", "/v1/chat/completions"),
        ("4", "/v1/completions"),
    ]
    assert json.loads(found[0].body) == whole["body"]
    assert "custom_id" not in json.loads(found[1].body)


def test_a_run_in_a_notebook_whose_event_loop_runs(tiny_engine: Path, tmp_path: Path) -> None:
    source = written(tmp_path, {"prompt": "x", "max_tokens": 2})

    async def cell() -> OfflineResult:
        return map_prompts(tiny_engine, source, tmp_path / "out.jsonl")

    assert asyncio.run(cell()) == OfflineResult(1, 0, 2, 0)


def test_a_seed_follows_from_the_line_and_the_run(tmp_path: Path) -> None:
    def seeds(*lines: object, seed: int) -> list[int]:
        return [json.loads(r.body)["seed"] for r in read_requests(written(tmp_path, *lines), seed)]

    same = [{"prompt": "x"}] * 3
    first = seeds(*same, seed=0)
    assert len(set(first)) == 3 and all(0 <= s < 2**32 for s in first)
    assert seeds({"prompt": "other"}, *same[1:], seed=0) == first, "the other lines do not matter"
    assert set(seeds(*same, seed=1)).isdisjoint(first)
    assert seeds({"prompt": "x", "seed": 7}, {"prompt": "x", "seed": None}, seed=0) == [7, first[1]]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "no JSON"),
        pytest.param("[" * 100_000, "no JSON", id="deep"),
        ({"text": "x"}, "either messages or prompt"),
        ({"prompt": "x", "stream": True}, "stream cannot be had"),
        ({"custom_id": "q", "url": "/v1/embeddings", "body": {}}, "either messages or prompt, or a body with the url"),
        ({"prompt": "x", "custom_id": "1"}, "that of an earlier line"),
        ({"prompt": "x", "custom_id": "\ud83d"}, "custom_id must be valid Unicode"),
    ],
)
def test_what_is_no_request_is_named_by_its_line(tmp_path: Path, line: object, complaint: str) -> None:
    path = written(tmp_path, {"prompt": "ok"}, line)
    with pytest.raises(UsageError, match=complaint) as caught:
        read_requests(path, 0)
    assert f"{path}, line 2: " in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="no requests"):
        read_requests(written(tmp_path, "", ""), 0)
