r"""Draw the output of a command, from stdin, as an SVG for the README.

FORCE_COLOR=1 COLUMNS=120 ddtree-trt run engines/tiny --prompt "…" --show-tree | head -60 \
    | python tools/documents/terminal_picture.py docs/images/trees.svg 'ddtree-trt run engines/tiny …'
"""

import io
import sys

from rich.console import Console
from rich.text import Text

if __name__ == "__main__":
    picture, command = sys.argv[1:]
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(Text(f"$ {command}", style="bold"))
    console.print(Text.from_ansi(sys.stdin.read()))
    console.save_svg(picture, title="ddtree-trt")
