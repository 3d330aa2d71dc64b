"""The decode loop: one round of draft → tree_build → tree_compile → verify → commit over any number of slots.

Every method is decoded by this one function. Autoregressive decoding is a round whose tree is the root alone. Where an
engine runs all five stages on its device, the results are emitted, stopped and counted here in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.runtime.decoding.budget.policy import AutoBudget, Decision, RoundPlan, SlotInput
from ddtree_trt.runtime.decoding.methods import Proposal
from ddtree_trt.runtime.decoding.sampling import Row, logprob
from ddtree_trt.runtime.engines.base import (
    Draft,
    DraftRequest,
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
from ddtree_trt.runtime.tree import EMPTY, DraftTree, compile_tree, descend, token_chain, walk

Path = NDArray[np.int32]
NOTHING = Proposal(EMPTY)


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
    """One sequence's part in a pass."""

    def __init__(self, sequence: Sequence, engine: Engine) -> None:
        assert sequence.slot is not None, "a sequence is decoded only while it holds a slot"
        self.sequence = sequence
        self.slot = sequence.slot
        self.past = engine.length(self.slot)

    def __enter__(self) -> None:
        """Begin a block whose exceptions end this sequence only; the others continue."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception):
            self.sequence.abort(error)
        return isinstance(error, Exception)


class PromptChunk(_Part):
    """The next tokens of a sequence's prompt, in a pass of their own or beside the trees of a round."""

    def __init__(self, sequence: Sequence, engine: Engine, most: int) -> None:
        """`most`: most tokens [T] of it."""
        super().__init__(sequence, engine)
        prompt, end = sequence.prompt, min(self.past + most, len(sequence.prompt))
        self.token_ids = np.array(prompt[self.past : end], np.int64)
        self._following = prompt[self.past + 1 : end + 1]
        self._last = end == len(prompt)

    @property
    def rows(self) -> LogitRows:
        """Those of its logits that are needed."""
        return "all" if self.sequence.params.prompt_logprobs is not None else "last" if self._last else "none"

    def verify_request(self) -> VerifyRequest:
        return VerifyRequest(self.slot, token_chain(self.token_ids), rows=self.rows)

    def walk(self, verdict: Verdict) -> None:
        """Keep the log-probabilities that are asked for, and emit the first token behind the whole prompt."""
        s, wanted = self.sequence, self.sequence.params.prompt_logprobs
        with self:
            if wanted is not None:
                for row, token in zip(np.asarray(verdict.logits), self._following, strict=False):
                    s.prompt_logprobs.append(logprob(row, token, wanted))
            if self._last:
                logits = verdict.logits[-1]
                s.append(s.sampler.pick(int(verdict.choices[-1]), logits), logits)

    def commit(self, engine: Engine) -> None:
        engine.commit(self.slot, np.arange(len(self.token_ids), dtype=np.int32), taps=self.sequence.drafts)


class _SlotRound(_Part):
    """One sequence's share of a round."""

    def __init__(self, sequence: Sequence, engine: Engine) -> None:
        super().__init__(sequence, engine)
        self.root_token = sequence.bonus_token
        self.ceiling = 0  # most nodes to draft
        self.decision: Decision | None = None  # why the tree has its size; None for a fixed budget
        self.proposal = NOTHING
        self.path: Path | None = None  # None before the walk, and if it failed

    @property
    def planned(self) -> SlotInput:
        """What the round's budgets are planned by."""
        s = self.sequence
        return SlotInput(s.budget, self.past, s.tokens_left, s.drafts, s.metrics.cached_tokens)

    def draft_request(self) -> DraftRequest:
        s = self.sequence
        k = s.method.candidates(self.ceiling, s.params.stochastic)
        length = min(self.ceiling, s.budget.levels or self.ceiling)
        return DraftRequest(self.slot, self.root_token, k, length, s.sampler.draft)

    def round_request(self) -> RoundRequest:
        params, sampler = self.sequence.params, self.sequence.sampler
        return RoundRequest(self.slot, self.root_token, self.ceiling, params.temperature, sampler.noise.target_seed)

    def propose(self, draft: Draft) -> None:
        s = self.sequence
        with self:
            constrained = s.sampler.matcher is not None and not s.method.draws
            nodes = with_spare(self.ceiling) if constrained else self.ceiling
            self.proposal = s.method.propose(draft, nodes, s.sampler.draft)
            if constrained:
                self.proposal = Proposal(self._allowed(self.proposal.tree).cut(self.ceiling))

    def cut(self, tree: DraftTree, nodes: int) -> None:
        """Keep the first nodes of the proposed tree."""
        s = self.sequence
        with self:
            tree = tree.cut(nodes)
            # How long a drawn chain is must not depend on what was drawn: it is cut by the constraint last.
            if s.sampler.matcher is not None and s.method.draws:
                tree = self._allowed(tree)
            self.proposal = Proposal(tree, self.proposal.drawn[:nodes])

    def _allowed(self, tree: DraftTree) -> DraftTree:
        """The part of a tree that the constraint of the output allows."""
        matcher = self.sequence.sampler.matcher
        assert matcher is not None, "only constrained sequences ask"
        return allowed_part(tree, matcher)

    def verify_request(self) -> VerifyRequest:
        return VerifyRequest(self.slot, compile_tree(self.root_token, self.proposal.tree))

    def take(self, result: RoundResult, engine: Engine) -> None:
        """Emit the tokens that the engine has committed; if the sequence ends at one, forget those after it."""
        with self:
            emitted = emit(self.sequence, ((token, None) for token in result.tokens))
            self.sequence.metrics.add_round(emitted, result.nodes, self.decision)
            if emitted < len(result.tokens):
                engine.truncate(self.slot, self.past + emitted)

    def walk(self, verdict: Verdict) -> None:
        if not self.sequence.finished:
            with self:
                self.path = accept(self.sequence, self.proposal, verdict)
                self.sequence.metrics.add_round(len(self.path), len(self.proposal.tree), self.decision)

    def commit(self, engine: Engine) -> None:
        s, path = self.sequence, self.path
        if path is None:
            return
        engine.commit(self.slot, path, taps=s.drafts)
        with self:
            if isinstance(s.budget, AutoBudget) and self.decision is not None:
                s.budget.observe(self.decision, self.proposal.tree, path, ends=s.finished)

    def show(self) -> None:
        """Call the watcher, if the sequence has one, with the round that is committed."""
        s, path = self.sequence, self.path
        if s.on_round is None or path is None:
            return
        with self:
            s.on_round(Round(self.root_token, self.proposal.tree, path, s.bonus_token, self.decision))


