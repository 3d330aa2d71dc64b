"""What the sampler promises, written plainly: a token's exact distribution, and tests of draws against it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import numpy as np
from scipy.stats import chi2

from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams

# Every statistical test here fails on a right implementation with this probability at most. Seeds are fixed, so a test
# that passes keeps passing; the level says how sure a failure is to be a fault.
FALSE_ALARM = 1e-6

Outcome = TypeVar("Outcome")


class Rows(Protocol):
    def row(self, context: list[int], /) -> Iterable[float]:
        """The target's logits [V] of what follows the tokens."""


def distribution(
    logits: Iterable[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    banned: Iterable[int] = (),
) -> list[float]:
    """Probabilities [V] of the next token, from `SamplingParams`'s documentation. `banned` are the stop tokens."""
    x = [float(v) for v in logits]
    for token in range(len(x)):
        count = list(output).count(token)
        if count or token in prompt:
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        x[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        x[token] += params.logit_bias.get(token, 0)
    if len(output) < params.min_tokens:
        for token in banned:
            x[token] = -math.inf
    if params.temperature == 0:
        return [float(token == x.index(max(x))) for token in range(len(x))]
    order = sorted(range(len(x)), key=lambda token: -x[token])
    kept = order[: params.top_k] if params.top_k else order
    weights = _normalised({t: math.exp((x[t] - x[kept[0]]) / params.temperature) for t in kept})
    mass, nucleus = 0.0, []
    for token in kept:
        if mass < params.top_p or params.top_p == 1:  # of the sum, which may be 1 before it is whole
            nucleus.append(token)
            mass += weights[token]
    floor = params.min_p * weights[kept[0]]
    final = _normalised({t: weights[t] for t in nucleus if weights[t] >= floor})
    return [final.get(token, 0.0) for token in range(len(x))]


def _normalised(weights: Mapping[int, float]) -> dict[int, float]:
    total = math.fsum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def joint(
    target: Rows, params: SamplingParams, prompt: Sequence[int], length: int, output: tuple[int, ...] = ()
) -> dict[tuple[int, ...], float]:
    """The exact probability of every possible beginning of the output, `length` tokens long."""
    if len(output) == length:
        return {output: 1.0}
    row = distribution(target.row([*prompt, *output]), params, prompt, output)
    found: dict[tuple[int, ...], float] = {}
    for token, p in enumerate(row):
        if p > 0:
            later = joint(target, params, prompt, length, (*output, token))
            found |= {tokens: p * q for tokens, q in later.items()}
    return found


def last_row(llm: LLM, tokens: list[int]) -> np.ndarray:
    """float32 [V]: what follows the tokens."""
    engine, chunk = llm.engine, llm.engine.manifest.limits.prefill_chunk
    llm.reset_prefix_cache()
    for start in range(0, len(tokens), chunk):
        verdict = engine.prefill(0, np.array(tokens[start : start + chunk]), rows="last", taps=False)
    row = np.array(verdict.logits[-1])
    engine.truncate(0, 0)
    return row


def chi_square(counts: Mapping[Outcome, int], expected: Mapping[Outcome, float]) -> float:
    """p-value of draws against their exact distribution. Outcomes expected fewer than five times are pooled; one that
    cannot happen is a certain failure."""
    draws = sum(counts.values())
    if any(outcome not in expected for outcome in counts):
        return 0.0
    seen, wanted, rest_seen, rest_wanted = [], [], 0, 0.0
    for outcome, p in expected.items():
        if p * draws >= 5:
            seen.append(counts.get(outcome, 0))
            wanted.append(p * draws)
        else:
            rest_seen += counts.get(outcome, 0)
            rest_wanted += p * draws
    if rest_wanted >= 5:
        seen.append(rest_seen)
        wanted.append(rest_wanted)
    statistic = sum((s - w) ** 2 / w for s, w in zip(seen, wanted, strict=True))
    return float(chi2.sf(statistic, max(len(seen) - 1, 1)))


def drift(tokens: Sequence[int], rows: Sequence[Sequence[float]], strata: Sequence[object]) -> float:
    """p-value of one long path against the exact distribution of each of its steps.

    tokens [n] were drawn from rows [n, V], where a row may depend on all that went before. Per stratum the sum of
    (one-hot − row) is a martingale with covariance Σ diag(row) − row rowᵀ: its normal form is chi-square distributed.
    """
    statistic, freedom = 0.0, 0
    for stratum in set(strata):
        chosen = [i for i, s in enumerate(strata) if s == stratum]
        p = np.array([rows[i] for i in chosen])
        hits = np.eye(p.shape[1])[[tokens[i] for i in chosen]]
        if (hits[p == 0] > 0).any():
            return 0.0
        if len(chosen) < 200:  # too few for the normal limit
            continue
        difference = (hits - p).sum(0)
        covariance = np.diag(p.sum(0)) - p.T @ p
        usable = p.sum(0) >= 10
        part = covariance[np.ix_(usable, usable)]
        values, vectors = np.linalg.eigh(part)
        large = values > 1e-6 * values.max()
        statistic += float(((vectors.T @ difference[usable])[large] ** 2 / values[large]).sum())
        freedom += int(large.sum())
    assert freedom > 0
    return float(chi2.sf(statistic, freedom))
