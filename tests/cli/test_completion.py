"""Shell completion: the script that the program prints, in a real shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# What bash does at a Tab, without a terminal.
TAB = """
source ./script
COMP_WORDS=({words}) COMP_CWORD=$(({count} - 1))
_ddtree_trt_completion ddtree-trt
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def test_commands_and_options_are_completed(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def bash(script: str) -> str:
        command = ["bash", "--norc", "--noprofile", "-c", script]  # the program asks its parent which shell it is
        environment = {**os.environ, "PATH": path, "HOME": str(tmp_path)}
        return subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout

    def offered(*words: str) -> set[str]:
        return {*bash(TAB.format(words=" ".join(f"'{word}'" for word in words), count=len(words))).split()}

    (tmp_path / "script").write_text(bash("ddtree-trt --show-completion; true"))
    exports = offered("ddtree-trt", "export-")
    assert {"build", "run", "serve"} <= offered("ddtree-trt", "")
    assert {"export-trtllm", "export-triton"} <= exports and not {"build", "run"} & exports
    assert "--prompt" in offered("ddtree-trt", "run", "--pro")
