"""Triton's Python modules as far as the exported model uses them, and a way to run that model without a server."""

from __future__ import annotations

import importlib.util
import json
import queue
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import json_format, text_format
from pacing import WAIT_S
from tritonclient.grpc.model_config_pb2 import ModelConfig

FINAL = 1


def read_config(model: Path) -> ModelConfig:
    """config.pbtxt of a model directory; raises what is wrong with it."""
    return text_format.Parse((model / "config.pbtxt").read_text(encoding="utf-8"), ModelConfig())


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array

    def to_dlpack(self) -> np.ndarray:
        return self._array

    @classmethod
    def from_dlpack(cls, name: str, capsule: np.ndarray) -> Tensor:
        return cls(name, capsule)


class TritonError(Exception):
    INVALID_ARG, UNAVAILABLE, CANCELLED, INTERNAL = "INVALID_ARG", "UNAVAILABLE", "CANCELLED", "INTERNAL"

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.message, self.code = message, code


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor], error: TritonError | None = None) -> None:
        self.arrays = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = error


class Request:
    """A request and, once it has been executed, what was sent back."""

    def __init__(
        self,
        declared: frozenset[str],
        inputs: Mapping[str, Any],
        *,
        parameters: Mapping[str, Any] | None = None,
        timeout_us: int = 0,
        outputs: frozenset[str] | None = None,
    ) -> None:
        self._inputs = [Tensor(name, array) for name, array in inputs.items()]
        self._parameters, self._timeout, self._outputs = parameters or {}, timeout_us, outputs or declared
        self._sent: queue.Queue[tuple[InferenceResponse, int]] = queue.Queue()
        self.gone = self.ended = False

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def parameters(self) -> str:
        return json.dumps(self._parameters) if self._parameters else ""

    def timeout(self) -> int:
        return self._timeout

    def requested_output_names(self) -> set[str]:
        return set(self._outputs)

    def get_response_sender(self) -> Request:
        return self

    def is_cancelled(self) -> bool:
        assert not self.ended, "a real server reads freed memory here"
        return self.gone

    def send(self, response: InferenceResponse, flags: int) -> None:
        assert not self.ended, "a response after the last one"
        self.ended = flags == FINAL
        self._sent.put((response, flags))

    def responses(self) -> Iterator[InferenceResponse]:
        """The responses as they come. Raises the TritonError that ended the request."""
        flags = 0
        while flags != FINAL:
            response, flags = self._sent.get(timeout=WAIT_S)
            if response.error is not None:
                raise response.error
            yield response


class _Metric:
    def __init__(self, values: dict[str, float], key: str) -> None:
        self._values, self._key = values, key
        values[key] = 0.0

    def increment(self, amount: float) -> None:
        self._values[self._key] += amount

    def set(self, value: float) -> None:
        self._values[self._key] = value

    observe = increment


def backend_utils(values: dict[str, float]) -> Any:
    """The server's module, whose metrics are kept in `values`, by their names or outcomes."""

    class MetricFamily:
        COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

        def __init__(self, name: str, description: str, kind: str) -> None:
            self._name = name

        def Metric(self, labels: Mapping[str, str], buckets: Sequence[float] = ()) -> _Metric:  # the server's name
            assert list(buckets) == sorted({*buckets})
            return _Metric(values, labels.get("outcome", self._name))

    return types.SimpleNamespace(
        Tensor=Tensor, TritonError=TritonError, InferenceResponse=InferenceResponse, MetricFamily=MetricFamily,
        TritonModelException=RuntimeError, TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
    )  # fmt: skip


class Instance:
    """A loaded instance of an exported model."""

    def __init__(self, directory: Path) -> None:
        self.metrics: dict[str, float] = {}
        config = read_config(directory)
        self.declared = frozenset(output.name for output in config.output)
        sys.modules["triton_python_backend_utils"] = backend_utils(self.metrics)
        spec = importlib.util.spec_from_file_location("exported_model", directory / "1" / "model.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.model = module.TritonPythonModel()
        arguments = {
            "model_config": json.dumps(json_format.MessageToDict(config, preserving_proto_field_name=True)),
            "model_name": config.name,
            "model_version": "1",
            "model_repository": str(directory),
            "model_instance_name": f"{config.name}_0_0",
            "model_instance_kind": "CPU",
            "model_instance_device_id": "0",
        }
        self.model.initialize(arguments)

    def start(self, inputs: Mapping[str, Any], **options: Any) -> Request:
        request = Request(self.declared, inputs, **options)
        self.model.execute([request])
        return request


@contextmanager
def loaded(directory: Path) -> Iterator[Instance]:
    """An instance, finalized at the end."""
    instance = Instance(directory)
    try:
        yield instance
    finally:
        instance.model.finalize()
        sys.modules.pop("triton_python_backend_utils", None)
