"""A manifest with every field, and a directory of small files that is an engine to whoever only verifies it."""

import dataclasses
from pathlib import Path
from typing import Any

from ddtree_trt.artifact import manifest as artifact
from ddtree_trt.artifact.files import MANIFEST, TOKENIZER_FILES
from ddtree_trt.artifact.manifest import CheckpointIdentity, FileEntry, Limits, Manifest
from ddtree_trt.build.directory import describe_files
from ddtree_trt.drafters.dflash.dims import DFlashDims
from ddtree_trt.models.decoder import TransformerDims

DIMS = TransformerDims(96, 32, 2, 4, 2, 16, 64, 1e-6, 1e6, 2048)
FILES = ("target.onnx", "drafter.onnx", "weights.bin", *TOKENIZER_FILES)


def make_manifest(**changes: Any) -> Manifest:
    manifest = Manifest(
        schema_version=artifact.SCHEMA_VERSION,
        product_version="1.2.3",
        backend="onnxruntime",
        precision="fp32",
        name="pair",
        target=CheckpointIdentity("org/target", "abc", "0" * 64),
        drafter=CheckpointIdentity("org/drafter", "def", "1" * 64),
        drafter_kind="dflash",
        target_dims=DIMS,
        drafter_dims=DFlashDims(**vars(DIMS), block_size=8, mask_token_id=4, tap_layers=(0, 1), num_target_layers=2),
        limits=Limits(),
        stop_token_ids=(2, 3),
        chat_template_args={"enable_thinking": False},
        toolchain={"onnx": "1.23"},
        tensors={"target": {"inputs": ["token_ids"], "outputs": ["logits"]}},
        files={"weights.bin": FileEntry(3, "2" * 64)},
        build_seconds=1.5,
        golden_tau={"ddtree": (4.0, 9.5)},
    )
    return dataclasses.replace(manifest, **changes)


def make_engine(path: Path, **changes: Any) -> Manifest:
    """A directory with a manifest that vouches for it; the files hold their own names."""
    path.mkdir(parents=True)
    for name in FILES:
        (path / name).write_text(name * 100)
    manifest = make_manifest(files=describe_files(path), **changes)
    (path / MANIFEST).write_text(manifest.to_json())
    return manifest


def vouch(engine: Path, **changes: Any) -> None:
    """Make the manifest of an engine directory, with other fields, one of the files that it has now."""
    manifest = dataclasses.replace(artifact.load_manifest(engine), files=describe_files(engine), **changes)
    (engine / MANIFEST).write_text(manifest.to_json())
