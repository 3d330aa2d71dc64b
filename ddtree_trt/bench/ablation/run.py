"""The run of an ablation: texts, drafts and replays first, then what only a clock can answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact.backends import BACKENDS
from ddtree_trt.artifact.limits import Limits
from ddtree_trt.artifact.manifest import Manifest, load_manifest
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.artifact.rebuild import rebuild_command
from ddtree_trt.bench.ablation.recording import RecordedText, record
from ddtree_trt.bench.ablation.redrafting import LevelTrees
from ddtree_trt.bench.ablation.result import AblationResult, BuildRow, TimeRow
from ddtree_trt.bench.ablation.settings import AblationSettings
from ddtree_trt.bench.ablation.trees import Trees
from ddtree_trt.bench.environment import describe_engine, read_environment
from ddtree_trt.bench.prompts import BenchPrompt, digest, load_prompts
from ddtree_trt.bench.reporting.summary import summarize
from ddtree_trt.bench.result import BenchResult, Part
from ddtree_trt.bench.runner import WHOLE, Measurement
from ddtree_trt.bench.session import EngineContender, Session
from ddtree_trt.bench.settings import BenchSettings
from ddtree_trt.drafters.kind import EXPANDED
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.candidates import Candidates, Marginals
from ddtree_trt.runtime.decoding.methods import AUTO, AUTOREGRESSIVE, Method, resolve_method
from ddtree_trt.runtime.engines.base import DrawnFrom
from ddtree_trt.runtime.engines.load import open_engine
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.tree import best_tree, compile_tree

BUILDS = 60  # drafts of which trees are built to measure the parts of a build


def run_ablation(settings: AblationSettings, progress: Progress = no_progress) -> AblationResult:
    """Answer every question for an engine.

    Raises UsageError for an engine whose drafter drafts no trees, for budgets that its plans do not take, and for
    prompts of which none fits; ArtifactError for an engine that cannot be opened.
    """
    directory = Path(settings.engine)
    manifest = load_manifest(directory)
    method = resolve_method(AUTO, manifest.drafter_kind)
    if not method.branches:
        raise UsageError(
            f"{directory} has an {manifest.drafting.title}, which drafts chains; ablate compares trees: give an engine "
            "with a block drafter or an EAGLE-3 drafter"
        )
    limits = limits_for(directory, manifest, settings.budgets[-1])
    engine = open_engine(directory, settings, limits=limits)
    with closing(Session(directory, engine=engine)) as session:
        prompts = load_prompts(settings.prompts, settings.limit)
        encoded = {p.id: session.codec.encode(p.opening) for p in prompts}
        fitting = [p for p in prompts if len(encoded[p.id]) + settings.max_tokens <= limits.max_seq_len]
        if not fitting:
            raise UsageError(
                f"no prompt fits: with {settings.max_tokens} new tokens each is longer than {limits.max_seq_len}, what "
                f"this engine's cache takes beside trees of {limits.max_tree_budget} nodes; lower --max-tokens or "
                "--budgets"
            )
        environment = read_environment()
        texts = _texts(session, [encoded[p.id] for p in fitting], settings, progress)
        trees: Trees
        if manifest.drafting.drafts == "levels":
            recorded = record(session.engine, texts[:1], EXPANDED, _most_probable, progress)
            trees = LevelTrees(
                [RecordedText(tuple(ids), start) for ids, start in texts], settings, session.engine, progress
            )
        else:
            recorded = record(session.engine, texts, settings.budgets[-1], _most_probable, progress)
            trees = Trees(recorded, settings, manifest.drafting.longest_draft, progress)
        budgets, temperatures = _times(session, method, fitting, settings, progress)
        return AblationResult(
            settings=settings,
            engine=describe_engine(session.manifest, session.engine),
            environment=environment,
            texts=len(fitting),
            tokens=sum(len(ids) - start for ids, start in texts),
            draft_length=trees.length,
            notes=tuple(_notes(manifest, limits, len(prompts) - len(fitting))),
            policies=trees.policies(),
            depths=trees.depths(),
            conditionals=trees.conditionals(),
            builds=build_times(recorded, settings.budgets),
            budgets=budgets,
            temperatures=temperatures,
        )


def limits_for(directory: Path, manifest: Manifest, nodes: int) -> Limits:
    """The engine's limits, with trees of so many nodes: a larger tree leaves fewer rows of the cache for text.

    Raises UsageError where the cache has too few rows, and for larger trees than an engine with plans was built for.
    """
    limits = manifest.limits
    if nodes <= limits.max_tree_budget:
        return limits
    if BACKENDS[manifest.backend].plans:
        raise UsageError(
            f"a tree of {nodes} nodes is above this engine's {limits.max_tree_budget}, which its plans were built for; "
            f"lower --budgets or rebuild with a larger --max-tree-budget: {rebuild_command(directory, manifest)}"
        )
    larger = replace(limits, max_tree_budget=nodes)
    left = limits.cache_rows - larger.max_tokens_per_pass
    if left < 1:
        raise UsageError(
            f"the cache of this engine has {limits.cache_rows} rows, which is no room for a tree of {nodes} nodes; "
            "lower --budgets or rebuild with a larger --max-tree-budget"
        )
    return replace(larger, max_seq_len=left)


def _notes(manifest: Manifest, limits: Limits, skipped: int) -> list[str]:
    notes = []
    if manifest.drafting.drafts == "levels":
        notes.append(
            "The drafter drafts level by level: each tree has drafts of its own, made where its rounds came to, and "
            "parts of tree_build are those of the first text's drafts."
        )
    if limits != manifest.limits:
        notes.append(
            f"The engine was built for trees of {manifest.limits.max_tree_budget} nodes; with {limits.max_tree_budget} "
            f"its cache takes {limits.max_seq_len} tokens instead of {manifest.limits.max_seq_len}."
        )
    if skipped:
        notes.append(f"{skipped} prompts were too long and left out.")
    return notes


def _texts(
    session: Session, prompts: Sequence[list[int]], settings: AblationSettings, progress: Progress
) -> list[tuple[list[int], int]]:
    """(token ids, number of the prompt's) of every prompt continued by the target alone."""
    params = SamplingParams(max_tokens=settings.max_tokens, temperature=0.0, method=AUTOREGRESSIVE.name)
    texts = []
    for number, ids in enumerate(prompts):
        progress("decode texts", number, len(prompts))
        output, _ = session.generate(ids, params, device_rounds="off")
        texts.append((ids + output.outputs[0].token_ids, len(ids)))
    progress("decode texts", len(prompts), len(prompts))
    return texts


def _most_probable(log_probs: NDArray[np.float32], token_ids: NDArray[np.int32], depth: int) -> DrawnFrom:
    return DrawnFrom(int(token_ids[0]), token_ids[:1], np.ones(1))


def build_times(texts: Sequence[RecordedText], budgets: Sequence[int]) -> tuple[BuildRow, ...]:
    """The times of the parts of a build at every number of nodes."""
    drafts = [draft for text in texts for draft in text.drafts]
    chosen = drafts[:: max(1, len(drafts) // BUILDS)][:BUILDS]
    if not chosen:
        return ()
    rows = []
    for nodes in budgets:
        parts = [_build_s(draft, nodes) for draft in chosen]
        rows.append(BuildRow(nodes, *(1000 * median(seconds) for seconds in zip(*parts, strict=True))))
    return tuple(rows)


def _build_s(candidates: Candidates, nodes: int) -> tuple[float, float, float]:
    """Seconds of one build's parts: the candidates copied, the heap, and the bits of which node sees which. A tree is
    built of as many candidates per position as it has nodes, where the drafter gives that many."""
    given = vars(candidates)
    if isinstance(candidates, Marginals):
        given = {name: values[:, :nodes] for name, values in given.items()}
    times = [time.perf_counter()]
    copied = type(candidates)(**{name: values.copy() for name, values in given.items()})
    times.append(time.perf_counter())
    tree = best_tree(copied, nodes)
    times.append(time.perf_counter())
    _ = compile_tree(0, tree).packed_mask  # computed for its time
    times.append(time.perf_counter())
    return times[1] - times[0], times[2] - times[1], times[3] - times[2]


def _times(
    session: Session, method: Method, prompts: Sequence[BenchPrompt], settings: AblationSettings, progress: Progress
) -> tuple[tuple[TimeRow, ...], tuple[TimeRow, ...]]:
    """(every number of nodes at temperature 0, the fastest of them at every temperature), decoded."""
    chosen = prompts[: settings.timed_prompts]
    if not chosen:
        return (), ()
    by_budget = _measured(session, method, chosen, settings, settings.budgets, (0.0,), progress)
    trees = [row for row in by_budget if row.case.startswith(f"{method.name}@")]
    fastest = int(max(trees, key=lambda row: row.tokens_per_s).case.rpartition("@")[2])
    return by_budget, _measured(session, method, chosen, settings, (fastest,), settings.temperatures, progress)


def _measured(
    session: Session,
    method: Method,
    prompts: Sequence[BenchPrompt],
    settings: AblationSettings,
    budgets: tuple[int, ...],
    temperatures: tuple[float, ...],
    progress: Progress,
) -> tuple[TimeRow, ...]:
    plan = BenchSettings(
        engine=settings.engine,
        methods=(method.name,),
        budgets=budgets,
        temperatures=temperatures,
        prompts=settings.prompts,
        max_tokens=settings.max_tokens,
        seed=settings.seed,
        device_rounds="off",
    )
    run = Measurement(plan, session, [EngineContender(session, plan)], progress)
    run.warm_up(prompts[0])
    run.measure(prompts, WHOLE)
    engine, part = describe_engine(session.manifest, session.engine), Part(WHOLE, read_environment(), {})
    result = BenchResult(plan, engine, digest(prompts), len(prompts), (part,), tuple(run.samples))
    return tuple(
        TimeRow(
            case=row.case.label,
            temperature=row.temperature,
            tau=row.tau.value if row.tau else 1.0,
            tokens_per_s=row.tokens_per_s.value,
            token_ms=1000 / row.tokens_per_s.value,
            speedup=row.speedup.value,
            stage_ms=row.stage_ms,
        )
        for row in summarize(result, pooled=True)
    )
