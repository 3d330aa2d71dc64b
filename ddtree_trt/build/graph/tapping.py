"""Graphs of targets with other layers tapped."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import onnx

from ddtree_trt.artifact import tensors as names

_LAYER = re.compile(r"(?<=\blayers\.)\d+(?=\.)")


def tap_other_layers(graph: Path, changed: Path, layers: Mapping[int, int]) -> None:
    """Write an ONNX Runtime target to `changed`, with other layers tapped: `layers` has the new number of each. Its
    weights stay where they are, in files of the same names beside it."""
    model = onnx.load(str(graph), load_external_data=False)
    node = next(node for node in model.graph.node if names.TAPS in node.output)
    tapped = [_LAYER.sub(lambda match: str(layers[int(match[0])]), name) for name in node.input]
    del node.input[:]
    node.input.extend(tapped)
    onnx.save(model, str(changed))
