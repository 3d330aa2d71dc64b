"""Drafts of a drafter by levels: which nodes it expands depends on the tree, so each tree has drafts of its own.

They are made at the places to which the tree's rounds come. The text is known, so nothing is verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddtree_trt.artifact.progress import Progress
from ddtree_trt.bench.ablation.recording import DraftBehind, RecordedText, commit
from ddtree_trt.bench.ablation.result import TreeRow
from ddtree_trt.bench.ablation.settings import AblationSettings
from ddtree_trt.bench.ablation.trees import CONDITIONALS, Trees
from ddtree_trt.drafters.kind import LEVELS
from ddtree_trt.runtime.candidates import Candidates
from ddtree_trt.runtime.decoding.loop import request_draft
from ddtree_trt.runtime.decoding.methods import EAGLE
from ddtree_trt.runtime.decoding.policies import BEAM, TreePlan
from ddtree_trt.runtime.engines.base import DrawnFrom, Engine


@dataclass(frozen=True)
class Redrafting:
    """Makes a tree's drafts. Uses slot 0."""

    engine: Engine
    plan: TreePlan

    def __call__(self, text: RecordedText, place: int) -> Candidates:
        """The draft behind token `place` of a text, of which places are asked for from its start on, rising."""
        if place == text.start:
            self.engine.truncate(0, 0)
        commit(self.engine, text.token_ids, place)
        plan = self.plan
        # The nodes of a beam are those of its upper levels.
        levels = -(-plan.budget // plan.expanded) if plan.policy is BEAM else None
        k = EAGLE.candidates(plan.budget, False)
        (draft,) = self.engine.draft([request_draft(0, text.token_ids[place], plan, k, levels, _refuse_to_draw)])
        return draft.candidates


class LevelTrees(Trees):
    """The same questions for a drafter by levels, which drafts for each tree."""

    def __init__(
        self, texts: Sequence[RecordedText], settings: AblationSettings, engine: Engine, progress: Progress
    ) -> None:
        """`texts` without drafts."""
        super().__init__(texts, settings, LEVELS, progress)
        self.deepest = engine.manifest.drafting.longest_draft
        self._engine = engine

    def conditionals(self) -> tuple[TreeRow, ...]:
        return ()

    def _kind(self) -> str:
        return CONDITIONALS

    def _drafts(self, plan: TreePlan) -> DraftBehind:
        return Redrafting(self._engine, plan)


def _refuse_to_draw(*_: object) -> DrawnFrom:
    raise AssertionError("a drafter by levels draws nothing")
