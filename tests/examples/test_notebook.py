"""The example notebook runs from its first cell to its last, and prints what it shows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

TOUR = Path(__file__).resolve().parents[2] / "examples" / "tour.ipynb"


def shown(cell: Any) -> list[str]:
    """What a cell printed, and its value; nothing of what went to stderr, such as warnings of Jupyter's own."""
    printed = "".join(o["text"] for o in cell["outputs"] if o["output_type"] == "stream" and o["name"] == "stdout")
    return [printed, *(o["data"]["text/plain"] for o in cell["outputs"] if o["output_type"] == "execute_result")]


def execute(notebook: Any, folder: Path) -> None:
    """Run every cell in a new kernel of this Python. Raises CellExecutionError for a cell that fails."""
    NotebookClient(
        notebook, kernel_name="python3", timeout=300, resources={"metadata": {"path": str(folder)}}
    ).execute()


@pytest.fixture(autouse=True)
def no_kernels_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))


def test_the_tour_runs_and_prints_what_it_shows(tmp_path: Path) -> None:
    committed = nbformat.read(TOUR, as_version=4)
    nbformat.validate(committed)
    fresh = copy.deepcopy(committed)
    for cell in fresh.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    execute(fresh, tmp_path)
    cells = [(old, new) for old, new in zip(committed.cells, fresh.cells, strict=True) if old.cell_type == "code"]
    assert len(cells) >= 6
    for old, new in cells:
        assert shown(new) == shown(old), old.source
        assert any(shown(old))


def test_a_cell_that_fails_is_noticed(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert 1 == 2")])
    with pytest.raises(CellExecutionError):
        execute(notebook, tmp_path)
