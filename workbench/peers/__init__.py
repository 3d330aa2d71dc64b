"""Compare an engine with transformers, llama.cpp, TensorRT-LLM or a server, on the same prompts, interleaved.

    python -m workbench peers ENGINE --peer hf --peer llama-cpp=Q8_0.gguf,DRAFT.gguf --peer tensorrt-llm=EXPORT
    python -m workbench peers ENGINE --peer openai=http://localhost:8000 --budgets auto,8 --json result.json

The prompts, limits, stop tokens and threads are the engine's. A peer loads the checkpoints that the engine was built
from, and is refused others. The table and the JSON are those of `ddtree-trt bench`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

from ddtree_trt.bench import report
from ddtree_trt.bench.measure import Run, engine_runs, measure
from ddtree_trt.bench.session import Session
from ddtree_trt.bench.settings import BenchSettings
from ddtree_trt.errors import UsageError
from ddtree_trt.terminal.printing import progress_bars
from workbench.peers.base import Peer, PeerContext

# Name → the value it takes, and its class, whose module is imported only when it is used.
PEERS = {
    "hf": ("", "hf:TransformersPeer"),
    "llama-cpp": ("MODEL.gguf[,DRAFT.gguf]", "llamacpp:LlamaCppPeer"),
    "tensorrt-llm": ("[DIR]", "trtllm:TensorRTLLMPeer"),
    "openai": ("URL", "server:OpenAIPeer"),
}


def open_peer(spec: str, context: PeerContext) -> Peer:
    """Load a peer by NAME or NAME=VALUE. Raises UsageError, or ModuleNotFoundError for its package."""
    name, _, value = spec.partition("=")
    if name not in PEERS:
        raise UsageError(f"unknown peer {spec!r}; known are {', '.join(PEERS)}")
    wanted, (module, _, made) = PEERS[name][0], PEERS[name][1].partition(":")
    if not wanted.startswith("[") and bool(wanted) != bool(value):
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("--peer", action="append", required=True, metavar="PEER")
    parser.add_argument("--checkpoint", help="the target that peers load; default: the engine's preset's")
    parser.add_argument("--drafter", help="the drafter, likewise")
    parser.add_argument("--assistant", help="a small model for assisted generation of transformers")
    parser.add_argument("--methods", default=(), type=lambda text: tuple(text.split(",")), help="besides ar and dflash")
    parser.add_argument("--budgets", default="auto,8", type=_budgets)
    parser.add_argument("--prompts", nargs="+", default=BenchSettings.prompts)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = vars(parser.parse_args())
    context = {name: args.pop(name) for name in ("checkpoint", "drafter", "assistant")}
    specs, output = args.pop("peer"), args.pop("json")
    compare(BenchSettings(**{**args, "prompts": tuple(args["prompts"])}), specs, context, output)


def _budgets(text: str) -> tuple[int | str, ...]:
    return tuple(size if size == "auto" else int(size) for size in text.split(","))
