"""The example of docs/concepts.md is what the code gives."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any, cast

import numpy as np
from rich.console import Console

from ddtree_trt.runtime.decoding.loop import Round
from ddtree_trt.runtime.text.codec import TextCodec
from ddtree_trt.runtime.tree import build_tree, descend
from ddtree_trt.terminal.tree_view import TreeView

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "concepts.md").read_text(encoding="utf-8")


class Words:
    """A codec whose tokens are the words of the page."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(self.words[i] for i in ids)


def candidates() -> tuple[list[list[str]], np.ndarray]:
    """The page's table by position: words and probabilities, [3, 3] each."""
    rows = re.findall(r"^\| (`.+?) \|$", PAGE, re.MULTILINE)
    cells = [[re.fullmatch(r"`(.+)` ([\d.]+)", cell) for cell in row.split(" | ")] for row in rows]
    found = [[(c[1], float(c[2])) for c in row if c] for row in cells]
    assert [len(row) for row in found] == [3, 3, 3]
    columns = list(zip(*found, strict=True))
    return [[w for w, _ in column] for column in columns], np.array([[p for _, p in column] for column in columns])


def test_the_drawn_tree() -> None:
    words, probs = candidates()
    all_words = [*(word for column in words for word in column), " France", " capital"]
    target = {" France": " is", " is": " the", " the": " capital"}  # what the page has the target choose
    tree = build_tree(np.log(probs.astype(np.float32)), np.arange(9, dtype=np.int32).reshape(3, 3), 8)

    def choose(node: int) -> int:
        word = all_words[int(tree.token_ids[node - 1])] if node else " France"
        return all_words.index(target[word])

    path = descend(tree, choose)
    text = io.StringIO()
    view = TreeView(cast(TextCodec, Words(all_words)), Console(file=text, width=100, highlight=False))
    view(Round(9, tree, path, 10, None))
    drawn = re.search(r"<!-- tree -->\n```\n(.*?)```", PAGE, re.DOTALL)
    assert drawn is not None
    assert text.getvalue().strip() == drawn[1].strip()


def test_the_stated_expectations() -> None:
    block = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {}
    exec(block[1], names)
    _, probs = candidates()
    assert np.allclose(names["marginals"], probs)
    nodes = np.exp(names["tree"].log_weights).sum()
    chain = np.cumprod(probs[:, 0]).sum()
    assert f"add up to {nodes:.2f}" in PAGE
    assert f"{1 + nodes:.2f} tokens a round are expected" in PAGE and f"# {1 + nodes:.2f}" in block[1]
    assert f"comes to {1 + chain:.2f}" in " ".join(PAGE.split())
