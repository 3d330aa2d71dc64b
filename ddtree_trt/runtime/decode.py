"""The decode loop: one round of draft → tree_build → tree_compile → verify → commit over any number of slots.

Every method goes through this one function. Autoregressive decoding is a round whose tree is the root alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.runtime.engine import DraftRequest, Engine, Verdict, VerifyRequest
from ddtree_trt.runtime.methods import NOTHING, Proposal, candidates, propose
from ddtree_trt.runtime.sequence import Sequence
from ddtree_trt.runtime.stats import StageClock
from ddtree_trt.runtime.tree import compile_tree, descend, walk

Path = NDArray[np.int32]


def decode_round(engine: Engine, sequences: list[Sequence], clock: StageClock) -> None:
    """Advance every sequence by one round. They hold distinct slots, each with a bonus token not yet in the cache."""
    sequences = sorted(sequences, key=_slot)
    pasts = [engine.length(_slot(s)) for s in sequences]

    with clock("draft"):
        ceilings = [s.budget.ceiling(past) if s.drafts else 0 for s, past in zip(sequences, pasts, strict=True)]
        drafting = [(s, b) for s, b in zip(sequences, ceilings, strict=True) if b > 0]
        drafts = engine.draft([_draft_request(s, b) for s, b in drafting])

    with clock("tree_build"):
        proposals = {_slot(s): NOTHING for s in sequences}
        for (s, ceiling), draft in zip(drafting, drafts, strict=True):
            proposal = propose(s.params.method, draft, ceiling, s.sampler)
            tree = proposal.tree.cut(s.budget.choose(proposal.tree, engine.length(_slot(s))))
            proposals[_slot(s)] = Proposal(tree, proposal.drawn[: len(tree)])

    with clock("tree_compile"):
        trees = [compile_tree(s.bonus_token, proposals[_slot(s)].tree) for s in sequences]

    with clock("verify"):
        verdicts = engine.verify([VerifyRequest(_slot(s), t) for s, t in zip(sequences, trees, strict=True)])
        paths = [accept(s, proposals[_slot(s)], v) for s, v in zip(sequences, verdicts, strict=True)]

    with clock("commit"):
        for s, path in zip(sequences, paths, strict=True):
            engine.commit(_slot(s), path, taps=s.drafts)
            s.budget.observe(proposals[_slot(s)].tree, path)


def accept(sequence: Sequence, proposal: Proposal, verdict: Verdict) -> Path:
    """Walk the verified tree, emit the target's tokens, and return the path [m] whose cache rows stay, root first.

    Each node on the path yields one emitted token: the accepted drafts, then the next bonus token. Where a stop or a
    limit is met inside the path, the path ends there.
    """
    tree = proposal.tree
    before = len(sequence.output)
    if sequence.sampler.takes_choices:
        path = walk(tree, verdict.choices)
        emitted = 0
        for node, token in zip(path.tolist(), verdict.choices[path].tolist(), strict=True):
            emitted += 1
            if not sequence.append(token, verdict.logits[node]):
                break
        path = path[:emitted]
    else:

        def choose(node: int) -> int | None:
            row = verdict.logits[node]
            if node < len(proposal.drawn):  # a chain: node d's only child is the token drawn at depth d + 1
                token = sequence.sampler.choose_against(row, proposal.drawn[node])
            else:
                token = sequence.sampler.choose(row)
            return token if sequence.append(token, row) else None

        path = descend(tree, choose)
    sequence.metrics.acceptance_lengths.append(max(len(sequence.output) - before, 0))
    sequence.metrics.budgets.append(len(tree))
    return path


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None, "a sequence is decoded only while it holds a slot"
    return sequence.slot


def _draft_request(sequence: Sequence, ceiling: int) -> DraftRequest:
    params = sequence.params
    k = candidates(params.method, ceiling, params.stochastic)
    return DraftRequest(_slot(sequence), sequence.bonus_token, k, ceiling, sequence.sampler.draft)
