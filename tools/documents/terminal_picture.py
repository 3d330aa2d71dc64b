"""Draw the terminal output of a command as an SVG, for the README.

python tools/documents/terminal_picture.py docs/images/trees.svg -- ddtree-trt run engines/tiny --prompt "…" --show-tree
"""

import argparse
import io
import os
import shlex
import subprocess
from pathlib import Path

from rich.console import Console
from rich.text import Text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="SVG to write")
    parser.add_argument("--columns", type=int, default=120)
    parser.add_argument("--lines", type=int, default=60, help="most lines shown")
    parser.add_argument("command", nargs="+", help="after --: the command")
    options = parser.parse_args()
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(options.columns), "TERM": "xterm-256color"}
    done = subprocess.run(options.command, env=environment, capture_output=True, text=True, check=True)
    console = Console(record=True, width=options.columns, file=io.StringIO())
    console.print(Text(f"$ {shlex.join(options.command)}", style="bold"))
    lines = done.stdout.rstrip().splitlines()
    console.print(Text.from_ansi("\n".join(lines[: options.lines])))
    if len(lines) > options.lines:
        console.print(Text(f"… {len(lines) - options.lines} more lines", style="dim"))
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    console.save_svg(str(options.picture), title="ddtree-trt")


if __name__ == "__main__":
    main()
