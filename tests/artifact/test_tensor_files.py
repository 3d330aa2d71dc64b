"""safetensors files: what is written is read, by the library too, and what cannot be right is refused in one line."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ddtree_trt.artifact.tensor_files import StoredTensor, read_tensors, safetensors_header
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


LIES: dict[str, dict[str, dict[str, Any]]] = {
    "another type": {"a": {"dtype": "F16"}},
    "an unknown type": {"a": {"dtype": "\x1b[2J"}},
    "another shape": {"a": {"shape": [5]}},
    "a negative extent": {"a": {"shape": [-4]}},
    "an extent that overflows": {"a": {"shape": [1 << 62, 16]}},
    "no length": {"a": {"data_offsets": [40, 24]}},
    "an overlap": {"a": {"data_offsets": [0, 16]}},
    "no integers": {"a": {"data_offsets": [24.0, 40.0]}},
    "one place": {"a": {"data_offsets": [24]}},
    "behind the end": {"scalar": {"shape": [2], "data_offsets": [40, 48]}},
    "before the end": {"scalar": {"dtype": "F16", "data_offsets": [40, 42]}},
    "no name": {"a\nb": {"dtype": "F32", "shape": [0], "data_offsets": [44, 44]}},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies(lie: str, file: Path) -> None:
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    for name, fields in LIES[lie].items():
        header[name] = {**header.get(name, {}), **fields}
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    with pytest.raises(ArtifactError) as caught:
        read(file)
    message = str(caught.value)
    assert message.startswith(f"{file}: ") and message.endswith("; make it again") and message.isprintable()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "too small"),
        (b"\xff" * 9, "too large"),
        (b"\x02" + bytes(7) + b"[]", "invalid"),
        (b"\x02" + bytes(7) + b"{]", "invalid"),
        (b"\x08" + bytes(7) + b'{"a": 1}', "invalid"),
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
