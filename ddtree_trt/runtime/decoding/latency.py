"""The latency profile: times of drafts and verifications on this machine, by tree tokens and context length.

Stored in the engine directory as `profile.json` with the machine's fingerprint. It is not part of the build: a profile
of another machine, engine or thread count is detected and measured again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact.files import PROFILE
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.device.cpu import read_cpu
from ddtree_trt.errors import ArtifactError
from ddtree_trt.files import write_atomically
from ddtree_trt.reading import Between, Source, parse_json, read_json, read_record
from ddtree_trt.runtime.engines.base import DraftRequest, DrawnFrom, Engine, VerifyRequest
from ddtree_trt.runtime.tree import TokenTree, chain_parents

PROFILE_VERSION = 2
TREE_TOKENS = (1, 2, 3, 5, 9, 17, 33, 65, 129, 257, 513, 1025)
CONTEXTS = (64, 512, 2048, 8192, 32768)
COSTLY = 8.0  # trees are measured until one costs this many single-token passes: larger ones cannot pay
REPETITIONS = (2, 10)  # least and most of every size
IN_A_ROW = 4  # rounds of one size in each repetition
LONG_PASS_S = 0.02  # a pass of this time or more is timed once in each repetition
DRAFT_LENGTHS = (1, 5)  # lengths of the timed drafts of an autoregressive drafter
DRAFT_ROWS = 4  # new context rows of the measured drafter pass, about as many as a round commits
_MAX_BYTES = 1 << 20  # of the file; a real one has some kilobytes
_log = logging.getLogger(__name__)

# Accepted ranges of stored costs.
_Seconds = Annotated[float, Between(1e-9, 3600)]
_SecondsOrZero = Annotated[float, Between(0, 3600)]
_Tokens = Annotated[int, Between(1, 1 << 31)]


@dataclass(frozen=True)
class ContextCost:
    """Costs at one context length."""

    context: _Tokens
    draft_s: _SecondsOrZero  # a draft, without the cost per drafted token
    tree_tokens: tuple[_Tokens, ...]  # T, rising from 1
    verify_s: tuple[_Seconds, ...]  # one per T
    draft_token_s: _SecondsOrZero = 0.0  # each drafted token, where the drafter drafts token by token

    def verify_curve(self, largest: int) -> NDArray[np.float64]:
        """Seconds to verify a tree of n = 0 … `largest` draft nodes, float64 [largest + 1].

        Monotone, and convex from n = 1 on; a single token takes another kernel and is kept as measured. Beyond the
        last measured size the curve continues with its last slope.
        """
        sizes, costs = np.array(self.tree_tokens, float), np.array(self.verify_s)
        wanted = np.arange(1, largest + 2, dtype=float)
        if len(sizes) == 1:
            return costs[0] * wanted
        curve = convex_fit(sizes[1:], costs[1:]) if len(sizes) > 2 else costs[1:]
        slope = (curve[-1] - curve[-2]) / (sizes[-1] - sizes[-2]) if len(curve) > 1 else costs[-1] / sizes[-1]
        result = np.interp(wanted, sizes[1:], curve) + np.maximum(wanted - sizes[-1], 0) * slope
        result[0] = costs[0]
        return np.maximum(result, costs[0])


@dataclass(frozen=True)
class LatencyProfile:
    fingerprint: str
    machine: str
    contexts: tuple[ContextCost, ...]  # rising context length
    version: int = PROFILE_VERSION

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> LatencyProfile:
        """The profile of `to_json`. Raises ArtifactError, which names the field, for any other text or version."""
        source = _source("the profile")
        return _read(parse_json(text, source), source)


def _source(where: str) -> Source:
    return Source(where, ArtifactError, "latencies are measured again")


def _read(data: object, source: Source) -> LatencyProfile:
    if isinstance(data, dict) and data.get("version") != PROFILE_VERSION:
        raise source.fault(f"it is not of version {PROFILE_VERSION}, the one of this ddtree-trt")
    profile = read_record(LatencyProfile, data, source)
    for number, cost in enumerate(profile.contexts):
        if len(cost.tree_tokens) != len(cost.verify_s):
            raise source.fault(f"contexts[{number}] has not one verify_s for each of its tree_tokens")
        if cost.tree_tokens[:1] != (1,) or not _rising(cost.tree_tokens):
            raise source.fault(f"contexts[{number}].tree_tokens must rise from 1")
    if not profile.contexts or not _rising(tuple(cost.context for cost in profile.contexts)):
        raise source.fault("contexts must hold costs of rising context lengths")
    return profile


def _rising(numbers: tuple[int, ...]) -> bool:
    return all(a < b for a, b in pairwise(numbers))


def convex_fit(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """The closest non-decreasing convex curve through points x [n] rising, y [n], found by pooling slopes that fall
    (pool adjacent violators, each weighted by its width) and re-centring the result on the points."""
    slopes = np.maximum(np.diff(y) / np.diff(x), 0)
    pools: list[tuple[float, float, int]] = []  # slope, width, points
    for slope, width in zip(slopes.tolist(), np.diff(x).tolist(), strict=True):
        pool = (slope, width, 1)
        while pools and pools[-1][0] > pool[0]:
            last = pools.pop()
            total = last[1] + pool[1]
            pool = ((last[0] * last[1] + pool[0] * pool[1]) / total, total, last[2] + pool[2])
        pools.append(pool)
    fitted = np.repeat([p[0] for p in pools], [p[2] for p in pools])
    curve = np.concatenate(([0.0], np.cumsum(fitted * np.diff(x))))
    return np.asarray(curve + np.median(y - curve))


def fingerprint(manifest: Manifest, threads: int) -> str:
    """A hash of what a profile depends on: the machine, the engine's graphs, the runtime and its threads."""
    graphs = {name: entry.sha256 for name, entry in manifest.files.items()}
    parts = [str(read_cpu()), manifest.backend, manifest.toolchain, graphs, threads]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def load_or_measure(directory: Path, engine: Engine) -> LatencyProfile:
    """The engine's profile for this machine: the stored one if its fingerprint matches, else a fresh one, which is
    stored.

    Measuring takes some seconds, uses slot 0 and empties it. A stored profile that cannot be read is logged as a
    warning.
    """
    path = directory / PROFILE
    if os.path.lexists(path):
        try:
            source = _source(str(path))
            stored = _read(read_json(path, source, max_bytes=_MAX_BYTES), source)
            if stored.fingerprint == fingerprint(engine.manifest, engine.threads):
                return stored
        except ArtifactError as error:
            _log.warning("%s", error)
    return measure_and_store(directory, engine)


