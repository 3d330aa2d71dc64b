"""The tokens that a drafter drafts: a shortlist of the target's vocabulary.

The head is most of a small drafter's pass: of SmolLM2's 49,152 tokens 12,288 make 95 % of its answers, and drafts from
them are accepted as far as drafts from all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ddtree_trt.drafters.tapped import TO_TARGET

from .shards import Shard, shard_paths

FIELD = "draft_vocab_size"


def count_tokens(data: Path, vocabulary: int) -> Tensor:
    """How often each token [V] stands in the answers of a folder's shards. Raises SystemExit where there are none."""
    paths = shard_paths(data)
    if not paths:
        raise SystemExit(f"{data} has no shards to count tokens in: run the stage data first")
    counts = np.zeros(vocabulary, np.int64)
    for path in paths:
        for record in Shard(path).records():
            np.add.at(counts, np.asarray(record.ids[record.prompt :]), 1)
    return torch.from_numpy(counts)


def most_frequent(counts: Tensor, size: int, always: Iterable[int] = ()) -> Tensor:
    """The `size` most frequent tokens, rising; of equally frequent ones the lower ids, which byte-pair encodings learnt
    earlier. Those of `always` are among them. Raises SystemExit where the vocabulary has fewer."""
    if not 0 < size <= len(counts):
        raise SystemExit(f"--size must be 1 to {len(counts)}, the target's vocabulary, not {size}")
    order = torch.argsort(counts, descending=True, stable=True)
    wanted = torch.tensor(sorted(set(always)), dtype=torch.int64)
    others = order[~torch.isin(order, wanted)][: max(size - len(wanted), 0)]
    return torch.cat([wanted, others]).sort().values


def read_shortlist(folder: Path) -> Tensor | None:
    """The token of each draft id [V'] of a drafter's folder; None where it drafts from the whole vocabulary."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
        if TO_TARGET not in names:
            return None
        offsets = file.get_tensor(TO_TARGET).to(torch.int64)
    return offsets + torch.arange(len(offsets))


def write_shortlist(folder: Path, ids: Tensor) -> None:
    """Have the drafter in `folder` draft from the tokens `ids` [V'], rising: `d2t` and the size in its config.json.
    Each file is replaced whole."""
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    tensors[TO_TARGET] = (ids - torch.arange(len(ids))).to(torch.int32)
    partial = weights.with_suffix(".partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    os.replace(partial, weights)
    config = folder / "config.json"
    entries = {**json.loads(config.read_text()), FIELD: len(ids)}
    partial = config.with_suffix(".partial")
    partial.write_text(json.dumps(entries, indent=2) + "\n")
    os.replace(partial, config)
