"""The documentation as a site: it builds without a warning. Links and anchors that lead nowhere: test_docs.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("docs") / "site"
    done = build(ROOT, site)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return site


def test_the_site_builds_without_a_warning(site: Path) -> None:
    command_line = (site / "reference" / "cli.html").read_text(encoding="utf-8")
    for name in ("ddtree-trt run", "ddtree-trt bench", "--tree-budget", "--list-examples"):
        assert name in command_line
    python = (site / "reference" / "python.html").read_text(encoding="utf-8")
    for name in ("LLM", "AsyncLLM", "RequestOutput", "mean_acceptance_length", "UsageError"):
        assert re.search(rf'id="[\w.]*\b{name}"', python), name
    assert 'data-md-component="source"' not in command_line  # it asks GitHub for stars
    assert '<script src="http' not in command_line and "fonts.googleapis" not in command_line
