"""The latency profile of an engine on this machine: what passes took when it was first opened, and rounds since then.
Stored in the engine directory as `profile.json` with a fingerprint; that of another machine, engine or thread count is
measured anew."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact.files import PROFILE, write_atomically
from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.device.cpu import read_cpu
from ddtree_trt.errors import ArtifactError
from ddtree_trt.reading import Between, Source, read_json, read_record
from ddtree_trt.runtime.engines.base import DraftRequest, Engine, RoundRequest, VerifyRequest, most_probable
from ddtree_trt.runtime.tree import TokenTree, chain_parents

COSTLY = 8.0  # sizes are timed until one takes this many single-token passes: larger ones cannot pay
SWEEPS, SECONDS = 10, 0.7  # most sweeps over the sizes, and the time after which no other begins
PASSES = 4  # of a timed draft of a drafter that makes several


def _time_passes(engine: Engine, slots: int, context: int, tree_tokens: Sequence[int]) -> PassTimes:
    """Times of the first `slots` slots, which must be free and then hold `context` tokens each. They are emptied. Of a
    pass timed several times the fastest counts, since other work only adds to it."""
    if engine.buckets is not None:
        tree_tokens = sorted({next((b for b in engine.buckets if b >= t), t) for t in tree_tokens})
    kind = engine.manifest.drafting
    passes, length = (1, kind.longest_draft) if kind.block_size else (PASSES, PASSES)
    verify, draft_s, end = dict[int, float](), float("inf"), time.perf_counter() + SECONDS
    try:
        first_s = float("inf")
        for _ in range(2 if slots == 1 else 1):
            for slot in range(slots):
                engine.truncate(slot, 0)
                _fill(engine, slot, context)
            unseen = max(1, sum(engine.unseen(slot) for slot in range(slots)))
            first_s = min(first_s, _round(engine, slots, context, 1, length)[0])  # a first draft takes in the prompt
        for sweep in range(SWEEPS):
            for tokens in tree_tokens if sweep == 0 else list(verify):
                drafted_s, verified_s = _round(engine, slots, context, tokens, length)
                draft_s = min(draft_s, drafted_s / passes)
                verify[tokens] = min(verify.get(tokens, float("inf")), verified_s)
                if verify[tokens] > COSTLY * verify[1]:
                    break
            if time.perf_counter() > end:
                break
    finally:
        for slot in range(slots):
            engine.truncate(slot, 0)
    context_s = max(0.0, first_s - passes * draft_s) / unseen
    return PassTimes(slots, context, draft_s, tuple(verify.items()), context_s)


def _fill(engine: Engine, slot: int, context: int) -> None:
    """Prefill the slot with random tokens until it holds `context` of them."""
    limits, vocab = engine.manifest.limits, engine.manifest.target_dims.vocab_size
    tokens = np.random.default_rng(0).integers(0, vocab, context)
    while (start := engine.length(slot)) < context:
        end = min(start + limits.prefill_chunk, context)
        engine.prefill(slot, tokens[start:end], rows="last" if end == context else "none", taps=True)


def _round(engine: Engine, slots: int, context: int, tokens: int, length: int) -> tuple[float, float]:
    """(draft, verify) seconds of one round, which drafts `length` positions, in the order of decoding, since earlier
    work fills the processor's caches; single tokens behind each other. Of rounds on the device, where they are the
    default, by its clock."""
    rounds = engine.rounds if engine.rounds is not None and engine.rounds.by_default else None
    if rounds is not None:
        while rounds.ahead:
            rounds.read()
        for nodes in (max(tokens - 1, 1), tokens - 1):
            rounds.launch([RoundRequest(slot, 1, nodes) for slot in range(slots)])
        draft_s, verify_s = rounds.read().draft_s, rounds.read().rest_s
        for slot in range(slots):
            engine.truncate(slot, context)
        return draft_s, verify_s
    _verify(engine, slots, 1)
    for slot in range(slots):
        engine.commit(slot, np.zeros(1, np.int32), taps=True)
    requests = [DraftRequest(slot, 1, 16, length, most_probable) for slot in range(slots)]
    start = time.perf_counter()
    engine.draft(requests)
    drafted = time.perf_counter()
    _verify(engine, slots, tokens)
    verified = before = time.perf_counter()
    verify_s = verified - drafted
    while tokens == 1 and before < verified + ALONE:
        _verify(engine, slots, 1)
        after = time.perf_counter()
        verify_s, before = min(verify_s, after - before), after
    for slot in range(slots):
        engine.truncate(slot, context)
        _fill(engine, slot, context)
    return drafted - start, verify_s


def _verify(engine: Engine, slots: int, tokens: int) -> None:
    depths = np.minimum(np.arange(tokens, dtype=np.int32), 16)
    tree = TokenTree(np.ones(tokens, np.int64), chain_parents(tokens), depths)
    engine.verify([VerifyRequest(slot, tree) for slot in range(slots)])


VERSION = 10  # 10: single tokens come behind each other
ALONE = 0.02  # seconds of single tokens: a small target's weights come back to the caches in about ten passes
CONTEXTS = (64, 512)  # tokens
TREE_TOKENS = (1, 2, 5, 17, 65, 257, 1025)
_log = logging.getLogger(__name__)

_Seconds = Annotated[float, Between(0, 3600)]
_Count = Annotated[int, Between(0, 1 << 53)]
_Positive = Annotated[int, Between(1, 1 << 31)]


@dataclass(frozen=True)
class PassTimes:
    """Seconds of passes over `slots` slots as a whole, each holding `context` tokens."""

    slots: _Positive
    context: _Positive
    draft_s: _Seconds  # a draft, or each pass of a drafter that makes several
    verify: tuple[tuple[_Positive, Annotated[float, Between(1e-9, 3600)]], ...]  # by the tree tokens of every slot
    context_s: _Seconds = 0.0  # what a draft takes longer for each token that the drafter has still to take in

    def verify_s(self, tokens: NDArray[Any]) -> NDArray[np.float64]:
        """Seconds of trees of so many tokens: linear between the measured sizes and beyond them."""
        sizes, times = (np.array(column, float) for column in zip(*sorted(dict(self.verify).items()), strict=True))
        slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else times[0]
        return np.interp(tokens, sizes, times) + max(0.0, slope) * np.maximum(tokens - sizes[-1], 0)


@dataclass(frozen=True)
class Correction:
    """How many times as long as in the profile some passes took on average."""

    kind: str  # "draft" or "verify"
    slots: _Positive  # bits of the number of slots
    size: _Count  # of a verification: the half power of two of its tree tokens
    ratio: Annotated[float, Between(1e-6, 1e6)]
    rounds: _Count


@dataclass(frozen=True)
class Profile:
    """Times of one slot at a short context, `far` behind, and of `many` slots at the short context. Others follow
    linearly; each slot adds for a longer context what one does, since it reads its own cache."""

    fingerprint: str
    near: PassTimes
    far: PassTimes | None = None
    many: PassTimes | None = None
    corrections: tuple[Correction, ...] = ()
    version: int = VERSION

    def at(self, past: int, slots: int, of: Callable[[PassTimes], NDArray[np.float64]]) -> NDArray[np.float64]:
        """A time of passes over so many slots with `past` tokens each; `of` reads it from those that were measured."""
        one = of(self.near)
        seconds = one * slots
        if self.many is not None and self.many.slots > 1:
            seconds = one + np.maximum(0, of(self.many) - one) * ((slots - 1) / (self.many.slots - 1))
        if self.far is not None and self.far.context > self.near.context:
            a_token = np.maximum(0, of(self.far) - one) / (self.far.context - self.near.context)
            seconds = seconds + slots * max(0, past - self.near.context) * a_token
        return seconds


def fingerprint(manifest: Manifest, threads: int) -> str:
    """A hash of what a profile depends on: the machine, the engine's graphs and slots, the runtime and its threads."""
    graphs = {name: entry.sha256 for name, entry in manifest.files.items()}
    parts = [str(read_cpu()), manifest.backend, manifest.toolchain, graphs, threads, manifest.limits.max_batch]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def read_profile(path: Path) -> Profile:
    """The profile in a file. Raises ArtifactError, which names the field, for any other content or version."""
    source = Source(str(path), ArtifactError, "latencies are measured again")
    data = read_json(path, source, max_bytes=1 << 20)
    if not isinstance(data, dict) or data.get("version") != VERSION:
        raise source.fault(f"it is not of version {VERSION}, the one of this ddtree-trt")
    profile = read_record(Profile, data, source)
    if not all(times is None or times.verify for times in (profile.near, profile.far, profile.many)):
        raise source.fault("verify must have a time")
    return profile


