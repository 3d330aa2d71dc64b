"""Build an engine directory from a request: everything that can be refused is refused before any work. Or say what it
would take in memory, from both networks' configuration alone."""

import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ddtree_trt import __version__
from ddtree_trt.artifact import files as artifact
from ddtree_trt.artifact.backends import BackendName
from ddtree_trt.artifact.files import ENGINES
from ddtree_trt.artifact.manifest import BUDGETS, INTERVAL, SCHEMA_VERSION, SLOTS, Limits, Manifest, parse_manifest
from ddtree_trt.artifact.precisions import PRECISIONS, PrecisionName
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.artifact.template_arguments import OPTION, check_arguments, template_variables, thinking_note
from ddtree_trt.build.backends.base import BackendBuild, BuilderOptions, Inputs
from ddtree_trt.build.checkpoint.tokenizer import copy_tokenizer, find_tokenizer, open_tokenizer
from ddtree_trt.build.choice import Wanted, backend_build, choose_backend, resolve_precision
from ddtree_trt.build.directory import atomic_directory, describe_files, prepare_destination
from ddtree_trt.build.pair import Pair, open_pair, outline_pair
from ddtree_trt.build.presets import PRESETS, Preset, find_preset
from ddtree_trt.build.sources import Source, named_source
from ddtree_trt.device.buffers import with_aligned_slots
from ddtree_trt.device.gpus import available_bytes, find_gpus
from ddtree_trt.device.memory import MemoryPlan, plan_engine
from ddtree_trt.device.survey import survey_machine
from ddtree_trt.drafters.registry import kind_of
from ddtree_trt.errors import BuildError, CheckpointError, UsageError
from ddtree_trt.models.decoder import POSITIONS
from ddtree_trt.reading import Between, shown
from ddtree_trt.reading import Source as JsonSource
from ddtree_trt.records import check, option


def _limit_option(name: str, text: str, within: Between) -> Any:
    default = f"Default {getattr(Limits, name)}, or the preset's."
    return option(None, f"{text} {default}", within=(within.lowest, within.highest))


@dataclass(frozen=True)
class BuildRequest(BuilderOptions):
    """A build as the user asks for it. None leaves a number to the preset."""

    target: str | None = option(None, f"One of {', '.join(PRESETS)}, or a name for your own pair.", "NAME")
    # Instead of the preset's: a path, or as text also an OWNER/NAME of the hub (`named_source`).
    checkpoint: str | Path | None = option(
        None,
        "A target: a directory, a GGUF file, or OWNER/NAME of the Hugging Face hub, with @REVISION if wanted.",
        "PATH|ID",
    )
    drafter: str | Path | None = option(None, "A drafter, likewise.", "PATH|ID")
    backend: Literal["auto", BackendName] = option("auto", "What runs the engine.", "")
    precision: Wanted = option("auto", "What it computes in.", "")
    max_seq_len: int | None = _limit_option("max_seq_len", "Prompt and output tokens.", POSITIONS)
    max_tree_budget: int | None = _limit_option("max_tree_budget", "Largest tree.", BUDGETS)
    max_batch: int | None = _limit_option("max_batch", "Sequences at a time.", SLOTS)
    snapshot_every: int | None = _limit_option(
        "snapshot_every",
        "Hybrids: tokens between the states kept for later prompts; 0: one, at a prompt's end.",
        INTERVAL,
    )
    output: Path | None = option(None, "The engine directory. Default engines/NAME.", "DIR")
    force: bool = option(False, "Replace an existing engine.")
    chat_template_args: Mapping[str, Any] = field(default_factory=dict)  # over the preset's

    def __post_init__(self) -> None:
        check(self)

    @property
    def name(self) -> str:
        """The engine's name. Raises UsageError when there is none, or none that can name a directory."""
        name = self.target or (named_source(self.checkpoint).engine_name if self.checkpoint else None)
        if name is None:
            raise UsageError(f"nothing to build; give --target NAME with one of {', '.join(PRESETS)}")
        if not re.fullmatch(artifact.NAME.expression, name):
            raise UsageError(f"{shown(name)} cannot name an engine; use letters, digits, '.', '_' and '-' in --target")
        return name

    @property
    def destination(self) -> Path:
        """The engine directory, as the user would write it."""
        return self.output or ENGINES / self.name


