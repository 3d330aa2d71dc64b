"""Printing of the command line: results on stdout, errors and progress on stderr, colour only on a terminal."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.device.memory import MemoryPlan
from ddtree_trt.doctor import Diagnosis, EngineReport
from ddtree_trt.reading import printable

if TYPE_CHECKING:
    from ddtree_trt.build.compile import DryRun


def print_error(message: str) -> None:
    """Print one line on stderr, without the message's line breaks and control characters."""
    print("error:", printable(" ".join(message.split())), file=sys.stderr)


def print_json(data: Any, indent: int | None = 1) -> None:
    """Print JSON indented for a reader, or with None in one line (JSON Lines)."""
    print(json.dumps(data, indent=indent, ensure_ascii=False))


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """A `Progress` that draws one bar per stage on stderr; silent where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield no_progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeRemainingColumn(),
    )
    bars = Bars(*columns, console=Console(stderr=True), transient=True)
    tasks: dict[str, TaskID] = {}

    def show(stage: str, done: int, total: int, /) -> None:
        bars.start()  # at the first stage: until then stdout is not rich's
        # Small totals count steps, large ones bytes.
        size = f"{done}/{total}" if total < 10_000 else f"{decimal(done)} of {decimal(total)}"
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, total=total, amount=size)
        bars.update(tasks[stage], completed=done, total=total, amount=size)

    try:
        yield show
    finally:
        bars.stop()


def print_fields(fields: Iterable[tuple[str, str]], indent: str = "") -> None:
    rows = list(fields)
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        print(printable(f"{indent}{name:<{width}}  {value}".rstrip()))


def print_note(line: str) -> None:
    """Print a line that the user should read before the work goes on; on stderr, since it is no result."""
    print(printable(line), file=sys.stderr, flush=True)


def print_built(directory: Path, manifest: Manifest, seconds: float) -> None:
    """Print what was built in how many seconds, and the next command."""
    size = decimal(sum(entry.size for entry in manifest.files.values()))
    shown_directory = printable(str(directory))
    print(f"built {shown_directory}: {manifest.backend} {manifest.precision}, {size}, {seconds:.1f} s")
    print(f"next: ddtree-trt run {printable(shlex.quote(str(directory)))}")


def print_dry_run(would: DryRun) -> None:
    if would.reason:
        print_note(would.reason)
    print(f"{would.name}: {would.backend} {would.precision} engine, not built")
    available = would.available_bytes
    found = "no GPU whose memory is known" if available is None else decimal(available)
    print_fields([("limits", _listing(vars(would.limits))), *_memory_fields(would.memory), ("there is", found)])


def print_engine(report: EngineReport) -> None:
    m, memory, host_reason = report.manifest, report.memory, report.no_device_rounds
    print(f"{m.name}: {m.backend} {m.precision} engine at {printable(report.directory)}, every file verified")
    print_fields(
        [
            ("target", f"{m.target.name} ({m.target.revision}) sha256 {m.target.sha256[:16]}"),
            ("drafter", f"{m.drafter.name} ({m.drafter.revision}) sha256 {m.drafter.sha256[:16]}, {m.drafter_kind}"),
            ("target dims", _listing(m.target_dims.stated())),
            ("drafter dims", _listing(m.drafter_dims.stated())),
            ("limits", _listing(vars(m.limits))),
            *_memory_fields(memory),
            ("stop tokens", ", ".join(map(str, m.stop_token_ids)) or "none"),
            ("chat template", _listing(m.chat_template_args) or "no arguments"),
            ("golden tau", ", ".join(f"{k} {low}–{high}" for k, (low, high) in m.golden_tau.items()) or "none"),
            ("toolchain", f"ddtree-trt {m.product_version}, {_listing(m.toolchain)}"),
            ("plugin", _listing(m.plugin or {}) or ("none, attention is native" if m.attention else "none")),
            *([("cannot run here", report.problem)] if report.problem else []),
            ("device rounds", f"none: {host_reason}" if host_reason else "on a GPU, methods ar, dflash and ddtree"),
            ("profile", "measured" if report.has_profile else "not measured yet"),
            ("build time", f"{m.build_seconds:.1f} s"),
            ("files", decimal(report.total_bytes)),
        ]
    )
    files = ((name, f"{decimal(e.size):>9}  {e.sha256[:16]}") for name, e in m.files.items())
    print_fields(files, indent="  ")


def _memory_fields(plan: MemoryPlan) -> list[tuple[str, str]]:
    """A memory plan as named lines."""
    each, every = decimal(plan.kv_bytes_per_slot), decimal(plan.kv_bytes_all_slots)
    return [
        ("weights", decimal(plan.weights_bytes)),
        ("KV cache", f"{each} per slot, {every} for {plan.slots} slots at full length"),
        ("buffers", f"{decimal(plan.buffers_bytes)}: logits, tapped states, control data"),
        ("workspace", f"about {decimal(plan.workspace_bytes)}"),
        ("memory", f"about {decimal(plan.total_bytes)} on the {plan.place}"),
    ]


def _listing(values: dict[str, Any]) -> str:
    plain = {n: f"[{', '.join(map(str, v))}]" if isinstance(v, tuple) else v for n, v in values.items()}
    return ", ".join(f"{name} {value}" for name, value in plain.items())


def print_diagnosis(diagnosis: Diagnosis) -> None:
    d = diagnosis
    print_fields(
        [
            ("ddtree-trt", d.version),
            ("python", d.python),
            ("platform", d.platform),
            ("cpu", f"{d.cpu.model}, {d.cpu.cores} cores"),
            ("cpu features", " ".join(d.cpu.features) or "none of interest"),
            ("packages", _listing(d.packages)),
        ]
    )
    print()
    print_fields((f"{'yes' if c.found else 'no ':3}  {c.name}", f"{c.detail} → {c.enables}") for c in d.checks)
    print()
    print(printable(d.backend))
    for command, missing in d.next_steps.items():
        print(printable(f"next for {missing}: {command}"))
