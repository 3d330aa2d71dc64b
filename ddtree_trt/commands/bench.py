"""`ddtree-trt bench`: measure an engine, its peers, and servers under load; merge, show and replay results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ddtree_trt.artifact.files import newest_engine
from ddtree_trt.bench.settings import DEVICE_ROUNDS_MEASURED, RANDOM_BACKENDS, BenchSettings, Shard
from ddtree_trt.commands.bench_load import LOAD_OPTIONS, load
from ddtree_trt.commands.options.common import Exact, NewestByDefault, TensorParallelSize, listing, numbers, words
from ddtree_trt.commands.options.outputs import STDOUT, Json, Markdown, Plot, prepare_outputs, write_text
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.decoding.methods import BASELINES, METHODS
from ddtree_trt.terminal import printing as terminal

if TYPE_CHECKING:
    from ddtree_trt.bench.result import BenchResult

_DEFAULT = BenchSettings  # class attributes are the fields' defaults

Latex = Annotated[Path | None, typer.Option("--latex", metavar="FILE", help="Write the paper's table; - is stdout.")]
Files = Annotated[list[Path], typer.Argument(metavar="FILE", help="Results written with --json.")]


class _MeasureByDefault(TyperGroup):
    """`bench ENGINE_DIR …` measures, a server under load where an option of LOAD_OPTIONS is given; `bench merge …` and
    `bench report …` work on results."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] in self.commands:
            return super().parse_args(ctx, args)
        load = any(arg.partition("=")[0] in LOAD_OPTIONS for arg in args)
        return super().parse_args(ctx, ["load" if load else "run", *args])


app = typer.Typer(cls=_MeasureByDefault, help="Measure an engine, its peers, and servers under load.")
app.command("load")(load)


@app.command("run")
def run(
    engine_dir: NewestByDefault = None,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help=f"Of {', '.join(METHODS)}; {' and '.join(m.name for m in BASELINES)} always. "
            "Default: what the drafter is for.",
        ),
    ] = None,
    budgets: Annotated[
        str | None,
        typer.Option(metavar="LIST", help=f"Draft nodes per round of ddtree. Default {listing(_DEFAULT.budgets)}."),
    ] = None,
    temperatures: Annotated[
        str | None, typer.Option(metavar="LIST", help=f"Default {listing(_DEFAULT.temperatures)}.")
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SET",
            help="A JSONL file, tiny, one of the paper's datasets (gsm8k, math500, aime24, "
            "aime25, humaneval, mbpp, livecodebench, swe-bench, mt-bench, alpaca), or NAME=FILE for a local "
            f"copy; repeatable. Default {listing(_DEFAULT.prompts)}.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="Prompts per set. Default: all of a file, the paper's of a dataset.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help=f"New tokens of a request. Default {_DEFAULT.max_tokens}.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(metavar="N", help=f"Of every prompt; the median counts. Default {_DEFAULT.repeats}.")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help=f"Default {_DEFAULT.seed}.")] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", help="CPU threads, of peers too; 0 chooses.")] = None,
    exact: Exact = _DEFAULT.exact,
    tensor_parallel_size: TensorParallelSize = _DEFAULT.tensor_parallel_size,
    shard: Annotated[str | None, typer.Option(metavar="I/N", help="Measure one part of the prompts.")] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PEER",
            help="Also measure hf, llama-cpp=MODEL.gguf[,DRAFT.gguf], ddtree-reference=PATH, tensorrt-llm[=DIR] or "
            "openai=URL; may be repeated.",
        ),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="PATH|ID", help="The target for peers. Default: the engine's preset's.")
    ] = None,
    drafter: Annotated[str | None, typer.Option(metavar="PATH|ID", help="The drafter for peers.")] = None,
    assistant: Annotated[
        str | None, typer.Option(metavar="DIR", help="A small model for Hugging Face assisted generation.")
    ] = None,
    random_weights: Annotated[
        str | None,
        typer.Option(metavar="SHAPE", help="Build and measure a random pair: micro or qwen3-0.6b, -1.7b, -4b, -8b."),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Of a random pair: {', '.join(RANDOM_BACKENDS)}, made on the device."),
    ] = None,
    precision: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of a random pair, as in ddtree-trt build. Default auto.")
    ] = None,
    device_rounds: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(DEVICE_ROUNDS_MEASURED),
            help="Rounds that stay on the GPU, for fixed budgets; both measures them beside those built on the host. "
            f"Default {_DEFAULT.device_rounds}.",
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", help=f"Length of a random pair's prompts. Default {_DEFAULT.prompt_tokens}."),
    ] = None,
    forced_acceptance: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Commit N tokens every round, whatever they are: for round times of random "
            "weights. The text means nothing.",
        ),
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measure again what a result measured, and compare.")
    ] = None,
    json: Json = None,
    markdown: Markdown = None,
    latex: Latex = None,
    plot: Plot = None,
) -> None:
    """Measure methods, budgets and peers on the same prompts, interleaved.

    Results are shown here, and kept with --json. See also: ddtree-trt bench load, ddtree-trt bench merge,
    ddtree-trt bench report.
    """
    given = {
        "methods": words(methods),
        "budgets": _budgets(budgets),
        "temperatures": numbers("--temperatures", temperatures, float),
        "prompts": tuple(prompts) if prompts else None,
        "limit": limit,
        "max_tokens": max_tokens,
        "repeats": repeats,
        "seed": seed,
        "threads": threads,
        "exact": exact,
        "tensor_parallel_size": None if tensor_parallel_size == 1 else tensor_parallel_size,
        "peers": tuple(peer) if peer else None,
        "checkpoint": checkpoint,
        "drafter": drafter,
        "assistant": assistant,
        "backend": backend,
        "precision": precision,
        "device_rounds": device_rounds,
        "prompt_tokens": prompt_tokens,
        "forced_acceptance": forced_acceptance,
    }
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    outputs = _Outputs(json, markdown, latex, plot)
    outputs.prepare()
    if replay is not None:
        if values or random_weights or shard:
            what = ", ".join([*values, *(["random_weights"] if random_weights else []), *(["shard"] if shard else [])])
            raise UsageError(f"--replay takes its settings from the file, so {what} cannot be given too")
        _replay(replay, engine_dir, outputs)
        return
    if random_weights and engine_dir:
        raise UsageError("--random-weights builds an engine of its own; give no ENGINE_DIR")
    engine = random_weights or str(engine_dir or newest_engine())
    settings = BenchSettings(engine=engine, random_weights=random_weights is not None, **values)
    part = Shard.parse(shard) if shard else Shard()

    from ddtree_trt.bench.runner import run_bench

    with terminal.progress_bars() as progress:
        result = run_bench(settings, part, progress)
    outputs.write([result])


