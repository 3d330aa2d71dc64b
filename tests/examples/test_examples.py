"""The examples run as a user runs them: the scripts answer, the notebook prints what it shows."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from serving import ProcessServer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, argument: object) -> str:
    """What a script prints; its errors fail the test."""
    done = subprocess.run([sys.executable, EXAMPLES / name, str(argument)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_scripts(tiny_engine: Path) -> None:
    elsewhere = {"tools.py", "triton_stream.py"}  # run by the tests of the servers
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"batch.py", "stream.py", "client.py"} | elsewhere
    lines = run("batch.py", tiny_engine).splitlines()
    assert lines[::2] == ["Answer: 192", "Answer: 328"]
    assert all(float(line.split()[-3]) > 1 for line in lines[1::2]), lines
    assert run("stream.py", tiny_engine).startswith("def get_number(numbers):\n")
    with ProcessServer(tiny_engine) as server:
        assert run("client.py", server.url).endswith("Answer: 192\n")


def shown(cell: Any) -> list[str]:
    """What a cell printed, and its value; nothing of what went to stderr, such as warnings of Jupyter's own."""
    printed = "".join(o["text"] for o in cell["outputs"] if o["output_type"] == "stream" and o["name"] == "stdout")
    return [printed, *(o["data"]["text/plain"] for o in cell["outputs"] if o["output_type"] == "execute_result")]


def test_the_tour_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))  # no kernels of the user
    committed = nbformat.read(EXAMPLES / "tour.ipynb", as_version=4)
    nbformat.validate(committed)
    fresh = copy.deepcopy(committed)
    for cell in fresh.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    NotebookClient(fresh, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    cells = [(old, new) for old, new in zip(committed.cells, fresh.cells, strict=True) if old.cell_type == "code"]
    assert len(cells) >= 6
    for old, new in cells:
        assert shown(new) == shown(old), old.source
        assert any(shown(old))
