"""`deploy/Containerfile`, which no test can build: its stages, what they copy, and that a GPU backend gets the native
libraries its engines ask for."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import get_args

import pytest

from ddtree_trt.artifact.backends import BackendName
from ddtree_trt.plugins import library

BACKENDS = get_args(BackendName)
ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "deploy" / "Containerfile").read_text(encoding="utf-8")
JOINED = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE))
STAGES = {
    name: (base, body)
    for base, name, body in re.findall(
        r"^FROM (\S+)(?: AS (\S+))?\n(.*?)(?=^FROM |\Z)", JOINED, re.MULTILINE | re.DOTALL
    )
}
# What the engines of a backend look for when they are opened; inspection and doctor say the same.
NEEDED: dict[str, set[str]] = {
    "onnxruntime": set(),
    "torch": {library.TORCH},
    "tensorrt": {library.PLUGINS},
    "tensorrt-rtx": set(),
}


def test_every_backend_has_a_stage() -> None:
    assert {name.removeprefix("native-") for name in STAGES if name.startswith("native-")} == set(BACKENDS)
    assert set(NEEDED) == set(BACKENDS)
    assert STAGES["native"][0] == "native-${BACKEND}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_gets_the_libraries_it_needs(backend: str) -> None:
    base, body = STAGES[f"native-{backend}"]
    taken = {Path(word).name for line in re.findall(r"\bcp (.*?)/native/", body) for word in line.split()}
    assert taken == NEEDED[backend]
    assert ("cpp_plugins/build_plugins.sh" in body) == bool(taken)
    assert not taken or (base == "cuda" and "nvidia/cuda:13." in TEXT)
    script = (ROOT / "cpp_plugins" / "build_plugins.sh").read_text(encoding="utf-8")
    assert all(name in script for name in taken)


def test_the_last_stage_puts_them_where_they_are_looked_for() -> None:
    base, last = STAGES[""]
    assert base == "${TRITON_IMAGE}"
    assert "COPY --from=native /native /native" in last and "ddtree_trt.plugins as p; print(p.__path__[0])" in last
    script = f"import ddtree_trt.plugins as p; assert p.__path__[0] == {str(library.FOLDER)!r}"
    exec(script, {})


def test_what_is_copied_is_there() -> None:
    for line in re.findall(r"^COPY (.*)$", JOINED, re.MULTILINE):
        if source := re.match(r"--from=(\S+) (\S+) \2$", line):
            stages = [n for n in STAGES if n == source[1] or (source[1] == "native" and n.startswith("native-"))]
            assert stages and all(source[2] in JOINED.split(f" AS {n}\n")[1] for n in stages), line
        else:
            assert all((ROOT / name).exists() for name in line.split()[:-1]), line


def test_arguments_are_declared_where_they_are_used() -> None:
    before = JOINED.split("FROM ")[0]
    for base, body in STAGES.values():
        for name in re.findall(r"\$\{(\w+)\}", base):
            assert f"ARG {name}=" in before
        if '"$BACKEND"' in body:
            assert re.search(r"^ARG BACKEND$", body, re.MULTILINE), "an argument before the first FROM is in no stage"


def test_commands_are_shell() -> None:
    commands = re.findall(r"^RUN (.*)$", JOINED, re.MULTILINE)
    assert len(commands) >= 10
    for command in commands:
        done = subprocess.run(["sh", "-n", "-c", command], capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stderr}"


def test_the_extra_is_the_backend_s() -> None:
    (line,) = re.findall(r'extra="\$\(.*?\)"', JOINED)
    extras = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for backend in BACKENDS:
        done = subprocess.run(
            ["sh", "-ec", f'{line} && echo "x$extra"'], env={"BACKEND": backend}, capture_output=True, text=True
        )
        assert done.stdout.strip() == ("x" if backend == "onnxruntime" else f"x[{backend}]")
        assert backend == "onnxruntime" or re.search(rf"^{backend} = \[", extras, re.MULTILINE)
