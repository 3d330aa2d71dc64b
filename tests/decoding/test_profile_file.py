"""`profile.json`: what is stored for all users, what is refused, and that no trouble with it ends anything."""

from __future__ import annotations

import json
import logging
import os
import resource
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddtree_trt.artifact.files import PROFILE
from ddtree_trt.errors import ArtifactError
from ddtree_trt.runtime.decoding.budget import latency as profiles
from ddtree_trt.runtime.decoding.budget.latency import ContextCost, LatencyProfile
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.triton.export import ExportRequest, export_triton


def a_profile() -> dict[str, Any]:
    costs = ContextCost(64, 0.001, (1, 2, 5), (0.001, 0.002, 0.003)), ContextCost(512, 0.01, (1,), (0.001,))
    batches = (ContextCost(64, 0.002, (1, 2), (0.002, 0.003), slots=2), ContextCost(64, 0.004, (1,), (0.004,), slots=8))
    return json.loads(LatencyProfile("f", "m", costs, batches).to_json())


def test_what_is_written_is_read() -> None:
    text = json.dumps(a_profile())
    assert json.loads(LatencyProfile.from_json(text).to_json()) == a_profile()


def damaged(path: str, value: Any) -> str:
    """A profile whose entry at `path`, such as contexts.0.draft_s, is another value."""
    data = a_profile()
    *parents, last = path.split(".")
    place: Any = data
    for name in parents:
        place = place[int(name) if name.isdecimal() else name]
    place[int(last) if last.isdecimal() else last] = value
    return json.dumps(data)


NUMBERS: list[Any] = ["x", None, True, -1, -0.5, float("nan"), float("inf"), 10**400, 3601.0, [], {}]
DAMAGED = [
    *(damaged("contexts.0.draft_s", value) for value in NUMBERS),
    *(damaged("contexts.0.verify_s.1", value) for value in [*NUMBERS, 0]),
    *(damaged("contexts.0.tree_tokens.1", value) for value in [*NUMBERS[:-3], 0, 1, 2.5, 10**10]),
    *(damaged("contexts.1.context", value) for value in ["x", None, 0, -1, 1.5, 64, 10**400]),
    *(damaged("batches.0.slots", value) for value in ["x", None, 0, -1, 1, 1.5, 8, 10**400]),
    damaged("batches.1.context", 128),
    *(damaged("batches.1.tree_tokens", value) for value in [[2], [1, 2], [], 5]),
    damaged("contexts.0.slots", 2),
    *(damaged("contexts", value) for value in list[Any](("x", None, 5, [], {}, [5], [None], [[]]))),
    *(damaged("contexts.0", value) for value in ["x", {}, {"context": 1}]),
    *(damaged("fingerprint", value) for value in list[Any]((None, 5, []))),
    *(damaged("machine", value) for value in [None, 5]),
    *(damaged("version", value) for value in list[Any]((0, 2, 99, None, "1", [], {}))),
    *(damaged(path, []) for path in ("contexts.0.tree_tokens", "contexts.0.verify_s")),
    *(damaged("contexts.0.tree_tokens", value) for value in [[2, 3, 4], [1, 3, 2], [1, 2]]),
    damaged("extra", 1),
    "",
    "{",
    "[]",
    "5",
    "null",
    '"x"',
    "[" * 100_000,
    '{"version":' * 50_000,
    json.dumps(a_profile()).replace("0.002", "1e400"),
    json.dumps(a_profile()).replace("0.002", "9" * 5000),
]


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_profile_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ArtifactError) as refused:
        LatencyProfile.from_json(text)
    message = str(refused.value)
    assert message.endswith("; latencies are measured again")
    assert "\n" not in message and len(message) < 400


@pytest.fixture
def engine(tiny_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, list[object]]]:
    """A copy of the engine, and how often it was measured; measuring takes no time."""
    directory = tmp_path / "tiny"
    directory.mkdir()
    for file in tiny_engine.iterdir():
        (directory / file.name).symlink_to(file)
    stored = LatencyProfile.from_json((tiny_engine / PROFILE).read_text())
    measured: list[object] = []

    def measure(engine: object, **_: object) -> LatencyProfile:
        measured.append(engine)
        return stored

    monkeypatch.setattr(profiles, "measure", measure)
    (directory / PROFILE).unlink()
    yield directory, measured
    directory.chmod(0o755)


