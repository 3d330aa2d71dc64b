"""DeepSpec's drafters and SpecForge's DSpark: position 0 of the block predicts too, and a Markov head may follow.

DeepSpec writes all fields beside those of the decoder and brings an embedding and a head; SpecForge has a
`dflash_config` and uses the target's.
"""

from __future__ import annotations

from ddtree_trt.build.checkpoint.dialects.block import (
    CONFIDENCE,
    FLAT,
    SECTION,
    attention,
    block_drafter,
    flat_entries,
    known,
    markov,
    tables_as_stored,
)
from ddtree_trt.build.checkpoint.dialects.dialect import Dialect, ReadDims, stated, words
from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.models.drafters import dflash
from ddtree_trt.models.drafters.dflash import DrafterDims
from ddtree_trt.models.families import Family
from ddtree_trt.reading import Fields

MARKOV = words("markov_rank markov_head_type")
_NEUTRAL = {"projector_type": ("dspark",), "tie_word_embeddings": (False,)}
CONFIDENCE_HEAD = "confidence_head."  # decides how much of a draft is proposed; here the budget does


def _reader(*, own_tables: bool) -> ReadDims:
    def read(fields: Fields, dims: TransformerDims, family: Family) -> DrafterDims:
        section = fields.section(dflash.SECTION)
        anchor = stated("sample_from_anchor", bool, fields, section)
        return block_drafter(
            fields,
            dims,
            **attention(fields, section, family, dims.num_layers),
            **flat_entries(fields, section),
            anchor_first=True if anchor is None else anchor,
            **markov(fields, section),
            own_embedding=own_tables,
            own_head=own_tables,
        )

    return read


def _dialect(title: str, architecture: str, *, own_tables: bool) -> Dialect:
    return Dialect(
        title=title,
        architectures=(architecture,),
        fields=known(FLAT, MARKOV, CONFIDENCE, (dflash.SECTION,), neutral=_NEUTRAL),
        sections={dflash.SECTION: known(SECTION, MARKOV, CONFIDENCE, neutral=_NEUTRAL)},
        read_dims=_reader(own_tables=own_tables),
        settle=tables_as_stored,
        unused=(CONFIDENCE_HEAD,),
    )


DEEPSPEC = _dialect("DeepSpec's drafters", "Qwen3DSparkModel", own_tables=True)
SPECFORGE_DSPARK = _dialect("DSpark drafters", "DSparkDraftModel", own_tables=False)
