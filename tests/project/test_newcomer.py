"""A newcomer's environment: the tutorial's commands install a fresh checkout, and take it away again.

Its lessons are run by test_doc_blocks.py; the life of the wheel is in tests/package.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from documents import blocks_of, commands_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_tutorial_installs_a_checkout_and_takes_it_away(tmp_path: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listed.split("\0")[:-1]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    checkout, binaries = set(tmp_path.iterdir()), tmp_path / ".venv" / "bin"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment = {**kept, "PATH": f"{binaries}:{os.environ['PATH']}"}

    def run(command: str) -> str:
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    install, *_, uninstall = [block for block in blocks_of(ROOT / "docs" / "tutorial.md") if block.runnable]
    for command, _ in commands_of(install):
        run(command)
    where = run("python -c 'import ddtree_trt._native; print(ddtree_trt.__file__)'")
    assert where.startswith(str(tmp_path)), "another checkout's package was met"
    assert "Answer: 192" in run("ddtree-trt build --target tiny > /dev/null && ddtree-trt run engines/tiny --example 2")
    (tmp_path / "models").mkdir()  # of a lesson

    for command, _ in commands_of(uninstall):
        run(command.replace("pip uninstall", "pip uninstall --yes"))
    assert set(tmp_path.iterdir()) == {*checkout, tmp_path / ".venv"}
    assert not list(tmp_path.glob(".venv/lib/*/site-packages/*ddtree_trt*"))
    assert not (binaries / "ddtree-trt").exists()
