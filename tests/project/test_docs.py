"""The documents describe the code that is there."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.serve.options import ServeOptions

ROOT = Path(__file__).resolve().parents[2]


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


def test_the_repository_has_one_address() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (address,) = re.findall(r'^Repository = "(.*)"$', project, re.MULTILINE)
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["repository-code"] == address
    files = [*PAGES, ROOT / "pyproject.toml", ROOT / "cpp_plugins" / "wheel" / "pyproject.toml"]
    own = re.compile(r"https://github\.com/[\w-]+/ddtree-trt\b")
    named = {path: set(own.findall(path.read_text(encoding="utf-8"))) for path in files}
    assert set().union(*named.values()) == {address}
    for path in ("README.md", "docs/index.md", "cpp_plugins/wheel/pyproject.toml"):
        assert named[ROOT / path] == {address}, path


def test_the_repository_and_an_installation_are_above_the_first_picture() -> None:
    above = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").partition("![")[0]
    assert re.search(r"\[the repository\]\(https://", above)
    assert re.search(r"^\$ git clone .* make demo$", above, re.MULTILINE)


def test_defaults_beside_vllm_s_are_ours() -> None:
    page = (ROOT / "docs" / "coming-from-vllm.md").read_text(encoding="utf-8").split("## Defaults")[1].split("##")[0]
    ours = {row.split("|")[1].strip(): row.split("|")[3].strip() for row in page.splitlines() if row.startswith("| ")}
    fields = {field.name: field for field in dataclasses.fields(SamplingParams)}
    assert ours["`temperature`"].startswith(f"{fields['temperature'].default:g}:")
    assert (fields["top_k"].default, fields["top_p"].default, fields["min_p"].default) == (0, 1.0, 0.0)
    table = (ROOT / "docs" / "generation.md").read_text(encoding="utf-8")
    assert f"Unless given: {ours['`max_tokens` in Python']}." in table
    assert ours["host of the server"] == ServeOptions().host
