"""The calls of the TensorRT engine beside the interfaces that TensorRT and cuda-python ship."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import FakeCuda
from fake_trt_engine import PROMPTS, RTX, Lowerings, generate, installed
from real_builder import rtx
from real_tensorrt import check_call, cuda_names, real_tensorrt, site

from ddtree_trt.device.libraries import make_log
from ddtree_trt.runtime.llm import LLM

# The shipping interfaces


def test_every_call_is_one_that_tensorrt_has(running: Any) -> None:
    llm, machine = running
    generate(llm, PROMPTS[:1], method="ddtree", tree_budget=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "tensorrt")
        real = real_tensorrt()
    seen = {(cls, method): arguments for cls, method, *arguments in machine.trt.calls}
    for (cls, method), arguments in seen.items():
        check_call(getattr(getattr(real, cls), method), arguments, {})
    check_names(real)
    assert hasattr(real.IPluginRegistry, "all_creators")


def test_every_call_is_one_that_tensorrt_for_rtx_has(small_engine: Path, tmp_path: Path) -> None:
    lowerings = Lowerings.packaged(tmp_path, small_engine, RTX, "fp16")
    real = rtx()
    with installed(lowerings.machine()) as machine:
        machine.store_profile()
        for _ in range(2):  # the second reads the kernels that the first has stored
            with LLM(machine.directory) as llm:
                generate(llm, PROMPTS[:1], method="ddtree", tree_budget=8)
    seen = {(cls, method): arguments for cls, method, *arguments in machine.trt.calls}
    assert {cls for cls, _ in seen} == {
        "Runtime",
        "ICudaEngine",
        "IExecutionContext",
        "IRuntimeConfig",
        "IRuntimeCache",
    }
    assert ("IRuntimeCache", "deserialize") in seen
    for (cls, method), arguments in seen.items():
        check_call(getattr(getattr(real, cls), method), arguments, {})
    check_names(real)
    for name in ("cuda_graph_strategy", "dynamic_shapes_kernel_specialization_strategy"):
        assert isinstance(getattr(real.IRuntimeConfig, name), property)
    assert {"EAGER", "NONE"} <= set(real.DynamicShapesKernelSpecializationStrategy.__members__)
    assert "DISABLED" in real.CudaGraphStrategy.__members__


def check_names(real: Any) -> None:
    """What the engine reads of an ICudaEngine, and the strategies and severities that it names."""
    for name in (
        *("get_tensor_name", "num_io_tensors", "device_memory_size_v2"),
        *("get_tensor_shape", "create_execution_context"),
    ):
        assert hasattr(real.ICudaEngine, name)
    assert "USER_MANAGED" in real.ExecutionContextAllocationStrategy.__members__
    assert {"INTERNAL_ERROR", "ERROR", "WARNING"} <= set(real.ILogger.Severity.__members__)


def test_tensorrts_log_is_one_that_tensorrt_takes() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "tensorrt", raising=False)
        real = real_tensorrt()
    log = make_log(real)
    assert isinstance(log, real.ILogger)
    for severity in real.ILogger.Severity.__members__.values():
        log.log(severity, f"{severity.name}\nof two lines")
    assert log.words() == "INTERNAL_ERROR of two lines; ERROR of two lines"
    log.clear()
    assert log.words() == ""


# What the engine passes to each function, tried on a machine whose GPUs are hidden: an argument of a kind that
# cuda-python does not take is a TypeError before CUDA is asked.
_ARGUMENTS = """
import numpy as np
from cuda.bindings import runtime as r
s, g, x, kinds = r.cudaStream_t(), r.cudaGraph_t(), r.cudaGraphExec_t(), r.cudaMemcpyKind
local = r.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
assert isinstance(int(s), int) and {"name", "major", "minor"} <= set(dir(r.cudaDeviceProp()))
assert r.cudaGetErrorString(r.cudaError_t.cudaErrorNoDevice)[1].decode()
calls = {
    "cudaGetDeviceCount": (), "cudaGetDevice": (), "cudaSetDevice": (0,), "cudaGetDeviceProperties": (0,),
    "cudaMemGetInfo": (), "cudaMalloc": (64,), "cudaFree": (256,), "cudaFreeHost": (256,),
    "cudaHostAlloc": (64, r.cudaHostAllocDefault), "cudaStreamCreateWithFlags": (r.cudaStreamNonBlocking,),
    "cudaMemsetAsync": (256, 0, 16, s), "cudaStreamSynchronize": (s,), "cudaStreamDestroy": (s,),
    "cudaStreamBeginCapture": (s, local), "cudaStreamEndCapture": (s,), "cudaGraphInstantiate": (g, 0),
    "cudaGraphDestroy": (g,), "cudaGraphLaunch": (x, s), "cudaGraphExecDestroy": (x,),
    "cudaMemcpyAsync": (256, np.zeros(4).ctypes.data, 16, kinds.cudaMemcpyHostToDevice, s),
    "cudaRuntimeGetVersion": (), "cudaDriverGetVersion": (),
}
for name, arguments in calls.items():
    status, *results = getattr(r, name)(*arguments)
    assert status.name.startswith("cuda"), status
print(*calls, "cudaGetErrorString")
"""


def test_every_name_is_one_that_cuda_python_has() -> None:
    used = {name for name in vars(FakeCuda) if name.startswith("cuda")}
    assert used <= cuda_names()
    members = [f"{e.__name__}.{m}" for e in (FakeCuda.cudaError_t, FakeCuda.cudaMemcpyKind) for m in e.__members__]
    code = _ARGUMENTS + "\n".join(f"r.{m}" for m in members)
    path = os.pathsep.join([str(site()), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    functions = {
        name for name in used if callable(getattr(FakeCuda, name)) and not name.endswith(("_t", "Kind", "Mode"))
    }
    assert functions == set(run.stdout.split())
