"""The example scripts run as a user runs them, and answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from serving import ProcessServer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, argument: object) -> str:
    """What a script prints; its errors fail the test."""
    done = subprocess.run([sys.executable, EXAMPLES / name, str(argument)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_script_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"batch.py", "stream.py", "client.py"}


def test_batch(tiny_engine: Path) -> None:
    lines = run("batch.py", tiny_engine).splitlines()
    assert lines[::2] == ["Answer: 192", "Answer: 328"]
    assert all(float(line.split()[-3]) > 1 for line in lines[1::2]), lines


def test_stream(tiny_engine: Path) -> None:
    assert run("stream.py", tiny_engine).startswith("def get_number(numbers):\n")


def test_client(tiny_engine: Path) -> None:
    with ProcessServer(tiny_engine) as server:
        assert run("client.py", server.url).endswith("Answer: 192\n")
