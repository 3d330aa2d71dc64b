"""`python -m workbench NAME …` runs one of the measurements; without a name it lists them."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import typer

from ddtree_trt.errors import DDTreeError, install_with

# Packages by the extra that has them.
EXTRAS = {"datasets": "bench", "httpx": "bench", "llama_cpp": "peers", "tensorrt_llm": "trtllm"}


def names() -> dict[str, str]:
    """The first line of each module that can be run, by the module's name."""
    found = {}
    for path in sorted(Path(__file__).parent.iterdir()):
        file = path / "__init__.py" if path.is_dir() else path
        if file.is_file() and "\ndef main(" in (text := file.read_text(encoding="utf-8")) and path.stem != "__main__":
            found[path.stem.replace("_", "-")] = text.lstrip('"').partition("\n")[0]
    return found


def main() -> None:
    known = names()
    name, *arguments = sys.argv[1:] or ["--help"]
    if name not in known:
        print("python -m workbench NAME …; NAME --help says more\n")
        print("\n".join(f"  {each:12} {line}" for each, line in known.items()))
        raise SystemExit(0 if name == "--help" else 2)
    try:
        module = importlib.import_module(f"workbench.{name.replace('-', '_')}")
        app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        app.command(help=re.sub(r"\n\n(?=    )", "\n\n\b\n", module.__doc__ or ""))(module.main)  # \b: lines stay
        app(arguments, prog_name=f"python -m workbench {name}")
    except DDTreeError as error:
        raise SystemExit(f"error: {error}") from error
    except ModuleNotFoundError as error:
        how = install_with(EXTRAS[error.name]) if error.name in EXTRAS else f"run: pip install {error.name}"
        raise SystemExit(f"error: this needs the Python package {error.name}; {how}") from error


if __name__ == "__main__":
    main()
