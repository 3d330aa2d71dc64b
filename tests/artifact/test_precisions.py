"""The table of precisions: complete, and what ONNX, PyTorch, NumPy and safetensors say of the same types."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from onnx import TensorProto
from safetensors.torch import save_file

from ddtree_trt.artifact.backends import BACKENDS, BackendName, load
from ddtree_trt.artifact.precisions import PRECISIONS, PrecisionName
from ddtree_trt.artifact.tensor_files import STORED, encode, read_tensors
from ddtree_trt.build.backends.base import BuilderOptions
from ddtree_trt.build.choice import backend_build, resolve_precision
from ddtree_trt.build.graph.ops import TYPES
from ddtree_trt.errors import ArtifactError, UsageError
from ddtree_trt.reading import Source


def test_every_name_has_its_row() -> None:
    assert tuple(PRECISIONS) == get_args(PrecisionName)
    assert tuple(BACKENDS) == get_args(BackendName)
    assert set().union(*(backend.precisions for backend in BACKENDS.values())) == set(PRECISIONS)
    for backend in BACKENDS.values():
        assert {*backend.builds} <= {*backend.precisions}
        assert callable(load(backend.builder)) and callable(load(backend.engine))


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_row_is_one_type_everywhere(name: str, tmp_path: Path) -> None:
    precision = PRECISIONS[name]
    dtype = getattr(torch, precision.dtype)
    assert dtype.itemsize == precision.value_bytes == STORED[precision.safetensors].itemsize
    assert TYPES[precision.dtype] == getattr(TensorProto, precision.dtype.upper().removesuffix("32"))
    values = torch.tensor([0.0, -0.0, 1.0, -1.0078125, 6e-5, 3.0e4, -65280.0]).to(dtype)
    file = tmp_path / "x.safetensors"
    save_file({"x": values}, file)
    tensor = read_tensors(file, Source("x", ArtifactError, "again"))["x"]
    assert (tensor.dtype, tensor.shape) == (precision.safetensors, (7,))
    np.testing.assert_array_equal(tensor.mapped().astype(np.float32), values.float().numpy())
    assert encode(values.float().numpy(), precision.dtype, "x").tobytes() == tensor.mapped().tobytes()


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_a_build_offers_what_its_engines_may_have(backend: BackendName) -> None:
    build = backend_build(backend, BuilderOptions())
    assert build.backend is BACKENDS[backend]
    assert sorted(build.precisions) == sorted(build.backend.builds)
    for name in get_args(PrecisionName):
        if name in build.precisions:
            assert resolve_precision(build, name) == name
        else:
            with pytest.raises(UsageError, match=f"precision '{name}' is not available: the {backend} backend"):
                resolve_precision(build, name)
    assert resolve_precision(build, "auto") == build.precisions[0]
