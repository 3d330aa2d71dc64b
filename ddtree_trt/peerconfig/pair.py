"""The pair of an engine directory as other inference engines are given it: two checkpoints and the engine's limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.precisions import PRECISIONS
from ddtree_trt.errors import UsageError


@dataclass(frozen=True)
class Model:
    """A checkpoint by the name that another engine loads it by."""

    name: str  # an absolute path, or a repository of the Hugging Face hub
    revision: str | None = None  # a commit of the hub's repository; None for a path

    def pinned(self, name: str = "revision") -> dict[str, str]:
        """The revision as a setting of that name; none for a path."""
        return {} if self.revision is None else {name: self.revision}


@dataclass(frozen=True)
class ServedPair:
    """What another engine's configuration is made of."""

    name: str
    target: Model
    drafter: Model
    draft_length: int  # L: tokens a draft proposes
    features: tuple[str, ...]  # fields in use that the first published DFlash drafters do not have
    dtype: str  # float16, bfloat16, or auto: the type the checkpoint is stored in
    max_seq_len: int  # prompt and output tokens of one sequence
    max_batch: int  # sequences at once
    chat_template_args: Mapping[str, Any]  # what the drafter was trained for


def served_pair(manifest: Manifest, target: Model, drafter: Model) -> ServedPair:
    """The pair of a DFlash engine. Raises UsageError for another kind of drafter."""
    if manifest.drafting.drafts != "block":
        raise UsageError(
            f"engine {manifest.name!r} has an {manifest.drafting.title}; exports are for DFlash drafters, whose chain "
            "the other engine then runs"
        )
    return ServedPair(
        name=manifest.name,
        target=target,
        drafter=drafter,
        draft_length=manifest.drafting.dims.draft_length,
        features=tuple(manifest.drafting.dims.features()),
        dtype=served_dtype(manifest),
        max_seq_len=manifest.limits.max_seq_len,
        max_batch=manifest.limits.max_batch,
        chat_template_args=manifest.chat_template_args,
    )


def served_dtype(manifest: Manifest) -> str:
    """The type another engine computes in: the engine's if it has 16 bits, else the one the checkpoint is stored in."""
    precision = PRECISIONS[manifest.precision]
    return precision.dtype if precision.half else "auto"
