"""docs/drafters.md names every published drafter whose configuration the tests hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIXTURES = sorted((ROOT / "tests" / "fixtures" / "drafters").glob("*.json"))


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: path.stem)
def test_the_page_names_it(fixture: Path) -> None:
    checkpoint = json.loads(fixture.read_text())["checkpoint"]
    assert checkpoint in (ROOT / "docs" / "drafters.md").read_text(encoding="utf-8")
