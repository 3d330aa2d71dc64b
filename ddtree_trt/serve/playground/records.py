"""JSON records of rounds and times, as the page draws them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ddtree_trt.runtime.decoding.budget.policy import Decision
from ddtree_trt.runtime.decoding.loop import Round
from ddtree_trt.runtime.stats import RequestMetrics
from ddtree_trt.serve.openai.tokens import TokenTexts


def round_record(texts: TokenTexts, round_: Round) -> dict[str, Any]:
    """A round as {root, nodes, path, emitted, decision}.

    `root` is the bonus token's text. A node is [text, parent, probability]: parent 0 is the root, i > 0 the node at
    place i − 1; the probability is the drafter's, of the whole prefix. `path` are the accepted nodes, counted like
    parents; `emitted` the texts that the round added to the output.
    """
    tree, path = round_.tree, [node for node in round_.path.tolist() if node]
    tokens, parents, weights = tree.token_ids.tolist(), tree.parents.tolist(), tree.log_weights.tolist()
    accepted = [tokens[node - 1] for node in path]
    return {
        "root": _text(texts, round_.root_token),
        "nodes": [
            [_text(texts, token), parent, round(math.exp(weight), 4)]
            for token, parent, weight in zip(tokens, parents[1:], weights, strict=True)
        ],
        "path": path,
        "emitted": [_text(texts, token) for token in [*accepted, round_.next_token]],
        "decision": None if round_.decision is None else _decision(round_.decision),
    }


def _decision(decision: Decision) -> dict[str, Any]:
    """Why an automatic budget chose the tree's size; seconds."""
    return {
        "drafted": decision.drafted,
        "probe": decision.probe,
        "expected_tokens": round(decision.expected_tokens, 3),
        "expected_s": decision.expected_s,
        "single_token_s": decision.single_token_s,
        "expected_gain": round(decision.expected_gain, 3),
    }


def figures(metrics: RequestMetrics) -> dict[str, Any]:
    """The figures of a request so far; seconds, and tokens per second."""
    stages: Mapping[str, float] = metrics.stage_s
    return {
        "output_tokens": metrics.output_tokens,
        "rounds": metrics.rounds,
        "tokens_per_round": metrics.mean_acceptance_length,
        "drafted_tokens": metrics.drafted_tokens,
        "accepted_tokens": metrics.accepted_tokens,
        "time_to_first_token_s": metrics.time_to_first_token_s,
        "decode_tokens_per_s": metrics.decode_tokens_per_s,
        "stage_s": dict(stages),
    }


def _text(texts: TokenTexts, token: int) -> str:
    return texts.of(token)[0]
