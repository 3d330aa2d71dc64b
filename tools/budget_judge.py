"""Play the rule of automatic budgets and its rivals over recorded drafts, under given costs.

    python tools/budget_judge.py record ENGINE [--prompts FILE] [--tokens 160] -o texts.npz
    python tools/budget_judge.py play texts.npz [texts.npz …] [--machine h100] [--slots 1,4,16,64] [--wrong 0.5]

`record` has the target answer prompts greedily, and drafts at every token of the answers: whatever a policy commits, its
next draft is known. `play` needs no engine and reads no clock. A line is a machine, a number of requests side by side
and a recording; its figures are tokens a second over those of single tokens: of `auto`, of the chain, of every fixed
budget, and of hindsight, which knows what every size would have had accepted, or that none pays, in each round. A last
column is `auto` over the best of them but hindsight. `--wrong 0.5` begins with a profile whose drafts cost half and whose
trees cost twice what they do, 2 the other way round; `--late` decides every round a round late, as a device's is.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ddtree_trt.runtime.candidates import Marginals
from ddtree_trt.runtime.decoding.budget.costs import Costs
from ddtree_trt.runtime.decoding.budget.policy import AutoBudgets, FixedBudget, RoundPlan, SlotInput
from ddtree_trt.runtime.engines.profile import PassTimes, Profile
from ddtree_trt.runtime.tree import EMPTY, DraftTree, best_tree, descend

NODES, PAST = 64, 200
FIXED = (1, 2, 4, 8, 12, 16, 24, 32, 64)


@dataclass(frozen=True)
class Text:
    """An answer, and the drafter's candidates at each of its tokens."""

    tokens: list[int]  # [P + 1]; tokens[p] is the bonus token that draft p is behind
    log_probs: Any  # [P, L, K]
    ids: Any  # [P, L, K]

    def tree(self, place: int, nodes: int) -> DraftTree:
        return best_tree(Marginals(self.log_probs[place].astype(np.float32), self.ids[place]), nodes)

    def path(self, place: int, tree: DraftTree) -> Any:
        following = iter(self.tokens[place + 1 :])
        return descend(tree, lambda node: next(following, None))


class Machine:
    """True seconds of passes: a table by slots of the verification by tree tokens, and of the draft."""

    def __init__(
        self, table: dict[int, tuple[dict[int, float], float]], in_turn: bool = False, buckets: Any = None
    ) -> None:
        self.table, self.in_turn, self.buckets = table, in_turn, buckets

    def verify_s(self, slots: int, tokens: int) -> float:
        if self.buckets:
            tokens = next(size for size in self.buckets if size >= tokens)
        counts = sorted(self.table)
        at = [np.interp(tokens, list(self.table[n][0]), list(self.table[n][0].values())) for n in counts]
        for k, n in enumerate(counts):  # beyond the last size, in proportion
            sizes, times = list(self.table[n][0]), list(self.table[n][0].values())
            if tokens > sizes[-1]:
                at[k] += (times[-1] - times[-2]) / (sizes[-1] - sizes[-2]) * (tokens - sizes[-1])
        return float(np.interp(slots, counts, at))

    def draft_s(self, slots: int) -> float:
        counts = sorted(self.table)
        return float(np.interp(slots, counts, [self.table[n][1] for n in counts])) if slots else 0.0

    def profile(self, most: int, wrong: float) -> Profile:
        def times(slots: int) -> PassTimes:
            sizes = (1, 2, 5, 17, 65)
            verify = tuple((t, self.verify_s(slots, t) * (1 if t == 1 else 1 / wrong)) for t in sizes)
            return PassTimes(slots, 64, self.draft_s(slots) * wrong, verify)

        return Profile("", times(1), None, times(most) if most > 1 else None)


