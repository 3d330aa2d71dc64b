"""Compare an engine with llama.cpp on the weights of one file: behind long pasts, with many sequences, in a chat.

    python -m workbench anchors ENGINE --prompts docs/benchmarks/smollm2-prompts.jsonl [--json FILE]

llama.cpp runs the GGUF file that the engine was built from, made Q8_0 by its own quantizer, on as many threads. All do
the same work: the answers are those of `ar`, found beforehand, and llama.cpp chooses its tokens and goes on with these;
*same* is how often they agree. A past is the beginning of a chat. Prompts count in the chat only, whose turns come
behind what is cached: sequences are timed from when all have begun until the first ends. Cases are interleaved and
rotated; shown are medians of the repeats, and ratios above 1 where ours is faster.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from ddtree_trt.bench.measure import PAUSE_S, BenchPrompt, Session, describe_engine, describe_environment, load_prompts
from ddtree_trt.bench.report import table
from ddtree_trt.device.cpu import busy_warning, usable_cores
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.options import EngineOptions
from ddtree_trt.runtime.params import SamplingParams
from workbench.budgets import run
from workbench.options import PROMPTS, Json, Prompts, integers
from workbench.peers.base import PeerContext

PEER, METHODS = "llama.cpp", ("ar", "auto")
ANSWER = 128  # most tokens of a chat's turn
_Ids = list[int]
_Turn = Sequence[tuple[_Ids, _Ids]]  # (prompt, what `ar` answers) of each sequence
_Times = list[list[float]]  # of one turn: when each token of each sequence came, in seconds after its start


@dataclass(frozen=True)
class Work:
    """Turns one after another behind kept caches, each of one prompt or of several side by side."""

    name: str
    turns: Sequence[_Turn]
    whole: bool = False  # timed with its prompts


OpenModel = Callable[[int, int], Any]  # a `peers.llamacpp.LlamaCpp`, with so many caches of so many tokens


def rate(times: Sequence[_Times], whole: bool) -> float:
    """Tokens a second: of all turns from start to end, or of the only one while all its sequences ran."""
    if whole:
        tokens = sum(len(sequence) for turn in times for sequence in turn)
        return tokens / sum(max(sequence[-1] for sequence in turn) for turn in times)
    (turn,) = times
    begun, ended = max(sequence[0] for sequence in turn), min(sequence[-1] for sequence in turn)
    if begun >= ended:
        raise UsageError("the first sequence ended before the last one began; give more --tokens")
    return sum(begun < at <= ended for sequence in turn for at in sequence) / (ended - begun)


def ours(
    session: Session, method: str, prompts: Sequence[_Ids], most: Sequence[int], ends: bool
) -> tuple[_Times, list[_Ids]]:
    """(times, answers) of one turn; `ends`: at the model's own end, too."""
    chosen = [SamplingParams(method=method, max_tokens=tokens, ignore_eos=not ends) for tokens in most]
    requests = [session.core.maker.make(ids, params) for ids, params in zip(prompts, chosen, strict=True)]
    times = run(session.core, requests, len(requests))
    return times, [request.sequences[0].output for request in requests]


def theirs(model: Any, held: list[_Ids], turn: _Turn) -> tuple[_Times, int]:
    """(times, choices that `ar` made, too) of one turn led along its answers. `held`: what each cache has."""
    times, agreed = [list[float]() for _ in turn], 0
    start, fed = time.perf_counter(), {}
    for number, (ids, _) in enumerate(turn):
        pairs = zip(held[number], ids[:-1], strict=False)
        kept = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(held[number]), len(ids) - 1))
        model.truncate(number, kept)
        fed[number], held[number] = ids[kept:], list(ids)
    place = -1
    while fed:
        place += 1
        choices = [int(logits.argmax()) for logits in model.step(fed)]
        now = time.perf_counter() - start
        for number, choice in zip(fed, choices, strict=True):
            times[number].append(now)
            agreed += choice == turn[number][1][place]
        fed = {number: said[place : place + 1] for number in fed if place + 1 < len(said := turn[number][1])}
        for number, ids in fed.items():
            held[number] += ids
    return times, agreed


