"""The command line around building: what a user types and reads."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest
from command_line import Cli
from pacing import WAIT_S

from ddtree_trt import __version__
from ddtree_trt.device.cpu import read_cpu
from ddtree_trt.device.gpus import find_gpus
from ddtree_trt.errors import install_with

HIDDEN = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # backend auto is the CPU's on every machine


@pytest.fixture(scope="module")
def built_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which `ddtree-trt build --target tiny` was run."""
    directory = tmp_path_factory.mktemp("built_folder")
    command = [sys.executable, "-m", "ddtree_trt.cli", "build", "--target", "tiny"]
    built = subprocess.run(command, capture_output=True, text=True, cwd=directory, env=HIDDEN)
    assert built.returncode == 0, built.stderr
    (why,), (first, second) = built.stderr.splitlines(), built.stdout.splitlines()
    assert why.startswith("backend onnxruntime: no NVIDIA GPU is visible")
    assert first.startswith("built engines/tiny: onnxruntime fp32, ")
    assert second == "next: ddtree-trt run engines/tiny"
    return directory


@pytest.fixture
def folder_of_work(built_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, entered."""
    monkeypatch.chdir(built_folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return built_folder


@pytest.mark.usefixtures("folder_of_work")
def test_inspect(cli: Cli) -> None:
    code, out, err = cli("inspect", "engines/tiny")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "tiny: onnxruntime fp32 engine at engines/tiny, every file verified"
    words = {line.split("  ")[0].strip() for line in lines[1:]}
    assert {"target", "drafter", "target dims", "limits", "weights", "KV cache", "toolchain", "files"} <= words
    assert any(line.strip().startswith("weights.bin") for line in lines) and "tiny/target (packaged)" in out
    report = json.loads(cli("inspect", "engines/tiny", "--json")[1])
    manifest = report["manifest"]
    assert (
        report["memory"]["weights_bytes"] > manifest["files"]["weights.bin"]["size"]
    )  # sessions pack heads of their own
    assert report["total_bytes"] == sum(f["size"] for f in manifest["files"].values())
    assert report["has_profile"] is True


@pytest.mark.parametrize("arguments", [("inspect", "engines/tiny"), ("--help",)])
def test_an_output_that_takes_nothing_is_said_in_one_line(built_folder: Path, arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "ddtree_trt.cli", *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=built_folder)
    assert done.returncode == 1
    assert done.stderr == ("error: cannot write: No space left on device; free some space, or write to another place\n")


@pytest.mark.usefixtures("folder_of_work")
def test_second_build_needs_force(cli: Cli) -> None:
    code, _, err = cli("build", "--target", "tiny")
    assert code == 1
    why, error = err.splitlines()
    assert why.startswith("backend onnxruntime: ") and error.startswith("error: ") and "give --force" in error
    assert cli("build", "--target", "tiny", "--force", "--no-profile")[0] == 0


def test_torch_engines_are_not_begun_without_torch(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "torch" else find_spec(name))
    build = ["build", "--target", "tiny", "--backend", "torch", "--output", tmp_path / "engine"]
    code, out, err = cli(*build)
    assert (code, out) == (1, "") and not list(tmp_path.iterdir())
    assert "--no-profile" in err and err.rstrip().endswith(install_with("torch"))
    assert cli(*build, "--no-profile")[0] == 0


def test_help_version_and_no_command(cli: Cli) -> None:
    assert cli("--version") == (0, f"ddtree-trt {__version__}\n", "")
    code, out, _ = cli("--help")
    assert code == 0 and all(word in out for word in ("build", "inspect", "doctor", "--debug"))
    code, out, _ = cli()
    assert code == 2 and "Usage" in out
    code, _, err = cli("bild")
    assert code == 2 and err.startswith("error: No such command 'bild'")


def test_bars_on_a_terminal_only(built_folder: Path) -> None:
    """On a terminal stderr carries progress; stdout is the same lines either way."""
    build = f"{sys.executable} -m ddtree_trt.cli build --target tiny --force --no-profile > out"
    environment = {**HIDDEN, "TERM": "xterm"}
    drawn, code = pexpect.run(
        f'sh -c "{build}"', cwd=str(built_folder), env=environment, timeout=WAIT_S, withexitstatus=True
    )
    first, second = (built_folder / "out").read_text().splitlines()
    assert code == 0 and b"write weights" in drawn and b"backend onnxruntime: " in drawn
    assert first.startswith("built engines/tiny: ") and second == "next: ddtree-trt run engines/tiny"


def test_a_closed_pipe_is_no_error(built_folder: Path) -> None:
    command = f"{sys.executable} -m ddtree_trt.cli inspect engines/tiny --json | head -c 1"
    shown = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=built_folder)
    assert (shown.stdout, shown.stderr) == ("{", "")


XEON = "processor\t: 0\nmodel name\t: Xeon\nflags\t\t: fpu avx2 fma avx512f avx512_vnni avx512_bf16 amx_tile\n\n"
GRAVITON = "processor\t: 0\nFeatures\t: fp asimd asimddp sve i8mm bf16\n\n"


@pytest.mark.parametrize(
    ("cpuinfo", "features"),
    [
        (XEON, ("avx2", "avx512", "vnni", "bf16", "amx")),
        (XEON.replace("avx512", "x"), ("avx2", "amx")),
        (GRAVITON, ("bf16", "neon", "dotprod", "i8mm", "sve")),
    ],
)
def test_cpu_features(tmp_path: Path, cpuinfo: str, features: tuple[str, ...]) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert read_cpu(tmp_path / "cpuinfo").features == features
    assert read_cpu(tmp_path / "nothing").features == ()


@pytest.mark.parametrize(
    ("script", "names"),
    [
        (
            "echo 'NVIDIA H200, 580.1, 143771 MiB, 9.0'; echo 'NVIDIA A100, 580.1, 1 MiB, 8.0'",
            ["NVIDIA H200", "NVIDIA A100"],
        ),
        ("echo 'couldn'\"'\"'t communicate with the driver' >&2; exit 9", []),
        ("echo gibberish", []),
    ],
)
def test_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, names: list[str]) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert [gpu.name for gpu in find_gpus()] == names
