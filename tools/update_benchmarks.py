"""Measure what docs/benchmarks.md shows of CPUs and write its tables and pictures.

    python tools/update_benchmarks.py                              sections that need nothing but this package
    python tools/update_benchmarks.py --only useless check         some sections
    python tools/update_benchmarks.py --only smollm2 smollm2-budgets --smollm2 engines/smollm2-int8
    python tools/update_benchmarks.py --only smollm2-peers --smollm2 ENGINE --gguf F32.gguf Q8_0.gguf
    python tools/update_benchmarks.py --render                     from the results kept in docs/benchmarks, unmeasured

A section is the text between `<!-- begin NAME -->` and `<!-- end NAME -->`. Its result is kept in docs/benchmarks as
NAME.json and can be measured again with `ddtree-trt bench --replay`. A busy machine is refused, since its figures
mean little.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from ddtree_trt.artifact.progress import Progress
from ddtree_trt.bench.reporting.markdown import markdown
from ddtree_trt.bench.reporting.plots import plot_all
from ddtree_trt.bench.result import BenchResult, read_result, to_json
from ddtree_trt.bench.runner import run_bench
from ddtree_trt.bench.settings import BenchSettings, CheckSettings
from ddtree_trt.build.compile import BuildRequest, compile_engine
from ddtree_trt.build.sources import PackagedSource
from ddtree_trt.check.findings import describe
from ddtree_trt.check.run import check_engine
from ddtree_trt.commands.build import measure as measure_latencies
from ddtree_trt.errors import DDTreeError
from ddtree_trt.terminal.printing import progress_bars

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs/benchmarks.md"
RESULTS = ROOT / "docs/benchmarks"
PICTURES = ROOT / "docs/images/benchmarks"
GIVEN = "smollm2"  # the engine of SmolLM2-135M, which the user builds
HELD_OUT = "docs/benchmarks/smollm2-prompts.jsonl"  # everyday prompts of kinds that its drafter was not trained on
BUSY_LOAD = 0.5  # runnable processes per core above which nothing is measured

CAPTIONS = {
    "speedup": "Speedup over autoregressive decoding, by method",
    "budget": "Tokens per round and speedup against the tree budget",
    "stages": "Where a round's time goes, by stage",
    "acceptance": "How deep rounds accept, by budget, and how many tokens they commit",
}


@dataclass(frozen=True)
class Section:
    """A benchmark in the document, and the pictures of it that are shown."""

    settings: Callable[[Path, str | None], BenchSettings]  # by the engine and the checkout of the published code
    pictures: tuple[str, ...]
    engine: str  # built here, but for GIVEN


def _peers(peers: tuple[str, ...], reference: str | None) -> tuple[str, ...]:
    """The peers, and among several the published code where its checkout is given."""
    return (*peers, f"ddtree-reference={reference}") if peers and reference else peers


def _smollm2(peers: tuple[str, ...] = (), **settings: Any) -> Section:
    """A section with a real language model on everyday prompts."""
    return Section(
        lambda engine, reference: BenchSettings(
            str(engine), prompts=(HELD_OUT,), peers=_peers(peers, reference), **{"max_tokens": 128, **settings}
        ),
        ("speedup", "budget", "stages", "acceptance"),
        engine=GIVEN,
    )


SECTIONS = {
    "useless": Section(
        lambda engine, _: BenchSettings(
            str(engine), budgets=("auto", 1, 8), temperatures=(0.0, 1.0), limit=30, repeats=3
        ),
        (),
        engine="useless",
    ),
    "smollm2": _smollm2(budgets=("auto",), temperatures=(0.0, 0.7)),
    "smollm2-budgets": _smollm2(budgets=("auto", 2, 4, 8, 16, 32, 64), limit=15),
    "smollm2-peers": _smollm2(budgets=("auto", 8), limit=10, max_tokens=64, peers=("hf",)),
}
COMPARISON = "drafters"  # the section that `python -m tools.train_tiny compare --document` writes
CHECKS = {"check": "tiny"}  # section → the engine whose losslessness report it shows


def replace_section(text: str, name: str, content: str) -> str:
    """The document with the text between a section's markers replaced. Raises ValueError without the markers."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"{DOCUMENT.name} must have one section between {begin} and {end}")
    return pattern.sub(lambda _: f"{begin}\n\n{content.strip()}\n\n{end}", text)


def render(name: str, result: BenchResult) -> str:
    """The text of a section: its pictures, which are drawn anew, and its tables."""
    folder = PICTURES / name
    lines = []
    drawn = {path.stem: path for path in plot_all(result, folder)}
    for picture, path in drawn.items():
        if picture not in SECTIONS[name].pictures:
            path.unlink()
            continue
        lines += [f"![{CAPTIONS[picture]}]({os.path.relpath(path, DOCUMENT.parent)})", ""]
    tables = markdown(result)
    if "stages" in drawn and "stages" in SECTIONS[name].pictures:  # which shows that table
        tables = re.sub(r"Milliseconds per round by stage.*\n\n(?:\|.*\n)+\n", "", tables)
    return "\n".join([*lines, tables])


