"""The fakes of CUDA and TensorRT beside what ships. Calls of TensorRT are checked where `FakeTrt` lists them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from fake_cuda import FakeCuda
from fake_trt_runtime import FakeTrt
from real_builder import rtx
from real_tensorrt import WrongCall, cuda_names, site

from ddtree_trt.device.libraries import make_log


def test_the_fake_of_tensorrt_has_what_ships() -> None:
    """What is read and set; every call of every test is checked where it is made."""
    real = rtx()
    with pytest.raises(WrongCall):
        FakeTrt(FakeCuda(), {}).record("IExecutionContext", "set_tensor_address", 256, "past_key.0")
    read = ("num_io_tensors", "device_memory_size_v2", "get_tensor_shape")
    assert all(hasattr(real.ICudaEngine, name) for name in (*read, "get_tensor_name"))
    assert hasattr(real.IPluginRegistry, "all_creators")
    for name in ("cuda_graph_strategy", "dynamic_shapes_kernel_specialization_strategy"):
        assert isinstance(getattr(real.IRuntimeConfig, name), property)
    for enum, members in (
        (real.ExecutionContextAllocationStrategy, {"USER_MANAGED"}),
        (real.DynamicShapesKernelSpecializationStrategy, {"EAGER", "NONE"}),
        (real.CudaGraphStrategy, {"DISABLED"}),
    ):
        assert members <= set(enum.__members__)


def test_tensorrts_log_is_one_that_tensorrt_takes() -> None:
    real = rtx()
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
