"""What targets and drafters of either kind are asked alike: their tensors, and whether they fit each other."""

from __future__ import annotations

from ddtree_trt.models.decoder import Shapes, TransformerDims, language_model_shapes
from ddtree_trt.models.drafters.dflash import DrafterDims, dflash_shapes


def checkpoint_shapes(dims: TransformerDims, *, tied: bool) -> Shapes:
    """Every tensor of a network's checkpoint. `tied` is for language models: a DFlash drafter has no head."""
    return dflash_shapes(dims) if isinstance(dims, DrafterDims) else language_model_shapes(dims, tied=tied)


def misfit(target: TransformerDims, drafter: TransformerDims) -> str | None:
    """Why a drafter was not made for a target of these dimensions, in Hugging Face's names; None where it fits."""

    def differs(name: str, found: int, whose: str, expected: int) -> str | None:
        return f"{name} is {found}, {whose} {expected}" if found != expected else None

    if problem := differs("vocab_size", drafter.vocab_size, "the target's", target.vocab_size):
        return problem
    if not isinstance(drafter, DrafterDims):
        return None
    if problem := differs("hidden_size", drafter.hidden_size, "the target's", target.hidden_size):
        return problem
    if problem := differs("num_target_layers", drafter.num_target_layers, "the target's layers", target.num_layers):
        return problem
    if outside := [i for i in drafter.tap_layers if not 0 <= i < target.num_layers]:
        return f"target_layer_ids {outside} are not layers of the target, which has {target.num_layers}"
    if drafter.mask_token_id >= target.vocab_size:
        return f"mask_token_id {drafter.mask_token_id} is not below vocab_size {target.vocab_size}"
    return None
