"""The documentation as a site: it builds without a warning, which links and anchors that lead nowhere would be."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the extra [docs] is not installed")
pytest.importorskip("mkdocstrings", reason="the extra [docs] is not installed")
ROOT = Path(__file__).resolve().parents[2]


def build(checkout: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=300)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    command_line = (tmp_path / "reference" / "cli.html").read_text(encoding="utf-8")
    for name in ("ddtree-trt run", "ddtree-trt bench merge", "--tree-budget", "--list-examples"):
        assert name in command_line
    python = (tmp_path / "reference" / "python.html").read_text(encoding="utf-8")
    for name in ("LLM", "AsyncLLM", "RequestOutput", "mean_acceptance_length", "UsageError"):
        assert re.search(rf'id="[\w.]*\b{name}"', python), name
    assert '<script src="http' not in command_line and "fonts.googleapis" not in command_line


def test_an_anchor_that_leads_nowhere_ends_it(tmp_path: Path) -> None:
    for name in ("docs", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.json", "__pycache__"))
    for name in ("mkdocs.yml", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "cpp_plugins", tmp_path / "cpp_plugins", ignore=shutil.ignore_patterns("[!R]*"))
    page = tmp_path / "docs" / "index.md"
    page.write_text(page.read_text(encoding="utf-8") + "\n[nowhere](concepts.md#no-such-heading)\n", encoding="utf-8")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0 and "no-such-heading" in done.stderr
