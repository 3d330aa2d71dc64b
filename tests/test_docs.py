"""The documents describe the code that is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (
    "ddtree_trt/**/*.py",
    "ddtree_trt/*.pyi",
    "cpp_plugins/**/*.h",
    "cpp_plugins/**/*.cpp",
    "cpp_plugins/**/*.cu",
)


def listed_files() -> set[str]:
    """Paths in the file list; after a path in backticks, bare names in the same line are its siblings."""
    paths = set()
    for line in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines():
        folder = ""
        if not line.startswith("- `"):
            continue
        for name in re.findall(r"`([\w./-]+\.\w+)`", line.split(" — ")[0]):
            folder = name.rpartition("/")[0] or folder
            paths.add(f"{folder}/{name.rpartition('/')[2]}")
    return paths


def test_the_architecture_lists_every_file_and_no_other() -> None:
    there = {str(p.relative_to(ROOT)) for pattern in SOURCES for p in ROOT.glob(pattern)}
    # A package's own file is listed where it holds more than the package's name.
    unlisted = {p for p in there - listed_files() if p.endswith("/__init__.py") and p.count("/") > 1}
    assert listed_files() == there - unlisted


@pytest.mark.parametrize("document", sorted(p.name for p in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]))
def test_links_lead_somewhere(document: str) -> None:
    path = next(p for p in (ROOT / document, ROOT / "docs" / document) if p.exists())
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), f"{document} links to {target}"
