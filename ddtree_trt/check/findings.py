"""Findings of `ddtree-trt check`, and their text."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ddtree_trt.check.drafting import DraftingFinding
from ddtree_trt.check.uniformity import FALSE_ALARM, UniformityTest

TEMPERATURES = (1.0, 2.0)  # of the distribution test: at 1 a good model leaves little to chance


@dataclass(frozen=True)
class Difference:
    """The first token at which a method's greedy output differs from that of `ar`."""

    prompt: str
    position: int  # output token, from 0
    expected: int | None  # token of `ar`; None when it had ended
    found: int | None
    gap: float | None  # logits: the target's best minus the worse of the two; None when one output had ended
    rounding: float  # largest change of a logit of this row that the precision explains

    @property
    def explained(self) -> bool:
        return self.gap is not None and self.gap <= self.rounding


@dataclass(frozen=True)
class GreedyFinding:
    """A case's greedy outputs beside those of `ar`."""

    case: str
    prompts: int
    differences: tuple[Difference, ...]
    tau: float  # mean over prompts of tokens committed per round
    acceptance_by_depth: tuple[float, ...]

    @property
    def passed(self) -> bool:
        return all(d.explained for d in self.differences)


@dataclass(frozen=True)
class DistributionFinding:
    """Whether a case's sampled tokens follow the target's distribution."""

    case: str
    test: UniformityTest

    @property
    def passed(self) -> bool:
        return self.test.passed


@dataclass(frozen=True)
class TauFinding:
    """A method's mean acceptance length beside the range of the pair."""

    case: str
    tau: float
    low: float
    high: float
    judged: bool  # whether the range is for these prompts

    @property
    def passed(self) -> bool:
        """A τ above the range is no fault: what was accepted was verified."""
        return not self.judged or self.tau >= self.low


@dataclass(frozen=True)
class CheckReport:
    """Everything `ddtree-trt check` prints."""

    engine: str
    precision: str
    prompts: int
    greedy: tuple[GreedyFinding, ...]
    distribution: tuple[DistributionFinding, ...]
    tau: tuple[TauFinding, ...]
    drafting: DraftingFinding

    @property
    def passed(self) -> bool:
        verdicts = [f.passed for group in (self.greedy, self.distribution, self.tau) for f in group]
        return all(verdicts) and self.drafting.passed

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data with every verdict."""
        body = dataclasses.asdict(self)
        for name in ("greedy", "distribution", "tau"):
            for row, finding in zip(body[name], getattr(self, name), strict=True):
                row["passed"] = finding.passed
        for row, finding in zip(body["greedy"], self.greedy, strict=True):
            for item, difference in zip(row["differences"], finding.differences, strict=True):
                item["explained"] = difference.explained
        body["drafting"] |= {
            **{name: getattr(self.drafting, name) for name in ("passed", "faults", "hints")},
            "by_position": self.drafting.agreement.by_position,
            "by_context": [dataclasses.asdict(each) for each in self.drafting.agreement.by_context],
        }
        return {"passed": self.passed, "false_alarm": FALSE_ALARM, **body}


def describe(report: CheckReport) -> list[str]:
    """The report in lines."""
    lines = [f"{report.engine}, {report.precision}, {report.prompts} prompts", "", "greedy, against ar"]
    for g in report.greedy:
        same = g.prompts - len(g.differences)
        lines.append(f"  {_mark(g.passed)}  {g.case:<16} {same}/{g.prompts} identical, τ {g.tau:.2f}")
        for d in g.differences:
            gap = "one output ends earlier" if d.gap is None else f"logits {d.gap:.1e} apart"
            why = "a tie within rounding" if d.explained else f"rounding moves them by at most {d.rounding:.1e}"
            lines.append(f"        {d.prompt}, token {d.position}: {d.expected} became {d.found}; {gap}: {why}")
    if report.distribution:
        at = " and ".join(f"{t:g}" for t in TEMPERATURES)
        lines += ["", f"distribution at temperature {at} (chi-square; false alarm {FALSE_ALARM:g} per method)"]
    for s in report.distribution:
        t = s.test
        lines.append(
            f"  {_mark(s.passed)}  {s.case:<16} {t.draws} tokens, χ² {t.chi_square:.1f} at {t.degrees} degrees, "
            f"p = {t.p_value:.3g}"
        )
    if report.tau:
        lines += ["", "golden τ (tokens per round)"]
    for f in report.tau:
        verdict = "" if f.judged else "; not judged, the range is for the shipped prompts"
        lines.append(f"  {_mark(f.passed)}  {f.case:<16} {f.tau:.2f}, expected {f.low:g} to {f.high:g}{verdict}")
    return [*lines, *_drafting(report.drafting), "", "passed" if report.passed else "FAILED"]


def _drafting(found: DraftingFinding) -> list[str]:
    a = found.agreement
    lines = ["", f"drafter: its chains behind {len(a.accepted)} places of the greedy texts"]
    shares = " ".join(f"{share:.0%}" for share in a.by_position)
    lines.append(f"  {_mark(found.passed)}  chain            τ {a.tau:.2f}; accepted up to position 1, 2, …: {shares}")
    lines += [f"        contexts up to {b.longest} tokens: τ {1 + b.accepted:.2f}" for b in a.by_context]
    lines.append("        wired: " + "; ".join(f"{name} {value}" for name, value in found.wiring.items()))
    lines += [f"  FAIL  {fault}" for fault in found.faults]
    return lines + [f"  note  {hint}" for hint in found.hints]


def _mark(passed: bool) -> str:
    return "ok  " if passed else "FAIL"