H100 = Machine(
    {
        1: ({1: 6.57, 4: 6.65, 16: 6.77, 64: 7.07, 128: 8.2}, 2.2),
        4: ({1: 6.69, 4: 6.8, 8: 6.95, 16: 7.10, 32: 7.56, 64: 9.04}, 2.2),
        16: ({1: 7.09, 4: 7.25, 8: 7.67, 16: 9.04, 32: 13.8, 64: 26.0}, 3.3),
        64: ({1: 8.66, 4: 10.28, 8: 15.2, 16: 27.8, 32: 54.0, 64: 106.0}, 9.25),
    },
    buckets=(1, 2, 4, 8, 16, 32, 48, 64, 65, 128),
)
TINY = Machine({1: ({1: 0.80, 2: 1.1, 3: 1.2, 5: 1.4, 9: 1.9, 17: 2.7, 33: 4.4, 65: 7.5}, 1.15)}, in_turn=True)
SMOL8 = Machine({1: ({1: 10.5, 2: 11.3, 5: 14.2, 9: 18.2, 17: 27.6, 33: 33.4, 65: 58.2}, 4.5)}, in_turn=True)
_PROC = {
    n: ({t: 2.3 + n * (0.2 + 0.06 * (t > 1) + 0.085 * (t - 1)) for t in (1, 2, 65)}, 1.4 + 0.67 * n) for n in (1, 64)
}
TORCH = Machine(_PROC)
MACHINES = {"tiny": TINY, "smol8": SMOL8, "torch": TORCH, "h100": H100}


class Slot:
    def __init__(self, text: Text, budget: Any, chain: bool) -> None:
        self.text, self.budget, self.chain, self.place, self.tree = text, budget, chain, 0, EMPTY
        self.late: list[Any] = []

    @property
    def left(self) -> int:
        return len(self.text.tokens) - 1 - self.place


def play(
    machine: Machine, texts: Sequence[Text], slots: int, make: Callable[[], Any], chain: bool = False
) -> tuple[float, int]:
    waiting = deque(Slot(text, make(), chain) for text in texts)
    running: list[Slot] = []
    seconds, tokens = 0.0, 0
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.popleft())
        for group in [[s] for s in running] if machine.in_turn else [running]:
            plan = RoundPlan([SlotInput(s.budget, PAST + s.place, s.left) for s in group])
            ceilings = plan.ceilings()
            trees = [
                s.text.tree(s.place, n) if n and not s.chain else None for s, n in zip(group, ceilings, strict=True)
            ]
            if chain:
                trees = [
                    best_tree(
                        Marginals(s.text.log_probs[s.place][:, :1].astype(np.float32), s.text.ids[s.place][:, :1]), 64
                    )
                    for s in group
                ]
            nodes = plan.choose(trees)
            for s, tree, n in zip(group, trees, nodes, strict=True):
                s.tree = EMPTY if tree is None else tree.cut(n)
            widest, drafting = max(len(s.tree) for s in group), sum(n > 0 for n in ceilings)
            draft_s, verify_s = machine.draft_s(drafting), machine.verify_s(len(group), 1 + widest)
            seconds += draft_s + verify_s
            plan.took(draft_s, verify_s, widest)
            for s, decision in zip(group, plan.decisions, strict=True):
                path = s.text.path(s.place, s.tree)[: s.left]
                if decision is not None:
                    s.budget.observe(decision, s.tree, path, ends=len(path) == s.left)
                s.place += len(path)
                tokens += len(path)
        running = [s for s in running if s.left]
    return seconds, tokens


def hindsight(machine: Machine, texts: Sequence[Text]) -> float:
    """Tokens a second of a lone request at a time, each round of the best size or without a draft."""
    seconds = tokens = 0.0
    single = machine.verify_s(1, 1)
    for text in texts:
        place = 0
        while (left := len(text.tokens) - 1 - place) > 0:
            tree = text.tree(place, NODES)
            path = text.path(place, tree)[:left]
            options = [(machine.draft_s(1) + machine.verify_s(1, 1 + int(n)), j + 1) for j, n in enumerate(path) if j]
            best = max([(single, 1), *options], key=lambda o: o[1] * single - o[0])
            seconds, tokens, place = seconds + best[0], tokens + best[1], place + best[1]
    return tokens / seconds


def auto(machine: Machine, slots: int, wrong: float) -> Callable[[], Any]:
    costs = Costs(machine.profile(1 if machine.in_turn else slots, wrong), NODES, machine.buckets)
    shared = AutoBudgets(costs, NODES, 15)
    return lambda: AutoBudget(shared)


