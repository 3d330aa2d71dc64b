"""The stages in order, each skipped when its result exists."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from . import corpus, evaluate, tokenizer
from .settings import DrafterSettings, Settings
from .training import draft_data, drafter, target


@dataclass(frozen=True)
class Run:
    """Where a run keeps its intermediate files (work) and its results (out)."""

    settings: Settings
    work: Path
    out: Path
    init: Path | None = None
    init_drafter: Path | None = None

    @property
    def corpus_path(self) -> Path:
        return self.work / "corpus.jsonl"

    @property
    def arrays(self) -> dict[str, Path]:
        return {part: self.work / f"{part}.npz" for part in ("train", "hold")}

    @property
    def prompts(self) -> Path:
        return self.out / "prompts.jsonl"

    @property
    def tokenizer(self) -> Path:
        return self.out / "tokenizer"

    @property
    def target(self) -> Path:
        return self.out / "target"


def make_corpus(run: Run) -> None:
    if run.corpus_path.exists():
        return
    print(json.dumps(corpus.build(run.settings.corpus, run.prompts, run.corpus_path)))


def make_tokenizer(run: Run) -> None:
    if run.arrays["hold"].exists():
        return
    sizes = run.settings.target.vocabulary
    print(json.dumps(tokenizer.build(run.corpus_path, sizes, run.tokenizer, list(corpus.DOMAINS), run.arrays)))


def make_target(run: Run) -> None:
    if (run.target / "model.safetensors").exists():
        return
    files = {
        "train": run.arrays["train"],
        "tokenizer": run.tokenizer,
        "prompts": run.prompts,
        "log": run.work / "target_log.jsonl",
        "partial": run.work / "target.partial",
        "out": run.target,
    }
    target.train(run.settings.target, run.settings.workers, files, run.init)


def make_draft_data(run: Run) -> None:
    if all(draft_data.stem_of(run.work, rank).with_suffix(".npz").exists() for rank in range(run.settings.workers)):
        return
    files = {"target": run.target, "train": run.arrays["train"], "out": run.work}
    draft_data.build(files, run.settings.workers, run.settings.draft_data, run.settings.drafter.target_layer_ids)


def _train(run: Run, name: str, settings: DrafterSettings, init: Path | None) -> None:
    """Train a drafter on the stored states, unless OUT has it."""
    if (run.out / name / "model.safetensors").exists():
        return
    files = {
        "target": run.target,
        "data": run.work,
        "log": run.work / f"{name}_log.jsonl",
        "partial": run.work / f"{name}.pt",
        "out": run.out / name,
    }
    drafter.train(settings, run.settings.target, run.settings.workers, files, init)


def make_drafter(run: Run) -> None:
    _train(run, "drafter", run.settings.drafter, run.init_drafter)


def make_dspark(run: Run) -> None:
    _train(run, "dspark", run.settings.dspark, run.out / "drafter")


def make_eagle3(run: Run) -> None:
    _train(run, "eagle3", run.settings.eagle3, None)


def make_evaluation(run: Run) -> None:
    """Of every drafter in OUT; writes evaluation.json."""
    report = {}
    for name in ("drafter", "dspark", "eagle3"):
        if (run.out / name).exists():
            engine = run.work / f"engine-{name}"
            report[name] = evaluate.evaluate(run.out, name, engine, run.settings.evaluation)
            print(json.dumps({name: report[name]}), flush=True)
    (run.out / "evaluation.json").write_text(json.dumps(report, indent=1) + "\n")


def copy_packaged(out: Path, names: tuple[str, ...]) -> None:
    """Begin OUT with the package's prompts and these folders of it, which are then not made."""
    packaged = Path(str(resources.files("ddtree_trt") / "assets" / "tiny"))
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(packaged / "prompts.jsonl", out)
    for name in names:
        if not (out / name).exists():
            shutil.copytree(packaged / name, out / name)


@dataclass(frozen=True)
class Stage:
    make: Callable[[Run], None]
    needs: tuple[str, ...] = ()


STAGES = {
    "corpus": Stage(make_corpus),
    "tokenizer": Stage(make_tokenizer, ("corpus",)),
    "target": Stage(make_target, ("tokenizer",)),
    "draft-data": Stage(make_draft_data, ("target",)),
    "drafter": Stage(make_drafter, ("draft-data",)),
    "dspark": Stage(make_dspark, ("drafter",)),
    "eagle3": Stage(make_eagle3, ("draft-data",)),
    "evaluate": Stage(make_evaluation),
}


def needed(name: str) -> list[str]:
    """The stage and all that it builds on, in an order in which each comes after what it needs."""
    before = [found for need in STAGES[name].needs for found in needed(need)]
    return list(dict.fromkeys([*before, name]))


def run_stages(run: Run, names: list[str]) -> None:
    for name in dict.fromkeys(stage for given in names for stage in needed(given)):
        began = time.time()
        STAGES[name].make(run)
        print(f"{name}: {time.time() - began:.0f} s", flush=True)
