"""Prompt files, the shipped set, and the paper's datasets from local copies."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ddtree_trt.bench.measure import load_prompts
from ddtree_trt.errors import UsageError
from workbench import datasets as paper
from workbench.datasets import load_turns

REASONING = "\nPlease reason step by step, and put your final answer within \\boxed{}."
# Of some datasets a row, with its columns as they are on the hub, and the user messages the paper made of it.
ROWS: dict[str, tuple[dict[str, object], list[str]]] = {
    "gsm8k": ({"question": "2 {x}?", "answer": "4"}, ["2 {x}?" + REASONING]),
    "mt-bench": ({"prompt": ["First?", "And then?"], "category": "writing"}, ["First?", "And then?"]),
    "alpaca": ({"instruction": "Sort.", "input": "3 1", "output": "1 3"}, ["Sort.\n\nInput:\n3 1"]),
}


def write(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def test_every_kind_of_prompt_is_read(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    cases: list[tuple[dict[str, object], object, tuple[str, ...]]] = [
        ({"prompt": "Hello", "domain": "ignored"}, [{"role": "user", "content": "Hello"}], ()),
        ({"turns": ["One", "Two", "Three"]}, [{"role": "user", "content": "One"}], ("Two", "Three")),
        ({"messages": chat}, chat, ()),
        ({"text": "Once\u2028upon"}, "Once\u2028upon", ()),
        ({"token_ids": [5, 6]}, [5, 6], ()),
    ]
    prompts = load_prompts([str(write(tmp_path / "mine.jsonl", [row for row, *_ in cases]))])
    assert [p.id for p in prompts] == [f"mine/{i}" for i in range(5)]
    assert [(p.opening, p.follow_ups) for p in prompts] == [(opening, later) for _, opening, later in cases]


NO_PROMPTS = ["{", "[]", "{}", '{"prompt": "a", "text": "b"}', '{"prompt": 3}', '{"prompt": ""}', '{"turns": []}']
NO_PROMPTS += ['{"turns": ["a", 1]}', '{"messages": [{"role": "user"}]}', '{"token_ids": [true]}', "[" * 100_000]


@pytest.mark.parametrize("line", NO_PROMPTS, ids=lambda line: line[:40])
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(UsageError, match=r"bad.jsonl, line 3"):
        load_prompts([str(path)])


def test_files_without_prompts_unknown_and_equal_names_are_refused(tmp_path: Path) -> None:
    files = {}
    for name, rows in (("a/same", [{"text": "a"}]), ("b/same", [{"text": "b"}]), ("empty", [])):
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        files[name] = str(write(path, rows))
    for specs, message in (
        ([files["empty"]], "has no prompts"),
        (["gsm9k"], "neither a file nor tiny"),
        ([files["a/same"], files["b/same"]], "two prompt sets are called 'same'"),
    ):
        with pytest.raises(UsageError, match=message):
            load_prompts(specs)


def test_a_limit_takes_prompts_evenly() -> None:
    everything, some = load_prompts(["tiny"]), load_prompts(["tiny"], 6)
    step = len(everything) // 6
    assert [p.opening for p in some] == [p.opening for p in everything[::step]][:6]
    assert load_prompts(["tiny"], 10_000) == everything


@pytest.mark.parametrize("name", ROWS)
def test_the_papers_prompts_are_made_of_a_row(tmp_path: Path, name: str) -> None:
    row, turns = ROWS[name]
    copy = write(tmp_path / "copy.jsonl", [row])
    paper.main(name, tmp_path / "out.jsonl", copy)
    (prompt,) = load_prompts([str(tmp_path / "out.jsonl")])
    assert (prompt.opening, prompt.follow_ups) == ([{"role": "user", "content": turns[0]}], tuple(turns[1:]))


def test_samples_are_chosen_as_the_published_experiments_do(tmp_path: Path) -> None:
    """As `datasets` shuffles: its generator is NumPy's."""
    copy = write(tmp_path / "copy.jsonl", [{"problem": str(i)} for i in range(40)])
    chosen = [turns[0].removesuffix(REASONING) for turns in load_turns("aime24", copy)]
    assert chosen == [str(i) for i in np.random.default_rng(0).permutation(40)[:30]]