def works(
    session: Session, prompts: Sequence[BenchPrompt], pasts: Sequence[int], sequences: Sequence[int], tokens: int,
    turns: int,
) -> Iterator[Work]:  # fmt: skip
    """What is to be done. Raises UsageError for prompts that are no chats or too few."""
    talk, said, chat, answers = list[dict[str, str]](), list[_Ids](), list[_Ids](), list[_Ids]()
    session.core.scheduler.reset_prefix_cache()
    for prompt in prompts:
        if not isinstance(prompt.opening, list) or not isinstance(prompt.opening[0], dict):
            raise UsageError(f"prompt {prompt.id} is no message of a chat; the turns of a chat are made of them")
        if len(chat) < max(turns, 1) or len(chat[-1]) <= max(pasts, default=0):
            talk += prompt.opening
            chat.append(session.codec.encode(talk))
            _, answer = ours(session, "ar", chat[-1:], [ANSWER], ends=True)
            answers += answer
            talk.append({"role": "assistant", "content": session.codec.decode(answer[0], skip_special_tokens=True)})
        said.append(session.codec.encode(prompt.opening))
    if len(chat) < turns or len(chat[-1]) < max(pasts, default=0) or len(said) < max(sequences, default=0):
        raise UsageError(
            f"{len(prompts)} prompts make a chat of {len(chat)} turns and {len(chat[-1])} tokens, too short for "
            f"--turns {turns}, --pasts up to {max(pasts, default=0)} or --sequences up to {max(sequences, default=0)}; "
            "give more --prompts"
        )
    several = {f"past {past}": [chat[-1][:past]] for past in pasts}
    several |= {f"{number} sequence{'s' * (number > 1)}": said[:number] for number in sequences}
    for name, ids in several.items():
        session.core.scheduler.reset_prefix_cache()
        _, answer = ours(session, "ar", ids, [tokens] * len(ids), ends=False)
        yield Work(name, [list(zip(ids, answer, strict=True))])
    if turns:
        yield Work(f"chat of {turns} turns", [[pair] for pair in zip(chat[:turns], answers[:turns], strict=True)], True)


def measure(session: Session, open_model: OpenModel, work: Work, repeats: int) -> tuple[dict[str, list[float]], float]:
    """(tokens a second of each repeat by case, share of tokens that llama.cpp chose as `ar`)."""
    slots, agreed = len(work.turns[0]), 0
    length = max(len(ids) + len(said) for turn in work.turns for ids, said in turn)
    rates = {case: list[float]() for case in (PEER, *METHODS)}
    with closing(open_model(slots, length)) as model:
        for repeat in range(repeats):
            for place in range(len(rates)):
                case, times, held = list(rates)[(place + repeat) % len(rates)], list[_Times](), [_Ids()] * slots
                session.core.scheduler.reset_prefix_cache()
                time.sleep(PAUSE_S)
                for turn in work.turns:
                    if case == PEER:
                        taken, same = theirs(model, held, turn)
                        agreed += same
                    else:
                        prompts, answers = [ids for ids, _ in turn], [said for _, said in turn]
                        taken, found = ours(session, case, prompts, [len(said) for said in answers], ends=False)
                        if found != answers:
                            print(f"{case} gave other tokens than ar in {work.name}")
                    times.append(taken)
                rates[case].append(rate(times, work.whole))
    return rates, agreed / (repeats * sum(len(said) for turn in work.turns for _, said in turn))


def main(
    engine: Path, prompts: Prompts = PROMPTS, pasts: str = "64,512,1024,1900", sequences: str = "1,4,8,16",
    turns: int = 12, tokens: int = 96, repeats: int = 3, threads: int = 0, checkpoint: str | None = None,
    drafter: str | None = None, output: Json = None,
) -> None:  # fmt: skip
    from workbench.peers.llamacpp import LlamaCpp, describe, quantize

    loaded, chosen = load_prompts(prompts), (integers(pasts), integers(sequences), tokens, turns)
    with closing(Session(engine, EngineOptions(threads=threads))) as session, TemporaryDirectory() as folder:
        manifest, used = session.manifest, session.engine.threads
        if (most := max(chosen[1], default=1)) > manifest.limits.max_batch:
            raise UsageError(
                f"--sequences {most} is more than the engine's max_batch {manifest.limits.max_batch}; ask for fewer, "
                f"or build it with --max-batch {most}"
            )
        target, _ = PeerContext(engine, manifest, used, checkpoint, drafter).checkpoints()
        file = quantize(target, Path(folder) / "target.gguf", used)
        facts = describe(used)

        def opened(side_by_side: int, length: int) -> LlamaCpp:
            return LlamaCpp(file, manifest, used, sequences=side_by_side, length=length)

        rows, figures = [], {}
        for work in works(session, loaded, *chosen):
            rates, same = measure(session, opened, work, repeats)
            figures[work.name] = {"tokens_per_s": rates, "same": same}
            middle = {case: median(each) for case, each in rates.items()}
            shown = [f"{1000 / each:.2f} ms" if "past" in work.name else f"{each:.0f}" for each in middle.values()]
            ratios = [f"{middle[case] / middle[PEER]:.2f}" for case in METHODS]
            rows.append([work.name, *shown, *ratios, f"{same:.0%}"])
        environment = describe_environment() | {"peer": facts, "engine": describe_engine(session)}
    if output is not None:
        output.write_text(json.dumps({"environment": environment, "works": figures}, indent=1) + "\n", encoding="utf-8")
    head = ["tokens/s, or ms a token", f"{PEER} Q8_0", *METHODS, *(f"{case} / {PEER}" for case in METHODS), "same"]
    print("\n".join(table(head, rows)))
    print(f"\n- {manifest.name}, {manifest.precision}; {environment['machine']}, {environment['started']}.")
    print(f"- llama.cpp: {', '.join(f'{name} {value}' for name, value in facts.items())}.")
    if warning := busy_warning(os.getloadavg()[0], usable_cores()):
        print(f"- {warning}")
