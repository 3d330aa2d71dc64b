"""The measurement: every case on every prompt, interleaved.

All cases of a prompt run right after one another, and the first one rotates, so that a slow moment of the machine, a
warm cache or a hot processor affects all of them alike. Every request starts from an empty cache.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from ddtree_trt.artifact.backends import TORCH
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.bench.contender import Contender, Outcome, Request
from ddtree_trt.bench.environment import describe_engine, read_environment
from ddtree_trt.bench.pairs.random_pair import random_engine
from ddtree_trt.bench.peers.base import PeerContext
from ddtree_trt.bench.peers.registry import check_peer, open_peer
from ddtree_trt.bench.prompts import BenchPrompt, digest, load_prompts, select
from ddtree_trt.bench.result import BenchResult, Part, Sample, output_digest
from ddtree_trt.bench.session import EngineContender, Session
from ddtree_trt.bench.settings import SINGLE_TOKENS, BenchSettings, Case, Shard
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.engines.load import require
from ddtree_trt.runtime.text.codec import Prompt

WHOLE = Shard()
PAUSE_S = 0.02  # between two requests, in which the previous one's threads stop spinning
RANDOM_PROMPTS = 3


@dataclass(frozen=True)
class _Entry:
    contender: Contender
    case: Case


def run_bench(
    settings: BenchSettings,
    shard: Shard = WHOLE,
    progress: Progress = no_progress,
    *,
    expected_prompts: str | None = None,
) -> BenchResult:
    """Run a benchmark, or one shard of it.

    Raises UsageError for settings the engine or a peer cannot honour, and for prompts whose digest is not the expected
    one, before anything is measured; MissingDependency for a peer that is not installed; whatever a contender raises
    ends the run.
    """
    for spec in settings.peers:
        check_peer(spec)
    with ExitStack() as stack:
        checkpoint, drafter = settings.checkpoint, settings.drafter
        if settings.random_weights and settings.backend == "torch":
            session = _random_torch_session(settings, stack)
        else:
            directory = Path(settings.engine)
            if settings.random_weights:
                pair = stack.enter_context(random_engine(settings, progress))
                directory, checkpoint, drafter = pair / "engine", str(pair / "target"), str(pair / "drafter")
            session = Session(directory, settings.options)
        stack.enter_context(closing(session))
        settings = _resolved(settings, session)
        prompts = _prompts(settings, session)
        if expected_prompts is not None and digest(prompts) != expected_prompts:
            raise UsageError(f"prompts {', '.join(settings.prompts)} are not what they were: their content has changed")
        own = EngineContender(session, settings)
        context = PeerContext(
            dataclasses.replace(settings, checkpoint=checkpoint, drafter=drafter),
            session.manifest,
            session.engine.threads,
            session.unusable_tokens,
        )
        contenders: dict[str, Contender] = {"": own}
        for spec in settings.peers:
            progress(f"load {spec}", 0, 1)
            contenders[spec] = stack.enter_context(closing(open_peer(spec, context)))
            progress(f"load {spec}", 1, 1)
        _check_names(contenders)
        environment = read_environment()
        run = Measurement(settings, session, list(contenders.values()), progress)
        run.warm_up(prompts[0])
        run.measure(prompts, shard)
        described = {name: contender.describe() for name, contender in contenders.items()}
        return BenchResult(
            settings=settings,
            engine=describe_engine(session.manifest, session.engine),
            prompts_digest=digest(prompts),
            prompt_count=len(prompts),
            parts=(Part(shard, environment, described, tuple(run.skipped)),),
            samples=tuple(run.samples),
        )


def _check_names(contenders: Mapping[str, Contender]) -> None:
    """Raises UsageError where two contenders measure a case of the same name: their figures would be mixed."""
    found: dict[str, str] = {}
    for name, contender in contenders.items():
        for case in contender.cases:
            if case.label in found:
                raise UsageError(f"two peers are called {case.label}, {found[case.label]} and {name}; leave one out")
            found[case.label] = name


def _resolved(settings: BenchSettings, session: Session) -> BenchSettings:
    """The settings with `auto` device rounds replaced by this engine's default, so that every case states its kind."""
    if settings.device_rounds != "auto":
        return settings
    rounds = session.engine.rounds
    return dataclasses.replace(settings, device_rounds="on" if rounds and rounds.by_default else "off")


def _random_torch_session(settings: BenchSettings, stack: ExitStack) -> Session:
    require(TORCH, "random weights of the torch backend are made by it")
    from ddtree_trt.bench.pairs.random_torch import random_session

    return random_session(settings, Path(stack.enter_context(TemporaryDirectory(prefix="ddtree-random-"))))


