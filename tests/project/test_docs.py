"""The documents describe the code that is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_architecture_lists_every_room() -> None:
    """A folder of the package is in the table, or its parent is."""
    table = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("## Where things are")[1]
    listed = {
        name
        for row in table.splitlines()
        for name in re.findall(r"`([\w/]+)/`", row.split("|")[1:2][0] if "|" in row else "")
    }
    for folder in {p.parent.relative_to(ROOT) for p in (ROOT / "ddtree_trt").rglob("*.py")}:
        assert {str(folder), str(folder.parent)} & listed or str(folder) == "ddtree_trt", folder
    assert {name for name in listed if not (ROOT / name).is_dir()} == set()


@pytest.mark.parametrize("document", sorted(p.name for p in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]))
def test_links_lead_somewhere(document: str) -> None:
    path = next(p for p in (ROOT / document, ROOT / "docs" / document) if p.exists())
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), f"{document} links to {target}"