def report(machine: str, slots: int, name: str, texts: Sequence[Text], wrong: float) -> float:
    m = MACHINES[machine]

    def rate(make: Callable[[], Any], chain: bool = False) -> float:
        seconds, tokens = play(m, texts, slots, make, chain)
        return tokens / seconds

    ar = rate(lambda: FixedBudget(0))
    found = {"chain": rate(lambda: FixedBudget(len(texts[0].log_probs[0])), True)}
    found |= {str(n): rate(lambda n=n: FixedBudget(n)) for n in FIXED}
    own = rate(auto(m, slots, wrong))
    best = max(ar, *found.values())
    cells = [f"{own / ar:.2f}", *(f"{v / ar:.2f}" for v in found.values())]
    cells.append(f"{hindsight(m, texts) / ar:.2f}" if slots == 1 else "")
    print(f"| {machine} | {slots} | {name} | " + " | ".join(cells) + f" | {own / best:.3f} |", flush=True)
    return own / best


def record(directory: Path, prompts: Sequence[str], tokens: int, output: Path) -> None:
    from ddtree_trt import LLM, SamplingParams
    from ddtree_trt.runtime.engines.base import DraftRequest, VerifyRequest
    from ddtree_trt.runtime.tree import compile_tree

    arrays: dict[str, Any] = {}
    with LLM(directory) as llm:
        chats: list[Any] = [[{"role": "user", "content": p}] for p in prompts]
        answers = llm.generate(chats, SamplingParams(method="ar", max_tokens=tokens, temperature=0.0))
        engine, path = llm.engine, np.zeros(1, np.int32)
        chunk, k = engine.manifest.limits.prefill_chunk, 16
        for number, answer in enumerate(answers):
            said, prompt = list(answer.outputs[0].token_ids), np.array(answer.prompt_token_ids)
            engine.truncate(0, 0)
            for start in range(0, len(prompt), chunk):
                engine.prefill(0, prompt[start : start + chunk], rows="none", taps=True)
            rows = []
            for token in said[:-1]:
                (draft,) = engine.draft([DraftRequest(0, token, k, 64, lambda *_: None)])  # type: ignore[arg-type]
                rows.append(draft.candidates)
                engine.verify([VerifyRequest(0, compile_tree(token, EMPTY))])
                engine.commit(0, path, taps=True)
            arrays[f"tokens{number}"] = np.array(said, np.int32)
            arrays[f"log_probs{number}"] = np.array([r.log_probs[:, :k] for r in rows], np.float32)
            arrays[f"ids{number}"] = np.array([r.token_ids[:, :k] for r in rows], np.int32)
    np.savez_compressed(output, **arrays)


def load(path: Path) -> list[Text]:
    data = np.load(path)
    count = sum(name.startswith("tokens") for name in data)
    return [
        Text(data[f"tokens{i}"].tolist(), data[f"log_probs{i}"], data[f"ids{i}"])
        for i in range(count)
        if len(data[f"tokens{i}"]) > 2
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record")
    recorder.add_argument("engine", type=Path)
    recorder.add_argument("--prompts", type=Path)
    recorder.add_argument("--count", type=int, default=15)
    recorder.add_argument("--tokens", type=int, default=160)
    recorder.add_argument("-o", "--output", type=Path, required=True)
    player = commands.add_parser("play")
    player.add_argument("texts", type=Path, nargs="+")
    player.add_argument("--machine", default=",".join(MACHINES))
    player.add_argument("--slots", default="1")
    player.add_argument("--wrong", type=float, default=1.0)
    args = parser.parse_args()
    if args.command == "record":
        lines = args.prompts.read_text(encoding="utf-8").splitlines()
        prompts = [json.loads(line)["prompt"] for line in lines]
        record(args.engine, prompts[:: max(1, len(prompts) // args.count)][: args.count], args.tokens, args.output)
        return
    heads = ["machine", "slots", "texts", "auto", "chain", *map(str, FIXED), "hindsight", "auto / best"]
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    for machine in args.machine.split(","):
        for slots in map(int, args.slots.split(",")):
            for path in args.texts:
                texts = load(path)
                if slots > len(texts):
                    texts = texts * -(-slots // len(texts))
                report(machine, slots, path.stem, texts, args.wrong)


if __name__ == "__main__":
    main()
