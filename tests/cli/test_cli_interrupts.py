"""Ctrl-C while a command works: exit code 130, not a word, nothing half done."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pacing import WAIT_S

# A background process begins with SIGINT ignored, hence the first handler.
COMMAND = [
    *(sys.executable, "-c"),
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from ddtree_trt.__main__ import main; main()",
]


@pytest.mark.parametrize("name", ["run", "build"])
def test_ctrl_c_is_silent_and_leaves_nothing(tiny_engine: Path, tmp_path: Path, name: str) -> None:
    """While `run` writes its answer, and while `build` writes its files."""
    words = {
        "run": ["run", str(tiny_engine), *"--prompt x --max-tokens 1900 --ignore-eos --method ar".split()],
        "build": ["build", "--target", "tiny", "--backend", "onnxruntime", "--output", str(tmp_path / "engine")],
    }
    profile = (tiny_engine / "profile.json").read_text()
    with subprocess.Popen([*COMMAND, *words[name]], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        if name == "run":
            process.stdout.read(1)
        else:
            while not list(tmp_path.glob(".engine.tmp-*/weights.bin")):
                assert process.poll() is None
                time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (130, b"")
    assert list(tmp_path.iterdir()) == []
    assert (tiny_engine / "profile.json").read_text() == profile
