"""Random checkpoints in Hugging Face format, small enough to build in milliseconds.

The scales are chosen so that a random network behaves like a network: attention that prefers some keys, a residual
stream in which the layers outweigh the embedding, logits with a standard deviation of about 3.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from ddtree_trt.build.checkpoint import reader
from ddtree_trt.build.checkpoint.config import ModelConfig, read_config
from ddtree_trt.build.checkpoint.reader import load_checkpoint
from ddtree_trt.drafters.dflash.dims import DFlashDims
from ddtree_trt.drafters.eagle3.dims import Eagle3Dims
from ddtree_trt.drafters.registry import checkpoint_shapes
from ddtree_trt.drafters.tapped import OWN_EMBEDDING, OWN_HEAD, TO_TARGET
from ddtree_trt.errors import CheckpointError
from ddtree_trt.models.decoder import BIAS, EMBEDDING, HEAD, Experts, TransformerDims
from ddtree_trt.models.delta import DeltaNet
from ddtree_trt.models.families import LLAMA, QWEN2, QWEN3, Family
from ddtree_trt.models.rope_scaling import RopeScaling
from tools import config_entries

# V, H, layers, Hq, Hkv, D, width of the MLP, epsilon, rotary base, positions.
TARGET_DIMS = TransformerDims(96, 32, 3, 4, 2, 16, 48, 1e-6, 10000.0, 256)
EXPERTS = Experts(count=8, per_token=3, normalised=True)  # of families that have any
DELTA = DeltaNet(key_heads=2, value_heads=4, key_dim=16, value_dim=32, taps=4, attention_layers=(2,))  # of hybrids
DRAFTER_EXTRA = {"block_size": 4, "mask_token_id": 95, "tap_layers": (0, 2), "num_target_layers": 3}
STOP_TOKEN = 1
SCALINGS = {  # of rotary embedding, at sizes that change every frequency of a small network differently
    "linear": RopeScaling("linear", 3.0),
    "llama3": RopeScaling("llama3", 8.0, 48, low_freq_factor=1.0, high_freq_factor=4.0),
    "yarn": RopeScaling("yarn", 4.0, 64, beta_fast=4.0, attention_factor=1.2),
}
BY_SWITCHES = {"llama": LLAMA, "qwen2": QWEN2}  # beside Qwen3's, one family for every set of switches
_LOGIT_STD = 3.0
_STORED: dict[str, Any] = {"fp32": "<f4", "fp16": "<f2", "bf16": ml_dtypes.bfloat16}


def family_fields(family: Family) -> dict[str, Any]:
    """Fields of TransformerDims that make TARGET_DIMS those of a family."""
    fields: dict[str, Any] = dict(family.switches)
    if family.experts:
        fields["experts"] = replace(EXPERTS, shared=24 if family.delta else 0, stacked=family.stacked)
    if family.delta:
        fields |= {"delta": replace(DELTA, interleaved=family.interleaved), "rotary_dim": 8}
    return fields


def dims_of(family: Family, **dims: Any) -> TransformerDims:
    """TARGET_DIMS in a family, with the fields that differ. Every third layer of a hybrid has attention, and the only
    one of a single layer."""
    found = TransformerDims(**{**vars(TARGET_DIMS), **family_fields(family), **dims})
    if found.delta is None or "delta" in dims:
        return found
    attention = tuple(range(2, found.num_layers, 3)) or (found.num_layers - 1,)
    return replace(found, delta=replace(found.delta, attention_layers=attention))


def make_target(
    path: Path,
    *,
    dtype: str = "fp32",
    shards: int = 1,
    tied: bool = True,
    seed: int = 0,
    tokenizer: bool = True,
    config: Mapping[str, Any] | None = None,
    family: Family = QWEN3,
    **dims: Any,
) -> Path:
    """Write a target (or, without a tokenizer, an autoregressive drafter) and return its directory.

    `dims` are fields of TransformerDims that differ from TARGET_DIMS; `config` overrides entries of config.json, where
    None removes one.
    """
    shape = dims_of(family, **dims)
    entries = {**_config(shape, family), "architectures": [family.architecture], "tie_word_embeddings": tied}
    write_config(path, entries, config)
    weights = random_weights(checkpoint_shapes(shape, tied=tied), seed)
    write_weights(path, weights, dtype=dtype, shards=shards)
    if tokenizer:
        make_tokenizer(path, shape.vocab_size)
    return path


def make_drafter(
    path: Path,
    *,
    dtype: str = "fp32",
    shards: int = 1,
    seed: int = 1,
    config: Mapping[str, Any] | None = None,
    family: Family = QWEN3,
    **dims: Any,
) -> Path:
    """Write a DFlash drafter and return its directory. `dims` are fields of DFlashDims; two layers by default."""
    shape = DFlashDims(**{**vars(TARGET_DIMS), **DRAFTER_EXTRA, "num_layers": 2, **family_fields(family), **dims})
    write_config(path, {**_config(shape, family), **config_entries.of_dflash(shape)}, config)
    weights = random_weights(checkpoint_shapes(shape, tied=False), seed)
    write_weights(path, weights, dtype=dtype, shards=shards)
    return path


def make_variant(path: Path, *, seed: int = 1, **dims: Any) -> DFlashDims:
    """Write a DFlash drafter of two layers with features that its config.json does not say; returns its dimensions.
    `reading_variant` has builds read these."""
    shape = DFlashDims(**{**vars(TARGET_DIMS), **DRAFTER_EXTRA, "num_layers": 2, **dims})
    write_config(path, {**_config(shape, QWEN3), **config_entries.of_dflash(shape)})
    weights = drafter_weights(shape, seed)
    for name in weights.keys() & {OWN_EMBEDDING, OWN_HEAD}:
        weights[name] *= _LOGIT_STD
    write_weights(path, weights, dtype="fp32", shards=1)
    return shape


@contextmanager
def reading_variant(path: Path, dims: DFlashDims) -> Iterator[None]:
    """Loading the drafter of `make_variant` in `path` gives it these dimensions, whatever its dialect would settle."""

    def read(directory: Path) -> ModelConfig:
        config = read_config(directory)
        if directory != path:
            return config
        return replace(config, dims=dims, dialect=replace(config.dialect, settle=lambda dims, _: dims))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "read_config", read)
        yield


def make_eagle(
    path: Path,
    *,
    seed: int = 1,
    config: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
    family: Family = LLAMA,
    **dims: Any,
) -> Path:
    """Write an EAGLE-3 drafter as SpecForge does, and return its directory. `dims` are fields of Eagle3Dims; the draft
    vocabulary has 60 of the target's tokens by default, and the taps follow from the target's layers. `names` are
    beginnings of tensor names to be written in place of ours."""
    shape = Eagle3Dims(
        **{**vars(TARGET_DIMS), "num_layers": 1, "draft_vocab_size": 60, **family_fields(family), **dims}
    )
    own: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": shape.head_size}
    own |= {name: True for name in ("norm_before_residual", "norm_output") if getattr(shape, name)}
    if shape.target_hidden_size:
        own["target_hidden_size"] = shape.target_hidden_size
    if shape.tap_layers:
        own["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(shape.tap_layers)}
    write_config(path, {**_config(shape, family), **own}, config)
    weights = drafter_weights(shape, seed)
    for old, new in (names or {"layers.0.": "midlayer."}).items():
        weights = {name.replace(old, new): values for name, values in weights.items()}
    write_weights(path, weights, dtype="fp32", shards=1)
    return path


def drafter_weights(dims: DFlashDims | Eagle3Dims, seed: int) -> dict[str, np.ndarray]:
    """Random weights; a draft vocabulary is a random part of the target's."""
    weights = random_weights(checkpoint_shapes(dims, tied=False), seed)
    if size := dims.draft_vocab_size:
        chosen = np.random.default_rng(seed).permutation(dims.vocab_size)[:size]
        weights[TO_TARGET] = np.sort(chosen) - np.arange(size)
    return weights


