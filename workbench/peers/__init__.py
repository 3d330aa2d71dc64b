"""Compare an engine with transformers, llama.cpp or TensorRT-LLM, on the same prompts, interleaved.

    python -m workbench peers ENGINE --peer hf --peer llama-cpp=Q8_0.gguf,DRAFT.gguf --peer tensorrt-llm

The prompts, limits, stop tokens and threads are the engine's. A peer loads the checkpoints that the engine was built
from, and is refused others. The table and the JSON are those of `ddtree-trt bench`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from ddtree_trt.bench import report
from ddtree_trt.bench.measure import Run, Session, engine_runs, measure
from ddtree_trt.bench.settings import BenchSettings, Budget
from ddtree_trt.commands.arguments import with_options
from ddtree_trt.errors import UsageError
from ddtree_trt.terminal.printing import progress_bars
from workbench.options import Json
from workbench.peers.base import Peer, PeerContext

# Name → the value it takes, and its class, whose module is imported only when it is used.
PEERS = {
    "hf": ("", "hf:TransformersPeer"),
    "llama-cpp": ("MODEL.gguf[,DRAFT.gguf]", "llamacpp:LlamaCppPeer"),
    "tensorrt-llm": ("", "trtllm:TensorRTLLMPeer"),
}


def open_peer(spec: str, context: PeerContext) -> Peer:
    """Load a peer by NAME or NAME=VALUE. Raises UsageError, or ModuleNotFoundError for its package."""
    name, _, value = spec.partition("=")
    if name not in PEERS:
        raise UsageError(f"unknown peer {spec!r}; known are {', '.join(PEERS)}")
    wanted, (module, _, made) = PEERS[name][0], PEERS[name][1].partition(":")
    if bool(wanted) != bool(value):
        raise UsageError(f"--peer {name} takes {f'{name}={wanted}' if wanted else 'no value'}, not {spec!r}")
    peer: Peer = getattr(import_module(f"workbench.peers.{module}"), made)(context, value)
    return peer


def compare(settings: BenchSettings, specs: Sequence[str], context: dict[str, str | None], output: Path | None) -> None:
    """Measure, and print the tables. `context`: the checkpoint, drafter and assistant that peers load."""
    engine, facts = Path(settings.engine), {}
    with progress_bars() as progress, closing(Session(engine, settings)) as session, ExitStack() as stack:
        runs: dict[str, Run] = engine_runs(session, settings)
        made = PeerContext(engine, session.manifest, session.engine.threads, **context)
        for spec in specs:
            peer = stack.enter_context(closing(open_peer(spec, made)))
            facts[spec] = peer.describe()
            for method in peer.methods:
                if (label := f"{spec.partition('=')[0]}:{method}") in runs:
                    raise UsageError(f"two peers are called {label}; leave one out")
                runs[label] = partial(peer.run, method)
        result = measure(session, settings, runs, progress)
    result = replace(result, environment={**result.environment, "peers": facts})
    if output is not None:
        output.write_text(result.to_json(), encoding="utf-8")
    print(report.text(result), end="")
    for spec, fact in facts.items():
        print(f"- {spec.partition('=')[0]}: {', '.join(f'{name} {value}' for name, value in fact.items())}.")


@with_options(settings=("prompts", "limit", "max_tokens", "temperature", "threads"))
def main(
    settings: BenchSettings,
    engine: str,
    peer: Annotated[list[str], typer.Option(metavar="PEER", help="repeatable")],
    methods: Annotated[str, typer.Option(help="besides ar and dflash")] = "",
    budgets: str = "auto,8",
    checkpoint: Annotated[str | None, typer.Option(help="that peers load; default: the preset's")] = None,
    drafter: Annotated[str | None, typer.Option(help="the drafter, likewise")] = None,
    assistant: Annotated[str | None, typer.Option(help="a small model for assisted generation")] = None,
    output: Json = None,
) -> None:
    sizes: tuple[Budget, ...] = tuple("auto" if size == "auto" else int(size) for size in budgets.split(","))
    chosen = tuple(methods.split(",")) if methods else ()
    context = {"checkpoint": checkpoint, "drafter": drafter, "assistant": assistant}
    compare(replace(settings, engine=engine, methods=chosen, budgets=sizes), peer, context, output)
