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
    Agreement,
    CheckReport,
    Difference,
    DistributionFinding,
    DraftingFinding,
    GreedyFinding,
    TauFinding,
    Text,
    place_in_distribution,
    uniformity,
)
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.decoding.methods import AUTOREGRESSIVE, METHODS, Method
from ddtree_trt.runtime.decoding.routing import engine_host_reason
from ddtree_trt.runtime.engines.base import DraftRequest, Engine, most_probable
from ddtree_trt.runtime.tree import descend

GREEDY_BUDGETS: tuple[Budget, ...] = ("auto", 3, 16, 64)
SAMPLED_BUDGETS: tuple[Budget, ...] = ("auto", 16)
DEVICE_BUDGET = 16  # of the case with a fixed budget whose rounds stay on the device
GOLDEN_BUDGET = 64  # what manifest.golden_tau of ddtree is for, or the engine's largest


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
        texts = dict(zip(prompts, answers(session, list(prompts.values()), settings.max_tokens), strict=True))
        agreement = measure_agreement(session.engine, list(texts.values()))
        golden = min(GOLDEN_BUDGET, limits.max_tree_budget)
        cases = engine_cases(manifest, list(dict.fromkeys([*GREEDY_BUDGETS, golden])))
        if agreement.broken:  # what drafts cannot be decoded with
            cases = [case for case in cases if not METHODS[case.method].drafts]
        greedy = _check_greedy(session, texts, cases, settings, progress)
        distribution = _check_distribution(session, prompts, settings, progress) if settings.seeds else ()
    # Each method's mean acceptance length beside the range of the pair, which is for the shipped prompts.
    found, shipped = {finding.case: finding.tau for finding in greedy}, set(settings.prompts) == {TINY}
    ranges = {} if agreement.broken else manifest.golden_tau
    labels = {name: Case(name, golden if METHODS[name].branches else None).label for name in ranges}
    tau = tuple(TauFinding(labels[n], found[labels[n]], *bounds, shipped) for n, bounds in ranges.items())
    judged = [finding.passed for finding in tau if finding.judged]
    low = not all(judged) if judged else agreement.tau < LOW_TAU
    kind, arguments = manifest.drafting, manifest.chat_template_args.items()
    wired = {
        "drafter": manifest.drafter.name,
        "tapped layers": ", ".join(map(str, kind.tap_layers)),
        "mask token": "" if kind.mask_token_id is None else str(kind.mask_token_id),
        "block": "" if kind.block_size is None else str(kind.block_size),
        "precision": manifest.precision,
        "chat template arguments": ", ".join(f"{k}={v}" for k, v in arguments) or "none",
    }
    return CheckReport(
        engine=manifest.name,
        precision=manifest.precision,
        inexact=inexact,
        prompts=len(prompts),
        greedy=greedy,
        distribution=distribution,
        tau=tau,
        drafting=DraftingFinding(agreement, {name: value for name, value in wired.items() if value}, low),
    )


def answers(session: Session, prompts: Sequence[list[int]], max_tokens: int) -> list[Text]:
    outputs = [session.run(ids, Case(AUTOREGRESSIVE.name), max_tokens=max_tokens)[0] for ids in prompts]
    return [Text((*ids, *o.outputs[0].token_ids), len(ids)) for ids, o in zip(prompts, outputs, strict=True)]


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
    session: Session, texts: dict[str, Text], cases: Sequence[Case], settings: CheckSettings, progress: Progress
) -> tuple[GreedyFinding, ...]:
    """A finding per case; `texts` are the prompts, continued by `ar`."""
    findings = []
    for done, case in enumerate(cases, 1):
        differences, taus = [], []
        for name, text in texts.items():
            ids, expected = list(text.token_ids[: text.start]), list(text.token_ids[text.start :])
            output, _ = session.run(ids, case, max_tokens=settings.max_tokens)
            tokens = output.outputs[0].token_ids
            taus.append(output.metrics.mean_acceptance_length)
            if tokens != expected:
                differences.append(_explain(session, name, ids, expected, tokens))
        findings.append(GreedyFinding(case.label, len(texts), tuple(differences), float(np.mean(taus))))
        progress("greedy equality", done, len(cases))
    return tuple(findings)


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
    session: Session, prompts: dict[str, list[int]], settings: CheckSettings, progress: Progress
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


def measure_agreement(engine: Engine, texts: Sequence[Text]) -> Agreement:
    """Draft a chain at the places of every text. Uses slot 0, and leaves it empty."""
    manifest = engine.manifest
    able = [m for m in METHODS.values() if m.drafts and m.serves(manifest.drafter_kind)]
    method = min(able, key=lambda each: (each.branches, each.draws))  # of one chain, where the drafter's kind has one
    length, chunk = manifest.drafting.longest_draft, manifest.limits.prefill_chunk
    contexts, accepted, broken_drafts, broken_rows = list[int](), list[int](), 0, 0
    for text in texts:
        engine.truncate(0, 0)
        for place in text.places(length):
            for start in range(engine.length(0), place, chunk):
                piece = np.array(text.token_ids[start : min(start + chunk, place)], np.int64)
                row = engine.prefill(0, piece, rows="last", taps=True).logits[-1]
            broken_rows += not np.isfinite(row).all()
            matches = _matches(engine, method, text.token_ids[place:], length)
            contexts.append(place)
            accepted.append(matches or 0)
            broken_drafts += matches is None
    engine.truncate(0, 0)
    return Agreement(tuple(contexts), tuple(accepted), length, broken_drafts, broken_rows)


def _matches(engine: Engine, method: Method, token_ids: Sequence[int], length: int) -> int | None:
    """Leading tokens of the chain drafted behind token_ids[0] that are the following ones; None where the draft has
    values that are not numbers."""
    top_k = method.candidates(length, False)
    draft = engine.draft([DraftRequest(0, token_ids[0], top_k, length, most_probable)])[0]
    if any(np.isnan(values).any() for values in vars(draft.candidates).values()):
        return None
    try:
        tree = method.propose(draft, length, most_probable).tree
    except ValueError:
        return None
    tokens = iter(token_ids[1:])
    return len(descend(tree, lambda node: next(tokens, None))) - 1