def measure_and_store(directory: Path, engine: Engine, progress: Progress = no_progress) -> LatencyProfile:
    """A fresh profile, stored in the engine directory; where it cannot be written, a warning is logged."""
    profile = measure(engine, progress=progress)
    try:
        write_atomically(directory / PROFILE, profile.to_json())
    except OSError as error:
        _log.warning(
            "%s cannot be written (%s): latencies are measured at every start; let a user who may write there run: "
            "ddtree-trt profile %s",
            *(directory / PROFILE, error.strerror or error, directory),
        )
    return profile


def measure(engine: Engine, *, seconds: float = 6.0, progress: Progress = no_progress) -> LatencyProfile:
    """Time drafts and verifications on slot 0, which must be free, for about `seconds`, shared by the contexts.

    Sizes are interleaved, so that a slow moment of the machine affects all of them, and the fastest time is kept: other
    work on the machine only adds to times. Every size is timed REPETITIONS[0] times, however long that takes.
    """
    limits = engine.manifest.limits
    contexts = [c for c in CONTEXTS if c <= limits.max_seq_len // 2] or [max(1, limits.max_seq_len // 2)]
    costs = []
    try:
        for i, context in enumerate(contexts):
            progress("measuring latencies", i, len(contexts))
            _fill(engine, context)
            share = seconds / len(contexts)
            costs.append(_measure_context(engine, context, share))
    finally:
        engine.truncate(0, 0)
    return LatencyProfile(fingerprint(engine.manifest, engine.threads), str(read_cpu()), tuple(costs))


def _fill(engine: Engine, context: int) -> None:
    limits, vocab = engine.manifest.limits, engine.manifest.target_dims.vocab_size
    tokens = np.random.default_rng(0).integers(0, vocab, context)
    # The last row anew: a drafter may have made its own with the token that rounds put behind it.
    engine.truncate(0, max(0, engine.length(0) - 1))
    while (start := engine.length(0)) < context:
        engine.prefill(0, tokens[start : start + limits.prefill_chunk], rows="none", taps=True)


def _measure_context(engine: Engine, context: int, seconds: float) -> ContextCost:
    deadline = time.perf_counter() + seconds
    verify: dict[int, float] = {}
    for t in _tree_tokens(engine):
        verify[t] = _rounds(engine, context, t)[1]
        if verify[t] > COSTLY * verify[1]:
            break
    # The first draft after a prefill, above, also processed the prompt's states; drafts of rounds do not.
    drafts = dict.fromkeys((1,) if engine.manifest.drafting.at_once else DRAFT_LENGTHS, float("inf"))
    for repetition in range(REPETITIONS[1]):
        for length in drafts:
            for t in verify:
                draft_s, verify_s = _rounds(engine, context, t, length)
                drafts[length], verify[t] = min(drafts[length], draft_s), min(verify[t], verify_s)
        if repetition + 1 >= REPETITIONS[0] and time.perf_counter() > deadline:
            break
    token_s = max(0.0, (drafts[max(drafts)] - drafts[1]) / max(1, max(drafts) - 1))
    return ContextCost(context, max(0.0, drafts[1] - token_s), tuple(verify), tuple(verify.values()), token_s)


def _tree_tokens(engine: Engine) -> list[int]:
    """Sizes to measure: TREE_TOKENS, or where an engine pads its passes the sizes it pads them to."""
    largest = 1 + engine.manifest.limits.max_tree_budget
    sizes = [t for t in TREE_TOKENS if t <= largest]
    if engine.buckets is None:
        return sizes
    return sorted({next((b for b in engine.buckets if b >= t), t) for t in sizes})


def _rounds(engine: Engine, context: int, tokens: int, length: int = 1) -> tuple[float, float]:
    """(draft, verify) seconds, the fastest of a few successive rounds: the first ones run with the caches and clock
    that another tree size left. That hardly affects long passes, which are timed once."""
    draft_s, verify_s = _round(engine, context, tokens, length)
    for _ in range(IN_A_ROW - 1):
        if verify_s > LONG_PASS_S:
            break
        draft, verify = _round(engine, context, tokens, length)
        draft_s, verify_s = min(draft_s, draft), min(verify_s, verify)
    return draft_s, verify_s


def _round(engine: Engine, context: int, tokens: int, length: int) -> tuple[float, float]:
    """(draft, verify) seconds of one round in the order of decoding, since earlier work decides the contents of the
    processor's caches: a single token follows a single token, a tree its draft."""
    _verify(engine, tokens)
    if tokens == 1:
        return float("inf"), _timed(_verify, engine, 1)
    rows = min(DRAFT_ROWS, tokens)
    engine.commit(0, np.arange(rows, dtype=np.int32), taps=True)
    draft_s = _timed(_draft, engine, length)
    verify_s = _timed(_verify, engine, tokens)
    engine.truncate(0, context)
    return draft_s, verify_s


def _verify(engine: Engine, tokens: int) -> None:
    depths = np.arange(tokens, dtype=np.int32)
    tree = TokenTree(np.ones(tokens, np.int64), chain_parents(tokens), np.minimum(depths, 16))
    engine.verify([VerifyRequest(0, tree)])


def _draft(engine: Engine, length: int) -> None:
    def most_probable(log_probs: NDArray[np.float32], token_ids: NDArray[np.int32], depth: int) -> DrawnFrom:
        return DrawnFrom(int(token_ids[0]), token_ids[:1], np.ones(1))

    engine.draft([DraftRequest(0, 1, 16, length, most_probable)])


def _timed(work: Callable[..., None], *args: object) -> float:
    start = time.perf_counter()
    work(*args)
    return time.perf_counter() - start
