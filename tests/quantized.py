"""Checkpoints as NVIDIA ModelOpt writes them in FP8."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

INPUT_RANGE = 8.0  # largest input of a projection that `quantize` leaves as it is


def quantize(
    path: Path,
    *,
    weights: str = "_proj.weight",
    shared: bool = True,
    replace: Mapping[str, np.ndarray | None] | None = None,
) -> Path:
    """Quantise the checkpoint in `path` to FP8 as ModelOpt does: every weight whose name ends with `weights`.

    `shared`: projections that are multiplied with the same rows get one scale. `replace` overrides tensors by the end
    of their names; None leaves one out.
    """
    file = path / "model.safetensors"
    tensors = {name: tensor.float() for name, tensor in load_file(file).items()}

    def group(name: str) -> str:
        if not shared:
            return name
        return name.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_proj", "gate_proj")

    largest: dict[str, float] = {}
    for name, tensor in tensors.items():
        largest[group(name)] = max(largest.get(group(name), 0.0), float(tensor.abs().max()))
    for name in [n for n in tensors if n.endswith(weights)]:
        scale = torch.tensor(largest[group(name)] / 448)
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[name.removesuffix("weight") + "weight_scale"] = scale
        tensors[name.removesuffix("weight") + "input_scale"] = torch.tensor(INPUT_RANGE / 448)
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(1.0)
    for end, array in (replace or {}).items():
        for name in [n for n in tensors if n.endswith(end)]:
            del tensors[name]
            if array is not None:
                tensors[name] = torch.tensor(array)
    save_file(tensors, file)
    config = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (path / "hf_quant_config.json").write_text(json.dumps(config))
    return path
