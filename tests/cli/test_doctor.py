"""What `doctor` says of made-up machines: what is there, and the next command for what is not."""

from dataclasses import replace
from pathlib import Path

import pytest

from ddtree_trt.device.gpus import Gpu
from ddtree_trt.device.survey import CUDA_PYTHON, TENSORRT, TENSORRT_RTX, Survey
from ddtree_trt.doctor import Check, diagnose
from ddtree_trt.plugins import library
from ddtree_trt.terminal.printing import print_diagnosis

H200 = Gpu("NVIDIA H200", "580.95", "143771 MiB", "9.0")
RTX4090 = Gpu("NVIDIA GeForce RTX 4090", "580.95", "24564 MiB", "8.9")
CUDA_13 = {CUDA_PYTHON: {"cuda-python": "13.0.3"}}
WHOLE = Survey(
    gpus=(H200,),
    driver_cuda="13.0",
    versions={
        TENSORRT: {"tensorrt": "11.4.0"},
        TENSORRT_RTX: {"tensorrt-rtx": "1.7.1"},
        "torch": {"torch": "2.13.0"},
        **CUDA_13,
    },
    torch_cuda="13.0",
    libraries=frozenset(library.NAMES),
    nvcc="/usr/local/cuda/bin/nvcc",
)


def check(name: str, survey: Survey | None = None) -> Check:
    (found,) = (c for c in diagnose(survey).checks if c.name == name)
    return found


def test_nothing_is_missing_on_a_whole_machine() -> None:
    found = diagnose(WHOLE)
    assert found.next_steps == {}
    assert found.backend.startswith("backend tensorrt: TensorRT 11.4.0")


BARE = replace(WHOLE, versions={}, torch_cuda=None)
OLD_DRIVER = replace(WHOLE, driver_cuda="12.4")
NO_GPU = Survey(driver_cuda=None)


@pytest.mark.parametrize(
    ("survey", "missing", "command"),
    [
        (NO_GPU, "NVIDIA GPU", "ddtree-trt build --target qwen3-8b --backend tensorrt-rtx --gpu sm89"),
        (OLD_DRIVER, "CUDA driver", "sudo apt-get install nvidia-driver-580-open"),
        (replace(WHOLE, driver_cuda=None), "CUDA driver", "start it with --gpus all"),
        (BARE, "TensorRT, CUDA for Python", "pip install --editable '.[tensorrt]'"),
        (replace(WHOLE, torch_cuda=None), "torch", "--index-url https://download.pytorch.org/whl/cu130"),
        (replace(WHOLE, gpus=(RTX4090,), versions=CUDA_13), "TensorRT for RTX", "install --editable '.[tensorrt-rtx]'"),
        (replace(WHOLE, nvcc=None), "nvcc", "sudo apt-get install cuda-toolkit-13-0"),
        (replace(WHOLE, libraries=frozenset()), ", ".join((*library.NAMES,)), "run `make plugins`"),
    ],
)
def test_the_next_command_for_what_is_missing(
    survey: Survey, missing: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {names: step for step, names in diagnose(survey).next_steps.items()}
    assert command in steps[missing]
    print_diagnosis(diagnose(survey))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next for ")]
    assert len(lines) == len(steps)
    assert f"next for {missing}: {steps[missing]}" in lines


def test_no_command_for_what_would_not_help() -> None:
    """No driver, TensorRT or nvcc without a GPU, and nothing for GPUs that TensorRT for RTX does not serve."""
    assert set(diagnose(NO_GPU).next_steps.values()) == {"NVIDIA GPU", "TensorRT for RTX", "torch"}
    assert not any("tensorrt-rtx" in command for command in diagnose(BARE).next_steps)


def test_a_torch_for_cpus_is_enough_without_a_gpu() -> None:
    survey = replace(NO_GPU, versions={"torch": {"torch": "2.13.0+cpu"}})
    assert check("torch", survey).found
    found = check("torch", replace(survey, gpus=(H200,)))
    assert not found.found and found.detail == "torch 2.13.0+cpu, a build for CPUs"


def test_stale_libraries_are_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    (tmp_path / library.PLUGINS).write_bytes(b"ddtree-plugin-abi=1;")
    details = {c.name: c.detail for c in diagnose(replace(WHOLE, libraries=frozenset())).checks}
    assert "plugin ABI 1, this version needs" in details[library.PLUGINS]
    assert details[library.TORCH] == "not built"
    (tmp_path / library.TORCH).write_bytes(b"")
    details = {c.name: c.detail for c in diagnose(replace(WHOLE, libraries=frozenset())).checks}
    assert "plugin ABI None, this version needs" in details[library.TORCH]
