"""One run of the suite in several processes: how many, and what is built once for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from sharing import WORKER_BYTES, build_once, free_bytes, run_folder, worker_count


@pytest.mark.parametrize(
    ("cores", "workers_memory_holds", "expected"), [(2, 9, 2), (16, 5, 5), (1, 9, 1), (8, 0, 1), (64, 64, 64)]
)
def test_a_worker_per_core_as_far_as_memory_reaches(cores: int, workers_memory_holds: int, expected: int) -> None:
    assert worker_count(cores, workers_memory_holds * WORKER_BYTES + 5) == expected


def test_free_memory_is_what_the_kernel_says(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       24000000 kB\nMemAvailable:   16000000 kB\nHugePages_Free:  0\n")
    assert free_bytes(tmp_path / "meminfo") == 16_000_000 * 1024
    assert free_bytes() > 0


def test_workers_of_a_run_share_a_folder(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path_factory.getbasetemp()
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw7")
    assert run_folder(tmp_path_factory) == own.parent
    monkeypatch.delenv("PYTEST_XDIST_WORKER")
    assert run_folder(tmp_path_factory) == own


def test_what_is_built_once_is_copied_for_everyone(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The name is the test's own: no other may ask for what it builds."""
    built = []

    def build(directory: Path) -> None:
        directory.mkdir()
        (directory / "weights.bin").write_text("as built")
        built.append(directory)

    name = f"shared-{tmp_path_factory.getbasetemp().name}"
    first = build_once(tmp_path_factory, name, build)
    (first / "weights.bin").write_text("changed by one")
    second = build_once(tmp_path_factory, name, build)
    assert (second / "weights.bin").read_text() == "as built"
    assert len(built) == 1


def test_a_build_that_failed_is_made_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    def fails(directory: Path) -> None:
        directory.mkdir()
        raise RuntimeError("scripted")

    name = f"failed-{tmp_path_factory.getbasetemp().name}"
    with pytest.raises(RuntimeError, match="scripted"):
        build_once(tmp_path_factory, name, fails)
    assert build_once(tmp_path_factory, name, lambda directory: directory.mkdir()).is_dir()
