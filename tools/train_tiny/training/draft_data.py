"""The drafter's training data: the target's own continuations and corpus text, with the target's states per token.

Three kinds of sequence: greedy continuations (met at temperature 0), continuations at temperature 1 (met there), and
training conversations as they are (contexts that are right where the target is not).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.multiprocessing.spawn import spawn

from tools.train_tiny.generation import continue_batch
from tools.train_tiny.model import Target, load_target
from tools.train_tiny.settings import DraftDataSettings
from tools.train_tiny.tokenizer import TokenSet

GREEDY, SAMPLED, CORPUS = range(3)
Sequence = tuple[list[int], int, int]
"""Token ids, number of prompt tokens, kind."""


@dataclass(frozen=True)
class DraftSet:
    """Sequences end to end.

    ids [total]; starts, lengths, prompts, kinds [sequences]; taps [total, K*H] and final [total, H] float16, the tapped
    layers' outputs and the final normed state at each token, mapped from disk.
    """

    ids: NDArray[Any]
    starts: NDArray[Any]
    lengths: NDArray[Any]
    prompts: NDArray[Any]
    kinds: NDArray[Any]
    taps: NDArray[Any]
    final: NDArray[Any]

    @staticmethod
    def load(stem: Path) -> DraftSet:
        with np.load(f"{stem}.npz") as arrays:
            fields = {name: arrays[name] for name in arrays.files}
        states = {name: np.load(f"{stem}.{name}.npy", mmap_mode="r") for name in ("taps", "final")}
        return DraftSet(**fields, **states)


def stem_of(folder: Path, rank: int) -> Path:
    return folder / f"draft-{rank}"


def continuations(target: Target, tokens: TokenSet, own: NDArray[Any], settings: DraftDataSettings) -> list[Sequence]:
    """Continue prompts of the conversations `own`, batches of like length, until the time is up; no prompt twice."""
    rng = np.random.default_rng(settings.seed)
    generator = torch.Generator().manual_seed(settings.seed)
    by_length = own[np.argsort(tokens.prompts[own], kind="stable")]
    groups = np.array_split(by_length, max(1, len(by_length) // settings.batch))
    deadline, sequences = time.time() + settings.seconds, []
    for index in rng.permutation(len(groups)):
        if time.time() > deadline:
            break
        group = groups[index]
        prompts = [tokens.conversation(i)[: int(tokens.prompts[i])].tolist() for i in group]
        sampled = torch.arange(len(group)) % settings.sampled_one_in == 0
        limit = settings.max_tokens - max(map(len, prompts))
        for prompt, answer, hot in zip(
            prompts, continue_batch(target, prompts, sampled, limit, generator), sampled.tolist(), strict=True
        ):
            sequences.append((prompt + answer, len(prompt), SAMPLED if hot else GREEDY))
    return sequences


@torch.no_grad()
def write_states(target: Target, sequences: list[Sequence], taps: tuple[int, ...], stem: Path) -> None:
    """One forward pass over every sequence; writes the files that DraftSet.load reads."""
    sequences = sorted(sequences, key=lambda s: len(s[0]))
    lengths = np.array([len(ids) for ids, _, _ in sequences])
    starts, total, hidden = np.cumsum(lengths) - lengths, int(lengths.sum()), target.cfg["hidden_size"]
    stores = {
        name: np.lib.format.open_memmap(f"{stem}.{name}.npy", "w+", np.float16, (total, width))
        for name, width in (("taps", hidden * len(taps)), ("final", hidden))
    }
    for begin in range(0, len(sequences), 16):
        chunk = [ids for ids, _, _ in sequences[begin : begin + 16]]
        width = max(map(len, chunk))
        padded = torch.tensor([ids + [0] * (width - len(ids)) for ids in chunk])
        final, tapped = target(padded, taps=taps)
        for row, ids in enumerate(chunk):
            place = slice(int(starts[begin + row]), int(starts[begin + row]) + len(ids))
            stores["taps"][place] = tapped[row, : len(ids)].numpy()
            stores["final"][place] = final[row, : len(ids)].numpy()
    for store in stores.values():
        store.flush()
    np.savez(
        f"{stem}.npz",
        ids=np.array([token for ids, _, _ in sequences for token in ids], np.uint16),
        starts=starts,
        lengths=lengths,
        prompts=np.array([prompt for _, prompt, _ in sequences]),
        kinds=np.array([kind for _, _, kind in sequences], np.int8),
    )


def _work(rank: int, workers: int, files: dict[str, Path], settings: DraftDataSettings, taps: tuple[int, ...]) -> None:
    """One process: its share of the conversations, its own files."""
    torch.set_num_threads(1)
    target, tokens = load_target(files["target"]), TokenSet.load(files["train"])
    order = np.random.default_rng(settings.seed).permutation(len(tokens.lengths))[rank::workers]
    reserve = len(order) // 5
    sequences = continuations(target, tokens, order[reserve:], settings)
    extra = order[: min(reserve, int(settings.corpus_share * len(sequences)))]
    sequences += [(tokens.conversation(i).tolist(), int(tokens.prompts[i]), CORPUS) for i in extra]
    write_states(target, sequences, taps, stem_of(files["out"], rank))
    counts = {name: sum(s[2] == kind for s in sequences) for kind, name in enumerate(("greedy", "sampled", "corpus"))}
    print({"rank": rank, **counts, "tokens": sum(len(s[0]) for s in sequences)}, flush=True)


def build(files: dict[str, Path], workers: int, settings: DraftDataSettings, taps: tuple[int, ...]) -> None:
    """files: target, train (read); out, the folder that gets draft-RANK.* (written)."""
    spawn(_work, (workers, files, settings, taps), nprocs=workers)
