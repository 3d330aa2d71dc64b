"""The decode loop: one round of draft → tree_build → tree_compile → verify → commit over any number of slots.

Every method is decoded by it; an autoregressive round is one whose tree is the root alone. Where an engine runs all
five stages on its device, the results are emitted, stopped and counted here in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree_trt import _native
from ddtree_trt.errors import EngineError
from ddtree_trt.runtime.decoding.budget.policy import AutoBudget, Decision, RoundPlan, SlotInput
from ddtree_trt.runtime.decoding.sampling import logprob
from ddtree_trt.runtime.engines.base import (
    AHEAD,
    DeviceRounds,
    Draft,
    DraftRequest,
    DrawnFrom,
    Engine,
    LogitRows,
    RoundRequest,
    RoundResult,
    Verdict,
    VerifyRequest,
)
from ddtree_trt.runtime.sequence import Sequence
from ddtree_trt.runtime.stats import DEVICE_ROUND, StageClock
from ddtree_trt.runtime.structured.matcher import allowed_part, with_spare
from ddtree_trt.runtime.tree import EMPTY, DraftTree, TokenTree, compile_tree, descend, token_chain

Path = NDArray[np.int32]
_ROOT = np.zeros(1, np.int32)
_SLOT, _PAST, _ON_DEVICE = attrgetter("slot"), attrgetter("past"), attrgetter("on_device")


@dataclass(frozen=True)
class Round:
    """One finished round of one sequence, as watchers get it."""

    root_token: int  # the bonus token of the round before
    tree: DraftTree
    path: Path  # [m], root first
    next_token: int  # the target's choice at the path's end
    decision: Decision | None  # why the tree had its size; None for a fixed budget


Watcher = Callable[[Round], None]


class _Part:
    tree: TokenTree
    rows: LogitRows = "all"  # those of its logits that are needed
    path: Path | None = None  # its nodes to be kept; None before the walk, and if that failed

    def __init__(self, sequence: Sequence, engine: Engine) -> None:
        assert sequence.slot is not None, "a sequence is decoded only while it holds a slot"
        self.sequence = sequence
        self.slot = sequence.slot
        self.past = engine.length(self.slot)
        self.root_token = sequence.bonus_token


class PromptChunk(_Part):
    """The next tokens of a sequence's prompt, in a pass of their own or beside the trees of a round."""

    def __init__(self, sequence: Sequence, engine: Engine, most: int) -> None:
        super().__init__(sequence, engine)
        prompt, end = sequence.prompt, min(self.past + most, len(sequence.prompt))
        self.tree = token_chain(np.array(prompt[self.past : end], np.int64))
        self.path = self.tree.depths  # all of them
        self._following = prompt[self.past + 1 : end + 1]
        self._last = end == len(prompt)
        if sequence.params.prompt_logprobs is None:
            self.rows = "last" if self._last else "none"

    def walk(self, verdict: Verdict) -> None:
        """Keep the log-probabilities that are asked for, and emit the first token behind the whole prompt."""
        s, wanted = self.sequence, self.sequence.params.prompt_logprobs
        if wanted is not None:
            for row, token in zip(np.asarray(verdict.logits), self._following, strict=False):
                s.prompt_logprobs.append(logprob(row, token, wanted))
        if self._last:
            token = s.sampler.pick(int(verdict.choices[-1]), verdict.logits)
            s.append(token, None if s.params.logprobs is None else verdict.logits[-1])


