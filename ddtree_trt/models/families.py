"""The families of decoders that are supported, and the entries of config.json that state them.

A family is one entry of `FAMILIES`; nothing else names it. What sets it apart from the others are its switches, which
`TransformerDims` carries to the graphs, to the engine's manifest and to the runtime.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ddtree_trt.models.decoder import TransformerDims
from ddtree_trt.models.rope_scaling import scaling_entries

# Field of `TransformerDims` → its name in every family's config.json.
CONFIG_NAMES: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "rms_norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "max_positions": "max_position_embeddings",
}
# The same for a mixture of experts: fields of `Experts`, and one of `TransformerDims` that has another name there.
EXPERT_NAMES: Mapping[str, str] = {
    "count": "num_experts",
    "per_token": "num_experts_per_tok",
    "normalised": "norm_topk_prob",
}
_EXPERT_WIDTH = {"intermediate_size": "moe_intermediate_size"}


@dataclass(frozen=True)
class Family:
    """A family of decoders. Names and defaults are those of its configuration in transformers."""

    title: str  # in messages: "dense Qwen3"
    model_type: str
    architecture: str  # the class of its language model
    # Values of the fields a config.json may leave out. None follows from others: head_dim is hidden_size divided by
    # num_attention_heads, num_key_value_heads is num_attention_heads.
    defaults: Mapping[str, float | None]
    qk_norm: bool = False  # see `TransformerDims`
    qkv_bias: bool = False
    # Whether layers have a window wherever config.json does not say `"sliding_window": null`. In other families
    # `use_sliding_window` decides.
    windowed: bool = False
    experts: bool = False  # every layer has a mixture of them

    @property
    def names(self) -> Mapping[str, str]:
        """Field of `TransformerDims` → its name in config.json."""
        return {**CONFIG_NAMES, **(_EXPERT_WIDTH if self.experts else {})}

    @property
    def switches(self) -> dict[str, bool]:
        """Fields of `TransformerDims` that are the same in every checkpoint of the family."""
        return {"qk_norm": self.qk_norm, "qkv_bias": self.qkv_bias}

    @property
    def neutral(self) -> dict[str, tuple[Any, ...]]:
        """Fields of config.json that state a switch → the values that agree with it."""
        layers = {"decoder_sparse_step": (1,), "mlp_only_layers": ([],), "shared_expert_intermediate_size": (0,)}
        return {"use_qk_norm": (self.qk_norm,), "qkv_bias": (self.qkv_bias,), **(layers if self.experts else {})}

    def config_entries(self, dims: TransformerDims) -> dict[str, object]:
        """The entries of config.json that a network of the family has as a target and as a drafter."""
        sizes = {name: getattr(dims, field) for field, name in self.names.items()}
        plain = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False, "sliding_window": None}
        scaling = {"rope_scaling": scaling_entries(dims.rope_scaling)} if dims.rope_scaling else {}
        mixture = {name: getattr(dims.experts, field) for field, name in EXPERT_NAMES.items()} if dims.experts else {}
        return {"model_type": self.model_type, **sizes, **plain, **scaling, **mixture}


_COMMON: Mapping[str, float | None] = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}  # of all families' defaults

QWEN3 = Family(
    title="dense Qwen3",
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    qk_norm=True,
    defaults={**_COMMON, "head_dim": 128, "max_position_embeddings": 32768},
)
LLAMA = Family(
    title="Llama",
    model_type="llama",
    architecture="LlamaForCausalLM",
    defaults={**_COMMON, "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048},
)
MISTRAL = Family(
    title="Mistral",
    model_type="mistral",
    architecture="MistralForCausalLM",
    defaults={**_COMMON, "num_key_value_heads": 8, "head_dim": None, "max_position_embeddings": 131072},
    windowed=True,
)
QWEN2 = Family(
    title="dense Qwen2",
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    qkv_bias=True,
    defaults={**_COMMON, "num_key_value_heads": 32, "head_dim": None, "max_position_embeddings": 32768},
)

QWEN3_MOE = Family(
    title="Qwen3-MoE",
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    qk_norm=True,
    defaults={
        **_COMMON,
        "num_key_value_heads": 4,
        "head_dim": None,
        "max_position_embeddings": 32768,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    experts=True,
)

FAMILIES: dict[str, Family] = {family.model_type: family for family in (QWEN3, LLAMA, MISTRAL, QWEN2, QWEN3_MOE)}


def titles(word: str, families: Iterable[Family] = FAMILIES.values()) -> str:
    """Families by title, for a message: "dense Qwen3, Llama and Mistral" where `word` is "and"."""
    *others, last = (family.title for family in families)
    return f"{', '.join(others)} {word} {last}" if others else last