def _replay(file: Path, engine_dir: Path | None, outputs: _Outputs) -> None:
    from ddtree_trt.bench.replay import replay
    from ddtree_trt.bench.reporting.terminal import print_replay
    from ddtree_trt.bench.result import read_result

    old = read_result(file)
    with terminal.progress_bars() as progress:
        new = replay(old, str(engine_dir) if engine_dir else None, progress)
    outputs.write([new])
    if not outputs.stdout_taken:
        print_replay(old, new)


@app.command()
def merge(files: Files, json: Json = None, markdown: Markdown = None, latex: Latex = None, plot: Plot = None) -> None:
    """Make one result of the shards of a run."""
    from ddtree_trt.bench.result import merge as merge_results
    from ddtree_trt.bench.result import read_result

    outputs = _Outputs(json, markdown, latex, plot)
    outputs.prepare()
    outputs.write([merge_results([read_result(file) for file in files])])


@app.command()
def report(files: Files, markdown: Markdown = None, latex: Latex = None, plot: Plot = None) -> None:
    """Show results again; several give one LaTeX table with a column group for each."""
    from ddtree_trt.bench.result import read_result

    outputs = _Outputs(None, markdown, latex, plot)
    outputs.prepare()
    outputs.write([read_result(file) for file in files])


class _Outputs:
    """Destinations of results. `prepare` refuses those that cannot be written, before hours of measuring."""

    def __init__(self, json: Path | None, markdown: Path | None, latex: Path | None, plot: Path | None) -> None:
        self._json = json
        self._markdown = markdown
        self._latex = latex
        self._plot = plot

    @property
    def stdout_taken(self) -> bool:
        """Whether stdout is one of the files, so that nothing else may be printed there."""
        return STDOUT in (self._json, self._markdown, self._latex)

    def prepare(self) -> None:
        prepare_outputs((self._json, self._markdown, self._latex), self._plot)

    def write(self, results: list[BenchResult]) -> None:
        from ddtree_trt.bench.reporting import latex
        from ddtree_trt.bench.reporting import markdown as report
        from ddtree_trt.bench.reporting.terminal import print_result
        from ddtree_trt.bench.result import to_json

        if self._json is not None:
            write_text(self._json, to_json(results[0]))
        if self._markdown is not None:
            write_text(self._markdown, "\n".join(report.markdown(result) for result in results))
        if self._latex is not None:
            write_text(self._latex, latex.latex(results))
        if self._plot is not None:
            from ddtree_trt.bench.reporting.plots import plot_all

            for number, result in enumerate(results):
                plot_all(result, self._plot if len(results) == 1 else self._plot / f"{number + 1}-{result.engine.name}")
        if not self.stdout_taken:
            for result in results:
                print_result(result)


def _budgets(text: str | None) -> tuple[int | str, ...] | None:
    given = words(text)
    if given is None:
        return None
    try:
        return tuple(word if word == "auto" else int(word) for word in given)
    except ValueError:
        raise UsageError(f"--budgets must be numbers and auto, separated by commas, not {text!r}") from None
