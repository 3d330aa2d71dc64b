"""The latency profile: times of drafts and verifications on this machine, by tree tokens, context length and slots.

Contexts are measured with one slot. Where an engine takes all slots in one pass, more slots are measured at the second
context, which is nearer to what slots hold than the first. A longer one adds to a pass what it adds for each slot,
since a slot reads its own cache.

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
from ddtree_trt.runtime.decoding.budget.timing import REPETITIONS, fill, time_rounds
from ddtree_trt.runtime.engines.base import Engine

PROFILE_VERSION = 4  # 4: passes of several slots at the second context
CONTEXTS = (64, 256, 1024, 4096, 16384)
BATCHES_S = (3.0, 20.0)  # passes of several slots are measured for about so long, and no number of slots for longer
_MAX_BYTES = 1 << 20  # of the file; a real one has some kilobytes
_log = logging.getLogger(__name__)

# Accepted ranges of stored costs.
_Seconds = Annotated[float, Between(1e-9, 3600)]
_SecondsOrZero = Annotated[float, Between(0, 3600)]
_Tokens = Annotated[int, Between(1, 1 << 31)]


@dataclass(frozen=True)
class ContextCost:
    """Costs at one context length, of a pass with `slots` slots as a whole."""

    context: _Tokens
    draft_s: _SecondsOrZero  # a draft, without the cost per drafted token
    tree_tokens: tuple[_Tokens, ...]  # T of every slot, rising from 1
    verify_s: tuple[_Seconds, ...]  # one per T
    draft_token_s: _SecondsOrZero = 0.0  # each drafted token, where the drafter drafts token by token
    slots: _Tokens = 1

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
    contexts: tuple[ContextCost, ...]  # rising context length, one slot
    batches: tuple[ContextCost, ...] = ()  # rising number of slots from 2, all at one context
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
    for name, costs in (("contexts", profile.contexts), ("batches", profile.batches)):
        for number, cost in enumerate(costs):
            if len(cost.tree_tokens) != len(cost.verify_s):
                raise source.fault(f"{name}[{number}] has not one verify_s for each of its tree_tokens")
            if cost.tree_tokens[:1] != (1,) or not _rising(cost.tree_tokens):
                raise source.fault(f"{name}[{number}].tree_tokens must rise from 1")
    if not profile.contexts or not _rising(tuple(cost.context for cost in profile.contexts)):
        raise source.fault("contexts must hold costs of rising context lengths")
    if any(cost.slots != 1 for cost in profile.contexts) or not _rising((1, *(c.slots for c in profile.batches))):
        raise source.fault("contexts must hold costs of 1 slot, batches those of rising numbers of slots from 2")
    if len({cost.context for cost in profile.batches}) > 1:
        raise source.fault("batches must have one context")
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
    """A hash of what a profile depends on: the machine, the engine's graphs and slots, the runtime and its threads."""
    graphs = {name: entry.sha256 for name, entry in manifest.files.items()}
    parts = [str(read_cpu()), manifest.backend, manifest.toolchain, graphs, threads, manifest.limits.max_batch]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def load_or_measure(directory: Path, engine: Engine) -> LatencyProfile:
    """The engine's profile for this machine: the stored one if its fingerprint matches, else a fresh one, which is
    stored.

    Measuring takes some seconds, uses the slots and empties them. A stored profile that cannot be read is logged as a
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
    """Time drafts and verifications on slots that must all be free: for about `seconds` with one slot, shared by the
    contexts, and for about half as long with several, where the engine takes them in one pass. All are emptied.

    Sizes are interleaved, so that a slow moment of the machine affects all of them, and the fastest time is kept: other
    work on the machine only adds to times. Every size is timed a few times, however long that takes.
    """
    limits = engine.manifest.limits
    contexts = [c for c in CONTEXTS if c <= limits.max_seq_len // 2] or [max(1, limits.max_seq_len // 2)]
    costs: list[ContextCost] = []
    batches: list[ContextCost] = []
    try:
        for context in contexts:
            progress("measuring latencies", len(costs), len(contexts) + 1)
            fill(engine, 0, context)
            costs.append(_cost(engine, 1, context, seconds / len(contexts)))
        engine.truncate(0, 0)
        progress("measuring latencies", len(costs), len(contexts) + 1)
        deadline = time.perf_counter() + BATCHES_S[0]
        context = contexts[:2][-1]
        for slots in _batches(limits.max_batch, costs[0]) if engine.batches else ():
            for slot in range(slots):
                fill(engine, slot, context)
            batches.append(_cost(engine, slots, context, BATCHES_S[0] / 4))
            if time.perf_counter() > deadline:
                break
    finally:
        for slot in range(limits.max_batch):
            engine.truncate(slot, 0)
    batches.sort(key=lambda cost: cost.slots)
    machine = str(read_cpu())
    return LatencyProfile(fingerprint(engine.manifest, engine.threads), machine, tuple(costs), tuple(batches))


def _batches(largest: int, one: ContextCost) -> list[int]:
    """Numbers of slots to measure, the most important first: the most there are, unless that would take too long at
    worst, then each twice the one before."""
    worst_s = REPETITIONS[0] * 2 * sum(one.verify_s)  # for each slot, if passes took as long as one after the other
    most = max(1, min(largest, int(BATCHES_S[1] / worst_s)))
    return [most, *(2**step for step in range(1, most.bit_length()) if 2**step < most)] if most > 1 else []


def _cost(engine: Engine, slots: int, context: int, seconds: float) -> ContextCost:
    timed = time_rounds(engine, slots, context, seconds)
    sizes, verify_s = tuple(timed.verify_s), tuple(timed.verify_s.values())
    return ContextCost(context, timed.draft_s, sizes, verify_s, timed.token_s, slots)
