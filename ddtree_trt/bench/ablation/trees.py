"""The questions about trees that replays answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddtree_trt.artifact.progress import Progress
from ddtree_trt.bench.ablation.policies import BEAM, EAGLE2, HEAP, POLICIES, TriedPolicy, without_conditions
from ddtree_trt.bench.ablation.recording import DraftBehind, RecordedText, Rounds, recorded_draft, replay_rounds
from ddtree_trt.bench.ablation.result import TreeRow
from ddtree_trt.bench.ablation.settings import AblationSettings
from ddtree_trt.runtime.candidates import Marginals
from ddtree_trt.runtime.decoding.policies import TreePlan

CONDITIONALS = "conditionals"


class Trees:
    """The questions that replays answer."""

    def __init__(
        self, texts: Sequence[RecordedText], settings: AblationSettings, length: int, progress: Progress
    ) -> None:
        """`length`: L, the most tokens of a path."""
        self._texts = texts
        self._settings = settings
        self.length = length
        self.deepest = length  # most tokens of a path where the depth is the question
        self._progress = progress

    def policies(self) -> tuple[TreeRow, ...]:
        """Every policy at every number of nodes."""
        return self._rows("policies", [(p, n, self.length) for n in self._settings.budgets for p in POLICIES])

    def depths(self) -> tuple[TreeRow, ...]:
        """The heap at every depth and number of nodes."""
        depths = sorted({*(d for d in self._settings.depths if d < self.deepest), self.deepest})
        return self._rows("depths", [(HEAP, n, d) for n in self._settings.budgets for d in depths])

    def conditionals(self) -> tuple[TreeRow, ...]:
        """The heap over both where the drafter states conditionals and the marginals they are made of."""
        plain = [_without_conditions(text) for text in self._texts]
        marginals = [text for text in plain if text is not None]
        if len(marginals) < len(plain):
            return ()
        cases = [(HEAP, n, self.length) for n in self._settings.budgets]
        return self._rows("marginals", cases, (marginals, "marginals")) + self._rows(CONDITIONALS, cases)

    def _rows(
        self,
        stage: str,
        cases: Sequence[tuple[TriedPolicy, int, int]],
        other: tuple[Sequence[RecordedText], str] | None = None,
    ) -> tuple[TreeRow, ...]:
        texts, kind = other or (self._texts, self._kind())
        rows = []
        for number, (policy, nodes, depth) in enumerate(cases):
            self._progress(f"replay {stage}", number, len(cases))
            rows.append(self._row(texts, kind, policy, nodes, depth))
        self._progress(f"replay {stage}", len(cases), len(cases))
        return tuple(rows)

    def _row(self, texts: Sequence[RecordedText], kind: str, policy: TriedPolicy, nodes: int, depth: int) -> TreeRow:
        tried: list[tuple[int, Rounds]] = []
        for width in policy.widths(nodes):
            plan = TreePlan(nodes, policy.policy, depth, width or None)
            tried.append((width, replay_rounds(texts, plan.grow, self._drafts(plan))))
        width, best = max(tried, key=lambda each: each[1].tau)
        shown = width if policy in (EAGLE2, BEAM) else None
        return TreeRow(policy.name, kind, nodes, depth, shown, best.tau, best.nodes, best.expected, best.histogram)

    def _kind(self) -> str:
        return kind_of(self._texts)

    def _drafts(self, plan: TreePlan) -> DraftBehind:
        """The drafts that trees of a plan are made of."""
        return recorded_draft


def kind_of(texts: Sequence[RecordedText]) -> str:
    """What the candidates of recorded texts are: marginals or conditionals."""
    return "marginals" if all(isinstance(d, Marginals) for text in texts for d in text.drafts) else CONDITIONALS


def _without_conditions(text: RecordedText) -> RecordedText | None:
    drafts = [without_conditions(candidates) for candidates in text.drafts]
    plain = tuple(each for each in drafts if each is not None)
    return replace(text, drafts=plain) if len(plain) == len(drafts) else None
