"""One small DFlash-like drafter, written as each family of publishers would write it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import random_weights, write_safetensors

VOCABULARY = 32  # V' of the drafter with a smaller one
_TAPS = [0, 2]
_DECODER: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "layer_types": ["full_attention"] * 2,
}
SHAPE: dict[str, Any] = {**_DECODER, "block_size": 6, "mask_token_id": 95}
_OUTER = {"block_size": 6, "num_target_layers": 3}
_SECTION = {"mask_token_id": 95, "target_layer_ids": _TAPS}


def _speculators(kind: str, **fields: Any) -> dict[str, Any]:
    return {
        "architectures": [f"{kind}DraftModel"],
        "speculators_model_type": kind.lower(),
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": kind.lower(),
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "a target"},
        },
        "aux_hidden_state_layer_ids": [tap + 1 for tap in _TAPS],
        "block_size": 6,
        "mask_token_id": 95,
        "draft_vocab_size": 96,
        "transformer_layer_config": _DECODER,
        **fields,
    }


DIALECTS: Mapping[str, dict[str, Any]] = {
    "zlab": {**_DECODER, **_OUTER, "architectures": ["DFlashDraftModel"], "dflash_config": _SECTION},
    "jetspec": {
        **_DECODER,
        **_OUTER,
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {**_SECTION, "causal_head": True},
    },
    "deepspec": {
        **_DECODER,
        **_OUTER,
        **_SECTION,
        "architectures": ["Qwen3DSparkModel"],
        "markov_rank": 0,
        "enable_confidence_head": False,
        "num_anchors": 512,
    },
    "specforge": {
        **_DECODER,
        **_OUTER,
        "architectures": ["DSparkDraftModel"],
        "dflash_config": {**_SECTION, "projector_type": "dspark", "attention_mode": "gqa", "markov_rank": 0},
    },
    "speculators-dflash": _speculators("DFlash"),
    "speculators-dspark": _speculators(
        "DSpark", sample_from_anchor=True, draft_vocab_size=VOCABULARY, markov_rank=0, markov_head_type="vanilla"
    ),
}
_WITH_TABLES = {"deepspec": 96, "speculators-dflash": 96, "speculators-dspark": VOCABULARY}  # → rows of the head


def drafter_weights(name: str) -> dict[str, np.ndarray]:
    """Random tensors under the names of the dialect."""
    of_layer = {
        **{f"{part}_layernorm": (32,) for part in ("input", "post_attention")},
        **{f"self_attn.{part}_norm": (16,) for part in "qk"},
        **{"self_attn.q_proj": (64, 32), "self_attn.k_proj": (32, 32), "self_attn.v_proj": (32, 32)},
        **{"self_attn.o_proj": (32, 64), "mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48)},
    }
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (32, 64), "hidden_norm.weight": (32,), "norm.weight": (32,)}
    shapes |= {f"layers.{i}.{part}.weight": shape for i in range(2) for part, shape in of_layer.items()}
    if name in _WITH_TABLES:
        shapes |= {"embed_tokens.weight": (96, 32), "lm_head.weight": (_WITH_TABLES[name], 32)}
    weights = random_weights(shapes, seed=7)
    if name in _WITH_TABLES:
        weights["lm_head.weight"] *= 3.0  # logits as peaked as the target's
    if _WITH_TABLES.get(name) == VOCABULARY:
        weights["d2t"] = 2 * np.arange(VOCABULARY, dtype=np.int64)  # every third token of the target
        weights["t2d"] = (np.arange(96) % 3 == 0).astype(np.float32)
    return weights


def make_dialect(
    path: Path,
    name: str,
    changes: Mapping[str, Any] | None = None,
    sections: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    weights: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write the drafter and return its directory. `changes` are entries of config.json that differ, where None removes
    one, `sections` those of objects within it."""
    path.mkdir(parents=True, exist_ok=True)
    config = json.loads(json.dumps(DIALECTS[name]))
    for section, entries in (sections or {}).items():
        config[section] |= entries
    merged = {**config, **(changes or {})}
    (path / "config.json").write_text(json.dumps({k: v for k, v in merged.items() if v is not None}, indent=1))
    write_safetensors(path / "model.safetensors", weights or drafter_weights(name), "fp32")
    return path