class _SlotRound(_Part):
    ceiling = 0  # most nodes to draft
    decision: Decision | None = None  # why the tree has its size; None for a fixed budget
    drafted = EMPTY
    drawn: tuple[DrawnFrom, ...] = ()  # as of a `Proposal`

    def draft_request(self) -> DraftRequest:
        s = self.sequence
        k = s.method.candidates(self.ceiling, s.params.stochastic)
        length = min(self.ceiling, s.budget.levels or self.ceiling)
        return DraftRequest(self.slot, self.root_token, k, length, s.sampler.draft)

    def propose(self, draft: Draft) -> None:
        """Make the tree, of what the constraint of the output allows: for as large a tree more is drafted."""
        s = self.sequence
        matcher = s.sampler.matcher if s.sampler.constrained else None
        nodes = self.ceiling if matcher is None or s.method.draws else with_spare(self.ceiling)
        try:
            self.drafted, self.drawn = s.method.propose(draft, nodes, s.sampler.draft)
        except ValueError as error:
            raise EngineError(f"the drafter's output cannot be used: {error}") from error
        if matcher is not None:
            self.drafted = allowed_part(self.drafted, matcher).cut(self.ceiling)

    def walk(self, verdict: Verdict) -> None:
        """Walk the verified tree and emit the target's tokens, one for each node of the accepted path: the accepted
        drafts, then the next bonus token. Where a stop or a limit is met inside the path, it ends there."""
        s, sampler, tree, drawn = self.sequence, self.sequence.sampler, self.drafted, self.drawn

        def choose(node: int) -> int | None:
            row = verdict.logits[node]
            # A chain was drawn: node d's only child is the token drawn at depth d + 1.
            token = sampler.choose_against(row, drawn[node]) if node < len(drawn) else sampler.choose(row)
            return token if s.append(token, row) else None

        if s.finish_reason is not None:
            return
        if sampler.takes_choices:
            path = _ROOT if tree is EMPTY else _native.walk(tree.parents, tree.token_ids, verdict.choices)
            rows = None if s.params.logprobs is None else (verdict.logits[node] for node in path.tolist())
            self.path = path[: s.extend(verdict.choices[path].tolist(), rows)]
        else:
            self.path = descend(tree, choose)
        s.metrics.add_round(len(self.path), len(tree.token_ids), self.decision)

    def learn(self) -> None:
        s, path = self.sequence, self.path
        if isinstance(s.budget, AutoBudget) and self.decision is not None and path is not None:
            s.budget.observe(self.decision, self.drafted, path, ends=s.finish_reason is not None)

    def show(self) -> None:
        """Call the watcher, if the sequence has one, with the round that is committed."""
        s, path = self.sequence, self.path
        if s.on_round is not None and path is not None:
            try:
                s.on_round(Round(self.root_token, self.drafted, path, s.bonus_token, self.decision))
            except Exception as error:  # of the last round, too
                s.error, s.finish_reason = s.error or error, "error"


def each(parts: Iterable[_Part], work: str, *columns: Iterable[Any]) -> None:
    """Have every part do its `work` with what the columns have for it. An exception ends that part's sequence only."""
    for part, *given in zip(parts, *columns, strict=True):
        try:
            getattr(part, work)(*given)
        except Exception as error:
            part.sequence.abort(error)


def prefill(engine: Engine, chunk: PromptChunk, clock: StageClock) -> None:
    with clock("prefill"):
        taps = chunk.sequence.drafts
        verdict = engine.prefill(chunk.slot, chunk.tree.token_ids, rows=chunk.rows, taps=taps)
        each([chunk], "walk", [verdict])


def decode_round(
    engine: Engine, sequences: list[Sequence], clock: StageClock, chunks: Iterable[PromptChunk] = ()
) -> None:
    """Advance sequences by one round: on the device if all can be, else by stages. Each holds a slot and has a bonus
    token that is not yet in the cache. `chunks`: prompts of other slots, read in the same pass."""
    rounds, chunks = engine.rounds, list(chunks)
    if rounds is not None and sequences and all(map(_ON_DEVICE, sequences)):
        with clock(DEVICE_ROUND):
            done = 0
            while not done:  # sequences that have left may have been alone in a round
                while rounds.ahead < AHEAD and _launch(engine, rounds, sequences):
                    pass
                done = _read(engine, rounds)
        return
    if rounds is not None and rounds.ahead:
        with clock(DEVICE_ROUND):
            while rounds.ahead:
                _read(engine, rounds)
        sequences = [s for s in sequences if s.finish_reason is None]
    if sequences or chunks:
        _round_by_stages(engine, sequences, clock, chunks)


def _launch(engine: Engine, rounds: DeviceRounds, sequences: list[Sequence]) -> bool:
    """Begin a round of all sequences that go on behind those under way; False if there are none."""
    slots = [s.slot for s in sequences if s.slot is not None]  # all have one
    going = []
    for s, slot, ahead in zip(sequences, slots, rounds.launchable(slots), strict=True):
        left = s.max_tokens - len(s.output) - ahead  # a round makes a token at least
        if left > 0 <= ahead:
            going.append((s, slot, left))
    if not going:
        return False
    slots, lefts = [slot for _, slot, _ in going], [left for _, _, left in going]
    inputs = map(SlotInput, map(engine.length, slots), lefts, map(engine.unseen, slots))
    plan = RoundPlan.of([s.budget for s, _, _ in going], inputs, ahead=True)
    longest, requests = engine.manifest.drafting.longest_draft, []
    for place, ((s, slot, _), nodes) in enumerate(zip(going, plan.ceilings(), strict=True)):
        params, chain = s.params, not s.method.branches
        budget, look = min(nodes, longest) if chain else nodes, plan.decisions[place] is not None
        seed, tag = s.sampler.noise.target_seed, (s, plan, place)
        requests.append(RoundRequest(slot, s.bonus_token, budget, params.temperature, seed, chain, s.drafts, look, tag))
    rounds.launch(requests)
    return True


