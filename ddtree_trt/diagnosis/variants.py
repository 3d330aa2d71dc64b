"""Engines that differ from the one on disk in one thing that may be wired wrongly: tapped layers, or mask token."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.precisions import PLAN_BACKENDS
from ddtree_trt.drafters.dflash.dims import DFlashDims
from ddtree_trt.runtime.engines.base import Engine
from ddtree_trt.runtime.engines.load import load_backend
from ddtree_trt.runtime.text.codec import TextCodec

SHIFTS = (-1, 1)  # layers: conventions count a layer's input, its output, or the embedding as number 0
MOST_MASKS = 8


@dataclass(frozen=True)
class Variant:
    """A drafter that is wired differently."""

    cause: str  # what was wrong if this one is better
    setting: str  # what it has in place of the engine's
    manifest: Manifest


def variants(manifest: Manifest, codec: TextCodec) -> list[Variant]:
    """What can be tried with the engine as it is; nothing where its drafter has neither taps nor a mask."""
    dims = manifest.drafter_dims
    if not isinstance(dims, DFlashDims):
        return []
    found = []
    for shift in SHIFTS if manifest.backend not in PLAN_BACKENDS else ():
        taps = tuple(layer + shift for layer in dims.tap_layers)
        if taps and min(taps) >= 0 and max(taps) < manifest.target_dims.num_layers:
            wired = replace(dims, tap_layers=taps)
            found.append(("wrong taps", f"tapped layers {', '.join(map(str, taps))}", wired))
    for token in _masks(manifest, codec):
        found.append(("wrong mask token", f"mask token {token}", replace(dims, mask_token_id=token)))
    return [Variant(cause, setting, replace(manifest, drafter_dims=wired)) for cause, setting, wired in found]


def _masks(manifest: Manifest, codec: TextCodec) -> list[int]:
    """Tokens that drafters are trained with as masks: what the tokenizer calls a mask, the first id that it does not
    use, its padding and other special tokens, and the last row of the vocabulary."""
    tokenizer, vocab = codec.tokenizer, manifest.target_dims.vocab_size
    added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
    named = [number for text, number in added.items() if "mask" in text.lower()]
    others = [tokenizer.mask_token_id, len(tokenizer), tokenizer.pad_token_id, vocab - 1, *tokenizer.all_special_ids]
    tokens = [t for t in dict.fromkeys([*named, *others]) if t is not None and 0 <= t < vocab]
    return [t for t in tokens if t != manifest.drafting.mask_token_id][:MOST_MASKS]


@contextmanager
def open_variant(
    directory: Path, manifest: Manifest, variant: Variant, threads: int, exact: bool | None
) -> Iterator[Engine]:
    """The engine of `directory`, whose digests were checked, wired as the variant is. Raises OSError where a tapped
    graph cannot be written beside the directory, because its file system has no links or is not writable."""
    before, after = manifest.drafting.tap_layers, variant.manifest.drafting.tap_layers
    if manifest.backend != "onnxruntime" or before == after:
        with closing(load_backend(directory, variant.manifest, threads, exact)) as engine:
            yield engine
        return
    from ddtree_trt.build.graph.tapping import tap_other_layers

    # ONNX Runtime reads weights from the folder of the graph only, and from no symbolic link.
    with TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as folder:
        wired = Path(folder)
        for name in manifest.files:
            if name != artifact.TARGET_GRAPH:
                os.link(directory / name, wired / name)
        tap_other_layers(
            directory / artifact.TARGET_GRAPH, wired / artifact.TARGET_GRAPH, dict(zip(before, after, strict=True))
        )
        with closing(load_backend(wired, variant.manifest, threads, exact)) as engine:
            yield engine
