"""A random checkpoint of a known shape, built into an engine: for round times where no trained weights are at hand.

Times do not depend on the weights, as long as the trees have a usual shape. So the embedding is scaled until the logits
are about as peaked as a trained drafter's. No draft of a random pair is ever accepted, so such a run forces acceptance.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact.manifest import Limits
from ddtree_trt.artifact.progress import Progress
from ddtree_trt.bench.settings import BenchSettings
from ddtree_trt.build.compile import BuildRequest, PrecisionChoice, compile_engine
from ddtree_trt.drafters.dflash import dims as dflash
from ddtree_trt.drafters.dflash.dims import DFlashDims
from ddtree_trt.drafters.registry import checkpoint_shapes
from ddtree_trt.errors import UsageError
from ddtree_trt.models.decoder import BIAS, BODY, EMBEDDING, FINAL_NORM, HEAD, TransformerDims
from ddtree_trt.models.families import QWEN3

LOGIT_STD = 10.0
_SHARD_BYTES = 512 << 20
_STOP_TOKEN = 0


@dataclass(frozen=True)
class PairShape:
    """The dimensions of a target and its drafter."""

    target: TransformerDims
    draft_layers: int
    tied: bool
    block_size: int = 16

    @property
    def drafter(self) -> DFlashDims:
        layers = self.target.num_layers
        return DFlashDims(
            **{**vars(self.target), "num_layers": self.draft_layers},
            block_size=self.block_size,
            mask_token_id=self.target.vocab_size - 1,
            tap_layers=dflash.default_tap_layers(layers, self.draft_layers),
            num_target_layers=layers,
        )


def _qwen3(hidden: int, layers: int, heads: int, inner: int) -> TransformerDims:
    return TransformerDims(
        vocab_size=151936,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=inner,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_positions=40960,
    )


_MICRO = TransformerDims(512, 64, 6, 4, 2, 16, 128, 1e-6, 1e4, 2048)

SHAPES: Mapping[str, PairShape] = {
    "micro": PairShape(_MICRO, 2, True, 8),  # seconds: to see what the command does
    "qwen3-0.6b": PairShape(_qwen3(1024, 28, 16, 3072), 5, True),
    "qwen3-1.7b": PairShape(_qwen3(2048, 28, 16, 6144), 5, True),
    "qwen3-4b": PairShape(_qwen3(2560, 36, 32, 9728), 5, True),
    "qwen3-8b": PairShape(_qwen3(4096, 36, 32, 12288), 5, False),
}


def find_shape(name: str) -> PairShape:
    """The shape of that name. Raises UsageError listing the known ones."""
    if name not in SHAPES:
        raise UsageError(f"unknown shape {name!r}; known are {', '.join(SHAPES)}")
    return SHAPES[name]


@contextmanager
def random_engine(settings: BenchSettings, progress: Progress) -> Iterator[Path]:
    """Write the checkpoints of shape `settings.engine`, build their engine, and remove it all at the end.

    Yields the folder that holds `target`, `drafter` and `engine`.
    """
    shape = find_shape(settings.engine)
    with tempfile.TemporaryDirectory(prefix="ddtree-random-") as folder:
        pair = write_pair(Path(folder), shape, settings.seed, progress)
        limits = random_limits(settings, shape)
        request = BuildRequest(
            target=f"random-{settings.engine}",
            checkpoint=pair / "target",
            drafter=pair / "drafter",
            precision=cast("PrecisionChoice", settings.precision),
            max_seq_len=limits.max_seq_len,
            max_tree_budget=limits.max_tree_budget,
            max_batch=limits.max_batch,
            output=pair / "engine",
        )
        compile_engine(request, progress)
        yield pair


def random_limits(settings: BenchSettings, shape: PairShape) -> Limits:
    """Limits just large enough for the run's prompts, outputs and trees."""
    largest = max([*(b for b in settings.budgets if b != "auto"), shape.block_size])
    return Limits(settings.prompt_tokens + settings.max_tokens, max_batch=1, max_tree_budget=largest)


def write_pair(folder: Path, shape: PairShape, seed: int, progress: Progress) -> Path:
    """Write `target` and `drafter` below a folder, in Hugging Face format and float32; returns the folder."""
    target_config, drafter_config = hugging_face_configs(shape)
    parts = (("target", target_config, shape.target), ("drafter", drafter_config, shape.drafter))
    for name, config, dims in parts:
        directory = folder / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config, indent=1))
        shapes = checkpoint_shapes(dims, tied=shape.tied)
        _write_weights(directory, shapes, np.random.default_rng([seed, len(name)]), f"write random {name}", progress)
    write_tokenizer(folder / "target")
    return folder


def hugging_face_configs(shape: PairShape) -> tuple[dict[str, object], dict[str, object]]:
    """The contents of `config.json` of the target and of the drafter."""
    target, drafter = shape.target, shape.drafter
    common: dict[str, object] = {"tie_word_embeddings": shape.tied, "eos_token_id": _STOP_TOKEN}
    return (
        {**QWEN3.config_entries(target), **common, "architectures": [QWEN3.architecture]},
        {**QWEN3.config_entries(drafter), **common, **dflash.config_entries(drafter)},
    )


def _write_weights(
    directory: Path, shapes: Mapping[str, tuple[int, ...]], rng: np.random.Generator, stage: str, progress: Progress
) -> None:
    """Write safetensors files of about _SHARD_BYTES each and their index; only one file's tensors are in memory."""
    from safetensors.numpy import save_file

    total = sum(4 * int(np.prod(shape)) for shape in shapes.values())
    files: list[list[str]] = [[]]
    room = _SHARD_BYTES
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        if size > room and files[-1]:
            files.append([])
            room = _SHARD_BYTES
        files[-1].append(name)
        room -= size
    placed: dict[str, str] = {}
    done = 0
    for i, names in enumerate(files, 1):
        file = f"model-{i:05}-of-{len(files):05}.safetensors"
        weights = {name: _random(shapes[name], name, rng) for name in names}
        save_file(weights, directory / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(names, file)
        done += sum(w.nbytes for w in weights.values())
        progress(stage, done, total)
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _random(shape: tuple[int, ...], name: str, rng: np.random.Generator) -> NDArray[np.float32]:
    if name.removeprefix(BODY) == FINAL_NORM:
        # Random signs before the head: else a token's own embedding, still in the residual stream, would always win.
        return rng.choice(np.array([-1, 1], np.float32), shape)
    if len(shape) == 1:
        return np.full(shape, not name.endswith(BIAS), np.float32)  # any other norm, or a bias
    values = rng.standard_normal(shape, np.float32)
    values *= (LOGIT_STD if name in (EMBEDDING, HEAD) else 1.0) / np.sqrt(shape[-1])
    return values


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer with one word: prompts of a random pair are token ids, and nobody reads its text."""
    words = {"model": {"type": "WordLevel", "vocab": {"w": 0}, "unk_token": "w"}, "version": "1.0"}
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    tokenizer = {**words, **empty, "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w", "eos_token": "w"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
