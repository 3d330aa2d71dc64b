"""Record answers, and what is drafted behind each of their tokens, for `judge`.

    python -m workbench drafts ENGINE [--prompts FILE.jsonl] [--tokens 160] -o known.npz

At temperature 0 a round's draft depends on the committed text alone, and that is the same for every tree: whatever a
policy commits, its next draft is known. So the rounds of decoding with a tree follow without a pass over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.bench.measure import Session, load_prompts
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.decoding.methods import AUTOREGRESSIVE
from ddtree_trt.runtime.engines.base import DraftRequest
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.tree import Candidates, DraftTree, Marginals, descend
from ddtree_trt.terminal.printing import progress_bars
from workbench.options import PROMPTS, Output, Prompts

TOP_K = 16  # candidates of a position that are kept in a file


@dataclass(frozen=True)
class Text:
    """An answer of P + 1 tokens, and the drafter's candidates behind each but the last."""

    tokens: Sequence[int]
    drafts: Sequence[Candidates]  # P

    def tree(self, place: int, nodes: int, width: int | None = None) -> DraftTree:
        """The draft behind token `place`."""
        return self.drafts[place].best_first(nodes, width=width)

    def path(self, place: int, tree: DraftTree) -> NDArray[np.int32]:
        """The nodes that the answer takes, root first, at most as many as it has tokens left."""
        following = iter(self.tokens[place + 1 :])
        return descend(tree, lambda node: next(following, None))[: len(self.tokens) - 1 - place]


def answer(session: Session, prompt_ids: Sequence[int], tokens: int) -> list[int]:
    """The target's greedy answer."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, method=AUTOREGRESSIVE.name)
    return session.generate(list(prompt_ids), params)[0].outputs[0].token_ids


def record(
    session: Session, prompts: Sequence[Sequence[int]], tokens: int, top_k: int, progress: Progress = no_progress
) -> list[Text]:
    """The answers to prompts, with `top_k` candidates per position. Uses slot 0, and leaves it empty."""
    engine, found = session.engine, []
    length, chunk = engine.manifest.drafting.longest_draft, engine.manifest.limits.prefill_chunk
    for number, prompt in enumerate(prompts):
        progress("record drafts", number, len(prompts))
        said = answer(session, prompt, tokens)
        ids, drafts = np.array([*prompt, *said], np.int64), []
        engine.truncate(0, 0)
        for place, token in enumerate(said[:-1], len(prompt)):
            for begin in range(engine.length(0), place, chunk):
                engine.prefill(0, ids[begin : min(begin + chunk, place)], rows="none", taps=True)
            (draft,) = engine.draft([DraftRequest(0, token, top_k, length)])
            drafts.append(draft.candidates)
        engine.truncate(0, 0)
        found.append(Text(tuple(said), tuple(drafts)))
    progress("record drafts", len(prompts), len(prompts))
    return found


def save(texts: Sequence[Text], path: Path) -> None:
    """Write the texts that have drafts, TOP_K candidates of each position. Raises UsageError for other drafts than a
    block drafter's."""
    arrays: dict[str, object] = {}
    for i, text in enumerate(text for text in texts if text.drafts):
        marginals = [draft for draft in text.drafts if isinstance(draft, Marginals)]
        if len(marginals) < len(text.drafts):
            raise UsageError("only a block drafter's marginals are kept; give an engine with one")
        arrays[f"tokens{i}"] = text.tokens
        arrays[f"log_probs{i}"] = np.array([draft.log_probs[:, :TOP_K] for draft in marginals], np.float32)
        arrays[f"ids{i}"] = np.array([draft.token_ids[:, :TOP_K] for draft in marginals], np.int32)
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]


def load(path: Path) -> list[Text]:
    data, texts = np.load(path), []
    for i in range(len(data) // 3):
        drafts = zip(data[f"log_probs{i}"], data[f"ids{i}"], strict=True)
        texts.append(Text(data[f"tokens{i}"].tolist(), [Marginals(*draft) for draft in drafts]))
    return texts


def main(engine: Path, output: Output, prompts: Prompts = PROMPTS, limit: int = 15, tokens: int = 160) -> None:
    with progress_bars() as progress, closing(Session(engine)) as session:
        encoded = [session.codec.encode(prompt.opening) for prompt in load_prompts(prompts, limit)]
        save(record(session, encoded, tokens, TOP_K, progress), output)
