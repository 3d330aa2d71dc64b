"""The distributions of this tree, and an environment in which nothing but the wheel is installed."""

import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 400  # a guard against hangs alone, of each program
# An index that cannot be reached ends in pip's own message after a minute.
PIP = ("-m", "pip", "--disable-pip-version-check", "--retries", "1", "--timeout", "30")


@dataclass(frozen=True)
class Distributions:
    """What `python -m build` makes: the wheel is built from the source distribution."""

    source: Path
    wheel: Path


@dataclass(frozen=True)
class Environment:
    """A virtual environment without any package of another one."""

    directory: Path

    @property
    def python(self) -> Path:
        return self.directory / "bin" / "python"

    def run(self, program: str, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment and return it when it has ended; whoever calls it looks at its status."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
        words = [str(self.directory / "bin" / program), *map(str, arguments)]
        return subprocess.run(words, cwd=cwd, env=inherited, capture_output=True, text=True, timeout=SECONDS)

    def install(self, *arguments: object) -> None:
        """Install what the arguments name."""
        result = self.run("python", *PIP, "install", "--quiet", "--no-compile", *arguments, cwd=self.directory)
        assert result.returncode == 0, result.stderr


def empty_environment(directory: Path) -> Environment:
    venv.create(directory, with_pip=True)
    return Environment(directory)


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    out = tmp_path_factory.mktemp("dist")
    words = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    built = subprocess.run(words, cwd=out, capture_output=True, text=True, timeout=SECONDS)
    assert built.returncode == 0, built.stdout + built.stderr
    (source,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return Distributions(source, wheel)


@pytest.fixture(scope="session")
def installed(distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel and what it depends on, in an environment that was empty."""
    environment = empty_environment(tmp_path_factory.mktemp("environment"))
    environment.install(distributions.wheel)
    return environment


@pytest.fixture
def empty(tmp_path: Path) -> Environment:
    """An environment without packages."""
    return empty_environment(tmp_path / "environment")
