"""Headers of safetensors files: what is written is read, and what cannot be right is refused by the reader's error."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ddtree_trt.artifact import safetensor_header
from ddtree_trt.artifact.safetensor_header import read_header, safetensors_header
from ddtree_trt.errors import ArtifactError, CheckpointError, DDTreeError
from ddtree_trt.reading import Source

SHAPES = {"b": (2, 3), "a": (4,), "scalar": (), "empty": (0, 5)}


def written(file: Path) -> np.ndarray:
    """A file of SHAPES; returns its 11 values in order."""
    values = np.arange(11, dtype="<f4")
    file.write_bytes(safetensors_header({name: ("F32", shape) for name, shape in SHAPES.items()}) + values.tobytes())
    return values


def source(file: Path, error: type[DDTreeError] = ArtifactError) -> Source:
    return Source(str(file), error, "make it again")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    values = written(file)
    tensors = read_header(file, source(file)).locate()
    assert {name: tensor.shape for name, tensor in tensors.items()} == SHAPES
    assert tensors["b"].offset % 64 == 0
    np.testing.assert_array_equal(tensors["b"].mapped(), values[:6])
    np.testing.assert_array_equal(tensors["a"].mapped(), values[6:10])
    np.testing.assert_array_equal(tensors["scalar"].mapped(), values[10:])
    assert tensors["empty"].size == 0
    library = load_file(file)
    assert {name: array.shape for name, array in library.items()} == SHAPES
    np.testing.assert_array_equal(library["a"], values[6:10])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a": {"dtype": "F16"}}, "a [4] F16 has 16 bytes"),
        ({"a": {"shape": [5]}}, "a [5] F32 has 16 bytes"),
        ({"a": {"data_offsets": [40, 24]}}, "a [4] F32 has -16 bytes"),
        (
            {"a": {"dtype": "U64", "data_offsets": [24, 38]}},
            "scalar begins at byte 40 of the data, where 38 was to come",
        ),
        ({"scalar": {"dtype": "U64", "data_offsets": [40, 48]}}, "scalar ends 4 bytes behind the end of the file"),
        ({"scalar": {"dtype": "U64", "data_offsets": [40, 42]}}, "2 bytes behind its last tensor belong to none"),
    ],
)
def test_tensors_must_fill_the_file(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    """An unknown type may have any length, and still has its place."""
    file = tmp_path / "x.safetensors"
    written(file)
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    del header["empty"]
    for name, fields in change.items():
        header[name] |= fields
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    opened = read_header(file, source(file))
    with pytest.raises(ArtifactError) as caught:
        opened.locate()
    assert str(caught.value) == f"{file}: {words}; make it again"


@pytest.mark.parametrize("kind", [ArtifactError, CheckpointError])
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "its header of 0 bytes does not fit into it"),
        (b"\xff" * 9, "does not fit into it"),
        (b"\x02" + bytes(7) + b"[]", "its header is not a JSON object but []"),
        (b"\x02" + bytes(7) + b"{]", "it is not valid JSON"),
        (b"\x08" + bytes(7) + b'{"a": 1}', "a must be an object, found 1"),
        (b"version https://git-lfs", "is a Git LFS pointer, not the weights; run: git lfs pull"),
    ],
)
def test_a_header_that_cannot_be_right(kind: type[DDTreeError], data: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(data)
    with pytest.raises(kind) as caught:
        read_header(file, source(file, kind))
    assert words in str(caught.value) and str(file) in str(caught.value)


def test_a_header_is_refused_by_its_size_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.safetensors"
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", 60_000_000))
        stream.truncate(60_000_100)
    monkeypatch.setattr(safetensor_header, "parse_json", lambda *_: pytest.fail("it was parsed"))
    with pytest.raises(ArtifactError, match="its header has 60000000 bytes, at most 16777216 are read"):
        read_header(file, source(file))


def test_a_file_that_is_absent_is_the_callers_to_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_header(tmp_path / "x", source(tmp_path / "x"))
