"""A pair made by hand whose drafter guesses the commonest token of what its attention sees.

The target repeats its last token for ever: its layers add nothing, so its hidden states are the embedding's rows, and
those are a unit matrix's. The drafter's keys are zero, so that it attends to all visible rows alike, and its values are
the tapped states: its output is the mean of the visible tokens and of the mask token's row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import DRAFTER_EXTRA, TARGET_DIMS, make_drafter, make_target, write_weights

from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.drafters.dflash.dims import DFlashDims
from ddtree_trt.drafters.registry import checkpoint_shapes
from ddtree_trt.drafters.tapped import FC
from ddtree_trt.models.decoder import EMBEDDING, TransformerDims

WIDTH = 64  # of the vocabulary and of the states
MASK = WIDTH - 1  # its row of the embedding is zero
SHAPE: dict[str, Any] = {"vocab_size": WIDTH, "hidden_size": WIDTH, "num_kv_heads": 4, "max_positions": 1024}
DRAFTER: dict[str, Any] = {"num_layers": 1, "tap_layers": (0,), "block_size": 8, "mask_token_id": MASK}


def build_majority(path: Path, *, gain: float = 0.0, config: dict[str, Any] | None = None, **build: Any) -> Path:
    """The engine of the pair under `path`.

    `gain` is a factor in the target's first MLP, whose inner values become about 64 times its square and are then
    scaled down to nothing. `config` has entries of the drafter's config.json, `build` fields of the BuildRequest.
    """
    target_dims = TransformerDims(**{**vars(TARGET_DIMS), **SHAPE})
    target = make_target(path / "target", **SHAPE)
    weights = _silent(target_dims)
    weights[EMBEDDING] = 4 * np.eye(WIDTH, dtype=np.float32)
    weights[EMBEDDING][MASK] = 0
    for name in ("gate_proj", "up_proj"):
        weights[f"model.layers.0.mlp.{name}.weight"][0] = gain
    weights["model.layers.0.mlp.down_proj.weight"][:, 0] = 1e-9
    write_weights(target, weights, dtype="fp32", shards=1)

    shape = {**SHAPE, **DRAFTER}
    drafter = make_drafter(path / "drafter", config=config, **shape)
    weights = _silent(DFlashDims(**{**vars(TARGET_DIMS), **DRAFTER_EXTRA, **shape}))
    weights[FC] = np.eye(WIDTH, dtype=np.float32)
    for name in weights:
        if "v_proj" in name or "o_proj" in name:
            weights[name] = 0.2 * np.eye(WIDTH, dtype=np.float32)
    write_weights(drafter, weights, dtype="fp32", shards=1)
    engine = path / "engine"
    compile_engine(BuildRequest(target="mine", checkpoint=target, drafter=drafter, output=engine, **build))
    return engine


def _silent(dims: TransformerDims) -> dict[str, np.ndarray]:
    """The weights of a network whose layers add nothing to the residual stream."""
    shapes = checkpoint_shapes(dims, tied=True)
    return {name: (np.ones if "norm" in name else np.zeros)(shape, np.float32) for name, shape in shapes.items()}
