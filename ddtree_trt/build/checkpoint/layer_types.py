"""Which layers of a config.json attend to a window of the sequence only."""

from __future__ import annotations

from typing import Annotated

from ddtree_trt.models.decoder import LAYERS
from ddtree_trt.models.families import Family
from ddtree_trt.reading import Between, Fields, shown

LONGEST_WINDOW = 1 << 30
_FULL, _SLIDING = "full_attention", "sliding_attention"


def sliding_layers(fields: Fields, family: Family, layers: int) -> list[bool]:
    """Per layer whether it has a window: as listed, or as transformers derives it where nothing is listed."""
    switched = family.windowed or fields.flag("use_sliding_window", False)
    # Configurations without a window may write 0 for none.
    within = Between(1 if switched else 0, LONGEST_WINDOW)
    no_window = fields.optional("sliding_window", Annotated[int, within]) is None and "sliding_window" in fields.data
    first = fields.integer("max_window_layers", Between(0, LAYERS.highest), 28)
    kinds = fields.optional("layer_types", list[str])
    if kinds is None:
        return [switched and not no_window and (family.windowed or i >= first) for i in range(layers)]
    if len(kinds) != layers:
        raise fields.fault("layer_types", f"has {len(kinds)} entries for num_hidden_layers {layers}")
    for kind in kinds:
        if kind not in (_FULL, _SLIDING):
            problem = f"is {shown(kind)}, which is not implemented; {_FULL!r} and {_SLIDING!r} are"
            raise fields.fault("layer_types", problem)
    return [kind == _SLIDING or (family.windowed and not no_window) for kind in kinds]


def refuse_windows(fields: Fields, family: Family, layers: int) -> None:
    """Raises the fields' error where a layer of a language model has a window."""
    sliding = sliding_layers(fields, family, layers)
    if not any(sliding):
        return
    if _SLIDING in (fields.optional("layer_types", list[str]) or ()):
        raise fields.fault("layer_types", f"is {_SLIDING!r}, which is not implemented: every layer must be {_FULL!r}")
    switch = "sliding_window" if family.windowed else "use_sliding_window"
    found = f"is {shown(fields.data[switch])}" if fields.has(switch) else "is left out, which means a window"
    raise fields.fault(switch, f"{found}: layers with {_SLIDING!r} are not implemented")
