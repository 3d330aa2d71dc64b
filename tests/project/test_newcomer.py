"""A newcomer's hour: a fresh checkout, and every command of docs/tutorial.md as it stands there, the installation too.
The life of the wheel is in tests/package."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import Block, Shell, blocks_of

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.md"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


class Newcomer(Shell):
    """A shell in a checkout with an environment of its own, activated."""

    def __init__(self, home: Path) -> None:
        super().__init__(self._serve, lambda: self._serve() and self.banner)
        self.home = home
        self.bin = home / ".venv" / "bin"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        self.environment = {**kept, "PATH": f"{self.bin}:{os.environ['PATH']}", "COLUMNS": "140"}
        self.server: subprocess.Popen[str] | None = None
        self.banner = ""

    def run(self, *command: str | Path) -> str:
        """What a command prints; raises RuntimeError with it where the command fails."""
        done = subprocess.run(
            list(map(str, command)),
            cwd=self.home,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{command} ended with {done.returncode}: {done.stdout}")
        return done.stdout

    def run_python(self, code: str) -> str:
        return self.run(self.bin / "python", "-c", code)

    def run_command(self, command: str) -> str:
        return self.run("bash", "-c", command)

    def _serve(self) -> str:
        if self.server is None:
            command = [str(self.bin / "ddtree-trt"), "serve", "engines/tiny", "--playground", "--port", "0"]
            self.server = subprocess.Popen(
                command, cwd=self.home, env=self.environment, stdout=subprocess.PIPE, text=True
            )
            assert self.server.stdout is not None
            self.banner = self.server.stdout.readline()
        return self.banner.split()[-1]

    def interrupt(self) -> int:
        """Press Ctrl-C in the server's terminal; returns its exit code."""
        assert self.server is not None
        self.server.send_signal(signal.SIGINT)
        self.server.communicate()
        return self.server.returncode


@pytest.fixture
def newcomer(tmp_path: Path) -> Iterator[Newcomer]:
    """In a copy of this checkout, as git would give it."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listed.split("\0")[:-1]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    newcomer = Newcomer(tmp_path)
    yield newcomer
    if newcomer.server is not None and newcomer.server.poll() is None:
        newcomer.server.kill()
        newcomer.server.communicate()


def commands(block: Block) -> list[str]:
    return [line.removeprefix("$ ") for line in block.text.splitlines()]


def test_the_tutorial_in_a_checkout(newcomer: Newcomer) -> None:
    checkout = set(newcomer.home.iterdir())
    install, *lessons, uninstall = [block for block in blocks_of(TUTORIAL) if block.runnable]
    for command in commands(install):
        newcomer.run_command(command)
    where = newcomer.run_python("import ddtree_trt; print(ddtree_trt.__file__)")
    assert where.startswith(str(newcomer.home)), "another checkout's package was met"

    told = [block for block in lessons if block.mark != "not run"]
    faults = [fault for block in told if (fault := newcomer.fault(block)) is not None]
    if faults:
        pytest.fail("\n".join(faults), pytrace=False)
    assert newcomer.interrupt() == 0

    for command in commands(uninstall):
        newcomer.run_command(command.replace("pip uninstall", "pip uninstall --yes"))
    assert set(newcomer.home.iterdir()) == {*checkout, newcomer.home / ".venv"}
    assert not list(newcomer.home.glob(".venv/lib/*/site-packages/*ddtree_trt*"))
    assert not (newcomer.bin / "ddtree-trt").exists()
