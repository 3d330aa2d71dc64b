"""Output of `ddtree-trt run`: streamed text, trees, closing figures, the comparison of methods, and examples."""

import math
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, replace
from statistics import median

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from ddtree_trt.artifact.examples import Examples
from ddtree_trt.device.cpu import busy_warning, usable_cores
from ddtree_trt.errors import DDTreeError, UsageError
from ddtree_trt.reading import printable
from ddtree_trt.runtime.decoding.loop import Round
from ddtree_trt.runtime.decoding.methods import AUTOREGRESSIVE, BASELINES, METHODS
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.outputs import RequestOutput
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.stats import DEVICE_ROUND, ROUND_STAGES, RequestMetrics
from ddtree_trt.runtime.text.codec import Prompt, TextCodec
from ddtree_trt.terminal.printing import print_json, print_note


class TreeView:
    """Prints every round it is called with."""

    def __init__(self, codec: TextCodec, console: Console | None = None) -> None:
        self._codec = codec
        self._console = console or Console(highlight=False)
        self._count = 0

    def __call__(self, round_: Round) -> None:
        self._count += 1
        # A heading in one line: the terminal wraps it, and not within a token's quotes.
        self._console.print(Text(self._heading(round_), style="bold"), soft_wrap=True)
        tree, accepted = round_.tree, set(round_.path.tolist())
        branches = [Tree(self._label(round_.root_token, "", 0 in accepted), guide_style="dim")]
        for node in range(1, len(tree) + 1):
            weight = float(tree.log_weights[node - 1])
            label = self._label(int(tree.token_ids[node - 1]), f" {math.exp(weight):.3f}", node in accepted)
            branches.append(branches[tree.parents[node]].add(label))
        if len(tree):
            self._console.print(branches[0])

    def _heading(self, round_: Round) -> str:
        accepted = round_.tree.token_ids[round_.path[1:] - 1].tolist()
        tokens = " ".join(self._text(t) for t in [*accepted, round_.next_token])
        head = f"round {self._count}: {len(round_.tree)} nodes, committed {len(round_.path)}: {tokens}"
        if (d := round_.decision) is None:
            return head
        if not d.drafted:
            return f"{head} (drafting does not pay at present)"
        why = (
            f"expected {d.expected_tokens:.1f} tokens in {1000 * d.expected_s:.2f} ms; without a draft one takes "
            f"{1000 * d.single_token_s:.2f} ms: {d.expected_gain:.2f}×"
        )
        return f"{head} ({'probe; ' if d.probe else ''}{why})"

    def _label(self, token: int, probability: str, accepted: bool) -> Text:
        mark = "✓ " if accepted else ""
        return Text.assemble((mark + self._text(token), "bold green" if accepted else ""), (probability, "dim"))

    def _text(self, token: int) -> str:
        return repr(self._codec.decode([token], skip_special_tokens=False))


AR = AUTOREGRESSIVE.name
REPETITIONS = 5  # of every method in a comparison, interleaved


def stream(llm: LLM, prompt: Prompt, params: SamplingParams, *, show_tree: bool = False) -> Iterator[RequestOutput]:
    """Print the text while it is generated, then the closing line; yields the output so far with each part."""
    view = TreeView(llm.codec) if show_tree else None
    output = None
    with closing(llm.stream(prompt, params, on_round=view)) as parts:
        for part in parts:
            output = part if output is None else output.joined(part)
            if view is None:
                print(part.outputs[0].text, end="", flush=True)
            yield output
    assert output is not None  # a request ends with a part
    print(output.outputs[0].text if view else "")
    if view and llm.engine.rounds and output.metrics.why_host:
        print(f"rounds did not stay on the device: {output.metrics.why_host}")
    cut, most = "", llm.engine.manifest.limits.max_seq_len
    if output.outputs[0].finish_reason == "length":
        full = output.usage.total_tokens >= most
        cut = f"cut at the end of the context of {most} tokens" if full else "cut by the limit --max-tokens"
    print(closing_line(output.metrics, cut))


def closing_line(m: RequestMetrics, ending: str = "") -> str:
    """One line with tokens, what ended them if it was not the model, speed, rounds, acceptance and times of stages."""
    parts = [f"{m.output_tokens} tokens", *([ending] if ending else [])]
    if m.decode_tokens_per_s:
        parts.append(f"{m.decode_tokens_per_s:.0f} tokens/s")
    where = " on the device" if m.on_device else ""
    parts += [
        f"{m.rounds} round{'s' * (m.rounds != 1)}{where}",
        f"{m.mean_acceptance_length:.2f} tokens/round",
        f"budget {m.mean_budget:.1f}",
    ]
    if m.rounds:
        stages = (DEVICE_ROUND,) if m.on_device else ROUND_STAGES
        parts.append("ms/round: " + ", ".join(f"{s} {1000 * m.stage_s[s] / m.rounds:.2f}" for s in stages))
    return f"[{' · '.join(parts)}]"


