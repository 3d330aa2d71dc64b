"""Settings of the exported model, read from its `config.pbtxt`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from ddtree_trt import __version__
from ddtree_trt.errors import ArtifactError
from ddtree_trt.triton.layouts import LAYOUTS, Layout

_PARAMETERS = ("ddtree_trt_version", "layout", "max_queue", "threads")


@dataclass(frozen=True)
class Settings:
    """The exported model's settings."""

    layout: Layout
    max_queue: int  # sequences that may wait for a slot
    threads: int  # CPU threads of the engine; 0 chooses
    outputs: frozenset[str]  # names the model declares

    @classmethod
    def read(cls, model_config: Mapping[str, Any]) -> Settings:
        """Read the `model_config` the server passes to `initialize`.

        Raises ArtifactError for a parameter that is missing or wrong, and when the installed ddtree-trt is not the
        version that exported the model.
        """
        name = model_config["name"]
        given = {key: value["string_value"] for key, value in model_config.get("parameters", {}).items()}
        if missing := [key for key in _PARAMETERS if key not in given]:
            raise ArtifactError(f"config.pbtxt of {name!r} lacks the parameters {missing}; export the model again")
        if given["ddtree_trt_version"] != __version__:
            raise ArtifactError(
                f"model {name!r} was exported by ddtree-trt {given['ddtree_trt_version']}, the server's Python "
                f"({sys.prefix}) has {__version__}; install the former there, or export the model again with the latter"
            )
        if given["layout"] not in LAYOUTS:
            raise ArtifactError(f"config.pbtxt of {name!r}: layout must be one of {', '.join(LAYOUTS)}")
        for key in ("max_queue", "threads"):
            if not given[key].isdecimal():
                raise ArtifactError(f"config.pbtxt of {name!r}: {key} must be a whole number, not {given[key]!r}")
        return cls(
            layout=LAYOUTS[given["layout"]],
            max_queue=int(given["max_queue"]),
            threads=int(given["threads"]),
            outputs=frozenset(output["name"] for output in model_config["output"]),
        )


def select_device(kind: str, device_id: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Make the instance's GPU the only one its process sees. Call before anything loads CUDA.

    Triton numbers the GPUs visible to it: where its CUDA_VISIBLE_DEVICES is set, the number is an index into that list.
    """
    if kind != "GPU":
        return
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[int(device_id)] if visible else device_id