def open_and_close(directory: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines that loading the engine logs."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        LLM(directory).close()
    return [record.getMessage() for record in caplog.records]


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def make_damaged(path: Path) -> None:
    path.write_text(damaged("contexts.0.draft_s", "x"))


def make_binary(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (make_fifo, "it is not a regular file"),
        (make_device, "it is not a regular file"),
        (make_huge, "it has more than 1 MiB"),
        (make_damaged, "contexts[0].draft_s must be a number from 0 to 3600, found 'x'"),
        (make_binary, "it is not valid JSON"),
    ],
)
def test_a_damaged_one_is_measured_again_and_replaced(
    engine: tuple[Path, list[object]],
    caplog: pytest.LogCaptureFixture,
    make: Callable[[Path], None],
    reason: str,
) -> None:
    directory, measured = engine
    make(directory / PROFILE)
    (line,) = open_and_close(directory, caplog)
    assert line.startswith(f"{directory / PROFILE}: {reason}") and line.endswith("; latencies are measured again")
    assert len(measured) == 1
    assert open_and_close(directory, caplog) == []
    assert len(measured) == 1, "the fresh one is in its place"


def test_a_directory_in_its_place_ends_nothing(
    engine: tuple[Path, list[object]], caplog: pytest.LogCaptureFixture
) -> None:
    directory, measured = engine
    (directory / PROFILE).mkdir()
    first, second = open_and_close(directory, caplog)
    assert "it is not a regular file" in first or "Is a directory" in first
    assert second.startswith(
        f"{directory / PROFILE} cannot be written (Is a directory): latencies are measured at every"
    )
    assert len(measured) == 1


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_its_mode_is_that_of_other_files(
    engine: tuple[Path, list[object]], caplog: pytest.LogCaptureFixture, umask: int, mode: int
) -> None:
    directory, _ = engine
    before = os.umask(umask)
    try:
        assert open_and_close(directory, caplog) == []
    finally:
        os.umask(before)
    assert stat.S_IMODE((directory / PROFILE).stat().st_mode) == mode


def test_a_full_disk_leaves_no_temporary_file(
    engine: tuple[Path, list[object]], caplog: pytest.LogCaptureFixture
) -> None:
    directory, measured = engine
    names = {path.name for path in directory.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        lines = [open_and_close(directory, caplog) for _ in range(2)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    for (line,) in lines:
        assert line == (
            f"{directory / PROFILE} cannot be written (File too large): latencies are measured at every start; let a "
            f"user who may write there run: ddtree-trt profile {directory}"
        )
    assert len(measured) == 2
    assert {path.name for path in directory.iterdir()} == names


# Exports


def refuse_to_open(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As a file of another user; whoever runs the tests may be allowed everything."""
    real = Path.open

    def opened(self: Path, *args: Any, **options: Any) -> Any:
        if self.name == name and self.parent.name == "tiny":
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, *args, **options)

    monkeypatch.setattr(Path, "open", opened)


def test_an_export_does_without_a_profile_it_cannot_read(
    engine: tuple[Path, list[object]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory, _ = engine
    (directory / PROFILE).write_text(json.dumps(a_profile()))
    refuse_to_open(monkeypatch, PROFILE)
    model = export_triton(ExportRequest(directory, tmp_path / "models", model_name="m"))
    assert not (model / "1" / "engine" / PROFILE).exists()
    assert [r.getMessage() for r in caplog.records] == [
        f"{directory / PROFILE} cannot be read (Permission denied); the exported model measures latencies itself, at "
        "every start"
    ]


def test_an_export_names_the_file_it_cannot_read(
    engine: tuple[Path, list[object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = engine
    monkeypatch.setattr("ddtree_trt.triton.export.verify_files", lambda *_: None)
    refuse_to_open(monkeypatch, "weights.bin")
    with pytest.raises(ArtifactError, match=r"tiny/weights.bin cannot be read \(Permission denied\)"):
        export_triton(ExportRequest(directory, tmp_path / "models", model_name="m"))
    assert not (tmp_path / "models" / "m").exists()
