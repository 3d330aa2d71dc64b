"""Ctrl-C at any moment of a command: exit code 130, not a word, nothing half done."""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pacing import WAIT_S

from ddtree_trt import __version__
from ddtree_trt.artifact.manifest import load_manifest
from ddtree_trt.artifact.verify import verify_files

# What the console script does, but that it says when the program's own handler is in place: what comes before is the
# interpreter's own start. What runs in the background begins with SIGINT ignored, hence the first handler.
CONSOLE_SCRIPT = """
import os, signal, sys
set_handler = signal.signal
set_handler(signal.SIGINT, signal.default_int_handler)
def noted(*args):
    result, signal.signal = set_handler(*args), set_handler
    os.write(1, b".")
    return result
signal.signal = noted
from ddtree_trt.__main__ import main
sys.exit(main())
"""
COMMANDS = {  # each takes seconds
    "run": ("run", "ENGINE", "--prompt", "Lars has 9 keys.", "--max-tokens", "1900", "--ignore-eos", "--method", "ar"),
    "check": ("check", "ENGINE"),
    "build": ("build", "--target", "tiny", "--backend", "onnxruntime", "--output", "FOLDER/engine"),
}


def interrupted(arguments: list[str], delay_s: float) -> tuple[int, str]:
    """Exit code and stderr of a command that is interrupted so long after its first line."""
    command = [sys.executable, "-c", CONSOLE_SCRIPT, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and os.read(process.stdout.fileno(), 1) == b"."
        time.sleep(delay_s)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=WAIT_S)
    return process.returncode, err.decode()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [15, pytest.param(200, marks=pytest.mark.slow)])
def test_ctrl_c_at_any_moment_is_silent(tiny_engine: Path, tmp_path: Path, count: int) -> None:
    rng = random.Random(count)
    profile = (tiny_engine / "profile.json").read_text()
    for number in range(count):
        name = list(COMMANDS)[number % len(COMMANDS)]
        folder = tmp_path / str(number)
        folder.mkdir()
        words = [w.replace("ENGINE", str(tiny_engine)).replace("FOLDER", str(folder)) for w in COMMANDS[name]]
        delay_s = rng.uniform(0, 0.1) if number % 3 == 0 else rng.uniform(0, 1.0)
        assert interrupted(words, delay_s) == (130, ""), f"{name} after {delay_s:.3f} s"
        left = list(folder.iterdir())
        if left:  # interrupted after the build, while latencies were measured
            assert [path.name for path in left] == ["engine"]
            verify_files(left[0], load_manifest(left[0]))
        assert (tiny_engine / "profile.json").read_text() == profile
        assert not list(tiny_engine.glob(".*"))


IN_AN_IMPORT = """
import signal, sys
sys.path.insert(0, {folder!r})
from ddtree_trt import interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)
interrupts.end_at_once()
interrupts.begin_work()
try:
    import interrupts_itself
    for _ in range(10**9):
        pass
except KeyboardInterrupt:
    print("interrupted after", interrupts_itself.done)
    interrupts.end_work()
"""


@pytest.mark.parametrize(
    ("module", "ends"),
    [
        ("time.sleep(0.1)\ndone = 'the import'\n", (0, "interrupted after the import\n", "")),
        ("signal.raise_signal(signal.SIGINT)\nprint('survived')\n", (130, "", "")),
    ],
    ids=["waits", "a second one does not"],
)
def test_an_interrupt_waits_for_an_import_to_end(tmp_path: Path, module: str, ends: tuple[int, str, str]) -> None:
    (tmp_path / "interrupts_itself.py").write_text("import signal, time\nsignal.raise_signal(signal.SIGINT)\n" + module)
    script = IN_AN_IMPORT.format(folder=str(tmp_path))
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S)
    assert (run.returncode, run.stdout, run.stderr) == ends


WITH_AN_ERROR = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
import ddtree_trt.inspection
def broken(*_):
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise RuntimeError("what a library makes of it")
ddtree_trt.inspection.load_manifest = broken
from ddtree_trt.__main__ import main
main()
"""


def test_an_error_that_an_interrupt_became_is_an_interrupt(tiny_engine: Path) -> None:
    command = [sys.executable, "-c", WITH_AN_ERROR, "inspect", str(tiny_engine)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "")


def test_where_the_parent_had_it_ignored_it_stays_ignored() -> None:
    """As a shell without job control has it for what runs in the background."""
    command = [sys.executable, "-m", "ddtree_trt", "--version"]
    ignore = functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=ignore) as process:
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.01)
        out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out.decode(), err.decode()) == (0, f"ddtree-trt {__version__}\n", "")


def test_the_ways_to_start_are_the_same() -> None:
    for module in ("ddtree_trt", "ddtree_trt.cli"):
        run = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True)
        assert (run.returncode, run.stdout) == (0, f"ddtree-trt {__version__}\n")


def test_the_first_lines_load_nothing_heavy() -> None:
    """What is loaded before the handler is set is not guarded by it."""
    script = "import sys; before = set(sys.modules); import signal, enum; import ddtree_trt.__main__; "
    script += (
        "print(sorted(m for m in set(sys.modules) - before if m.startswith(('ddtree', 'typing', 'typer', 'rich'))))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "['ddtree_trt', 'ddtree_trt.__main__', 'ddtree_trt.interrupts']"
