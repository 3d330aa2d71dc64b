"""The layouts of the exported Triton model, by name."""

from __future__ import annotations

from typing import Literal, get_args

LayoutName = Literal["trtllm", "vllm"]
LAYOUT_NAMES: tuple[str, ...] = get_args(LayoutName)
ENGINE_FOLDER = "engine"  # inside the model's version directory
