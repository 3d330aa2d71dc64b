"""The benchmark document has a place for everything its command writes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

sys.path.append(str(Path(__file__).resolve().parents[2]))

from tools import update_benchmarks as tool

ROOT = Path(__file__).resolve().parents[2]


def test_every_section_has_its_place() -> None:
    text = tool.DOCUMENT.read_text(encoding="utf-8")
    names = re.findall(r"<!-- begin ([\w-]+) -->", text)
    assert sorted(names) == sorted([*tool.SECTIONS, *tool.CHECKS, tool.COMPARISON])
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


def test_the_useless_drafter_is_random_but_fits(tmp_path: Path) -> None:
    made = load_file(tool.make_useless(tmp_path / "drafter") / "model.safetensors")
    packaged = load_file(ROOT / "ddtree_trt/assets/tiny/drafter/model.safetensors")
    assert made.keys() == packaged.keys()
    for name, w in made.items():
        assert w.shape == packaged[name].shape and w.dtype == packaged[name].dtype
        assert np.array_equal(w, packaged[name]) == (w.ndim == 1)
        assert w.ndim == 1 or abs(np.corrcoef(w.ravel(), packaged[name].ravel())[0, 1]) < 0.05
