"""safetensors files: what is written is read, by the library too, and what cannot be right is refused in one line."""

import random
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from fuzzing import mutate_weights
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto
from safetensors.numpy import load_file
from safetensors.torch import save_file

from ddtree_trt.artifact.backends import BACKENDS, Backend, load
from ddtree_trt.artifact.precisions import PRECISIONS
from ddtree_trt.artifact.tensor_files import STORED, StoredTensor, encode, read_tensors, safetensors_header
from ddtree_trt.build.graph.ops import TYPES
from ddtree_trt.errors import ArtifactError
from ddtree_trt.reading import Source

SHAPES = {"b": (2, 3), "a": (4,), "scalar": (), "empty": (0, 5)}
VALUES = np.arange(11, dtype="<f4")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "x.safetensors"
    file.write_bytes(safetensors_header({name: ("F32", shape) for name, shape in SHAPES.items()}) + VALUES.tobytes())
    return file


def read(file: Path) -> dict[str, StoredTensor]:
    return read_tensors(file, Source(str(file), ArtifactError, "make it again"))


def test_what_is_written_is_read(file: Path) -> None:
    tensors = read(file)
    assert {name: tensor.shape for name, tensor in tensors.items()} == SHAPES
    assert tensors["b"].offset % 64 == 0
    np.testing.assert_array_equal(tensors["b"].mapped(), VALUES[:6])
    np.testing.assert_array_equal(tensors["a"].mapped(), VALUES[6:10])
    np.testing.assert_array_equal(tensors["scalar"].mapped(), VALUES[10:])
    assert tensors["empty"].size == 0
    library = load_file(file)
    assert {name: array.shape for name, array in library.items()} == SHAPES
    np.testing.assert_array_equal(library["a"], VALUES[6:10])


@given(st.integers(0, 1 << 32))
def test_a_damaged_file_is_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Or what it holds lies within it, apart from each other."""
    file = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    header = safetensors_header({name: ("F32", shape) for name, shape in SHAPES.items()})
    file.write_bytes(mutate_weights(header + VALUES.tobytes(), random.Random(seed)))
    try:
        found = read(file).values()
    except ArtifactError as refused:
        message = str(refused)
        assert message.startswith(f"{file}: ") and message.endswith("; make it again") and message.isprintable()
        return
    spans = sorted((tensor.offset, tensor.offset + tensor.mapped().nbytes) for tensor in found)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert not spans or spans[-1][1] <= file.stat().st_size


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "too small"),
        (struct.pack("<Q", 600_000) + b'{"a":' * 100_000 + b"}" * 100_000, "recursion"),
        (b"version https://git-lfs", "is a Git LFS pointer, not the weights; run: git lfs pull"),
        (None, "it cannot be read (No such file or directory); make it again"),
    ],
)
def test_what_is_no_such_file(data: bytes | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(ArtifactError) as caught:
        read(file)
    assert words in str(caught.value) and str(file) in str(caught.value) and "\n" not in str(caught.value)


# The table of precisions: complete, and what ONNX, PyTorch, NumPy and safetensors say of the same types


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_a_backend_names_what_there_is(backend: Backend) -> None:
    assert {*backend.builds} <= {*backend.precisions} <= {*PRECISIONS}
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
