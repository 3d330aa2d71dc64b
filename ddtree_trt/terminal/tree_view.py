"""Drawing of rounds: the verified tree, its probabilities, and the path the target accepted."""

from __future__ import annotations

import math

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from ddtree_trt.runtime.decoding.loop import Round
from ddtree_trt.runtime.text.codec import TextCodec


class TreeView:
    """Prints every round it is called with; neighbouring rounds that drafted nothing in one line."""

    def __init__(self, codec: TextCodec, console: Console | None = None) -> None:
        self._codec = codec
        self._console = console or Console(highlight=False)
        self._count = 0
        self._single: list[int] = []  # tokens of the latest rounds that drafted nothing

    def __call__(self, round_: Round) -> None:
        self._count += 1
        if not len(round_.tree):
            self._single.append(round_.next_token)
            return
        self._print_single(before=self._count)
        self._print_line(self._heading(round_))
        tree = round_.tree
        accepted = set(round_.path.tolist())
        branches = [Tree(self._label(round_.root_token, "", 0 in accepted), guide_style="dim")]
        for node in range(1, len(tree) + 1):
            weight = float(tree.log_weights[node - 1])
            label = self._label(int(tree.token_ids[node - 1]), f" {math.exp(weight):.3f}", node in accepted)
            branches.append(branches[tree.parents[node]].add(label))
        self._console.print(branches[0])

    def finish(self) -> None:
        """Print what is left. Call it after the last round."""
        self._print_single(before=self._count + 1)

    def _print_single(self, before: int) -> None:
        """Print the collected rounds, which end before round `before`."""
        if not self._single:
            return
        first, last = before - len(self._single), before - 1
        which = f"round {first}" if first == last else f"rounds {first}–{last}"
        tokens = " ".join(map(self._text, self._single))
        self._print_line(f"{which}: no draft, one token each: {tokens}")
        self._single.clear()

    def _print_line(self, text: str) -> None:
        """Print a heading in one line: the terminal wraps it, and not within a token's quotes."""
        self._console.print(Text(text, style="bold"), soft_wrap=True)

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
