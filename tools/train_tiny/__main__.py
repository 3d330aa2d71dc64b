"""Command line: `python -m tools.train_tiny STAGE --work DIR --out DIR`; a stage whose result exists is skipped."""

import argparse
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path

import numpy as np

from tools.train_drafter import data
from tools.train_drafter.loop import Log
from tools.train_drafter.target import Answer, Target, load_target
from tools.train_drafter.training import train_drafter

from . import corpus, tokenizer
from .evaluate import evaluate
from .settings import DFLASH, HYBRID, MASK, Settings
from .target import PACKAGED, train_target
from .tokenizer import TokenSet


@dataclass(frozen=True)
class Tiny:
    """Where a run keeps its intermediate files (work) and its results (out)."""

    settings: Settings
    work: Path
    out: Path

    @property
    def arrays(self) -> dict[str, Path]:
        return {part: self.work / f"{part}.npz" for part in ("train", "hold")}

    def load(self) -> Target:
        return load_target(str(self.out / "target"), DFLASH.taps, tokenizer=self.out / "tokenizer")

    def corpus(self) -> None:
        if not (self.work / "corpus.jsonl").exists():
            counts = corpus.build(self.settings.corpus, self.out / "prompts.jsonl", self.work / "corpus.jsonl")
            print(json.dumps(counts))

    def tokenizer(self) -> None:
        if not self.arrays["hold"].exists():
            size, folder = self.settings.target.vocabulary, self.out / "tokenizer"
            print(json.dumps(tokenizer.build(self.work / "corpus.jsonl", size, folder, self.arrays)))

    def target(self) -> None:
        if not (self.out / "target").exists():
            folder = self.work / "target"
            if train_target(self.settings.target, self.arrays, folder, folder / "best"):
                shutil.copytree(folder / "best", self.out / "target")

    def data(self) -> None:
        """Answers to the corpus's prompts, no prompt twice, some of its conversations, and answers to measure by."""
        s, folder = self.settings, self.work / "data"
        target, tokens, held = self.load(), *(TokenSet.load(path) for path in self.arrays.values())
        order = np.random.default_rng(s.data.seed).permutation(len(tokens.lengths))
        size = s.data.batch * s.data.pool

        def prompts(pool: int) -> list[list[list[int]]]:
            return [[tokens.prompt(i)] for i in order[pool * size : (pool + 1) * size]]

        report = Log(self.work / "data.log").write
        data.write_pools(target, folder, range(s.pools), s.data, prompts, report)
        taken = order[len(order) - round(s.corpus_share * s.pools * size) :]
        told = [tokens.conversation(i).tolist() for i in taken]
        spans = [((int(tokens.prompts[i]), len(ids)),) for i, ids in zip(taken, told, strict=True)]
        data.write(
            [Answer(ids, span, 1.0) for ids, span in zip(told, spans, strict=True)], folder / "pool-corpus.safetensors"
        )
        v = s.validation
        asked = [[held.prompt(i)] for i in np.random.default_rng(v.seed).permutation(len(held.lengths))[: v.prompts]]
        data.write_greedy(target, asked, replace(s.data, max_new=v.max_new), self.work / "validation.safetensors")

    def train(self, name: str) -> None:
        if not (self.out / name).exists():
            work, init = self.work / name, self.out / "drafter" if name == "dspark" else None
            if self.settings.target.delta:
                init = PACKAGED / name
            if train_drafter(self.load(), self.settings.drafters[name], MASK, work, self.work / "data", init):
                shutil.copytree(work / "best", self.out / name)

    def evaluate(self) -> None:
        """Of every drafter in OUT; writes evaluation.json."""
        found = {}
        for name in self.settings.drafters:
            if (self.out / name).exists():
                found[name] = evaluate(self.out, name, self.work / f"engine-{name}", self.settings.evaluation)
                print(json.dumps({name: found[name]}), flush=True)
        (self.out / "evaluation.json").write_text(json.dumps(found, indent=1) + "\n")


NEEDS: dict[str, tuple[str, ...]] = {
    "corpus": (),
    "tokenizer": ("corpus",),
    "target": ("tokenizer",),
    "data": ("target",),
    "drafter": ("data",),
    "dspark": ("drafter",),
    "eagle3": ("data",),
    "evaluate": (),
}


def needed(name: str) -> list[str]:
    """The stage and all that it builds on, in an order in which each comes after what it needs."""
    return list(dict.fromkeys([*(found for need in NEEDS[name] for found in needed(need)), name]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools.train_tiny", description="Make a tiny target and its drafters.")
    parser.add_argument("stage", choices=["all", *NEEDS])
    parser.add_argument("--work", type=Path, required=True, help="folder of intermediate files")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--hybrid", action="store_true", help="a target of gated delta nets, with a DFlash drafter")
    parser.add_argument(
        "--packaged", action="store_true", help="take target, drafter and tokenizer from the package; evaluate: all"
    )
    args = parser.parse_args()
    settings = HYBRID if args.hybrid else Settings()
    if args.packaged or args.hybrid:  # a hybrid begins as the packaged target, and so with its tokenizer
        packaged = Path(str(resources.files("ddtree_trt") / "assets" / "tiny"))
        args.out.mkdir(parents=True, exist_ok=True)
        shutil.copy(packaged / "prompts.jsonl", args.out)
        pair = ("target", "drafter") if args.packaged else ()
        others = ("dspark", "eagle3") if args.packaged and args.stage == "evaluate" else ()
        for name in ("tokenizer", *pair, *others):
            if not (args.out / name).exists():
                shutil.copytree(packaged / name, args.out / name)
    tiny = Tiny(settings, args.work, args.out)
    unknown = Settings().drafters.keys() - settings.drafters.keys()
    for name in [each for each in NEEDS if each not in unknown] if args.stage == "all" else needed(args.stage):
        began = time.time()
        stage: Callable[[], None] = partial(tiny.train, name) if name in settings.drafters else getattr(tiny, name)
        stage()
        print(f"{name}: {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
