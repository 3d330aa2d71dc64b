"""Write the prompts of one of the DDTree paper's datasets (arXiv 2604.12989) as JSON Lines, for `bench` and others.

    python -m workbench datasets gsm8k -o gsm8k.jsonl            from the Hugging Face hub; needs the package `datasets`
    python -m workbench datasets gsm8k --copy FILE -o gsm8k.jsonl      from a local JSON, JSON Lines or Parquet file

The prompts are those of the published experiments, so that acceptance lengths can be compared with the paper's. The
choice of samples is theirs too: a shuffle with seed 0, then the first so many.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ddtree_trt.errors import DDTreeError, MissingDependency, UsageError, install_with
from workbench.options import Output

Row = Mapping[str, Any]
SHUFFLE_SEED = 0


@dataclass(frozen=True)
class PaperSet:
    """One dataset on the Hugging Face hub."""

    name: str
    samples: int  # the paper's number
    repository: str
    split: str
    turns: str | Callable[[Row], list[str]]  # a row's user messages; of one its text, with the columns' names in braces
    config: str | None = None
    files: tuple[str, ...] = ()  # JSON files to read where the repository needs a loading script


def _livecodebench(row: Row) -> list[str]:
    """LiveCodeBench's own prompt for instruction models, with its system message in front."""
    starter = row["starter_code"] or ""
    how = "Use the following code structure:" if starter else "Write your code in the following format:"
    parts = (
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate "
        "a correct Python program that matches the specification and passes all tests. You will NOT return anything "
        "except for the program",
        f"### Question:\n{row['question_content']}",
        f"### Format: {how}\n```python\n{starter or '# YOUR CODE HERE'}\n```",
        "### Answer: (use the provided format with backticks)",
    )
    return ["\n\n".join(parts)]


_REASONING = "\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_PROBLEM = "{problem}" + _REASONING
_HUMANEVAL = "Write a solution to the following problem and make sure that it passes the tests:\n"
_HUMANEVAL += "```python\n{prompt}\n```"
_SWE_BENCH = "Problem Statement:\n{problem_statement}\nPlease fix the issue described above."
_LCB_FILES = tuple(f"test{n}.jsonl" for n in ("", 2, 3, 4, 5, 6))
_SETS = (
    PaperSet("gsm8k", 128, "openai/gsm8k", "test", "{question}" + _REASONING, "main"),
    PaperSet("math500", 128, "HuggingFaceH4/MATH-500", "test", _PROBLEM),
    PaperSet("aime24", 30, "HuggingFaceH4/aime_2024", "train", _PROBLEM),
    PaperSet("aime25", 30, "MathArena/aime_2025", "train", _PROBLEM),
    PaperSet("humaneval", 164, "openai/openai_humaneval", "test", _HUMANEVAL),
    PaperSet("mbpp", 128, "google-research-datasets/mbpp", "test", "{prompt}", "sanitized"),
    PaperSet("livecodebench", 128, "livecodebench/code_generation_lite", "test", _livecodebench, files=_LCB_FILES),
    PaperSet("swe-bench", 128, "princeton-nlp/SWE-bench_Lite", "test", _SWE_BENCH),
    PaperSet("mt-bench", 80, "HuggingFaceH4/mt_bench_prompts", "train", lambda row: list(row["prompt"])),
    PaperSet(
        *("alpaca", 128, "tatsu-lab/alpaca", "train"),
        lambda row: [row["instruction"] + (f"\n\nInput:\n{row['input']}" if row["input"] else "")],
    ),
)
PAPER_SETS: Mapping[str, PaperSet] = {s.name: s for s in _SETS}


def load_turns(name: str, copy: Path | None = None, limit: int | None = None) -> list[list[str]]:
    """The user messages of a dataset's samples, `limit` of them or the paper's number.

    `copy` is a local JSON, JSON Lines or Parquet file with the dataset's columns, read instead of the hub.
    Raises UsageError for an unknown name and a file without those columns, MissingDependency without `datasets` where
    it is needed, DDTreeError when the hub cannot be read.
    """
    if name not in PAPER_SETS:
        raise UsageError(f"unknown dataset {name!r}; known are {', '.join(PAPER_SETS)}")
    dataset = PAPER_SETS[name]
    base = f"https://huggingface.co/datasets/{dataset.repository}/resolve/main"
    if copy is not None:
        rows = _read_copy(copy)
    elif dataset.files:
        rows = _load_dataset("json", data_files=[f"{base}/{file}" for file in dataset.files], split="train")
    else:
        rows = _load_dataset(dataset.repository, dataset.config, split=dataset.split)
    # All in order where there are no more, else as `datasets` shuffles them.
    count, shuffled = limit or dataset.samples, np.random.default_rng(SHUFFLE_SEED).permutation(len(rows))
    turns, chosen = dataset.turns, rows if len(rows) <= count else [rows[int(i)] for i in shuffled[:count]]
    try:
        return [[turns.format_map(row)] if isinstance(turns, str) else turns(row) for row in chosen]
    except KeyError as error:
        raise UsageError(f"{copy or dataset.repository} is not {name}: it has no column {error}") from error


def _read_copy(path: Path) -> Sequence[Row]:
    if not path.is_file():
        raise UsageError(f"no dataset file at {path}")
    try:
        if path.suffix == ".parquet":
            return _load_dataset("parquet", data_files=str(path), split="train")
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else [json.loads(s) for s in text.splitlines() if s.strip()]
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path} as JSON, JSON Lines or Parquet: {error}") from error


def _load_dataset(path: str, *args: Any, **options: Any) -> Sequence[Row]:
    try:
        import datasets
    except ImportError as error:
        raise MissingDependency(
            f"{path} needs the package `datasets`, which is not installed; {install_with('bench')}, "
            "or give a local copy with --copy FILE"
        ) from error
    try:
        rows: Sequence[Row] = datasets.load_dataset(path, *args, **options)
    except Exception as error:  # network, hub, disk, schema: their errors share no base
        reason = (str(error).strip().splitlines() or [""])[0]
        raise DDTreeError(
            f"cannot load dataset {path} ({type(error).__name__}: {reason}); give a local copy with --copy FILE"
        ) from error
    return rows


def main(
    name: str,
    output: Output,
    copy: Annotated[Path | None, typer.Option(help="a local file with the dataset's columns")] = None,
    limit: Annotated[int | None, typer.Option(help="samples; default: the paper's number")] = None,
) -> None:
    turns = load_turns(name, copy, limit)
    output.write_text("".join(json.dumps({"turns": each}) + "\n" for each in turns), encoding="utf-8")
