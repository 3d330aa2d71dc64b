"""`--backend auto`, over a table of machines: what it takes, and what it says of the better one."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_pair

from ddtree_trt.artifact.backends import BackendName
from ddtree_trt.build import compile as compiling
from ddtree_trt.build.checkpoint.outline import Outline
from ddtree_trt.build.checkpoint.quantization import Quantization
from ddtree_trt.build.choice import Wanted, choose_backend
from ddtree_trt.build.compile import BuildRequest, compile_engine, dry_run
from ddtree_trt.build.pair import Pair
from ddtree_trt.device.gpus import Gpu, visible_gpus
from ddtree_trt.device.survey import CUDA_PYTHON, TENSORRT, TENSORRT_RTX, Survey
from ddtree_trt.drafters.dflash.dims import DFlashDims
from ddtree_trt.drafters.registry import checkpoint_shapes
from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.plugins import library

GPUS = {
    "h200": Gpu("NVIDIA H200", "580.95", "143771 MiB", "9.0"),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", "580.95", "24564 MiB", "8.9"),
    "rtx4060": Gpu("NVIDIA GeForce RTX 4060", "580.95", "8188 MiB", "8.9"),
    "a100": Gpu("NVIDIA A100", "580.95", "81920 MiB", "8.0"),
    "t4": Gpu("Tesla T4", "580.95", "15360 MiB", "7.5"),
    "gtx1080": Gpu("NVIDIA GeForce GTX 1080", "580.95", "8192 MiB", "6.1"),
    "spark": Gpu("NVIDIA GB10", "580.95", "[N/A]", "12.1"),
    "nameless": Gpu("unknown", "580.95", "unknown", "unknown"),
}
PACKAGES: Mapping[str, dict[str, Any]] = {  # words of a machine's description → fields of its survey
    "trt": {"versions": {TENSORRT: {"tensorrt": "11.4.0.106"}, CUDA_PYTHON: {"cuda-python": "13.0.3"}}},
    "oldtrt": {"versions": {TENSORRT: {"tensorrt": "10.13.0"}, CUDA_PYTHON: {"cuda-python": "13.0.3"}}},
    "rtx": {"versions": {TENSORRT_RTX: {"tensorrt-rtx": "1.7.1"}, CUDA_PYTHON: {"cuda-python": "13.0.3"}}},
    "oldrtx": {"versions": {TENSORRT_RTX: {"tensorrt-rtx": "1.6.0"}, CUDA_PYTHON: {"cuda-python": "13.0.3"}}},
    "nocuda": {"versions": {TENSORRT_RTX: {"tensorrt-rtx": "1.7.1"}}},
    "torch": {"versions": {"torch": {"torch": "2.13.0"}}, "torch_cuda": "13.0"},
    "torch12": {"versions": {"torch": {"torch": "2.13.0"}}, "torch_cuda": "12.8"},
    "cputorch": {"versions": {"torch": {"torch": "2.13.0+cpu"}}},
    "kernels": {"libraries": frozenset({library.TORCH})},
    "driver550": {"driver_cuda": "12.4"},
    "nodriver": {"driver_cuda": None},
    "broken": {"faults": {TENSORRT: "tensorrt cannot be imported (libnvinfer.so.11: cannot open shared object file)"}},
}


def machine(description: str) -> Survey:
    """A machine from words of `GPUS` and `PACKAGES`, with a new driver unless they say otherwise."""
    survey = Survey(host_bytes=16_000_000_000)
    versions: dict[str, Any] = {}
    for word in description.split():
        if word in GPUS:
            driver = survey.driver_cuda or "13.0"
            survey = dataclasses.replace(survey, gpus=(*survey.gpus, GPUS[word]), driver_cuda=driver)
        else:
            versions |= PACKAGES[word].get("versions", {})
            survey = dataclasses.replace(survey, **PACKAGES[word])
    return dataclasses.replace(survey, versions=versions)


MACHINES: list[tuple[str, BackendName, str]] = [
    ("", "onnxruntime", "no NVIDIA GPU is visible; an engine for a GPU needs one, and its driver 580 or newer"),
    ("trt rtx torch kernels", "onnxruntime", "no NVIDIA GPU is visible"),
    ("h200 trt", "tensorrt", "TensorRT 11.4.0.106 and the NVIDIA H200 (compute capability 9.0)"),
    ("h200 trt rtx torch kernels", "tensorrt", "TensorRT 11.4.0.106"),
    ("h200 torch kernels", "torch", "(compute capability 9.0); for tensorrt: tensorrt is not installed"),
    ("h200 torch", "onnxruntime", "for tensorrt: tensorrt is not installed"),
    ("h200 oldtrt", "onnxruntime", "for tensorrt: TensorRT must be 11.1 or newer below 12, not 10.13.0"),
    ("h200 trt broken", "onnxruntime", "for tensorrt: tensorrt cannot be imported (libnvinfer.so.11: cannot open"),
    ("h200 trt driver550", "onnxruntime", "driver must be 580 or newer, and this one is for CUDA 12.4"),
    ("h200 trt nodriver", "onnxruntime", "and libcuda.so.1 is not found"),
    ("rtx4090", "onnxruntime", "run in a checkout of ddtree-trt: pip install --editable '.[tensorrt-rtx]'"),
    ("rtx4090 rtx", "tensorrt-rtx", "for RTX 1.7.1 and the NVIDIA GeForce RTX 4090 (compute capability 8.9)"),
    ("rtx4090 nocuda", "onnxruntime", "for tensorrt-rtx: cuda.bindings.runtime is not installed"),
    ("rtx4090 trt rtx", "tensorrt", "TensorRT 11.4.0.106"),
    ("rtx4090 torch kernels", "torch", "for tensorrt-rtx: tensorrt_rtx is not installed"),
    ("rtx4090 oldrtx", "onnxruntime", "for tensorrt-rtx: TensorRT for RTX must be 1.7 or newer below 2, not 1.6.0"),
    ("t4 trt rtx", "onnxruntime", "for tensorrt: the GPU's compute capability must be 8.0 or newer, not 7.5"),
    ("gtx1080 trt rtx torch kernels", "onnxruntime", "compute capability must be 8.0 or newer, not 6.1"),
    ("nameless trt", "onnxruntime", "for tensorrt: the GPU's compute capability must be known: install nvidia-smi"),
]


def outline(layers: int, hidden: int, head_dim: int = 128, quantization: Quantization | None = None) -> Pair:
    """A pair of Qwen3's vocabulary whose target has these dimensions."""
    target = TransformerDims(151936, hidden, layers, 32, 8, head_dim, 3 * hidden, 1e-6, 1e6, 40960)
    drafter = DFlashDims(151936, hidden, 5, 32, 8, head_dim, 3 * hidden, 1e-6, 1e6, 40960, 16, 151669, (1, 9), layers)
    return Pair(
        Outline("target", target, checkpoint_shapes(target, tied=False), quantization, ""),
        Outline("drafter", drafter, checkpoint_shapes(drafter, tied=True), None, ""),
    )