def write_section(name: str, content: str) -> None:
    DOCUMENT.write_text(replace_section(DOCUMENT.read_text(encoding="utf-8"), name, content), encoding="utf-8")
    print(f"wrote section {name} of {DOCUMENT.relative_to(ROOT)}")


def make_useless(drafter: Path) -> Path:
    """Write the tiny pair's drafter with random matrices, whose drafts are right by chance only; returns its folder."""
    packaged, rng = PackagedSource("tiny/drafter").directory, np.random.default_rng(0)
    drafter.mkdir()
    shutil.copy(packaged / "config.json", drafter)
    weights = load_file(packaged / "model.safetensors")
    for name, w in weights.items():
        if w.ndim == 2:
            weights[name] = (rng.standard_normal(w.shape) / np.sqrt(w.shape[1])).astype(w.dtype)
    save_file(weights, drafter / "model.safetensors", metadata={"format": "pt"})
    return drafter


def build_engines(names: set[str], progress: Progress) -> dict[str, Path]:
    """The engines of these names, built and profiled below `engines/`."""
    engines = {name: Path("engines") / name for name in names}
    for name, engine in engines.items():
        with tempfile.TemporaryDirectory() as folder:
            drafter = make_useless(Path(folder) / "drafter") if name == "useless" else None
            request = BuildRequest(target="tiny", drafter=drafter, precision="fp32", output=engine, force=True)
            compile_engine(request, progress)
        measure_latencies(engine, progress)
    return engines


def measure(names: list[str], args: argparse.Namespace) -> None:
    os.chdir(ROOT)  # so that results name the engine and the checkout as a reader of the repository would
    checkout = os.path.relpath(args.reference) if args.reference else None
    wanted = {CHECKS.get(name) or SECTIONS[name].engine for name in names}
    with progress_bars() as progress:
        engines = build_engines(wanted - {GIVEN}, progress)
        if args.smollm2:
            engines[GIVEN] = Path(os.path.relpath(args.smollm2))
        for name in names:
            if name in CHECKS:
                lines = describe(check_engine(CheckSettings(str(engines[CHECKS[name]]), limit=60), progress))
                write_section(name, "\n".join(["```text", *lines, "```"]))
                continue
            section = SECTIONS[name]
            settings = section.settings(engines[section.engine], checkout)
            if section.engine == GIVEN and settings.peers:
                files = [f"llama-cpp={os.path.relpath(file)}" for file in args.gguf]
                settings = replace(settings, peers=(*settings.peers, *files))
            result = run_bench(settings, progress=progress)
            RESULTS.mkdir(parents=True, exist_ok=True)
            (RESULTS / f"{name}.json").write_text(to_json(result), encoding="utf-8")
            write_section(name, render(name, result))


def refuse_if_busy(anyway: bool) -> None:
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > BUSY_LOAD * cores and not anyway:
        raise SystemExit(
            f"the machine is busy: load {load:.1f} on {cores} cores, at most {BUSY_LOAD * cores:g} is wanted; wait "
            "until it is quiet, or give --anyway for figures nobody should publish"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", help="a checkout of https://github.com/liranringel/ddtree")
    parser.add_argument("--only", nargs="+", choices=[*SECTIONS, *CHECKS], help="these sections")
    parser.add_argument("--smollm2", type=Path, metavar="ENGINE", help="an int8 engine of the preset smollm2-135m")
    parser.add_argument("--gguf", nargs="+", default=[], metavar="FILE", help="the same model's, for llama.cpp")
    parser.add_argument("--render", action="store_true", help="draw and write from kept results; measure nothing")
    parser.add_argument("--anyway", action="store_true", help="measure on a busy machine too")
    args = parser.parse_args()
    lacks = {name for name, section in SECTIONS.items() if section.engine == GIVEN and not args.smollm2}
    wanted = args.only or [n for n in [*SECTIONS, *CHECKS] if args.render or n not in lacks]
    try:
        if args.render:
            for name in wanted:
                if (path := RESULTS / f"{name}.json").is_file():
                    write_section(name, render(name, read_result(path)))
            return
        for name in wanted:
            if name in lacks:
                parser.error(f"section {name} needs --smollm2 ENGINE")
        refuse_if_busy(args.anyway)
        for name in ("reference", "smollm2"):
            setattr(args, name, Path(value).resolve() if (value := getattr(args, name)) else None)
        args.gguf = [Path(file).resolve() for file in args.gguf]
        measure(wanted, args)
    except DDTreeError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
