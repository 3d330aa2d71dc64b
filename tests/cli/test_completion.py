"""Shell completion: the script that the program prints, in a real shell."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
# What each shell does at a Tab, without a terminal: {line} is typed, the cursor behind it.
BASH = """
source ./script
COMP_WORDS=({words}) COMP_CWORD=$(({count} - 1))
_ddtree_trt_completion ddtree-trt
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
# The function that shows what is offered is zsh's own; here it prints it.
ZSH = """
compdef() {{ }}
_arguments() {{ print -r -- "$@" }}
words=({words}) CURRENT={count}
source ./script
_ddtree_trt_completion
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """Runs words at an empty home that knows `ddtree-trt`; returns what they print."""
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}

    def run(*words: str) -> str:
        result = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


@pytest.mark.parametrize(("shell", "tab"), [("bash", BASH), ("zsh", ZSH)])
def test_commands_and_options_are_completed(shell: str, tab: str, tmp_path: Path, run: Callable[..., str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    options = ["--norc", "--noprofile"] if shell == "bash" else ["--no-rcs"]
    # The program asks its parent process which shell it is.
    (tmp_path / "script").write_text(run(shell, *options, "-c", "ddtree-trt --show-completion; true"))

    def offered(*words: str) -> set[str]:
        script = tab.format(words=" ".join(f"'{word}'" for word in words), count=len(words))
        text = run(shell, *options, "-c", script)
        return set(text.split() if shell == "bash" else re.findall(r'"([\w-]+)":"', text))

    assert {"build", "run", "serve", "export-trtllm"} <= offered("ddtree-trt", "")
    exports = offered("ddtree-trt", "export-")
    assert {"export-trtllm", "export-triton"} <= exports and not {"build", "run"} & exports
    assert "--prompt" in offered("ddtree-trt", "run", "--pro")


def test_completion_is_installed_for_one_user(tmp_path: Path, run: Callable[..., str]) -> None:
    assert "completion installed in" in run(
        "bash", "--norc", "--noprofile", "-c", "ddtree-trt --install-completion; true"
    )
    (script,) = (path for path in tmp_path.rglob("ddtree-trt.sh"))
    assert "_DDTREE_TRT_COMPLETE=complete_bash" in script.read_text()
    assert str(script) in (tmp_path / ".bashrc").read_text()
