"""ddtree-trt for Triton's Python backend: parse a request, hand it to the runtime, forward what comes back.

The runtime batches in flight, so `execute` returns at once and responses leave from the runtime's own thread.
"""

import json
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

try:
    from ddtree_trt.errors import DDTreeError
    from ddtree_trt.triton import ENGINE_FOLDER
    from ddtree_trt.triton.requests import Arrays, Call, parse
    from ddtree_trt.triton.service import Code, Metrics, Service, Settings, select_device
except ImportError as error:
    raise ImportError(
        f"the server's Python (packages of {sys.prefix}) cannot import ddtree-trt: {error}; install it there, start "
        "the server with another python3 first on PATH, or set EXECUTION_ENV_PATH as the model's README.md shows"
    ) from error


class Reply:
    """The way back to one client.

    The lock is what keeps the server alive: to ask whether a request is cancelled while its last response leaves, or
    after, reads freed memory there.
    """

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        self._lock = threading.Lock()
        self._ended = False

    def send(self, arrays: Arrays, *, final: bool) -> None:
        tensors = [pb_utils.Tensor(name, array) for name, array in arrays.items()]
        self._send(pb_utils.InferenceResponse(output_tensors=tensors), final)

    def fail(self, code: Code, message: str) -> None:
        error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, code))
        self._send(pb_utils.InferenceResponse(output_tensors=[], error=error), True)

    def cancelled(self) -> bool:
        with self._lock:
            return not self._ended and self._sender.is_cancelled()

    def _send(self, response: Any, final: bool) -> None:
        with self._lock:
            self._ended = final
            self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        try:
            self._settings = Settings.read(json.loads(args["model_config"]))
            _check_numpy()
            select_device(args["model_instance_kind"], args["model_instance_device_id"])
            labels = {
                "model": args["model_name"],
                "version": args["model_version"],
                "instance": args["model_instance_name"],
            }
            engine = Path(args["model_repository"]) / args["model_version"] / ENGINE_FOLDER
            self._service = Service(engine, self._settings, Metrics(pb_utils.MetricFamily, labels))
        except DDTreeError as error:
            raise pb_utils.TritonModelException(str(error)) from error

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._service.receive(partial(self._parse, request), Reply(request))

    def _parse(self, request: Any) -> Call:
        return parse(
            {tensor.name(): tensor.as_numpy() for tensor in request.inputs()},
            self._settings.layout,
            parameters=json.loads(request.parameters() or "{}"),
            timeout_us=request.timeout(),
            requested=frozenset(request.requested_output_names()),
            declared=self._settings.outputs,
        )

    def finalize(self) -> None:
        self._service.close()


def _check_numpy() -> None:
    """A backend built for NumPy 1 misreads the arrays of NumPy 2: texts end the process, strides come out wrong."""
    probe = np.array([[1.5, 2.5]], np.float32)
    tensor = pb_utils.Tensor.from_dlpack("probe", pb_utils.Tensor("probe", probe).to_dlpack())
    if not np.array_equal(tensor.as_numpy(), probe):
        raise pb_utils.TritonModelException(
            f"this server's Python backend was built for NumPy 1, the server's Python (packages of {sys.prefix}) has "
            f"NumPy {np.__version__}; install 'numpy<2' there"
        )
