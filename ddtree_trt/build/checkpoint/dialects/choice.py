"""Which dialect a config.json is."""

from __future__ import annotations

from ddtree_trt.build.checkpoint.dialects.deepspec import DEEPSPEC, SPECFORGE_DSPARK
from ddtree_trt.build.checkpoint.dialects.dialect import Dialect
from ddtree_trt.build.checkpoint.dialects.eagle import ARCHITECTURE as EAGLE_CLASS
from ddtree_trt.build.checkpoint.dialects.eagle import DRAFT_VOCABULARY, EAGLE, EAGLE_DEEPSPEC
from ddtree_trt.build.checkpoint.dialects.language_model import LANGUAGE_MODEL
from ddtree_trt.build.checkpoint.dialects.speculators import DECODER, TYPE, speculators_dialect
from ddtree_trt.build.checkpoint.dialects.zlab import DFLASH, DFLASH2
from ddtree_trt.models.drafters.dflash import SECTION
from ddtree_trt.reading import Fields

_BY_ARCHITECTURE = {
    name: dialect
    for dialect in (DFLASH, DFLASH2, DEEPSPEC, SPECFORGE_DSPARK, EAGLE_DEEPSPEC)
    for name in dialect.architectures
} | {EAGLE_CLASS: EAGLE}


def architectures(fields: Fields) -> list[str]:
    """The classes that the file names; it may leave them out."""
    return fields.optional("architectures", list[str]) or []


def dialect_of(fields: Fields) -> Dialect:
    """By the type of speculators' layout, else by the class, else by the object that DFlash has, or the vocabulary that
    an EAGLE-3 drafter has under its decoder's class. What is none of these is a language model, whose allow-list
    refuses every other drafter's fields."""
    if fields.has(TYPE) or fields.has(DECODER):
        return speculators_dialect(fields)
    named = (_BY_ARCHITECTURE[name] for name in architectures(fields) if name in _BY_ARCHITECTURE)
    unnamed = DFLASH if fields.has(SECTION) else EAGLE if fields.has(DRAFT_VOCABULARY) else LANGUAGE_MODEL
    return next(named, unnamed)
