"""Pictures: each is drawn where there is something to draw, and the same result gives the same picture."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import numpy as np
import pytest
from bench_results import STAGES, make_result, make_sample

from ddtree_trt.bench.reporting.plots import acceptance, budget, length_shares, plot_all, require_matplotlib
from ddtree_trt.bench.reporting.summary import summarize
from ddtree_trt.errors import MissingDependency

RICH = make_result(
    *(make_sample("ar", f"{s}/{i}", token_ms=4 + i, temperature=t) for s in "ab" for i in (0, 1) for t in (0.0, 1.0)),
    *(
        make_sample(case, f"{s}/{i}", token_ms=2 + i, temperature=t, stage_s=STAGES, mean_budget=8.0)
        for case in ("dflash", "ddtree@4", "ddtree@16", "ddtree@auto", "ddtree-reference:ddtree@4")
        for s in "ab"
        for i in (0, 1)
        for t in (0.0, 1.0)
    ),
    peers=("ddtree-reference=somewhere",),
    temperatures=(0.0, 1.0),
)


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def test_every_picture_is_drawn_at_the_same_width(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = plot_all(RICH, tmp_path / "new" / "folder")
    assert [p.name for p in written] == ["speedup.png", "budget.png", "stages.png", "acceptance.png"]
    assert {png_size(p)[0] for p in written} == {1660}
    assert all(300 < png_size(p)[1] < 2000 for p in written)


def test_the_same_result_gives_the_same_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pairs = zip(plot_all(RICH, tmp_path / "a"), plot_all(RICH, tmp_path / "b"), strict=True)
    assert all(a.read_bytes() == b.read_bytes() for a, b in pairs)


def test_what_was_not_measured_is_not_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    poor = make_result(make_sample("ar"), make_sample("hf:generate", acceptance_lengths=None))
    assert [p.name for p in plot_all(poor, tmp_path)] == ["speedup.png"]


def test_without_matplotlib_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"\.\[bench\]"):
        require_matplotlib()


def test_the_automatic_star_is_whole() -> None:
    """Also where it is the highest point: its middle is a star's half height or more below the border."""
    pytest.importorskip("matplotlib")
    figure = budget(RICH)
    assert figure is not None
    figure.draw_without_rendering()
    for axis in figure.axes:
        frame = axis.get_window_extent()
        stars = [line for line in axis.lines if line.get_marker() == "*"]
        assert len(stars) == 2
        for star in stars:
            half = star.get_markersize() / 2 * figure.dpi / 72
            ((x, y),) = axis.transData.transform(star.get_xydata())
            assert frame.x0 + half <= x <= frame.x1 - half and y <= frame.y1 - half


def test_lengths_are_those_of_the_rounds() -> None:
    lengths = [length for s in RICH.samples if s.case == "ddtree@auto" for length in s.acceptance_lengths or ()]
    (row,) = [r for r in summarize(RICH, pooled=True) if (r.case.label, r.temperature) == ("ddtree@auto", 0.0)]
    counted = np.bincount(lengths, minlength=len(row.acceptance_by_depth) + 2)[1:] / len(lengths)
    np.testing.assert_allclose(length_shares(row.acceptance_by_depth), counted, atol=1e-12)


def test_budgets_are_told_apart() -> None:
    pytest.importorskip("matplotlib")
    figure = acceptance(RICH)
    assert figure is not None
    looks = [(line.get_color(), line.get_marker()) for line in figure.axes[0].lines]
    assert len(looks) == 4 and len({colour for colour, _ in looks}) == len({marker for _, marker in looks[1:]}) + 1 == 4
    assert len(figure.axes[1].containers) == 3  # the chain, the best budget and the automatic one