def compile_engine(
    request: BuildRequest, progress: Progress = no_progress, notice: Callable[[str], None] = lambda line: None
) -> Manifest:
    """Build the engine a request asks for and return its manifest; the engine is at `request.destination`.
    `notice` is called with each line that the user should read.

    Raises UsageError for a wrong request, CheckpointError for a pair that cannot be used, and BuildError when the
    engine cannot be written. Whatever is raised, an engine already there is untouched and no half engine is left.
    """
    started = time.monotonic()
    found = resolve(request, notice)
    preset, backend, precision, limits = found.preset, found.backend, found.precision, found.limits
    destination = prepare_destination(request.destination, force=request.force)
    target, drafter = open_pair(*found.sources)
    tokenizer = find_tokenizer(target.path)
    template_args = {**(preset.chat_template_args if preset else {}), **request.chat_template_args}
    needed = Pair(target, drafter).bytes_on_disk(backend.backend.name, precision)
    usage = shutil.disk_usage(destination.parent)
    if usage.total and usage.free < needed:  # some network file systems report no size at all
        raise BuildError(
            f"cannot write {destination}: it needs {needed / 1e6:,.0f} MB and {destination.parent} has "
            f"{usage.free / 1e6:,.0f} MB free; free some space or give --output DIR on another disk"
        )

    with atomic_directory(destination, force=request.force) as directory:
        copy_tokenizer(tokenizer, target.path, target.stop_token_ids, directory)
        loaded = open_tokenizer(directory, tokenizer, target.dims.vocab_size)
        read_from = JsonSource(str(tokenizer), CheckpointError, "fetch the tokenizer again")
        variables = template_variables(loaded, read_from)
        check_arguments(loaded, variables, request.chat_template_args, OPTION)
        # A drafter that reads the target's states was trained on prompts of one format.
        if drafter.kind.tap_layers and (note := thinking_note(variables, template_args)):
            notice(note)
        written = backend.write(directory, Inputs(target, drafter, limits, precision), progress)
        for line in written.notes:
            notice(line)
        if preset and preset.examples and request.checkpoint is None:
            shutil.copyfile(preset.examples.directory / artifact.EXAMPLES, directory / artifact.EXAMPLES)
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            product_version=__version__,
            backend=backend.backend.name,
            precision=precision,
            name=request.name,
            target=target.identify(progress),
            drafter=drafter.identify(progress),
            drafter_kind=drafter.kind.name,
            target_dims=target.dims,
            drafter_dims=drafter.dims,
            limits=limits,
            stop_token_ids=target.stop_token_ids,
            chat_template_args=template_args,
            toolchain=written.toolchain,
            tensors=written.tensors,
            plugin=written.plugin,
            files=describe_files(directory, progress),
            build_seconds=round(time.monotonic() - started, 3),
            golden_tau=dict(preset.golden_tau) if preset else {},
        )
        text = manifest.to_json()
        parse_manifest(text, artifact.MANIFEST)  # what is written can be read
        (directory / artifact.MANIFEST).write_text(text, encoding="utf-8")
    return manifest


@dataclass(frozen=True)
class Resolved:
    """What a request asks for, known before any weight is read."""

    preset: Preset | None  # None where the request gives both networks
    sources: tuple[Source, Source]  # of target and drafter: what the user named, else the preset's
    pair: Pair
    backend: BackendBuild
    precision: PrecisionName
    limits: Limits


