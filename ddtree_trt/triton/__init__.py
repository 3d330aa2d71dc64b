"""What stands behind the exported Triton model, `triton_repo/model/1/model.py`: its settings, reading requests, running
them on an engine, answering, and figures. The layouts' names are here.

Nothing here imports Triton: the server's modules exist only inside the server, so the model hands in what is needed.
"""

from __future__ import annotations

from typing import Literal, get_args

LayoutName = Literal["trtllm", "vllm"]
LAYOUT_NAMES: tuple[str, ...] = get_args(LayoutName)
ENGINE_FOLDER = "engine"  # inside the model's version directory
