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


PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("tools/*/README.md")])


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)", path.read_text(encoding="utf-8")):
        there = path.parent / target if target else path
        made = there.name == "cli.md"  # by tools/documents/docs_site.py
        assert made or there.exists(), f"{path.name} links to {target}"
        assert not anchor or anchor in anchors(there), f"{path.name} links to {target}#{anchor}"
