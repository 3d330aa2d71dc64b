"""The families of decoders that are supported, and the entries of config.json that state them.

A family is one entry of `FAMILIES`; nothing else names it. What sets it apart from the others are its switches, which
`TransformerDims` carries to the graphs, to the engine's manifest and to the runtime.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Field of `TransformerDims` → its name in every family's config.json.
CONFIG_NAMES: Mapping[str, str] = {
    **{n: n for n in "vocab_size hidden_size head_dim intermediate_size rms_norm_eps rope_theta".split()},
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_positions": "max_position_embeddings",
}
# The same for a mixture of experts: fields of `Experts`, and one of `TransformerDims` that has another name there.
EXPERT_NAMES: Mapping[str, str] = {
    "count": "num_experts",
    "per_token": "num_experts_per_tok",
    "normalised": "norm_topk_prob",
}
SHARED_EXPERT = "shared_expert_intermediate_size"
_EXPERT_WIDTH = {"intermediate_size": "moe_intermediate_size"}
# The same for the gated delta nets of a hybrid: fields of `DeltaNet`.
DELTA_NAMES: Mapping[str, str] = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "taps": "linear_conv_kernel_dim",
}
LAYER_TYPES, INTERVAL, ROTARY_SHARE = "layer_types", "full_attention_interval", "partial_rotary_factor"
FULL_ATTENTION, LINEAR_ATTENTION = "full_attention", "linear_attention"


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
    stacked: bool = False  # as `Experts` has it
    delta: bool = False  # a hybrid: most layers have a gated delta net
    interleaved: bool = False  # as `DeltaNet` has it
    with_vision: str = ""  # the class of the whole model, of which this is the text part
    in_gguf: str = ""  # what GGUF calls it, where that is not its model_type

    @property
    def names(self) -> Mapping[str, str]:
        """Field of `TransformerDims` → its name in config.json."""
        return {**CONFIG_NAMES, **(_EXPERT_WIDTH if self.experts else {})}

    @property
    def switches(self) -> dict[str, bool]:
        """Fields of `TransformerDims` that are the same in every checkpoint of the family."""
        return {"qk_norm": self.qk_norm, "qkv_bias": self.qkv_bias}

    @property
    def neutral(self) -> dict[str, tuple[Any, ...] | None]:
        """Fields of config.json that state a switch → values that agree with it; None: read, or changes nothing."""
        known: dict[str, Any] = {"use_qk_norm": (self.qk_norm,), "qkv_bias": (self.qkv_bias,)}
        if self.experts:
            shared = None if SHARED_EXPERT in self.defaults else (0,)
            known |= {"decoder_sparse_step": (1,), "mlp_only_layers": ([],), SHARED_EXPERT: shared}
        if self.delta:
            # Layers that predict several tokens are left out; the gate of a delta net's output is silu in both words.
            known |= dict.fromkeys((*DELTA_NAMES.values(), INTERVAL, ROTARY_SHARE, "mtp_use_dedicated_embeddings"))
            known |= {"mtp_num_hidden_layers": None, "attn_output_gate": (True,), "mamba_ssm_dtype": ("float32",)}
            known |= {"output_gate_type": ("swish", "silu")}
        return known


# Each with its title, its model_type, the class of its language model, and the defaults.
_COMMON: Mapping[str, float | None] = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}  # of all families' defaults

QWEN3 = Family(
    *("dense Qwen3", "qwen3", "Qwen3ForCausalLM"),
    {**_COMMON, "head_dim": 128, "max_position_embeddings": 32768},
    qk_norm=True,
)
LLAMA = Family(
    *("Llama", "llama", "LlamaForCausalLM"),
    {**_COMMON, "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048},
)
MISTRAL = Family(
    *("Mistral", "mistral", "MistralForCausalLM"),
    {**_COMMON, "num_key_value_heads": 8, "head_dim": None, "max_position_embeddings": 131072},
    windowed=True,
)
QWEN2 = Family(
    *("dense Qwen2", "qwen2", "Qwen2ForCausalLM"),
    {**_COMMON, "num_key_value_heads": 32, "head_dim": None, "max_position_embeddings": 32768},
    qkv_bias=True,
)
QWEN3_MOE = Family(
    *("Qwen3-MoE", "qwen3_moe", "Qwen3MoeForCausalLM"),
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
    in_gguf="qwen3moe",
)

_HYBRID: Mapping[str, float | None] = {
    **_COMMON,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    INTERVAL: 4,
    ROTARY_SHARE: 0.25,
}
_HYBRID_EXPERTS = {"num_key_value_heads": 2, "moe_intermediate_size": 512, SHARED_EXPERT: 512, "norm_topk_prob": True}
QWEN3_NEXT = Family(
    *("Qwen3-Next", "qwen3_next", "Qwen3NextForCausalLM"),
    qk_norm=True,
    defaults={**_HYBRID, **_HYBRID_EXPERTS, "num_experts": 512, "num_experts_per_tok": 10},
    experts=True,
    delta=True,
    interleaved=True,
    in_gguf="qwen3next",
)
QWEN3_5 = Family(
    *("Qwen3.5", "qwen3_5_text", "Qwen3_5ForCausalLM"),
    qk_norm=True,
    defaults={**_HYBRID, "num_key_value_heads": 4},
    delta=True,
    with_vision="Qwen3_5ForConditionalGeneration",
    in_gguf="qwen35",
)
QWEN3_5_MOE = Family(
    *("Qwen3.5-MoE", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
    qk_norm=True,
    defaults={**_HYBRID, **_HYBRID_EXPERTS, "num_experts": 256, "num_experts_per_tok": 8},
    experts=True,
    stacked=True,
    delta=True,
    with_vision="Qwen3_5MoeForConditionalGeneration",
    in_gguf="qwen35moe",
)

_EVERY = (QWEN3, LLAMA, MISTRAL, QWEN2, QWEN3_MOE, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _EVERY}


def titles(word: str, families: Iterable[Family] = FAMILIES.values()) -> str:
    """Families by title, for a message: "dense Qwen3, Llama and Mistral" where `word` is "and"."""
    *others, last = (family.title for family in families)
    return f"{', '.join(others)} {word} {last}" if others else last
