"""`ddtree-trt bench` measures methods, budgets and prompts on one engine; `check` whether it is lossless."""

import importlib.util
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ddtree_trt.artifact.files import newest_engine
from ddtree_trt.bench.settings import BenchSettings, CheckSettings
from ddtree_trt.commands.arguments import AsJson, EngineDirectory, NewestByDefault, with_options
from ddtree_trt.errors import MissingDependency, UsageError, install_with
from ddtree_trt.runtime.decoding.methods import BASELINES, METHODS
from ddtree_trt.terminal import printing as terminal

STDOUT = Path("-")
_METHODS = f"Of {', '.join(METHODS)}; {' and '.join(m.name for m in BASELINES)} always. Default: the drafter's own."


@with_options()
def bench(
    engine_dir: NewestByDefault = None,
    methods: Annotated[str, typer.Option(metavar="LIST", help=_METHODS)] = "",
    budgets: Annotated[
        str, typer.Option(metavar="LIST", help="Draft nodes per round of methods that make trees; auto chooses.")
    ] = ",".join(map(str, BenchSettings.budgets)),
    *,
    settings: BenchSettings,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result; - is stdout.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw the result, as PNG or SVG.")] = None,
) -> None:
    """Measure methods and budgets, interleaved.

    On the same prompts, each from a cold cache, beside `ar` and the chain of the same engine.
    """
    try:
        sizes: list[Any] = [size if size == "auto" else int(size) for size in _items(budgets)]
    except ValueError:
        raise UsageError(f"--budgets must be numbers and auto, separated by commas, not {budgets!r}") from None
    directory = engine_dir or newest_engine()
    settings = replace(settings, engine=str(directory), methods=tuple(_items(methods)), budgets=tuple(sizes))
    if plot is not None and plot.suffix not in (".png", ".svg"):
        raise UsageError(f"--plot draws a PNG or an SVG, by the file's name; {plot.name!r} is neither")
    for file in (each for each in (json, plot) if each is not None and each != STDOUT):  # before hours of measuring
        if file.is_dir():
            raise UsageError(f"{file} is a directory; give the name of a file")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=file.parent).close()
        except OSError as error:
            raise UsageError(f"cannot write into {file.parent}: {error.strerror}") from error

    from ddtree_trt.bench import report
    from ddtree_trt.bench.measure import Session, engine_runs, measure

    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise MissingDependency(f"pictures need matplotlib, which is not installed; {install_with('bench')}")
    with terminal.progress_bars() as progress, closing(Session(directory, settings)) as session:
        result = measure(session, settings, engine_runs(session, settings), progress)
    if json == STDOUT:
        print(result.to_json(), end="")
    elif json is not None:
        json.write_text(result.to_json(), encoding="utf-8")
    if json != STDOUT:
        print(report.text(result), end="")
    if plot is not None:
        report.draw(result, plot)


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


@with_options()
def check(engine_dir: EngineDirectory, settings: CheckSettings, json: AsJson = False) -> None:
    """Check that an engine is lossless, its drafter wired right.

    Every method must give what the target alone would, up to rounding. Ends with exit code 1 when something fails.
    """
    from ddtree_trt.check.findings import describe
    from ddtree_trt.check.run import check_engine

    with terminal.progress_bars() as progress:
        report = check_engine(replace(settings, engine=str(engine_dir)), progress)
    if json:
        terminal.print_json(report.to_dict())
    else:
        print("\n".join(describe(report)))
    if not report.passed:
        raise typer.Exit(1)
