"""Checkpoints as NVIDIA ModelOpt writes them, and what they stand for, said in PyTorch.

The layout is stated in `build/checkpoint/quantization.py`. Nothing of the package is used here, so that the two can be
compared.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

INPUT_RANGE = 8.0  # largest input of a projection that `quantize` leaves as it is
GROUP = 16  # values of a row that share a scale in INT4
ALGORITHMS = ("FP8", "W8A8_SQ_PER_CHANNEL", "W8A16", "W4A16_AWQ")
_LARGEST = {"FP8": 448, "W8A8_SQ_PER_CHANNEL": 127, "W8A16": 127, "W4A16_AWQ": 7}
# What ModelOpt leaves of AWQ's scales: those before which there is no norm to fold them into.
LEFT = ("o_proj", "down_proj")
EVERY = ("_proj",)
# Quantisations that are taken: by name, the algorithm and the options of `quantize`.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "FP8": ("FP8", {}),
    "FP8, a scale each": ("FP8", {"shared": False}),
    "INT8": ("W8A8_SQ_PER_CHANNEL", {"smooth": EVERY}),
    "INT8, a scale each": ("W8A8_SQ_PER_CHANNEL", {"smooth": EVERY, "shared": False}),
    "INT8 weights": ("W8A16", {}),
    "INT4 AWQ": ("W4A16_AWQ", {"smooth": LEFT}),
    "INT4 AWQ, a scale each": ("W4A16_AWQ", {"smooth": EVERY, "shared": False}),
    "INT4": ("W4A16_AWQ", {"config": {"group_size": None}}),
}


def quantize(
    path: Path,
    algorithm: str = "FP8",
    *,
    weights: str = "_proj.weight",
    shared: bool = True,
    smooth: tuple[str, ...] = (),
    group_size: int = GROUP,
    replace: Mapping[str, np.ndarray | None] | None = None,
    config: Mapping[str, object] | None = None,
) -> Path:
    """Quantise the checkpoint in `path` as ModelOpt does: every weight whose name ends with `weights`.

    `shared`: projections that are multiplied with the same rows get one scale of their inputs, and in FP8 of their
    weights. `smooth`: projections with a pre_quant_scale, by the end of their names. `replace` overrides tensors by
    the end of their names; None leaves one out. `config` overrides entries of the configuration; None removes one.
    """
    file = path / "model.safetensors"
    tensors = {name: tensor.float() for name, tensor in load_file(file).items()}

    def group(name: str) -> str:
        if not shared:
            return name
        return name.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_proj", "gate_proj")

    quantized = [n for n in tensors if n.endswith(weights)]
    groups = sorted({group(n) for n in quantized})
    largest = {g: max(float(tensors[n].abs().max()) for n in quantized if group(n) == g) for g in groups}
    limit = _LARGEST[algorithm]
    for name in quantized:
        weight, base, number = tensors[name], name.removesuffix("weight"), groups.index(group(name))
        if base.rstrip(".").endswith(smooth):
            factors = torch.rand(weight.shape[1], generator=torch.Generator().manual_seed(number)) + 0.5
            factors = factors.to(torch.bfloat16)
            tensors[f"{base}pre_quant_scale"], weight = factors, weight / factors.float()
        tensors[name], tensors[f"{base}weight_scale"] = _stored(weight, algorithm, largest[group(name)], group_size)
        if algorithm in ("FP8", "W8A8_SQ_PER_CHANNEL"):
            step = INPUT_RANGE / limit if shared else INPUT_RANGE / limit * (1 + number / 100)
            tensors[f"{base}input_scale"] = torch.tensor(step)
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(1.0)
    for end, array in (replace or {}).items():
        for name in [n for n in tensors if n.endswith(end)]:
            del tensors[name]
            if array is not None:
                tensors[name] = torch.tensor(array)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    said: dict[str, object] = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    if algorithm == "W4A16_AWQ":
        said |= {"group_size": group_size, "has_zero_point": False, "pre_quant_scale": True}
    said = {name: value for name, value in {**said, **(config or {})}.items() if value is not None}
    whole = {"producer": {"name": "modelopt"}, "quantization": said}
    (path / "hf_quant_config.json").write_text(json.dumps(whole))
    return path


def _stored(weight: Tensor, algorithm: str, largest: float, group_size: int) -> tuple[Tensor, Tensor]:
    """A weight [out, in] as the algorithm stores it, and its scale: one number where FP8 shares `largest`, else [out]
    or [out, groups]."""
    limit = _LARGEST[algorithm]
    if algorithm == "FP8":
        scale = torch.tensor(largest / limit)
        return (weight / scale).to(torch.float8_e4m3fn), scale
    if algorithm == "W4A16_AWQ":
        scale = weight.abs().reshape(len(weight), -1, group_size).amax(-1) / limit
        values = (weight / scale.repeat_interleave(group_size, 1)).round().clamp(-8, 7).to(torch.int8)
        return ((values[0::2] & 15) | ((values[1::2] & 15) << 4)).view(torch.uint8), scale
    scale = weight.abs().amax(1) / limit
    return (weight / scale[:, None]).round().clamp(-128, 127).to(torch.int8), scale


@dataclass(frozen=True)
class Projection:
    """A quantised projection: its product with rows x is `rounded(x · smooth)` times the transpose of `weight`."""

    weight: Tensor  # [out, in]
    smooth: Tensor  # [in]
    step: float | None  # of the rounding of rows
    algorithm: str

    def rows(self, x: Tensor, *, rounded: bool = True) -> Tensor:
        x = x * self.smooth
        if self.step is None or not rounded:
            return x
        if self.algorithm == "FP8":
            return (x / self.step).clamp(-448, 448).to(torch.float8_e4m3fn).float() * self.step
        return (x / self.step).round().clamp(-128, 127) * self.step


def projections(path: Path) -> dict[str, Projection]:
    """Every quantised projection of a checkpoint, by the name of its weight."""
    tensors = load_file(path / "model.safetensors")
    algorithm = json.loads((path / "hf_quant_config.json").read_text())["quantization"]["quant_algo"]
    found = {}
    for name in [n for n in tensors if f"{n}_scale" in tensors]:
        stored, scale, base = tensors[name], tensors[f"{name}_scale"], name.removesuffix("weight")
        if algorithm == "W4A16_AWQ":
            low, high = stored.int() & 15, stored.int() >> 4
            unsigned = torch.stack([low, high], 1).reshape(-1, stored.shape[1])
            values = torch.where(unsigned < 8, unsigned, unsigned - 16)
            weight = values * scale.repeat_interleave(values.shape[1] // scale.shape[1], 1)
        else:
            weight = stored.float() * (scale[:, None] if scale.ndim else scale)
        smooth = tensors.get(f"{base}pre_quant_scale", torch.ones(weight.shape[1])).float()
        step = tensors.get(f"{base}input_scale")
        found[name] = Projection(weight, smooth, None if step is None else float(step), algorithm)
    return found
