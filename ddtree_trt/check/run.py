"""Checks of `ddtree-trt check`: whether an engine is lossless up to its rounding, and its drafter wired right.

Greedy: every method gives the tokens of `ar`; where one differs, the target's logits of both tokens must be closer than
the precision rounds, and in an exact engine (`engines/base.py`) none may differ. Distribution: every sampled
token's place in the target's own distribution is uniform. Golden τ: the mean acceptance length is in the pair's range.
"""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.precisions import PRECISIONS
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.bench.measure import Session, load_prompts
from ddtree_trt.bench.settings import TINY, Budget, Case, CheckSettings
from ddtree_trt.check.findings import (
    LOW_TAU,
    TEMPERATURES,
    CheckReport,
    Difference,
    DistributionFinding,
    DraftingFinding,
    GreedyFinding,
    TauFinding,
    place_in_distribution,
    uniformity,
)
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.decoding.methods import AUTOREGRESSIVE, METHODS
from ddtree_trt.runtime.decoding.routing import engine_host_reason
from ddtree_trt.runtime.outputs import RequestOutput

GREEDY_BUDGETS: tuple[Budget, ...] = ("auto", 3, 16, 64)
SAMPLED_BUDGETS: tuple[Budget, ...] = ("auto", 16)
DEVICE_BUDGET = 16  # of the case with a fixed budget whose rounds stay on the device
GOLDEN_BUDGET = 64  # what manifest.golden_tau of ddtree is for, or the engine's largest

Prompts = dict[str, list[int]]  # name → token ids


def check_engine(settings: CheckSettings, progress: Progress = no_progress) -> CheckReport:
    """Run every check. Raises UsageError for prompts that do not fit, ArtifactError for an engine that cannot load."""
    with closing(Session(Path(settings.engine), settings)) as session:
        manifest, limits, inexact = session.manifest, session.manifest.limits, session.engine.inexact
        prompts = {p.id: session.codec.encode(p.opening) for p in load_prompts(settings.prompts, settings.limit)}
        for name, ids in prompts.items():
            if len(ids) + settings.max_tokens > limits.max_seq_len:
                raise UsageError(
                    f"prompt {name} has {len(ids)} tokens; with {settings.max_tokens} new ones it does not fit "
                    f"max_seq_len {limits.max_seq_len}; lower --max-tokens or leave the prompt out"
                )
        golden = min(GOLDEN_BUDGET, limits.max_tree_budget)
        cases = engine_cases(manifest, list(dict.fromkeys([*GREEDY_BUDGETS, golden])))
        able = [m for m in METHODS.values() if m.drafts and m.serves(manifest.drafter_kind)]
        method = min(able, key=lambda each: (each.branches, each.draws))  # a chain, where the drafter's kind has one
        drafted = Case(method.name, golden if method.branches else None)
        greedy, rounds = _check_greedy(session, prompts, cases, drafted, settings, progress)
        distribution = _check_distribution(session, prompts, settings, progress) if settings.seeds else ()
    # Each method's mean acceptance length beside the range of the pair, which is for the shipped prompts.
    found, shipped = {finding.case: finding.tau for finding in greedy}, set(settings.prompts) == {TINY}
    labels = {name: Case(name, golden if METHODS[name].branches else None).label for name in manifest.golden_tau}
    tau = tuple(TauFinding(labels[n], found[labels[n]], *bounds, shipped) for n, bounds in manifest.golden_tau.items())
    judged = [finding.passed for finding in tau if finding.judged]
    low = not all(judged) if judged else found[drafted.label] < LOW_TAU
    drafting = None
    if rounds:
        contexts, accepted = zip(*rounds, strict=True)
        drafting = DraftingFinding(drafted.label, contexts, accepted, manifest.drafting.longest_draft, low)
    return CheckReport(
        engine=manifest.name,
        precision=manifest.precision,
        inexact=inexact,
        prompts=len(prompts),
        greedy=greedy,
        distribution=distribution,
        tau=tau,
        drafting=drafting,
    )


def engine_cases(manifest: Manifest, budgets: Sequence[Budget]) -> list[Case]:
    """Every method the engine can do, `ar` first; trees at each of the budgets within the engine's limit. Then those of
    the device, trees at two budgets."""
    allowed = [b for b in budgets if b == "auto" or b <= manifest.limits.max_tree_budget]
    cases = []
    for method in METHODS.values():
        if not method.serves(manifest.drafter_kind):
            continue
        cases += [Case(method.name, b) for b in allowed] if method.branches else [Case(method.name)]
        if method.host_reason is None and engine_host_reason(manifest) is None:
            on_device = [b for b in allowed if b in ("auto", DEVICE_BUDGET)] if method.branches else [None]
            cases += [Case(method.name, b, device=True) for b in on_device]
    return sorted(cases, key=lambda case: case.method != AUTOREGRESSIVE.name)


