"""A hook of MkDocs that adds the pages which are not in docs/: documents of other folders, and the command line.

Documents of other folders, and files that any page links to, are at `source/` and their path in the repository, without
dots that would hide them; links are rewritten. The page of the command line is Typer's own description of it.
"""

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

import typer.main
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click

from ddtree_trt.cli import app

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "cpp_plugins/README.md",
    "tools/train_drafter/README.md",
    "tools/train_tiny/README.md",
)
_LINK = re.compile(r"(?<=\]\()(?!https?://|#|mailto:)([^)#\s]+)")
_REQUIRED = re.compile(r"\{(\w+)\}")  # an argument in a usage line


def on_files(files: Files, config: Any) -> Files:
    """Add the pages, and the files outside of docs/ that they link to and that are no pages."""
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in OUTSIDE)]
    links = [(page.parent, link) for page in pages for link in _LINK.findall(page.read_text(encoding="utf-8"))]
    targets = {Path(os.path.normpath(folder / link)) for folder, link in links}
    linked = {path.relative_to(ROOT).as_posix() for path in targets if path.is_file() and path.suffix != ".md"}
    for name in sorted({*OUTSIDE, *(name for name in linked if not name.startswith("docs/"))}):
        files.append(File.generated(config, str(_placed(name)), abs_src_path=str(ROOT / name)))
    files.append(File.generated(config, "reference/cli.md", content=command_line()))
    return files


def _placed(path: str | PurePosixPath) -> PurePosixPath:
    """Where a file of the repository is on the site."""
    return PurePosixPath("source", *(part.lstrip(".") for part in PurePosixPath(path).parts))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite links that lead out of docs/, and those of documents from other folders."""
    uri = PurePosixPath(page.file.src_uri)
    generated = uri.parts[0] == "source"
    folder = PurePosixPath(*uri.parts[1:-1]) if generated else PurePosixPath("docs", *uri.parts[:-1])

    def rewritten(match: re.Match[str]) -> str:
        target = PurePosixPath(os.path.normpath(folder / match[1]))
        inside = target.is_relative_to("docs")
        if inside and not generated:
            return match[1]
        return os.path.relpath(target.relative_to("docs") if inside else _placed(target), uri.parent)

    return _LINK.sub(rewritten, markdown)


def command_line() -> str:
    """The page of the command line: every command with its arguments and options."""
    command = typer.main.get_command(app)
    context: Any = command.make_context("ddtree-trt", [], resilient_parsing=True)
    described = get_docs_for_click(obj=command, ctx=context, name="ddtree-trt", title="Command line")
    described = re.sub(r"\*\*Commands\*\*:\n\n(?:\*.*\n)+", "", described)  # they follow, with longer texts
    # Subcommands are headings of one level, so that the contents list all of them.
    described = re.sub(r"^#{3,} ", "## ", described, flags=re.MULTILINE)
    return _REQUIRED.sub(r"\1", described.replace("\n$ ", "\n"))