def load_or_measure(directory: Path, engine: Engine, progress: Progress = no_progress) -> Profile:
    """The stored profile if it is this machine's, else a fresh one, which is stored. Measuring takes some seconds, uses
    the slots and empties them. A file that cannot be read is logged as a warning."""
    path = directory / PROFILE
    try:
        stored = read_profile(path) if os.path.lexists(path) else None
        if stored is not None and stored.fingerprint == fingerprint(engine.manifest, engine.threads):
            return stored
    except ArtifactError as error:
        _log.warning("%s", error)
    profile = measure(engine, progress)
    store(directory, profile)
    return profile


def store(directory: Path, profile: Profile, lost: str = "latencies are measured at every start") -> None:
    """Write the profile; where it cannot be written, a warning is logged that says so, and what is lost."""
    try:
        write_atomically(directory / PROFILE, json.dumps(dataclasses.asdict(profile), indent=1) + "\n")
    except OSError as error:
        _log.warning("%s cannot be written (%s): %s", directory / PROFILE, error.strerror, lost)


def measure(engine: Engine, progress: Progress = no_progress) -> Profile:
    """Time passes on slots that must all be free."""
    limits = engine.manifest.limits
    near, far = (min(context, max(1, limits.max_seq_len // 2)) for context in CONTEXTS)
    sizes = [tokens for tokens in TREE_TOKENS if tokens <= 1 + limits.max_tree_budget]

    def timed(step: int, slots: int, context: int) -> PassTimes:
        progress("measuring latencies", step, 3)
        return _time_passes(engine, slots, context, sizes)

    one, behind = timed(0, 1, near), timed(1, 1, far) if far > near else None
    together = timed(2, limits.max_batch, near) if limits.max_batch > 1 else None
    progress("measuring latencies", 3, 3)
    return Profile(fingerprint(engine.manifest, engine.threads), one, behind, together)