def _check_greedy(
    session: Session, prompts: Prompts, cases: list[Case], drafted: Case, settings: CheckSettings, progress: Progress
) -> tuple[tuple[GreedyFinding, ...], list[tuple[int, int]]]:
    """A finding per case, against the tokens of `ar`; and of the rounds of `drafted`, one of the cases, the tokens
    before each and how many drafted ones it accepted. Left out are rounds at a text's end that are not its first:
    they could not accept all."""

    def run(ids: list[int], case: Case) -> RequestOutput:
        return session.run(ids, case, max_tokens=settings.max_tokens)[0]

    expected = {name: run(ids, Case(AUTOREGRESSIVE.name)).outputs[0].token_ids for name, ids in prompts.items()}
    findings, rounds, longest = [], list[tuple[int, int]](), session.manifest.drafting.longest_draft
    for done, case in enumerate(cases, 1):
        differences, taus = [], []
        for name, ids in prompts.items():
            output = run(ids, case)
            tokens, spent = output.outputs[0].token_ids, 0
            taus.append(output.metrics.mean_acceptance_length)
            if tokens != expected[name]:
                differences.append(_explain(session, name, ids, expected[name], tokens))
            for length in output.metrics.acceptance_lengths if case == drafted else ():
                if spent == 0 or spent + longest < len(tokens) - 1:
                    rounds.append((len(ids) + spent, length - 1))
                spent += length
        findings.append(GreedyFinding(case.label, len(prompts), tuple(differences), float(np.mean(taus))))
        progress("greedy equality", done, len(cases))
    return tuple(findings), rounds


def _explain(session: Session, name: str, prompt: list[int], expected: list[int], found: list[int]) -> Difference:
    pairs = list(zip(expected, found, strict=False))
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    # Of equal tokens that are not the first to differ one output has ended: the row is of the longer one.
    row = target_logits(session, prompt, max(expected, found, key=len)[: position + 1])[position]
    exact = session.engine.inexact is None
    rounding = 0.0 if exact else PRECISIONS[session.manifest.precision].relative_rounding * float(np.abs(row).max())
    a, b = (next(iter(tokens[position : position + 1]), None) for tokens in (expected, found))
    gap = None if a is None or b is None else float(row.max() - min(row[a], row[b]))
    return Difference(name, position, a, b, gap, rounding)


def target_logits(session: Session, prompt: list[int], output: Sequence[int]) -> NDArray[np.float32]:
    """The target's own logits [len(output), V]: row i is what output token i was chosen from. Uses slot 0."""
    engine, chunk = session.engine, session.manifest.limits.prefill_chunk
    engine.truncate(0, 0)
    head, tail = prompt[:-1], [prompt[-1], *output[:-1]]
    for start in range(0, len(head), chunk):
        engine.prefill(0, np.array(head[start : start + chunk], np.int64), rows="none", taps=False)
    rows = []
    for start in range(0, len(tail), chunk):
        verdict = engine.prefill(0, np.array(tail[start : start + chunk], np.int64), rows="all", taps=False)
        rows.append(np.array(verdict.logits))
    engine.truncate(0, 0)
    return np.concatenate(rows)


def _check_distribution(
    session: Session, prompts: Prompts, settings: CheckSettings, progress: Progress
) -> tuple[DistributionFinding, ...]:
    """A finding per case. Every case draws with seeds of its own, at each of TEMPERATURES: cases are independent."""
    cases = engine_cases(session.manifest, SAMPLED_BUDGETS)
    chosen = list(prompts.values())[: settings.sampled_prompts]
    findings = []
    for number, case in enumerate(cases):
        rng = np.random.default_rng([number, 1])
        places: list[float] = []
        for i in range(settings.seeds):
            for j, ids in enumerate(chosen):
                for temperature in TEMPERATURES:
                    seed = (number * settings.seeds + i) * len(chosen) + j
                    sampling = {"max_tokens": settings.sampled_tokens, "temperature": temperature, "seed": seed}
                    tokens = session.run(ids, case, **sampling)[0].outputs[0].token_ids
                    rows = target_logits(session, ids, tokens)
                    found = [place_in_distribution(*pair, temperature, rng) for pair in zip(rows, tokens, strict=True)]
                    places += [place for place in found if place is not None]
        findings.append(uniformity(places, case.label))
        progress("distribution", number + 1, len(cases))
    return tuple(findings)