def _read(engine: Engine, rounds: DeviceRounds) -> int:
    """Emit the tokens of the oldest round under way; returns of how many sequences."""
    results, draft_s, rest_s = rounds.read()
    seen = {r.request.tag[2]: r.drafted[1] for r in results if r.drafted is not None}
    if seen:
        results[0].request.tag[1].weigh(seen)
    for result in results:
        sequence = result.request.tag[0]
        try:
            _take(engine, result)
        except Exception as error:
            sequence.abort(error)
    if results:
        plan, nodes = results[0].request.tag[1], [result.nodes for result in results]
        if len(nodes) == len(plan.decisions):
            plan.took(draft_s, rest_s, nodes)
    return len(results)


def _take(engine: Engine, result: RoundResult) -> None:
    """Emit the tokens that the engine has committed; if the sequence ends at one, forget those after it."""
    request, tokens, nodes, drafted = result
    s, plan, place = request.tag
    emitted = s.extend(tokens)
    decision = plan.decisions[place]
    s.metrics.add_round(emitted, nodes, decision)
    s.metrics.rounds_on_device += 1
    if decision is not None:
        tree, path = EMPTY, _ROOT
        if drafted is not None:
            tree, _, path = drafted
        s.budget.observe(decision, tree, path[:emitted], ends=s.finish_reason is not None)
    if emitted < len(tokens):
        engine.truncate(request.slot, engine.length(request.slot) - len(tokens) + emitted)


def _round_by_stages(engine: Engine, sequences: list[Sequence], clock: StageClock, chunks: list[PromptChunk]) -> None:
    start = time.perf_counter()
    with clock("draft"):
        slot_rounds = [_SlotRound(s, engine) for s in sorted(sequences, key=_SLOT)]
        left = [part.sequence.max_tokens - len(part.sequence.output) for part in slot_rounds]
        inputs = map(SlotInput, map(_PAST, slot_rounds), left, map(engine.unseen, map(_SLOT, slot_rounds)))
        budgets = RoundPlan.of([part.sequence.budget for part in slot_rounds], inputs)
        for part, ceiling in zip(slot_rounds, budgets.ceilings(), strict=True):
            part.ceiling = ceiling
        drafting = [part for part in slot_rounds if part.ceiling > 0]
        drafts = engine.draft([part.draft_request() for part in drafting])
    drafted = time.perf_counter()

    with clock("tree_build"):
        each(drafting, "propose", drafts)
        trees = [None if part.drafted is EMPTY else part.drafted for part in slot_rounds]
        for part, nodes, decision in zip(slot_rounds, budgets.choose(trees), budgets.decisions, strict=True):
            part.decision = decision
            if nodes < len(part.drafted.token_ids):
                part.drafted = part.drafted.cut(nodes)

    with clock("tree_compile"):
        for part in slot_rounds:
            part.tree = compile_tree(part.root_token, part.drafted)
        parts: list[_SlotRound | PromptChunk] = sorted([*slot_rounds, *chunks], key=_SLOT)
        requests = [VerifyRequest(p.slot, p.tree, rows=p.rows) for p in parts]

    with clock("verify"):
        each(parts, "walk", engine.verify(requests))

    with clock("commit"):
        for p in parts:
            if p.path is not None:
                engine.commit(p.slot, p.path, taps=p.sequence.drafts)
        each([part for part in slot_rounds if part.decision is not None and part.decision.drafted], "learn")
    if not chunks:  # whose rows take time, too
        sizes = [len(part.drafted.token_ids) for part in slot_rounds]
        budgets.took(drafted - start, time.perf_counter() - drafted, sizes)

    # What watchers do is no part of a stage.
    each([part for part in slot_rounds if part.sequence.on_round is not None], "show")
