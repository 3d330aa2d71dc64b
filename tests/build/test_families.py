"""What a family of models is: one entry, read into dimensions, tensors and the manifest; and what is refused."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import dims_of, edit_json, make_target, make_tokenizer, refusal

from ddtree_trt.build.checkpoint.config import read_config
from ddtree_trt.build.checkpoint.reader import load_checkpoint
from ddtree_trt.build.checkpoint.tokenizer import find_tokenizer, open_tokenizer
from ddtree_trt.drafters.registry import checkpoint_shapes
from ddtree_trt.errors import CheckpointError
from ddtree_trt.models.families import FAMILIES, LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_5, QWEN3_MOE, Family
from tools import config_entries


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_tensors_are_those_of_transformers(family: Family, tied: bool) -> None:
    """Every name and shape, and no other."""
    dims = dims_of(family)
    entries: dict[str, Any] = config_entries.of_family(family, dims)
    config = transformers.AutoConfig.for_model(**entries, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert type(model).__name__ == family.architecture
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if tied:
        del expected["lm_head.weight"]
    if dims.experts and not dims.experts.stacked:  # transformers stacks what checkpoints have for each expert
        for index, name in itertools.product(range(dims.num_layers), ("gate_up", "down")):
            experts, rows, columns = expected.pop(f"model.layers.{index}.mlp.experts.{name}_proj")
            each = ("gate", "up") if name == "gate_up" else ("down",)
            for expert, part in itertools.product(range(experts), each):
                expected[f"model.layers.{index}.mlp.experts.{expert}.{part}_proj.weight"] = rows // len(each), columns
    assert checkpoint_shapes(dims, tied=tied) == expected


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_family_is_read_by_its_name(family: Family, tmp_path: Path) -> None:
    path = make_target(tmp_path, family=family)
    assert load_checkpoint(path).dims == dims_of(family)
    edit_json(path / "config.json", model_type="phi3")
    kinds = "dense Qwen3, Llama, Mistral, dense Qwen2, Qwen3-MoE, Qwen3-Next, Qwen3.5 and Qwen3.5-MoE models"
    types = "'qwen3', 'llama', 'mistral', 'qwen2', 'qwen3_moe', 'qwen3_next', 'qwen3_5_text', 'qwen3_5_moe_text'"
    known = f"only {kinds} ({types})"
    with pytest.raises(CheckpointError, match=re.escape(f"model_type is 'phi3', {known}")):
        load_checkpoint(path)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("whole", [True, False])
def test_what_transformers_writes(family: Family, whole: bool, tmp_path: Path) -> None:
    """Every field of its configuration, or those that differ from its defaults; what is left out is what it means."""
    names = {"num_hidden_layers": 2, "num_attention_heads": 32, "hidden_size": 4096}
    config = transformers.AutoConfig.for_model(family.model_type, **names, eos_token_id=5)
    config.architectures = [family.architecture]
    written = json.loads(config.to_json_string(use_diff=not whole))
    if not whole:  # these it writes always
        written = {k: v for k, v in written.items() if k not in ("head_dim", "rope_parameters")}
    needed = ["intermediate_size"] if hasattr(config, "intermediate_size") else []
    needed += ["vocab_size", *(["num_key_value_heads"] if family is QWEN3 else [])]
    if family.windowed:
        config.sliding_window = None
        needed.append("sliding_window")
    written |= {name: getattr(config, name) for name in needed}
    written |= {"shared_expert_intermediate_size": 0} if family.experts else {}  # as Qwen3-Coder is published
    (tmp_path / "config.json").write_text(json.dumps({**written, "model_type": family.model_type}))
    dims = read_config(tmp_path).dims
    assert (dims.head_dim, dims.num_kv_heads) == (256 if family.delta else 128, config.num_key_value_heads)
    assert dims.rotated == (64 if family.delta else 128)
    assert (dims.max_positions, dims.rms_norm_eps) == (config.max_position_embeddings, config.rms_norm_eps)
    assert dims.rope_theta == config.rope_parameters["rope_theta"]
    assert {name: getattr(dims, name) for name in family.switches} == family.switches


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (QWEN3_5, {"attn_output_gate": False}, "attn_output_gate is false, which is not implemented; only true is"),
        (QWEN3_5, {"layer_types": ["sliding_attention"] * 3}, "is 'sliding_attention', which is not implemented"),
        (QWEN3_5, {"linear_num_value_heads": 3}, "delta: value_heads 3 is not a multiple of key_heads 2"),
        (QWEN3_5, {"linear_key_head_dim": 24}, "linear_key_head_dim is 24, it must be a multiple of 16"),
        (QWEN3_5, {"partial_rotary_factor": 0.19}, "rotates 3 of 16 elements, no even number"),
        (QWEN3_5, {"rope_parameters": {"partial_rotary_factor": 0.25}}, "is 0.25, but 0.5 in the file"),
        (QWEN3_5, {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}, "layers are quantised"),
        (QWEN3_5, {"hc_count": 4}, "hc_count is 4, which is not implemented"),
        (QWEN3_MOE, {"mlp_only_layers": [1]}, "mlp_only_layers is [1], which is not implemented; only [] is"),
        (QWEN3_MOE, {"num_experts_per_tok": 9}, "experts: per_token 9 is more than the count 8"),
        (QWEN3_MOE, {"shared_expert_intermediate_size": 8}, "size is 8, which is not implemented"),
        (QWEN3_MOE, {"num_experts": 9}, "lacks model.layers.0.mlp.experts.8.gate_proj.weight"),
        (LLAMA, {"qkv_bias": True}, "qkv_bias is true, which is not implemented; only false is"),
        (LLAMA, {"rope_interleaved": True}, "rope_interleaved is true, which is not implemented; only false is"),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}, "use_sliding_window is"),
        (MISTRAL, {"sliding_window": 4096}, "sliding_window is 4096: layers with 'sliding_attention' are not"),
        (MISTRAL, {"sliding_window": None}, "sliding_window is left out, which means a window: layers with"),
        (LLAMA, {"head_dim": None, "num_attention_heads": 3}, "hidden_size 32 is not a multiple of num_attention"),
        (LLAMA, {"head_dim": None, "num_attention_heads": 4}, "head_dim is 8, it must be a multiple of 16"),
    ],
)  # fmt: skip
def test_another_arithmetic_is_refused(family: Family, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    one_head = {"num_key_value_heads": 1} if family is LLAMA else {}
    assert message in refusal(make_target(tmp_path, family=family, config={**one_head, **changes}))


def test_tokenizer_beside_the_checkpoint(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", tokenizer=False)
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        find_tokenizer(target)
    make_tokenizer(tmp_path / "tokenizer", 96)
    assert find_tokenizer(target) == tmp_path / "tokenizer"
    make_tokenizer(target, 96)
    assert find_tokenizer(target) == target


def test_tokenizers_that_cannot_be_used(tmp_path: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(CheckpointError, match=message) as caught:
            open_tokenizer(find_tokenizer(tmp_path), tmp_path, 96)
        assert str(caught.value).isprintable()

    make_tokenizer(tmp_path, 97)
    refused("has token 96, the target's vocab_size is 96; fetch the tokenizer again, that of the target")
    make_tokenizer(tmp_path, 96)
    edit_json(tmp_path / "tokenizer_config.json", extra_special_tokens=["<new>"])  # it gets the next id
    refused("has token 96")
    for changes in ({"model": None}, {"added_tokens": 5}, {"added_tokens": [{"id": "7", "content": "x"}]}):
        make_tokenizer(tmp_path, 96)
        edit_json(tmp_path / "tokenizer.json", **changes)
        refused("no usable tokenizer")
    for text in ("[]", "{", '{"added_tokens": ' + "[" * 99_999, '{"x": Infinity}'):
        (tmp_path / "tokenizer.json").write_text(text)
        refused("no usable tokenizer .*; fetch the tokenizer again, that of the target")
    make_tokenizer(tmp_path, 96)
    (tmp_path / "tokenizer_config.json").unlink()
    refused("has no tokenizer_config.json")