LARGE, SMALL = outline(36, 4096), outline(4, 512)
FP8 = outline(36, 4096, quantization=Quantization("FP8", None, ()))


@pytest.mark.parametrize(
    ("description", "pair", "precision", "backend", "words"),
    [
        *((description, None, "auto", backend, words) for description, backend, words in MACHINES),
        ("h200 trt torch kernels", LARGE, "fp32", "torch", "for tensorrt: the precision must be one of bf16, fp16,"),
        ("h200 trt torch", LARGE, "fp32", "torch", ""),  # no kernel computes in fp32, so none need be built
        ("h200 trt torch kernels", LARGE, "int8", "onnxruntime", "the precision must be one of bf16, fp16, not int8"),
        ("h200 trt", LARGE, "fp16", "tensorrt", ""),
        ("h200 torch", outline(4, 512, head_dim=96), "auto", "torch", ""),  # head sizes without a kernel are PyTorch's
        ("h200 torch12 driver550", outline(4, 512, head_dim=96), "auto", "torch", ""),
        ("rtx4060 rtx", LARGE, "auto", "onnxruntime", "for tensorrt-rtx: the GPU must hold "),
        ("spark rtx", LARGE, "auto", "tensorrt-rtx", ""),  # whose memory is the host's, and not known
        ("a100 trt", FP8, "auto", "onnxruntime", ""),
        ("a100 trt torch kernels", FP8, "auto", "torch", "FP8 needs compute capability 8.9, not 8.0"),
    ],
)
def test_machines(description: str, pair: Pair | None, precision: Wanted, backend: BackendName, words: str) -> None:
    """Of any pair, and of pairs that a backend would refuse."""
    choice = choose_backend(machine(description), pair, precision)
    assert choice.backend == backend
    assert choice.reason.startswith(f"backend {backend}: ") and words in choice.reason
    assert "\n" not in choice.reason
    if pair is None and (backend == "tensorrt" or words.startswith("for RTX")):
        assert "; for " not in choice.reason  # there is no better one


def test_a_large_target_on_a_cpu_is_told_its_size() -> None:
    reason = choose_backend(machine(""), LARGE).reason
    size, small = (LARGE.weights_bytes("onnxruntime", p) / 1e9 for p in ("fp32", "int8"))
    assert size > 30 > 12 > small
    words = f"in fp32 its weights take {size:.1f} GB of this machine's 16.0 GB of memory: --precision int8 makes that "
    assert reason.endswith(f"{words}{small:.1f} GB")
    assert "GB" not in choose_backend(machine(""), SMALL).reason
    assert "GB" not in choose_backend(machine(""), LARGE, "int8").reason
    assert "GB" in choose_backend(machine("h200"), LARGE).reason


@pytest.mark.parametrize(
    ("chosen", "left"),
    [(None, "ab"), ("", ""), ("0", "a"), ("1,0", "ba"), ("0,7,1", "a"), ("-1", ""), ("GPU-5f", "ab"), (" 1 ", "b")],
)
def test_cuda_visible_devices(chosen: str | None, left: str) -> None:
    gpus = tuple(Gpu(name, "580.1", "1 MiB", "9.0") for name in "ab")
    assert "".join(gpu.name for gpu in visible_gpus(gpus, chosen)) == left


def test_gpus_that_are_hidden_are_named() -> None:
    hidden = dataclasses.replace(machine("trt"), visible_devices="")
    assert "no NVIDIA GPU is visible (CUDA_VISIBLE_DEVICES is '')" in choose_backend(hidden).reason


def test_a_build_says_it_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = make_pair(tmp_path / "pair")
    monkeypatch.setattr(compiling, "survey_machine", lambda import_modules: machine("h200 torch kernels"))
    request = BuildRequest(target="x", checkpoint=target, drafter=drafter, output=tmp_path / "e", precision="fp32")
    heard: list[str] = []
    manifest = compile_engine(request, lambda *call: heard.append("work"), heard.append)
    assert manifest.backend == "torch"
    assert heard[0].startswith("backend torch: PyTorch 2.13.0 and the NVIDIA H200") and "work" in heard
    assert dry_run(request).reason == heard[0]
    assert json.loads(json.dumps(dry_run(request).to_dict()))["reason"] == heard[0]
    named = dataclasses.replace(request, backend="onnxruntime", force=True)
    assert dry_run(named).reason is None
    compile_engine(named, notice=lambda line: pytest.fail(line))
