"""The parts of an offline run: whole or absent, joined in order, and never mixed with another run's."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ddtree_trt.errors import DDTreeError, UsageError
from ddtree_trt.replicas.parts import open_parts, rows_per_part

RUN = {"engine": "e", "requests": "r"}


def test_parts_are_joined_in_order(tmp_path: Path) -> None:
    output = tmp_path / "new" / "out.jsonl"
    with open_parts(output, 3, RUN) as parts:
        assert parts.missing() == [0, 1, 2]
        parts.write(2, "c\n")
        parts.write(0, "a\n")
    assert not output.exists()
    with open_parts(output, 3, RUN) as parts:
        assert parts.missing() == [1]
        parts.write(1, "b\n")
        parts.join()
    assert output.read_text() == "a\nb\nc\n"
    assert os.listdir(output.parent) == ["out.jsonl"]
    with pytest.raises(UsageError, match="is there already"), open_parts(output, 3, RUN):
        pass


def test_a_part_that_was_not_finished_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out.jsonl"
    with open_parts(output, 1, RUN) as parts:

        def killed(descriptor: int) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            parts.write(0, "half")
        assert parts.missing() == [0]
        monkeypatch.undo()
        parts.write(0, "whole")
        assert parts.missing() == [] and list(parts.read()) == ["whole"]


def test_a_full_disk_is_said_in_one_line_and_the_run_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a part is written, and when the output is."""
    output = tmp_path / "out.jsonl"

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with open_parts(output, 1, RUN) as parts:
        for write, name in ((lambda: parts.write(0, "a\n"), "000000.jsonl"), (parts.join, "out.jsonl")):
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", full)
                with pytest.raises(DDTreeError) as caught:
                    write()
            assert str(caught.value).endswith(
                f"{name}: No space left on device; free some space, then the same command goes on with what is there"
            )
            assert caught.value.exit_code == 1 and not output.exists()
            write()
    assert output.read_text() == "a\n"


def test_another_run_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"

    def refusal(run: dict[str, str]) -> str:
        with pytest.raises(UsageError) as caught, open_parts(output, 1, run):
            pass
        return str(caught.value)

    with open_parts(output, 1, RUN):
        assert "another run writes" in refusal(RUN)
    assert "another engine (e, here f)" in refusal({**RUN, "engine": "f"})
    (output.with_name("out.jsonl.parts") / "run.json").write_text('{"engi')  # of a run killed in its first moment
    with open_parts(output, 1, RUN):
        pass
    with open_parts(output, 1, RUN):
        pass


def test_there_are_never_very_many_parts() -> None:
    for rows in (1, 32, 1000, 131_072, 131_073, 10_000_000):
        size = rows_per_part(rows)
        assert size >= 32 and -(-rows // size) <= 4096