def prefill(engine: Engine, chunk: PromptChunk, clock: StageClock) -> None:
    """Advance a prompt by a chunk, in a pass of its own."""
    with clock("prefill"):
        taps = chunk.sequence.drafts
        chunk.walk(engine.prefill(chunk.slot, chunk.token_ids, rows=chunk.rows, taps=taps))


def decode_round(
    engine: Engine, sequences: list[Sequence], clock: StageClock, chunks: Iterable[PromptChunk] = ()
) -> None:
    """Advance sequences by one round, in the same passes. All of them run on the device, or all by stages; each holds a
    slot and has a bonus token that is not yet in the cache. `chunks`: prompts of other slots, advanced in the same pass
    of an engine that mixes them with trees."""
    if sequences and sequences[0].route.on_device:
        _round_on_device(engine, sequences, clock)
    else:
        _round_by_stages(engine, sequences, clock, list(chunks))


def _by_slot(engine: Engine, sequences: list[Sequence]) -> tuple[list[_SlotRound], RoundPlan]:
    """The slots' rounds and the plan of their budgets, by slot; the ceilings are set."""
    slot_rounds = sorted((_SlotRound(s, engine) for s in sequences), key=lambda slot_round: slot_round.slot)
    budgets = RoundPlan([each.planned for each in slot_rounds])
    for each, ceiling in zip(slot_rounds, budgets.ceilings(), strict=True):
        each.ceiling = ceiling
    return slot_rounds, budgets


def _round_on_device(engine: Engine, sequences: list[Sequence], clock: StageClock) -> None:
    assert engine.rounds is not None, "routing sends sequences here only where the engine has device rounds"
    with clock(DEVICE_ROUND):
        slot_rounds, _ = _by_slot(engine, sequences)
        results = engine.rounds.round([each.round_request() for each in slot_rounds])
        for each, result in zip(slot_rounds, results, strict=True):
            each.take(result, engine)


def _round_by_stages(engine: Engine, sequences: list[Sequence], clock: StageClock, chunks: list[PromptChunk]) -> None:
    start = time.perf_counter()
    with clock("draft"):
        slot_rounds, budgets = _by_slot(engine, sequences)
        drafting = [each for each in slot_rounds if each.ceiling > 0]
        drafts = engine.draft([each.draft_request() for each in drafting])
    drafted = time.perf_counter()

    with clock("tree_build"):
        for each, draft in zip(drafting, drafts, strict=True):
            each.propose(draft)
        trees = [each.proposal.tree if each.ceiling and not each.sequence.finished else None for each in slot_rounds]
        for each, tree, nodes in zip(slot_rounds, trees, budgets.choose(trees), strict=True):
            if tree is not None:
                each.cut(tree, nodes)
        for each, decision in zip(slot_rounds, budgets.decisions, strict=True):
            each.decision = decision

    with clock("tree_compile"):
        parts: list[_SlotRound | PromptChunk] = sorted([*slot_rounds, *chunks], key=lambda part: part.slot)
        requests = [part.verify_request() for part in parts]

    with clock("verify"):
        for part, verdict in zip(parts, engine.verify(requests), strict=True):
            part.walk(verdict)

    with clock("commit"):
        for part in parts:
            part.commit(engine)
    if not chunks:  # whose rows take time, too
        widest = max(len(each.proposal.tree) for each in slot_rounds)
        budgets.took(drafted - start, time.perf_counter() - drafted, widest)

    for each in slot_rounds:  # what watchers do is no part of a stage
        each.show()


def accept(sequence: Sequence, proposal: Proposal, verdict: Verdict) -> Path:
    """Walk the verified tree and emit the target's tokens; the accepted path [m], root first.

    Each node on the path yields one token: the accepted drafts, then the next bonus token. Where a stop or a limit is
    met inside the path, the path ends there.
    """
    sampler, drawn = sequence.sampler, proposal.drawn
    if sampler.takes_choices:
        path = walk(proposal.tree, verdict.choices)
        wanted = sequence.params.logprobs is not None  # reading a row may copy it from a device
        rows = zip(path.tolist(), verdict.choices[path].tolist(), strict=True)
        return path[: emit(sequence, ((token, verdict.logits[node] if wanted else None) for node, token in rows))]

    def choose(node: int) -> int | None:
        row = verdict.logits[node]
        # A chain was drawn: node d's only child is the token drawn at depth d + 1.
        token = sampler.choose_against(row, drawn[node]) if node < len(drawn) else sampler.choose(row)
        return token if sequence.append(token, row) else None

    return descend(proposal.tree, choose)


def emit(sequence: Sequence, tokens: Iterable[tuple[int, Row | None]]) -> int:
    """Append tokens, each with its logits if they are wanted, until the sequence ends. Returns how many were
    appended."""
    emitted = 0
    for token, logits in tokens:
        emitted += 1
        if not sequence.append(token, logits):
            break
    return emitted
