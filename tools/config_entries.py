"""The entries of a config.json that state a network, for checkpoints that trainers and tests write."""

from ddtree_trt.drafters.dflash.dims import ARCHITECTURE, SECTION, DFlashDims
from ddtree_trt.models import families
from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.models.rope_scaling import SCALINGS


def of_family(family: families.Family, dims: TransformerDims) -> dict[str, object]:
    """Those that a network of the family has as a target and as a drafter."""
    sizes = {name: getattr(dims, field) for field, name in family.names.items()}
    plain = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False, "sliding_window": None}
    rope, scaling = dims.rope_scaling, {}
    if rope:
        used = ("rope_type", *SCALINGS[rope.rope_type])
        scaling = {"rope_scaling": {name: getattr(rope, name) for name in used}}
    mixture: dict[str, object] = {}
    if dims.experts:
        mixture = {name: getattr(dims.experts, field) for field, name in families.EXPERT_NAMES.items()}
        mixture |= {families.SHARED_EXPERT: dims.experts.shared} if dims.experts.shared else {}
    return {"model_type": family.model_type, **sizes, **plain, **scaling, **mixture, **_of_delta(dims)}


def _of_delta(dims: TransformerDims) -> dict[str, object]:
    if dims.delta is None:
        return {}
    full = dims.attention_layers
    kinds = [(families.LINEAR_ATTENTION, families.FULL_ATTENTION)[i in full] for i in range(dims.num_layers)]
    sizes = {name: getattr(dims.delta, field) for field, name in families.DELTA_NAMES.items()}
    return {**sizes, families.LAYER_TYPES: kinds, families.ROTARY_SHARE: dims.rotated / dims.head_dim}


def of_dflash(dims: DFlashDims) -> dict[str, object]:
    """Those of a block drafter that its family does not have."""
    return {
        "architectures": [ARCHITECTURE],
        "block_size": dims.block_size,
        "num_target_layers": dims.num_target_layers,
        SECTION: {"mask_token_id": dims.mask_token_id, "target_layer_ids": list(dims.tap_layers)},
    }
