"""What a config.json says of rotary embedding: its base and its scaling, in the two spellings that are published.

transformers 5 has both in `rope_parameters`, older versions have `rope_theta` beside an object `rope_scaling`, whose
type is `rope_type` or, older still, `type`.
"""

from __future__ import annotations

from typing import Annotated, Any

from ddtree_trt.build.checkpoint.config_fields import refuse_unknown
from ddtree_trt.models.rope_scaling import (
    FACTOR,
    ROPE_BASE,
    SCALINGS,
    RopeScaling,
    contradiction,
    scaling_fields,
    yarn_attention_factor,
)
from ddtree_trt.reading import Between, Fields, read_record, shown

_SECTIONS = ("rope_parameters", "rope_scaling")
_NAMES = ("rope_type", "type")
_POSITIONS = "original_max_position_embeddings"
_MSCALE = ("mscale", "mscale_all_dim")  # a YaRN scaling may give these instead of its attention factor
_OPTIONAL = (_POSITIONS, "beta_fast", "beta_slow", "truncate", "attention_factor")
_NEUTRAL = {**dict.fromkeys(_NAMES, ("default", *SCALINGS)), "partial_rotary_factor": (1,)}


def read_theta(fields: Fields) -> float | None:
    """The base; None where nothing states it."""
    places = (*map(fields.section, _SECTIONS), fields)
    given = [part for part in places if part.has("rope_theta")]
    found = {part.place("rope_theta"): part.number("rope_theta", ROPE_BASE) for part in given}
    if len(set(found.values())) > 1:
        values = " and ".join(f"{name} {value:g}" for name, value in found.items())
        raise fields.source.fault(f"there are two values, {values}: which is it?")
    return next(iter(found.values()), None)


def read_scaling(fields: Fields, theta: float, max_positions: int) -> RopeScaling | None:
    """The scaling; None for plain rotary embedding. Raises the fields' error for a type or a field that is not
    implemented, and for values that contradict each other."""
    sections = [section for name in _SECTIONS if (section := fields.section(name)).data]
    found = [_scaling(section, max_positions) for section in sections]
    if len(set(found)) > 1:
        raise fields.source.fault(f"{' and '.join(_SECTIONS)} state different scalings: which is it?")
    scaling = next(iter(found), None)
    if problem := contradiction(theta, scaling):
        raise sections[0].source.fault(f"{sections[0].path}: {problem}")
    return scaling


def positions_with(scaling: RopeScaling | None, max_positions: int) -> int:
    """The positions that the embedding is made for. `max_position_embeddings` is often left as it was where YaRN is
    switched on, which is made for `factor` times the positions of training."""
    if scaling is None or scaling.rope_type != "yarn":
        return max_positions
    return max(max_positions, int(scaling.factor * scaling.original_max_position_embeddings))


def _scaling(section: Fields, max_positions: int) -> RopeScaling | None:
    """One object's scaling."""
    kind = _type(section)
    if kind == "default":
        refuse_unknown(section, ("rope_theta",), {**_NEUTRAL, "factor": (1,)})
        return None
    used = scaling_fields(kind)
    also = _MSCALE if kind == "yarn" else ()
    refuse_unknown(section, ("rope_theta", *used, *also), _NEUTRAL)
    given: dict[str, Any] = {name: section.data[name] for name in used if section.has(name)}
    if missing := [name for name in used if name not in given and name not in _OPTIONAL]:
        raise section.source.fault(f"{section.path} has no {missing[0]}")
    if _POSITIONS in used:
        given.setdefault(_POSITIONS, max_positions)
    if kind == "yarn" and "attention_factor" not in given:
        scales = (section.optional(name, Annotated[float, Between(0, 1e3)]) for name in _MSCALE)
        given["attention_factor"] = yarn_attention_factor(section.number("factor", FACTOR), *scales)
    return read_record(RopeScaling, {"rope_type": kind, **given}, section.source, section.path)


def _type(section: Fields) -> Any:
    """The type by either name. Raises the fields' error where the two differ, and for a type that is not known."""
    refuse_unknown(section, [name for name in section.data if name not in _NAMES], _NEUTRAL)
    given = {name: section.text(name) for name in _NAMES if section.has(name)}
    if len(set(given.values())) > 1:
        raise section.fault("type", f"is {shown(given['type'])}, rope_type {shown(given['rope_type'])}: which is it?")
    return next(iter(given.values()), "default")
