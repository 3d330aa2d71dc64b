"""Every console, sh and Python block of README and docs/ is run and prints what is shown, or says why it is not run."""

import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from documents import Shell, blocks_of
from serving import ProcessServer

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [block for path in DOCUMENTS for block in blocks_of(path)]
each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@pytest.fixture(scope="module")
def server(tiny_engine: Path) -> Iterator[Callable[[], ProcessServer]]:
    """The server, started when it is first asked for."""
    with ExitStack() as stack:
        started: list[ProcessServer] = []

        def get() -> ProcessServer:
            if not started:
                started.append(stack.enter_context(ProcessServer(tiny_engine, "--playground")))
            return started[0]

        yield get


@pytest.fixture
def shell(
    tiny_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Callable[[], ProcessServer]
) -> Shell:
    """A shell in a folder with engines/tiny, as after `make demo`."""
    shutil.copytree(tiny_engine, tmp_path / "engines" / "tiny")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")
    return Shell(lambda: server().url, lambda: server().ready)


def faults(shell: Shell, path: Path, *states: str) -> list[str]:
    chosen = [block for block in blocks_of(path) if block.runnable and (block.mark or "run") in states]
    return [fault for block in chosen if (fault := shell.fault(block)) is not None]


def check(found: list[str]) -> None:
    if found:
        pytest.fail("\n".join(found), pytrace=False)


@each_document
def test_blocks_print_what_is_shown(shell: Shell, path: Path) -> None:
    check(faults(shell, path, "run", "serves"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@each_document
def test_slow_blocks_print_what_is_shown(shell: Shell, path: Path) -> None:
    check(faults(shell, path, "slow"))


def test_no_block_is_left_out_silently() -> None:
    counts = Counter(block.mark or "run" for block in BLOCKS if block.runnable)
    print(counts)
    assert {*counts} <= {"run", "slow", "serves", "not run"}
    assert counts["run"] >= 14 and counts["slow"] >= 1 and counts["serves"] >= 2
    for block in BLOCKS:
        where = f"{block.path.name}:{block.line}"
        assert block.mark != "not run" or len(block.reason.split()) >= 3, f"{where} is not run, and does not say why"
        assert not block.hides_a_command, f"{where} has commands: make it a console or sh block"


def test_the_output_of_make_demo(shell: Shell) -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n\t", "")
    prompt = re.findall(r"^PROMPT \?= (.*)$", text, re.MULTILINE)[0]
    shown = (ROOT / "README.md").read_text(encoding="utf-8").split("<!-- demo -->\n```\n")[1].split("```")[0]
    shown = re.sub(r"(acceptance lengths of ddtree:).*", r"\1 …", shown)
    path = Path("demo.md")
    path.write_text(f'```console\n$ ddtree-trt run engines/tiny --compare --prompt "{prompt}"\n{shown}```\n')
    check(faults(shell, path, "run"))


@pytest.mark.parametrize(
    ("block", "found"),
    [
        ("```console\n$ ddtree-trt run engines/tiny --example 2\nAnswer: 192\n```", "Answer: 193"),
        ('```python\nprint("one")\n```\n\n```text\none\n```', "two"),
        ("```python\nprint(40 + 2)  # 42\n```", "43"),
    ],
)
def test_a_wrong_output_is_found(shell: Shell, tmp_path: Path, block: str, found: str) -> None:
    path = tmp_path / "x.md"
    shown = block.replace("\nAnswer", "\n…\nAnswer").replace("192\n", "192\n…\n")
    path.write_text(shown)
    assert faults(shell, path, "run") == []
    right = re.findall(r"192|one(?=\n```)|(?<=# )42", shown)[0]
    path.write_text(re.sub(rf"{right}(?=\n(?:…\n)?```)", found.removeprefix("Answer: "), shown))
    assert len(faults(shell, path, "run")) == 1