def _prompts(settings: BenchSettings, session: Session) -> list[BenchPrompt]:
    if not settings.random_weights:
        return load_prompts(settings.prompts, settings.limit)
    rng = np.random.default_rng(settings.seed)
    banned = session.unusable_tokens
    usable = np.array([t for t in range(session.manifest.target_dims.vocab_size) if t not in banned])
    count = settings.limit or RANDOM_PROMPTS
    draws = [rng.choice(usable, settings.prompt_tokens).tolist() for _ in range(count)]
    return [BenchPrompt(f"random/{i}", "random", ids) for i, ids in enumerate(draws)]


class Measurement:
    """One pass over the prompts; its measurements are in `samples`."""

    def __init__(
        self, settings: BenchSettings, session: Session, contenders: Sequence[Contender], progress: Progress
    ) -> None:
        self.samples: list[Sample] = []
        self.skipped: list[str] = []
        self._settings = settings
        self._session = session
        self._progress = progress
        self._entries = [_Entry(c, case) for c in contenders for case in c.cases]
        self._turns = 0  # measured so far; decides which case is first

    def warm_up(self, prompt: BenchPrompt) -> None:
        """Run every case once, unmeasured: kernels are chosen, memory is touched, code is compiled."""
        settings = self._settings
        if settings.warmup_tokens == 0:
            return
        limit = self._session.manifest.limits.max_seq_len
        ids = self._session.codec.encode(prompt.opening)[-max(limit - settings.warmup_tokens, 1) :]
        tokens = min(settings.warmup_tokens, limit - len(ids))
        request = self._request(settings.temperatures[0], settings.seed, tokens)
        for i, entry in enumerate(self._entries):
            self._progress("warm up", i, len(self._entries))
            entry.contender.run(entry.case, ids, request)
        self._progress("warm up", len(self._entries), len(self._entries))

    def measure(self, prompts: Sequence[BenchPrompt], shard: Shard) -> None:
        settings, numbers = self._settings, {p.id: i for i, p in enumerate(prompts)}
        chosen = select(prompts, shard)
        total = len(chosen) * len(settings.temperatures)
        for done, (prompt, temperature) in enumerate((p, t) for p in chosen for t in settings.temperatures):
            self._progress("measure", done, total)
            self._conversation(prompt, temperature, settings.seed + numbers[prompt.id] * settings.repeats)
        self._progress("measure", total, total)
        if not self.samples:
            limit = self._session.manifest.limits.max_seq_len
            raise UsageError(
                f"no prompt of this run fits: with {settings.max_tokens} new tokens each is longer than the engine's "
                f"max_seq_len {limit}; lower --max-tokens or rebuild with a larger --max-seq-len"
            )

    def _conversation(self, prompt: BenchPrompt, temperature: float, seed: int) -> None:
        """Measure all turns of a prompt. Later turns follow the answers of `ar`, the same for every case."""
        history: Prompt = prompt.opening
        for turn, following in enumerate((*prompt.follow_ups, None)):
            ids = self._session.codec.encode(history)
            name = f"{prompt.id}#{turn}" if prompt.follow_ups else prompt.id
            if len(ids) + self._settings.max_tokens > self._session.manifest.limits.max_seq_len:
                self.skipped.append(name)
                return
            answer = self._turn(prompt.source, name, ids, temperature, seed)
            if following is not None:
                messages = [{"role": "assistant", "content": answer}, {"role": "user", "content": following}]
                history = [*history, *messages]

    def _turn(self, source: str, name: str, ids: list[int], temperature: float, seed: int) -> str:
        """Measure every case on one request; returns the answer of `ar`."""
        answer = ""
        for repeat in range(self._settings.repeats):
            first = self._turns % len(self._entries)
            self._turns += 1
            for order, entry in enumerate(self._entries[first:] + self._entries[:first]):
                time.sleep(PAUSE_S)
                request = self._request(temperature, seed + repeat, self._settings.max_tokens)
                outcome = entry.contender.run(entry.case, ids, request)
                if entry.case == SINGLE_TOKENS and repeat == 0:
                    answer = outcome.text or ""
                self.samples.append(_sample(entry.case, outcome, source, name, temperature, repeat, order, len(ids)))
        return answer

    def _request(self, temperature: float, seed: int, max_tokens: int) -> Request:
        forced = self._settings.forced_acceptance is not None
        stops = () if forced else self._session.manifest.stop_token_ids
        return Request(max_tokens, temperature, seed, stops)


def _sample(
    case: Case, o: Outcome, source: str, name: str, temperature: float, repeat: int, order: int, prompt_tokens: int
) -> Sample:
    return Sample(
        case=case.label,
        temperature=temperature,
        source=source,
        prompt=name,
        repeat=repeat,
        order=order,
        prompt_tokens=prompt_tokens,
        output_tokens=o.output_tokens,
        decoded_tokens=max(o.output_tokens - o.first_tokens, 0),
        first_token_s=o.first_token_s,
        decode_s=o.decode_s,
        acceptance_lengths=o.acceptance_lengths,
        mean_budget=o.mean_budget,
        stage_s=dict(o.stage_s),
        output_digest=output_digest(o),
        automatic=None if o.automatic is None else dict(o.automatic),
    )
