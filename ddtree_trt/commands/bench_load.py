"""`ddtree-trt bench --concurrency …` and `--rate …`: a server under load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ddtree_trt.artifact.files import newest_engine
from ddtree_trt.bench.load.settings import BASELINE, DEFAULT_METHOD, LoadSettings
from ddtree_trt.commands.options.common import listing, numbers, words
from ddtree_trt.commands.options.outputs import STDOUT, Json, Markdown, Plot, prepare_outputs, write_text
from ddtree_trt.errors import UsageError
from ddtree_trt.terminal import printing as terminal

LOAD_OPTIONS = ("--url", "--concurrency", "--rate")  # each makes `bench` this command
_D = LoadSettings


def load(
    engine_dir: Annotated[
        Path | None,
        typer.Argument(
            metavar="ENGINE_DIR", help="Served for the time of the measurement. Default without --url: the newest."
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A running server; its key is read from DDTREE_API_KEY or OPENAI_API_KEY."),
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(metavar="LIST", help="Closed loop: clients that always have a request under way.")
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Open loop: requests per second, which arrive at random (Poisson)."),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help=f"Asked of the same server, request by request; {DEFAULT_METHOD} names none. "
            f"Default {DEFAULT_METHOD},{BASELINE}.",
        ),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(metavar="N", help="Of each level and method. Default: 4 for each client, 24 at least.")
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(metavar="SET", help=f"As for bench; openings only. Default {listing(_D.prompts)}."),
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help="Prompts per set.")] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="New tokens of a request.")] = _D.max_tokens,
    temperature: Annotated[float, typer.Option(metavar="T", help="Of every request.")] = _D.temperature,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Of the arrivals, the order of prompts and the requests.")
    ] = _D.seed,
    json: Json = None,
    markdown: Markdown = None,
    plot: Plot = None,
) -> None:
    """Measure a server under load: throughput and latencies against concurrent requests or their rate, beside ar."""
    given: dict[str, Any] = {
        "concurrency": numbers("--concurrency", concurrency, int),
        "rates": numbers("--rate", rate, float),
        "methods": words(methods),
        "prompts": tuple(prompts) if prompts else None,
    }
    if url is not None and engine_dir is not None:
        raise UsageError("--url measures a running server; give no ENGINE_DIR")
    settings = LoadSettings(
        url=url,
        engine=None if url is not None else str(engine_dir or newest_engine()),
        requests=requests,
        limit=limit,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        **{name: value for name, value in given.items() if value is not None},
    )
    prepare_outputs((json, markdown), plot)

    from ddtree_trt.bench.load import tables
    from ddtree_trt.bench.load.picture import plot_load
    from ddtree_trt.bench.load.result import to_json
    from ddtree_trt.bench.load.run import run_load

    with terminal.progress_bars() as progress:
        result = run_load(settings, progress)
    if json is not None:
        write_text(json, to_json(result))
    if markdown is not None:
        write_text(markdown, tables.markdown(result))
    if plot is not None:
        plot_load(result, plot)
    if STDOUT not in (json, markdown):
        from ddtree_trt.bench.reporting.terminal import print_tables

        print_tables([("under load", tables.overview(result))], [tables.LEGEND, *tables.notes(result)])
