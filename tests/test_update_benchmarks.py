"""The benchmark document has a place for everything its command writes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import update_benchmarks as tool  # noqa: E402


def test_every_section_has_its_place() -> None:
    text = tool.DOCUMENT.read_text(encoding="utf-8")
    names = re.findall(r"<!-- begin ([\w-]+) -->", text)
    assert sorted(names) == sorted([*tool.SECTIONS, tool.CHECK])
    for name in names:
        assert tool.replace_section(text, name, "new words").count("new words") == 1


def test_a_section_is_replaced_and_nothing_else() -> None:
    text = "before\n<!-- begin a -->\nold \\1\n<!-- end a -->\nbetween\n<!-- begin b -->\nkept\n<!-- end b -->\n"
    once = tool.replace_section(text, "a", r"new \1")
    assert once == text.replace("\nold \\1\n", "\n\nnew \\1\n\n")
    assert tool.replace_section(once, "a", r"new \1") == once
    with pytest.raises(ValueError, match="one section between"):
        tool.replace_section(text, "c", "")


def test_a_busy_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (99.0, 0, 0))
    with pytest.raises(SystemExit, match="the machine is busy"):
        tool.refuse_if_busy(False)
    tool.refuse_if_busy(True)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0, 0))
    tool.refuse_if_busy(False)
