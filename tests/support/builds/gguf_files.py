"""GGUF files of checkpoints in Hugging Face format, as llama.cpp's converter would write them.

Names, order of rows and metadata are stated here by hand: nothing of the package's reader is used, so that the two can
be compared.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

TOKENIZER = "tokenizer.ggml."
_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
_WHOLE = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}
_ARCHITECTURES = {  # where they are not the model_type
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
}
_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor of Hugging Face's: model.layers.3.self_attn.q_proj.weight is blk.3.attn_q.weight."""
    if name in _OUTER:
        return _OUTER[name]
    _, _, layer, rest = name.split(".", 3)
    if rest in _WHOLE:
        return f"blk.{layer}.{_WHOLE[rest]}"
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_NAMES[module]}.{kind}"


def metadata_of(directory: Path) -> dict[str, Any]:
    """What the converter writes of a config.json and of a tokenizer of words t0, t1, …, as a byte-level BPE of them."""
    config = json.loads((directory / "config.json").read_text())
    kind = architecture(config)
    numbers = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size", 5632),
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
        "rope.dimension_count": config["head_dim"],
    }
    if "num_experts" in config:
        numbers |= {
            "expert_count": config["num_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
        }
        if shared := config.get("shared_expert_intermediate_size"):
            numbers["expert_shared_feed_forward_length"] = shared
    if "layer_types" in config and "linear_num_value_heads" in config:
        heads, size = config["linear_num_value_heads"], config["linear_value_head_dim"]
        numbers |= {
            "rope.dimension_count": int(config["head_dim"] * config["partial_rotary_factor"]),
            "rope.dimension_sections": [11, 11, 10, 0],
            "ssm.conv_kernel": config["linear_conv_kernel_dim"],
            "ssm.state_size": config["linear_key_head_dim"],
            "ssm.group_count": config["linear_num_key_heads"],
            "ssm.time_step_rank": heads,
            "ssm.inner_size": heads * size,
            "full_attention_interval": 1 + config["layer_types"].index("full_attention"),
        }
    entries = {"general.name": "Random", **{f"{kind}.{key}": value for key, value in numbers.items()}}
    return entries | tokenizer_metadata(config["vocab_size"], eos=config["eos_token_id"])


def tokenizer_metadata(size: int, *, eos: int, pre: str = "gpt-2") -> dict[str, Any]:
    """A byte-level BPE of `size` tokens: two that no text has, letters and digits, and merges of these."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)] + list("0123456789") + ["Ġ", "Ċ", ",", "'"]
    pairs = [f"{a}{b}" for a in "Ġthe" for b in "thers"] + [f"ĠĠ{d}" for d in ("", "Ġ")] + ["12", "Ġ1"]
    pairs = list(dict.fromkeys(pairs))
    tokens = (["<s>", "</s>", *letters, *pairs] + [f"<pad{i}>" for i in range(size)])[:size]
    merges = [f"{p[:-1]} {p[-1]}" for p in pairs if p in tokens]
    types = [3, 3] + [5 if token.startswith("<pad") else 1 for token in tokens[2:]]
    values: dict[str, Any] = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges}
    values |= {"bos_token_id": 0, "eos_token_id": eos, "add_bos_token": False}
    return {f"{TOKENIZER}{name}": value for name, value in values.items()}


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint by GGUF's names; a llama's queries and keys in llama.cpp's order of rows."""
    config = json.loads((directory / "config.json").read_text())
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for name, values in _one_per_kind(load_file(directory / "model.safetensors"), config):
        kind = name.split(".")[2] if name.startswith("blk.") else name
        if config["model_type"] == "llama" and kind in heads:
            halves = values.reshape(heads[kind], 2, -1, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if "linear_num_value_heads" in config:
            values = _of_hybrid(kind, values, config)
            name = name.replace("ffn_norm", "post_attention_norm")
        tensors[name] = np.ascontiguousarray(values if values.size == 1 else values.squeeze())
    return tensors


def _one_per_kind(stored: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Experts of one kind in one tensor, gates and ups apart; interleaved projections of a delta net in two."""
    experts: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    for source, tensor in stored.items():
        values: np.ndarray = tensor.float().numpy()
        if one := re.fullmatch(r"(.+\.experts)\.(\d+)\.(.+)", source):
            experts[f"{one[1]}.{one[3]}"][int(one[2])] = values
        elif source.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                yield gguf_name(f"{source.replace('gate_up', part)}.weight"), half
        elif source.endswith("in_proj_qkvz.weight"):
            keys, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
            by_head = values.reshape(keys, -1, values.shape[1])
            own = (by_head.shape[1] - 2 * size) // 2
            kinds = np.split(by_head, (size, 2 * size, 2 * size + own), axis=1)
            q, k, v, z = (kind.reshape(-1, values.shape[1]) for kind in kinds)
            yield gguf_name(source.replace("qkvz", "qkv")), np.concatenate([q, k, v])
            yield gguf_name(source.replace("qkvz", "z")), z
        else:
            yield gguf_name(source if source.endswith((".weight", ".bias", *_WHOLE)) else f"{source}.weight"), values
    for name, some in experts.items():
        yield gguf_name(name), np.stack([some[i] for i in range(len(some))])


def architecture(config: Mapping[str, Any]) -> str:
    return _ARCHITECTURES.get(config["model_type"], config["model_type"])


def _of_hybrid(kind: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """Norms and decays as they are used, and but for Qwen3-Next value heads one of every key head after the other."""
    keys, heads, size = (config[f"linear_{n}"] for n in ("num_key_heads", "num_value_heads", "value_head_dim"))
    order = np.arange(heads).reshape(keys, -1).T.ravel()
    if kind == "ssm_a":
        values = -np.exp(values)
    elif "norm" in kind and kind != "ssm_norm":
        values = values + np.float32(1)
    if config["model_type"] == "qwen3_next":
        return values
    if kind in ("ssm_a", "ssm_dt", "ssm_alpha", "ssm_beta"):
        return values[order]
    if kind in ("attn_qkv", "ssm_conv1d", "attn_gate"):
        values = values.reshape(len(values), -1)
        others = len(values) - heads * size
        by_head = values[others:].reshape(heads, size, -1)[order]
        return np.concatenate([values[:others], by_head.reshape(heads * size, -1)])
    if kind == "ssm_out":
        return values.reshape(-1, heads, size)[:, order].reshape(len(values), -1)
    return values


def make_gguf(
    directory: Path,
    path: Path,
    kind: str = "F32",
    *,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    raw: Mapping[str, tuple[np.ndarray, str]] | None = None,
    split: int = 0,
) -> Path:
    """Write a checkpoint as a GGUF file with matrices of the type `kind`; norms and biases are always F32.

    `metadata` overrides entries, None removes one; so do `tensors`. `raw` are stored bytes [rows, bytes] and types.
    `split` is the most tensors in one of several files, of which the first is returned.
    """
    config = json.loads((directory / "config.json").read_text())
    entries = {**metadata_of(directory), **(metadata or {})}
    path.parent.mkdir(parents=True, exist_ok=True)
    family = str(entries.pop("general.architecture", architecture(config)))
    writer = gguf.GGUFWriter(path, family, split_max_tensors=split)
    for key, value in entries.items():
        if value is not None:
            _add(writer, key, value)
    stored = {**tensors_of(directory), **(tensors or {})}
    for name, values in stored.items():
        if values is None or name in (raw or {}):
            continue
        number = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        plain = number in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
        writer.add_tensor(name, gguf.quantize(values, number), raw_dtype=None if plain else number)
    for name, (data, raw_kind) in (raw or {}).items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[raw_kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(iter(sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf")))) if split else path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Lists by their entries' kind; whole numbers as 32 bits, others as float32, as the converter writes them."""
    kinds: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    kinds.get(type(value), writer.add_array)(key, value)