def print_output_json(output: RequestOutput) -> None:
    """One request as JSON: its completions, figures and usage. Raises UsageError where one ended with an error."""
    plain = {
        "request_id": output.request_id,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [asdict(o) for o in output.outputs],
        "usage": {**asdict(output.usage), "total_tokens": output.usage.total_tokens},
        "metrics": output.metrics.to_dict(),
    }
    print_json(plain, indent=None)
    _raise_error(output)


def _raise_error(output: RequestOutput) -> None:
    if error := next((o.error for o in output.outputs if o.error is not None), None):
        raise UsageError(error)


def compare(llm: LLM, prompt: Prompt, params: SamplingParams) -> None:
    """Run the request by its method and the baselines in turn; print medians. Raises DDTreeError where texts differ."""
    if params.stochastic and params.seed is None:
        # With one seed every method draws the same tokens, but those whose drafts are drawn.
        params = replace(params, seed=secrets.randbits(32))
    baselines = [m.name for m in BASELINES if m.serves(llm.engine.manifest.drafter_kind)]
    runs: dict[str, list[RequestOutput]] = {m: [] for m in [*baselines, params.method]}
    warning = busy_warning(round(os.getloadavg()[0], 2), usable_cores())  # before this becomes a load itself
    for _ in range(1 + REPETITIONS):
        for method, outputs in runs.items():
            budget = params.tree_budget if method == params.method else "auto"
            each = replace(params, method=method, tree_budget=budget)
            outputs.append(llm.generate(prompt, each, use_tqdm=False)[0])
            _raise_error(outputs[-1])
    firsts = {m: outputs[1] for m, outputs in runs.items()}  # the first of each warms up
    speeds = {m: median(o.metrics.decode_tokens_per_s or 0.0 for o in outputs[1:]) for m, outputs in runs.items()}
    tokens = {m: [o.token_ids for o in output.outputs] for m, output in firsts.items()}
    differing = [m for m in runs if tokens[m] != tokens[AR]]
    for completion in firsts[params.method].outputs:
        print(completion.text)
    print()
    _print_table({m: output.metrics for m, output in firsts.items()}, speeds)
    lengths = firsts[params.method].metrics.acceptance_lengths
    print(f"acceptance lengths of {params.method}: {' '.join(map(str, lengths))}")
    print(f"identical: {'no' if differing else 'yes'}")
    if warning:
        print(warning)
    drawing = [m for m in differing if params.stochastic and METHODS[m].draws]
    if drawing:
        print(f"at a temperature {' and '.join(drawing)} draw their own tokens, of the same distribution")
    if faults := [m for m in differing if m not in drawing]:
        inexact = llm.engine.inexact
        why = f"this engine is not exact: {inexact}" if inexact else "this engine is exact, so that is a fault"
        raise DDTreeError(f"{faults[0]} differs from {AR}; {why}")


def _print_table(metrics: dict[str, RequestMetrics], speeds: dict[str, float]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("method")
    stages = (*ROUND_STAGES, *([DEVICE_ROUND] if any(m.on_device for m in metrics.values()) else []))
    figures = ("tokens", "tokens/s", "speedup", "rounds", "tokens/round", "budget")
    for name in (*figures, *(f"{s} ms" for s in stages)):
        table.add_column(name, justify="right")
    for method, m in metrics.items():
        gain = speeds[method] / speeds[AR] if speeds[AR] else 0.0
        cells = [f"{speeds[method]:.0f}", f"{gain:.2f}×", str(m.rounds), f"{m.mean_acceptance_length:.2f}"]
        times = [f"{1000 * m.stage_s[s] / max(m.rounds, 1):.2f}" for s in stages]
        table.add_row(method, str(m.output_tokens), *cells, f"{m.mean_budget:.1f}", *times)
    Console(width=None if sys.stdout.isatty() else 140, highlight=False).print(table)


def print_examples(examples: Examples) -> None:
    width = len(str(len(examples.prompts)))
    for number, prompt in enumerate(examples.prompts, 1):
        for place, line in enumerate(prompt.splitlines()):
            print(f"{'' if place else number:>{width}}  {printable(line)}")


def hint(prompt: str, examples: Examples | None) -> None:
    """Say what the engine's model knows where that is little and the prompt is shorter than all of its examples."""
    if examples is None or examples.knows is None:
        return
    if len(prompt.split()) < min(len(each.split()) for each in examples.prompts):
        sys.stdout.flush()  # the answer comes first, also where both go into one file
        print_note(f"hint: this model knows only {examples.knows}; --list-examples shows prompts, --example asks one")