def make_pair(
    path: Path, *, dtype: str = "fp32", tied: bool = True, family: Family = QWEN3, **dims: Any
) -> tuple[Path, Path]:
    """A target and a DFlash drafter that fits it: the directories `target` and `drafter` below `path`."""
    target = make_target(path / "target", dtype=dtype, tied=tied, family=family, **dims)
    if family.delta:  # whose drafters are of another family
        family = QWEN3
        dims = {name: value for name, value in dims.items() if name not in ("delta", "experts", "rotary_dim")}
    shape = TransformerDims(**{**vars(TARGET_DIMS), **dims})
    last = shape.num_layers - 1
    extra = {"tap_layers": (0, last) if last else (0,), "mask_token_id": shape.vocab_size - 1}
    extra |= {"num_layers": 2, "num_target_layers": shape.num_layers}
    return target, make_drafter(path / "drafter", dtype=dtype, family=family, **{**dims, **extra})


def _config(dims: TransformerDims, family: Family) -> dict[str, Any]:
    return {**config_entries.of_family(family, dims), "eos_token_id": STOP_TOKEN}


def write_config(path: Path, entries: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> None:
    path.mkdir(parents=True, exist_ok=True)
    removed = {name for name, value in (overrides or {}).items() if value is None}
    merged = {**entries, **(overrides or {})}
    kept = {name: value for name, value in merged.items() if name not in removed}
    (path / "config.json").write_text(json.dumps(kept, indent=1))


def edit_json(path: Path, **changes: Any) -> None:
    """Set entries of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}, indent=1))


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Float32 weights by name, with the scales the module's docstring promises."""
    rng = np.random.default_rng(seed)
    weights, hybrid = {}, any("linear_attn" in name for name in shapes)
    for name, shape in shapes.items():
        values = rng.standard_normal(shape, np.float32)
        if name.endswith((BIAS, "dt_bias")):
            values *= 0.5
        elif name.endswith("A_log"):
            values -= 2  # states that last for some tokens, in some heads for many
        elif len(shape) == 1:
            # A norm; queries are stretched so that attention is not flat.
            values = (1.5 if "q_norm" in name else 1.0) + 0.1 * values
            values -= hybrid and "linear_attn" not in name  # a hybrid's norms are around 0
        else:
            values *= (_LOGIT_STD if name in (EMBEDDING, HEAD) else 1.0) / np.sqrt(shape[-1])
        weights[name] = values.astype(np.float32)
    return weights


def write_safetensors(path: Path, weights: Mapping[str, np.ndarray], dtype: str) -> None:
    """float32 values as fp32, fp16 or (rounded to nearest even) bf16; integers in 64 bits."""
    stored = {n: values.astype("<i8" if values.dtype.kind == "i" else _STORED[dtype]) for n, values in weights.items()}
    save_file(stored, path, {"format": "pt"})


def write_weights(path: Path, weights: Mapping[str, np.ndarray], *, dtype: str, shards: int) -> None:
    """One model.safetensors, or several files and the index that places every tensor."""
    if shards == 1:
        write_safetensors(path / "model.safetensors", weights, dtype)
        return
    placed: dict[str, str] = {}
    for i in range(shards):
        names = list(weights)[i::shards]
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        write_safetensors(path / file, {n: weights[n] for n in names}, dtype)
        placed |= dict.fromkeys(names, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def make_tokenizer(path: Path, vocab_size: int) -> None:
    """A word-level tokenizer whose words are t0, t1, …: enough for everything but real text."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0", "eos_token": f"t{STOP_TOKEN}"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def refusal(path: Path) -> str:
    """The message with which loading a checkpoint is refused, one line."""
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    message = str(caught.value)
    assert "\n" not in message
    return message
