"""The checkpoint tensors of targets and of drafters of every kind, and whether a drafter fits a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ddtree_trt.models.decoder import Shapes, TransformerDims, language_model_shapes
from ddtree_trt.models.drafters.dflash import dflash_shapes
from ddtree_trt.models.drafters.eagle3 import Eagle3Dims, eagle3_shapes
from ddtree_trt.models.drafters.kinds import KindName, kind_of

# Kind of drafter → a function of (dimensions, whether the head is the embedding) that returns the shapes.
_SHAPES: Mapping[KindName, Callable[[Any, bool], Shapes]] = {
    "dflash": lambda dims, tied: dflash_shapes(dims),
    "autoregressive": lambda dims, tied: language_model_shapes(dims, tied=tied),
    "eagle3": lambda dims, tied: eagle3_shapes(dims),
}


def checkpoint_shapes(dims: TransformerDims, *, tied: bool) -> Shapes:
    """Shapes of every tensor of a network's checkpoint. With `tied` its head is its embedding."""
    return _SHAPES[kind_of(dims).name](dims, tied)


def misfit(target: TransformerDims, drafter: TransformerDims) -> str | None:
    """Why a drafter does not fit a target of these dimensions, in Hugging Face's names; None where it fits."""
    kind = kind_of(drafter)
    equal = [("vocab_size", drafter.vocab_size, "the target's", target.vocab_size)]
    if isinstance(drafter, Eagle3Dims) and drafter.target_hidden_size is not None:
        equal.append(("target_hidden_size", drafter.target_hidden_size, "the target's", target.hidden_size))
    elif not kind.language_model:
        equal.append(("hidden_size", drafter.hidden_size, "the target's", target.hidden_size))
    if kind.target_layers is not None:
        equal.append(("num_target_layers", kind.target_layers, "the target's layers", target.num_layers))
    for name, found, whose, expected in equal:
        if found != expected:
            return f"{name} is {found}, {whose} {expected}"
    if isinstance(drafter, Eagle3Dims) and not kind.tap_layers:
        return f"it names no target layers to tap, and a target of {target.num_layers} layers has no usual ones"
    if outside := [i for i in kind.tap_layers if not 0 <= i < target.num_layers]:
        return f"target_layer_ids {outside} are not layers of the target, which has {target.num_layers}"
    if isinstance(drafter, Eagle3Dims) and drafter.hidden_size != target.hidden_size:
        found, expected = drafter.hidden_size, target.hidden_size
        for table, own in (("embedding", drafter.own_embedding), ("head", drafter.own_head)):
            if not own:
                return f"hidden_size is {found}, that of the target's {table}, which it uses, {expected}"
    if kind.mask_token_id is not None and kind.mask_token_id >= target.vocab_size:
        return f"mask_token_id {kind.mask_token_id} is not below vocab_size {target.vocab_size}"
    return None
