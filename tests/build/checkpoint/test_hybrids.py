"""Hybrids: what is read of their configurations and tensors, and what is refused by its name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import edit_json, make_target, refusal, write_weights
from safetensors.numpy import load_file

from ddtree_trt.build import sources
from ddtree_trt.build.checkpoint.config import read_config
from ddtree_trt.build.checkpoint.reader import load_checkpoint
from ddtree_trt.build.compile import BuildRequest, dry_run, resolve
from ddtree_trt.build.pair import check_pair
from ddtree_trt.drafters.registry import checkpoint_shapes
from ddtree_trt.errors import CheckpointError, UsageError
from ddtree_trt.models.families import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, Family

FIXTURES = Path(__file__).parents[2] / "fixtures"


def published(path: Path, kind: str, name: str) -> Path:
    config = json.loads((FIXTURES / kind / f"{name}.json").read_text())
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config.get("config", config)))
    return path


# Preset → configurations of its target and drafter, published ones or one like it with what differs, and what follows:
# layers with attention, megabytes of a slot's states, weights.
_OWN: dict[str, Any] = {"layer_types": None, "num_attention_heads": 16, "num_hidden_layers": 32}
_4B = {"hidden_size": 2560, "intermediate_size": 9216}
_9B = {"hidden_size": 4096, "intermediate_size": 12288}
_NEXT = {"num_hidden_layers": 48, "num_experts": 512, "num_experts_per_tok": 10}
_WORDS = {"vocab_size": 151936, "eos_token_id": 151645, "mask_token_id": 151669}
_27B, _35B, _DENSE = "qwen3.8-27b", "qwen3.5-35b-a3b", {**_OWN, "linear_num_value_heads": 32}
PAIRS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any], int, float, float]] = {
    "qwen3.5-4b": (_27B, {**_DENSE, **_4B, "tie_word_embeddings": True}, "zlab-qwen3.5-9b-dflash", _4B, 8, 52.7, 4.2e9),
    "qwen3.5-9b": (_27B, {**_DENSE, **_9B}, "zlab-qwen3.5-9b-dflash", {}, 8, 52.7, 8.95e9),
    "qwen3.8-27b": (_27B, {}, "zlab-qwen3.8-27b-dflash2", {}, 16, 156.9, 26.9e9),
    # The drafter counts one layer more than the target has.
    "qwen3.6-35b-a3b": (_35B, {}, "zlab-qwen3.6-35b-a3b-dflash", {}, 10, 65.9, 34.7e9),
    "qwen3-coder-next": (
        *(_35B, {**_NEXT, **_WORDS, "layer_types": None}, "zlab-qwen3.6-35b-a3b-dflash"),
        *({**_WORDS, "num_target_layers": 48}, 12, 79.0, 79.7e9),
    ),
}


def _changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """With these entries, wherever in it they are; None removes one."""
    found = {name: _changed(value, changes) if isinstance(value, dict) else value for name, value in config.items()}
    return {name: changes.get(name, value) for name, value in found.items() if changes.get(name, value) is not None}


@pytest.mark.parametrize("name", PAIRS)
def test_what_a_presets_configurations_say(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, changes, drafter, others, layers, state_mb, values = PAIRS[name]
    folders = published(tmp_path / "t", "targets", target), published(tmp_path / "d", "drafters", drafter)
    for folder, changed in zip(folders, (changes, others), strict=True):
        config = _changed(json.loads((folder / "config.json").read_text()), changed)
        if name == "qwen3-coder-next" and "text_config" in config:
            config = {**config["text_config"], "model_type": "qwen3_next", "architectures": [QWEN3_NEXT.architecture]}
        (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(sources, "_download", lambda source, *_: folders["z-lab/" in source.repository])
    dims, lines = read_config(folders[0]).dims, list[str]()
    assert dims.delta is not None and (dims.delta.key_heads, dims.delta.interleaved) == (16, "next" in name)
    assert (len(dims.attention_layers), round(dims.state_bytes / 1e6, 1)) == (layers, state_mb)
    assert (dims.rotated, dims.rope_theta) == (64, 1e7)
    tied = read_config(folders[0]).tied
    assert sum(map(np.prod, checkpoint_shapes(dims, tied=tied).values())) == pytest.approx(values, rel=5e-3)
    for backend in ("onnxruntime", "torch", "tensorrt-rtx"):
        request = BuildRequest(target=name, backend=backend, max_seq_len=1024)
        if backend == "tensorrt-rtx" and dims.experts:
            with pytest.raises(UsageError, match="mixtures of experts are not implemented for TensorRT"):
                resolve(request, lines.append, dry_run=True)
            continue
        found = dry_run(request)
        assert found.memory.kv_bytes_per_slot > 2 * dims.state_bytes and found.memory.weights_bytes > 1.9 * values
    assert resolve(BuildRequest(target=name, backend="torch"), lines.append, dry_run=True).pair.target.dims == dims
    assert any("its vision tower is left out" in line for line in lines) == (name != "qwen3-coder-next")
    with pytest.raises(UsageError, match="not implemented in int8; use --precision fp32"):
        resolve(BuildRequest(target=name, backend="onnxruntime", precision="int8"), lines.append, dry_run=True)


@pytest.mark.parametrize("family", [QWEN3_5, QWEN3_5_MOE], ids=lambda f: f.model_type)
def test_the_text_part_of_a_vision_language_model(family: Family, tmp_path: Path) -> None:
    """The same tensors under other names, beside those of the tower and of layers that predict several tokens."""
    path = make_target(tmp_path, family=family, tied=False)
    plain = load_checkpoint(path)
    values = {name: plain.tensor(name) for name in plain.tensors}
    whole = family.model_type.removesuffix("_text")
    text = json.loads((path / "config.json").read_text())
    text.pop("architectures")
    outer = {
        "architectures": [family.with_vision],
        "model_type": whole,
        "text_config": text,
        "vision_config": {"depth": 2},
    }
    (path / "config.json").write_text(json.dumps({**outer, "tie_word_embeddings": False}))
    stored = load_file(path / "model.safetensors")
    weights = {name.replace("model.", "model.language_model.", 1): value for name, value in stored.items()}
    weights |= {"model.visual.blocks.0.w": np.ones(2, np.float32), "mtp.fc.weight": np.ones(2, np.float32)}
    write_weights(path, weights, dtype="fp32", shards=1)
    found = load_checkpoint(path)
    assert found.dims == plain.dims and found.skipped == "its vision tower" and not plain.skipped
    for name, expected in values.items():
        np.testing.assert_array_equal(found.tensor(name), expected)
    edit_json(path / "config.json", tie_word_embeddings=True)
    assert "tie_word_embeddings is false, but true in the file: which is it?" in refusal(path)
    edit_json(path / "config.json", tie_word_embeddings=False, architectures=["Qwen3VLForConditionalGeneration"])
    assert f"of vision-language models {family.with_vision} is" in refusal(path)


def test_experts_that_are_stored_apart(tmp_path: Path) -> None:
    path = make_target(tmp_path, family=QWEN3_5_MOE)
    stacked = load_checkpoint(path)
    weights = load_file(path / "model.safetensors")
    for name in [name for name in weights if ".experts." in name]:
        both = weights.pop(name)
        prefix, _, kind = name.rpartition(".")
        for e, values in enumerate(both):
            parts = (
                dict(zip(("gate", "up"), np.split(values, 2), strict=True)) if "gate_up" in kind else {"down": values}
            )
            weights |= {f"{prefix}.{e}.{part}_proj.weight": np.ascontiguousarray(v) for part, v in parts.items()}
    write_weights(path, weights, dtype="fp32", shards=1)
    apart = load_checkpoint(path)
    assert apart.dims.experts is not None and not apart.dims.experts.stacked
    assert len(apart.tensors) > len(stacked.tensors)


def test_a_hybrid_is_no_drafter(tmp_path: Path) -> None:
    target = load_checkpoint(make_target(tmp_path, family=QWEN3_5))
    with pytest.raises(CheckpointError, match="has gated delta-net layers, which are not implemented in drafters"):
        check_pair(target, target)
