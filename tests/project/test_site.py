"""The documentation as a site: it builds without a warning. Links and anchors that lead nowhere: test_docs.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the extra [docs] is not installed")
pytest.importorskip("mkdocstrings", reason="the extra [docs] is not installed")
ROOT = Path(__file__).resolve().parents[2]


# Of the extra [dev] and of those that only run engines: `make docs` installs none of them.
NOT_INSTALLED = ("fastapi", "gguf", "httpx", "hypothesis", "llguidance", "openai", "prometheus_client", "ray", "torch")


def build(checkout: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site with the packages of the extra [docs] alone."""
    absent = site.parent / "absent"
    absent.mkdir()
    for name in NOT_INSTALLED:
        (absent / f"{name}.py").write_text(f"raise ModuleNotFoundError('no {name}')\n", encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(absent)}
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=300)


class Titles(HTMLParser):
    """The titles of a page: its own, and those by which its navigation leads to others."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.own, self.links = "", dict[str, str]()
        self._into, self._target = "", ""
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "h1":
            self._into = "own"
        elif tag == "a" and "md-nav__link" in (given.get("class") or "").split():
            self._into, self._target = "links", given.get("href") or ""
        elif tag == "a" and given.get("class") == "headerlink":
            self._into = ""

    def handle_endtag(self, tag: str) -> None:
        if tag in ("h1", "a"):
            self._into = ""

    def handle_data(self, data: str) -> None:
        if self._into == "own":
            self.own += data.strip()
        elif self._into == "links" and data.strip():
            self.links[self._target] = data.strip()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("docs") / "site"
    done = build(ROOT, site)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return site


def test_pages_are_called_in_navigation_as_they_call_themselves(site: Path) -> None:
    links = {target: name for target, name in Titles(site / "tutorial.html").links.items() if ".html" in target}
    pages = {target: name for target, name in links.items() if "#" not in target}
    assert len(pages) >= 20 and "coming-from-vllm.html" in pages
    assert {target: Titles(site / target).own for target in pages} == pages


def test_the_site_builds_without_a_warning(site: Path) -> None:
    command_line = (site / "reference" / "cli.html").read_text(encoding="utf-8")
    for name in ("ddtree-trt run", "ddtree-trt bench", "--tree-budget", "--list-examples"):
        assert name in command_line
    python = (site / "reference" / "python.html").read_text(encoding="utf-8")
    for name in ("LLM", "AsyncLLM", "RequestOutput", "mean_acceptance_length", "UsageError"):
        assert re.search(rf'id="[\w.]*\b{name}"', python), name
    assert 'data-md-component="source"' not in command_line  # it asks GitHub for stars
    assert '<script src="http' not in command_line and "fonts.googleapis" not in command_line
