"""Whether a request's rounds stay on the device or run by stages on the host, with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddtree_trt.artifact.backends import BACKENDS
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.toolchain import RANKS
from ddtree_trt.errors import UsageError
from ddtree_trt.plugins import MAX_DEVICE_BUDGET
from ddtree_trt.runtime.decoding.methods import METHODS
from ddtree_trt.runtime.options import DeviceRoundsMode
from ddtree_trt.runtime.params import PARAMETERS, SamplingParams

if TYPE_CHECKING:
    from ddtree_trt.runtime.engines.base import Engine


def request_host_reason(
    mode: DeviceRoundsMode, engine: Engine, params: SamplingParams, *, watched: bool = False
) -> str | None:
    """Why a request's rounds run on the host; None where they stay on the device. Its `params` name a method other than
    `auto`. `watched`: every tree goes to a watcher. Raises UsageError for a reason in the mode `on`."""
    if mode == "off":
        return "device_rounds is off"
    reason = engine_host_reason(engine.manifest)
    if reason is None and mode == "auto" and not (engine.rounds and engine.rounds.by_default):
        reason = "there is no GPU"
    reason = reason or _params_host_reason(params, watched=watched)
    refuse_on(mode, reason)
    return reason


def refuse_on(mode: DeviceRoundsMode, reason: str | None) -> None:
    """Raises UsageError in the mode `on` where there is a reason for rounds on the host."""
    if mode == "on" and reason is not None:
        raise UsageError(f"device_rounds is on, but {reason}; use auto or off")


def engine_host_reason(manifest: Manifest) -> str | None:
    """Why an engine builds every tree on the host; None when it has rounds that stay on the device."""
    if not BACKENDS[manifest.backend].device_rounds:
        return f"the {manifest.backend} backend builds trees on the host"
    if RANKS in manifest.toolchain:
        return f"its target is split over {manifest.toolchain[RANKS]} processes, which the host leads"
    if manifest.drafting.drafts != "block":
        how = {"levels": "level by level", "tokens": "no trees"}[manifest.drafting.drafts]
        return f"an {manifest.drafting.title} drafts {how}"
    if manifest.target_dims.delta is not None:
        return "the states of its target's delta-net layers cannot be cut back when a round was launched in vain"
    if manifest.drafting.pairs is not None:
        return "the children that its drafter scores depend on their parent, and trees on the device take marginals"
    return None


def _params_host_reason(params: SamplingParams, *, watched: bool) -> str | None:
    budget, method = params.tree_budget, METHODS[params.method]
    if method.host_reason is not None:
        return f"method {method.name!r} {method.host_reason}"
    if budget != "auto" and method.branches and budget > MAX_DEVICE_BUDGET:
        return f"the device builds trees of {MAX_DEVICE_BUDGET} nodes at most, not of {budget}"
    if watched:
        return "its trees are watched, and a tree on the device is not seen"
    honoured = ("always",) if params.stochastic else ("always", "greedy")
    rows = [row for row in PARAMETERS.values() if row.device not in honoured]
    if names := [row.name for row in rows if getattr(params, row.name) != row.default]:
        return f"{', '.join(names)} work{'' if len(names) > 1 else 's'} on logits, which stay on the device"
    return None