def resolve(request: BuildRequest, notice: Callable[[str], None], *, dry_run: bool = False) -> Resolved:
    """Resolve a request; for backend `auto` by what this machine has, and `notice` is called with the reason. For a dry
    run any machine will do. Raises what `backend_build`, `resolve_precision` and the backend's `check` raise,
    UsageError for a wrong request and CheckpointError for a configuration that cannot be used."""
    name, given = request.name, [request.checkpoint, request.drafter]
    preset = PRESETS.get(name) if request.target is not None else None
    if preset is None and None in given:
        if request.target is None:
            raise UsageError("--checkpoint without --target needs --drafter PATH too")
        preset = find_preset(name)
    own = [preset.target, preset.drafter] if preset else []
    target, drafter = (own[i] if value is None else named_source(value) for i, value in enumerate(given))
    pair = outline_pair(target, drafter)
    backend, reason = request.backend, None
    if backend == "auto":
        choice = choose_backend(survey_machine(import_modules=True), pair, request.precision)
        backend, reason = choice.backend, choice.reason
    build = backend_build(backend, request, dry_run=dry_run)
    precision = resolve_precision(build, request.precision)
    build.check((pair.target.dims, pair.drafter.dims), precision)
    if reason:
        notice(reason)
    if skipped := pair.target.skipped:
        notice(f"{pair.target.name}: {skipped} is left out, engines read text")
    limits = _limits(request, preset.limits if preset else Limits(), pair, build, precision)
    return Resolved(preset, (target, drafter), pair, build, precision, limits)


def _limits(
    request: BuildRequest, defaults: Limits, pair: Pair, backend: BackendBuild, precision: PrecisionName
) -> Limits:
    """The request's limits over the preset's. A default longer than the models' positions is cut, a request refused.
    For native attention a prompt's chunk may become longer by a few rows."""
    positions, model = min((c.dims.max_positions, c.name) for c in (pair.target, pair.drafter))
    wanted = request.max_seq_len
    if wanted is not None and wanted > positions:
        raise UsageError(f"--max-seq-len {wanted} is more than the {positions} positions {model} was made for")
    given = {name: vars(request)[name] for name in ("max_batch", "max_tree_budget", "snapshot_every")}
    given = {name: value for name, value in given.items() if value}
    limits = replace(defaults, max_seq_len=wanted or min(defaults.max_seq_len, positions), **given)
    if limits.snapshot_every and pair.target.dims.delta is None:
        raise UsageError("--snapshot-every keeps states of hybrids, and this target has none; leave it out")
    block = kind_of(pair.drafter.dims).block_size or 1
    if block > limits.max_tokens_per_pass:
        raise UsageError(
            f"the drafter's block has {block} tokens, more than one pass of {limits.max_tokens_per_pass}; give "
            f"--max-tree-budget {block}"
        )
    networks = (pair.target.dims, pair.drafter.dims)
    if backend.attention(networks) == "native":
        return with_aligned_slots(limits, networks, PRECISIONS[precision].value_bytes)
    return limits


@dataclass(frozen=True)
class DryRun:
    name: str
    backend: BackendName
    precision: PrecisionName
    limits: Limits
    memory: MemoryPlan
    available_bytes: int | None  # of the memory it would run in; None where this machine has no such
    reason: str | None = None  # why backend `auto` chose this one; None where it was named

    def check(self) -> None:
        """Raises BuildError when the engine cannot fit, with the batch that does."""
        memory, available = self.memory, self.available_bytes
        if available is None or memory.total_bytes <= available:
            return
        # Buffers and workspace grow with the slots as the cache does.
        each = (memory.total_bytes - memory.weights_bytes) / memory.slots
        slots = int((available - memory.weights_bytes) // each)
        advice = f"give --max-batch {slots}" if slots > 0 else "give a smaller --max-seq-len, or a smaller pair"
        raise BuildError(
            f"{self.name} needs about {memory.total_bytes / 1e9:.1f} GB of the {memory.place}'s memory, which has "
            f"{available / 1e9:.1f} GB; {advice}"
        )

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "limits": vars(self.limits), "memory": self.memory.to_dict()}


def dry_run(request: BuildRequest) -> DryRun:
    """Resolve a request as `compile_engine` would. A hub checkpoint's config.json is fetched, its weights are not.
    Raises UsageError for a wrong request and CheckpointError for a configuration that cannot be used."""
    reasons: list[str] = []
    found = resolve(request, reasons.append, dry_run=True)
    name, networks = found.backend.backend.name, (found.pair.target.dims, found.pair.drafter.dims)
    weights = found.pair.weights_bytes(name, found.precision)
    memory = plan_engine(name, found.precision, *networks, found.limits, weights)
    return DryRun(
        name=request.name,
        backend=name,
        precision=found.precision,
        limits=found.limits,
        memory=memory,
        available_bytes=available_bytes(memory.place, find_gpus()),
        reason=next(iter(reasons), None),
    )
