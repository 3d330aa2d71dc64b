"""Load a plugin library into the registry of TensorRT's lean runtime and print its creators as JSON.

Run with an interpreter that has tensorrt_lean_cu13_bindings, tensorrt_lean_cu13_libs and numpy; needs no GPU.
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import tensorrt_lean_bindings as trt

GOOD = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128, "max_tree": 65, "mask_mode": 0, "scale": 0.1}
BAD = {
    "head_dim": {"head_dim": 96},
    "heads": {"num_q_heads": 7},
    "mask_mode": {"mask_mode": 5},
    "scale": {"scale": float("inf")},
    "missing": {"max_tree": None},
    "unknown": {"block_size": 4},
}


def fields(change: dict[str, float | None]) -> trt.PluginFieldCollection:
    values = {name: value for name, value in {**GOOD, **change}.items() if value is not None}
    kinds = {int: (np.int32, trt.PluginFieldType.INT32), float: (np.float32, trt.PluginFieldType.FLOAT32)}
    return trt.PluginFieldCollection(
        [
            trt.PluginField(name, np.array([value], kinds[type(value)][0]), kinds[type(value)][1])
            for name, value in values.items()
        ]
    )


def main(path: str) -> None:
    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    registry = trt.get_plugin_registry()
    assert registry.load_library(path) is not None, f"{path} was not loaded"
    attention = registry.get_creator("DDTreeAttention", "1", "ddtree")
    compact = registry.get_creator("DDTreeKVCompact", "1", "ddtree")
    nothing = trt.PluginFieldCollection([])
    build, runtime = trt.TensorRTPhase.BUILD, trt.TensorRTPhase.RUNTIME
    print(
        json.dumps(
            {
                "version": trt.__version__,
                "creators": [[c.name, c.plugin_version, c.plugin_namespace] for c in registry.all_creators],
                "attributes": {c.name: [field.name for field in c.field_names] for c in (attention, compact)},
                "created": [
                    creator.create_plugin("a", given, phase) is not None
                    for creator, given in ((attention, fields({})), (compact, nothing))
                    for phase in (build, runtime)
                ],
                "refused": {
                    "attributes of the other": compact.create_plugin("a", fields({}), runtime) is None,
                    **{name: attention.create_plugin("a", fields(bad), runtime) is None for name, bad in BAD.items()},
                },
                "elsewhere": [
                    place
                    for place in (("2", "ddtree"), ("1", ""))
                    for name in ("DDTreeAttention", "DDTreeKVCompact")
                    if registry.get_creator(name, *place) is not None
                ],
            }
        ),
        flush=True,
    )
    del logger


if __name__ == "__main__":
    main(sys.argv[1])
    # TensorRT's objects have no order to be destroyed in without a driver: leave without destroying them.
    os._exit(0)
