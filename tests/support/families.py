"""Families that are not offered, each an entry as `models/families.py` would have it: for what the switches do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ddtree_trt.models.families import FAMILIES, Family

LLAMA = Family(
    title="dense Llama",
    model_type="llama",
    architecture="LlamaForCausalLM",
    qk_norm=False,
    qkv_bias=False,
    defaults={
        "num_key_value_heads": None,
        "head_dim": None,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
    },
)
QWEN2 = Family(
    title="dense Qwen2",
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    qk_norm=False,
    qkv_bias=True,
    defaults={
        "num_key_value_heads": 32,
        "head_dim": None,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 32768,
    },
)
OTHERS = {"llama": LLAMA, "qwen2": QWEN2}


@contextmanager
def offered(*families: Family) -> Iterator[None]:
    """Checkpoints of these families are read inside, as if the table had them."""
    with pytest.MonkeyPatch.context() as patch:
        for family in families:
            patch.setitem(FAMILIES, family.model_type, family)
        yield
