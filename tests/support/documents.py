"""The code blocks of the documents: found, run in this process, and their output compared with what is shown.

A block is console, sh or python, or it is no command. A comment in the line above it may say how it is treated:

    <!-- not run: REASON -->   it cannot be run on this machine, or not by a test
    <!-- slow -->              run by the slow tests
    <!-- serves -->            its command is the server that the other blocks of the document ask

`<!-- no block below is run: REASON -->` holds to the end of the page. Shown output follows its command in a console
block, and a python block in a block of text, or stands in a comment behind the call that prints it. `…` stands for any
text, in a line of its own for any lines; times and rates are not compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ddtree_trt.cli import app

RUNNABLE = ("console", "sh", "python")
PORT = ":8000"  # of the documents' servers
_MARK = re.compile(r"<!-- (?:(not run|no block below is run): (.+?)|(slow)|(serves)) -->")
_COMMAND = re.compile(r"^(?:\$ )?(?:[\w./-]*/)?(?:ddtree-trt|curl|pip|make|python3?) ", re.MULTILINE)
_TIMED = re.compile(r"tokens/s|×|\bms\b|\d (?:[kMG]?B|s)\b|^serving ")
_NUMBER = re.compile(r"\d[\d.]*")


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    path: Path
    line: int
    language: str
    text: str
    mark: str = ""  # "not run", "slow", "serves"
    reason: str = ""
    shown: str | None = None  # of python: the output that follows

    @property
    def runnable(self) -> bool:
        return self.language in RUNNABLE

    @property
    def hides_a_command(self) -> bool:
        """Whether a block that is not run holds commands all the same."""
        return not self.runnable and self.language != "json" and _COMMAND.search(self.text) is not None


def blocks_of(path: Path) -> list[Block]:
    """The blocks of a document, in order."""
    found: list[Block] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    below = ""  # the reason for which no further block is run
    start, mark = None, None
    for number, line in enumerate(lines):
        if start is None and line.startswith("```"):
            start, mark = number, _MARK.fullmatch(lines[number - 1]) if number else None
        elif start is not None and line == "```":
            kind = "" if mark is None else mark[1] or mark[3] or mark[4]
            text = "".join(f"{each}\n" for each in lines[start + 1 : number])
            reason = below or ("" if mark is None else mark[2] or "")
            language = lines[start].removeprefix("```")
            previous = found[-1] if found else None
            if language == "text" and previous and previous.language == "python" and not any(
                lines[previous.line + previous.text.count("\n") + 1 : start]
            ):  # fmt: skip
                found[-1] = dataclasses.replace(previous, shown=text)
            found.append(Block(path, start + 1, language, text, "not run" if below else kind, reason))
            start = None
        elif start is None and (whole := _MARK.fullmatch(line)) and whole[1] == "no block below is run":
            below = whole[2]
    return found


class Shell:
    """Runs blocks in the test's own process and working directory, and compares what they print."""

    def __init__(self, address: Callable[[], str], banner: Callable[[], str]) -> None:
        self._address = address  # gives the server that the documents ask at port 8000
        self._banner = banner  # gives the line that the server printed when it was ready

    def fault(self, block: Block) -> str | None:
        """What is wrong with a block's output; None where it is as shown."""
        where = f"{block.path.name}:{block.line}"
        try:
            if block.mark == "serves":
                return self._serves(block, where)
            if block.language == "python":
                printed = self.run_python(self._addressed(block.text))
                return differs(shown_by(block, printed), printed, where)
            for command, shown in commands_of(block):
                printed = self.run_command(self._addressed(command))
                if shown is not None and (fault := differs(shown, printed, f"{where}: {command}")):
                    return fault
        except Exception as error:
            return f"{where}: {type(error).__name__}: {error}"
        return None

    def _serves(self, block: Block, where: str) -> str | None:
        ((command, shown),) = commands_of(block)
        if not re.search(r"ddtree-trt serve engines/tiny(?: |$)", command):
            return f"{where}: the server of the tests is that of engines/tiny"
        return differs(shown or "", self._banner(), where)

    def _addressed(self, text: str) -> str:
        if PORT not in text:
            return text
        return re.sub(r"(?:http://)?(?:127\.0\.0\.1|localhost):8000", self._address(), text)

    def run_python(self, code: str) -> str:
        """What a program prints."""
        with _captured() as printed:
            exec(compile(code, "example", "exec"), {"__name__": "__main__"})
        return printed.getvalue()

    def run_command(self, command: str) -> str:
        """What a command prints. Raises an exception where it fails or cannot be run."""
        program, *arguments = shlex.split(command, comments=True)
        if program.rpartition("/")[2] == "ddtree-trt":
            with _captured() as printed:
                try:
                    app(arguments, prog_name="ddtree-trt")
                except SystemExit as ended:
                    if ended.code:
                        raise RuntimeError(f"{command} ended with {ended.code}: {printed.getvalue()}") from None
            return printed.getvalue()
        if program == "curl":
            done = subprocess.run([program, *arguments], capture_output=True, text=True, check=True)
            return f"{done.stdout.rstrip()}\n"
        raise ValueError(f"tests run no {program}: mark the block with <!-- not run: REASON -->")


def shown_by(block: Block, printed: str) -> str:
    """The output that a python block shows: the text behind it, or the comment that is what it printed."""
    if block.shown is not None:
        return block.shown
    comments = re.findall(r"# +(.+)$", block.text, re.MULTILINE)
    return next((f"{c}\n" for c in comments if differs(f"{c}\n", printed) is None), "")


@contextlib.contextmanager
def _captured() -> Iterator[io.StringIO]:
    """What is written to stdout and stderr, in its order."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        yield text


def commands_of(block: Block) -> list[tuple[str, str | None]]:
    """(command, shown output) of a console block, whose outputs are None where none is shown; (command, None) of sh."""
    text = re.sub(r"\\\n\s*", "", block.text)
    if block.language == "sh":
        return [(line, None) for line in text.splitlines() if line and not line.startswith("#")]
    parts = re.split(r"^\$ ", text, flags=re.MULTILINE)
    if parts[0]:
        raise ValueError("a console block begins with a command: $ …")
    found = (part.partition("\n")[::2] for part in parts[1:])
    return [(command, shown.strip("\n") + "\n" if shown.strip() else None) for command, shown in found]


def differs(shown: str, printed: str, where: str = "") -> str | None:
    """A message where a printed text is not the one that is shown."""
    pattern = ""
    for line in plain(shown).splitlines():
        if line.strip() == "…":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += ".*".join(map(re.escape, line.split("…"))) + r"\n"
    if re.fullmatch(pattern, plain(printed)):
        return None
    return f"{where}: shown\n{plain(shown)}\nprinted\n{plain(printed)}"


def plain(text: str) -> str:
    """A text without what may differ: numbers of lines with times, decimals, and the width of columns."""
    lines = (re.sub(r"(?<=\S) {2,}", " ", line.rstrip()) for line in text.rstrip().splitlines())
    return "".join(
        (_NUMBER.sub("#", line) if _TIMED.search(line) else re.sub(r"\d+\.\d{2,}", "#", line)) + "\n" for line in lines
    )
