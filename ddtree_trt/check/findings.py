"""Findings of `ddtree-trt check`, and their text."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

BINS = 7  # few, since what goes wrong is a trend; and an even number of degrees, whose p-value has a closed form
FEWEST = 100  # draws: with fewer the test would find nothing but the crudest bias
CERTAIN = 0.95  # probability of the best token from which on a position is left out
FALSE_ALARM = 1e-4  # how often a correct sampler fails one test


@dataclass(frozen=True)
class DistributionFinding:
    """A chi-square test, over BINS equal bins, that a case's tokens come from given distributions.

    A token drawn from a distribution has a uniform place in it: the mass of all more probable tokens, plus a uniform
    share of its own. So tokens at any position after any prefix are pooled in one test, and a bias towards likely (say,
    drafted) tokens shows as too many places near 0. Where one token is nearly certain every sampler looks alike: such
    positions are left out, which is fair because it is decided before the token is seen.
    """

    case: str
    draws: int
    chi_square: float
    p_value: float | None  # None: fewer draws than FEWEST, which show nothing

    @property
    def passed(self) -> bool:
        return self.p_value is None or self.p_value >= FALSE_ALARM


def place_in_distribution(
    logits: NDArray[np.float32], token: int, temperature: float, rng: np.random.Generator
) -> float | None:
    """The place of `token` in softmax(logits [V] / temperature) ordered by falling probability. Uniform on [0, 1) if
    the token was drawn from it; None where the best token is all but certain."""
    x = logits.astype(np.float64)
    p = np.exp((x - x.max()) / temperature)
    p /= p.sum()
    if p.max() >= CERTAIN:
        return None
    ahead = (x > x[token]) | ((x == x[token]) & (np.arange(len(x)) < token))
    return float(min(p[ahead].sum() + rng.random() * p[token], np.nextafter(1, 0)))


def uniformity(places: Sequence[float], case: str = "") -> DistributionFinding:
    """Test that the places are uniform on [0, 1)."""
    n = len(places)
    counts = np.histogram(places, BINS, (0, 1))[0]
    expected = max(n, 1) / BINS
    statistic = float(((counts - expected) ** 2).sum() / expected)
    p_value = chi_square_tail(statistic, BINS - 1) if n >= FEWEST else None
    return DistributionFinding(case, n, statistic, p_value)


def chi_square_tail(statistic: float, degrees: int) -> float:
    """P(χ² ≥ statistic) for an even number of degrees: a Poisson sum (Abramowitz and Stegun 26.4.21)."""
    half = statistic / 2
    terms = (k * math.log(half) - half - math.lgamma(k + 1) for k in range(degrees // 2))
    return 1.0 if half == 0 else min(1.0, sum(math.exp(t) for t in terms))


TEMPERATURES = (1.0, 2.0)  # of the distribution test: at 1 a good model leaves little to chance

LOW_TAU = 4.0  # of the chain: published block drafters have more on the texts they were trained for
CHANCE = 0.2  # share of first drafted tokens accepted below which the drafter hardly sees its context
CAUSES = (
    "a missing chat template argument: published Qwen3 drafters are for chats without thinking "
    "(--chat-template-arg enable_thinking=false)",
    "wrong tapped layers: some configurations count a layer's input, some its output",
    "a wrong mask token, or a drafter of another target",
    "windows: sliding layers that run as full attention accept nothing past their window",
    "half precision: hidden states above 65504 overflow in fp16",
    "a drafter with little training, or prompts unlike those that it was trained on",
)


@dataclass(frozen=True)
class Difference:
    """The first token at which a method's greedy output differs from that of `ar`."""

    prompt: str
    position: int  # output token, from 0
    expected: int | None  # token of `ar`; None when it had ended
    found: int | None
    gap: float | None  # logits: the target's best minus the worse of the two; None when one output had ended
    rounding: float  # largest change of a logit of this row that the precision explains; 0 in an exact engine

    @property
    def explained(self) -> bool:
        return self.gap is not None and self.rounding > 0 and self.gap <= self.rounding


@dataclass(frozen=True)
class GreedyFinding:
    case: str
    prompts: int
    differences: tuple[Difference, ...]
    tau: float  # mean over prompts of tokens committed per round

    @property
    def passed(self) -> bool:
        return all(d.explained for d in self.differences)


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


FEWEST_ROUNDS = 12  # of a bin of contexts that says something
LOST = 0.25  # share of the drafted tokens accepted with short contexts below which longer ones are said to fail
SHORTEST_BIN = 128  # tokens: contexts are counted by powers of two from here


@dataclass(frozen=True)
class ContextBin:
    """Rounds with a context of at most `longest` tokens, and more than the bin before has."""

    longest: int
    rounds: int
    accepted: float  # drafted tokens accepted, mean


@dataclass(frozen=True)
class DraftingFinding:
    """What a drafter's drafts are worth, by the greedy rounds of one case, and why. It decides no verdict."""

    case: str
    contexts: tuple[int, ...]  # [R]: tokens before the one that is drafted behind
    accepted: tuple[int, ...]  # [R]: drafted tokens that were accepted
    length: int  # most of them
    low: bool  # whether few are

    @property
    def tau(self) -> float:
        """Mean tokens of a round, the target's own included."""
        return 1 + float(np.mean(self.accepted))

    @property
    def by_position(self) -> tuple[float, ...]:
        """Share of rounds in which the drafted tokens up to position 1, 2, … are accepted."""
        return tuple(float(np.mean(np.array(self.accepted) >= d)) for d in range(1, self.length + 1))

    @property
    def by_context(self) -> tuple[ContextBin, ...]:
        """Bins of contexts up to 128, 256, 512, … tokens that have rounds."""
        contexts, accepted = np.array(self.contexts), np.array(self.accepted)
        edges = [-1, *(SHORTEST_BIN << i for i in range(24))]
        found = [(high, accepted[(contexts > low) & (contexts <= high)]) for low, high in pairwise(edges)]
        return tuple(ContextBin(high, len(values), float(values.mean())) for high, values in found if len(values))

    @property
    def fails_past(self) -> int | None:
        """Tokens of context from which on drafts fail that are accepted with shorter ones; None where they do not."""
        bins = self.by_context
        for number, each in enumerate(bins[1:], 1):
            best = max(b.accepted for b in bins[:number])
            if all(b.accepted < LOST * best for b in bins[number:]) and each.rounds >= FEWEST_ROUNDS:
                return bins[number - 1].longest
        return None

    @property
    def hints(self) -> list[str]:
        """What may be wrong, or is the nature of the drafter."""
        past, first, found = self.fails_past, self.by_position[0], []
        if past is not None:
            found.append(
                f"drafts fail past {past} tokens of context: a window that is ignored, or contexts longer than the "
                "drafter was trained with"
            )
        elif first < CHANCE:
            found.append(
                f"even first tokens are accepted in {first:.0%} of rounds only: a drafter of another target, or "
                "tensors in wrong places"
            )
        return found or [f"usual cause: {cause}" for cause in CAUSES if self.low]


@dataclass(frozen=True)
class CheckReport:
    engine: str
    precision: str
    inexact: str | None  # why the engine's rows may have other bits in other passes; None where none may
    prompts: int
    greedy: tuple[GreedyFinding, ...]
    distribution: tuple[DistributionFinding, ...]
    tau: tuple[TauFinding, ...]
    drafting: DraftingFinding | None  # None: no text had a round

    @property
    def passed(self) -> bool:
        return all(f.passed for group in (self.greedy, self.distribution, self.tau) for f in group)

    def to_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, "false_alarm": FALSE_ALARM, **_with_verdicts(self)}


def _with_verdicts(value: Any) -> Any:
    """The fields of findings, and their properties: verdicts and what they are drawn from."""
    if isinstance(value, tuple):
        return [_with_verdicts(each) for each in value]
    if not dataclasses.is_dataclass(value):
        return value
    found = {field.name: _with_verdicts(getattr(value, field.name)) for field in dataclasses.fields(value)}
    shown = [name for name, each in vars(type(value)).items() if isinstance(each, property)]
    return found | {name: _with_verdicts(getattr(value, name)) for name in shown}


def describe(report: CheckReport) -> list[str]:
    def line(passed: bool, name: str, text: str) -> str:
        return f"  {'ok  ' if passed else 'FAIL'}  {name:<16} {text}"

    held = f"up to rounding: {report.inexact}" if report.inexact else "to the bit: this engine is exact"
    lines = [f"{report.engine}, {report.precision}, {report.prompts} prompts", "", f"greedy, against ar, {held}"]
    for g in report.greedy:
        same = g.prompts - len(g.differences)
        lines.append(line(g.passed, g.case, f"{same}/{g.prompts} identical, τ {g.tau:.2f}"))
        for d in g.differences:
            gap = "one output ends earlier" if d.gap is None else f"logits {d.gap:.1e} apart"
            moved = f"rounding moves them by at most {d.rounding:.1e}" if d.rounding else "an exact engine has none"
            why = "a tie within rounding" if d.explained else moved
            lines.append(f"        {d.prompt}, token {d.position}: {d.expected} became {d.found}; {gap}: {why}")
    if report.distribution:
        at = " and ".join(f"{t:g}" for t in TEMPERATURES)
        lines += ["", f"distribution at temperature {at} (chi-square; false alarm {FALSE_ALARM:g} per method)"]
    for t in report.distribution:
        figures = f"{t.draws} tokens that are not all but certain, too few to judge; raise --seeds"
        if t.p_value is not None:
            figures = f"{t.draws} tokens, χ² {t.chi_square:.1f} at {BINS - 1} degrees, p = {t.p_value:.3g}"
        lines.append(line(t.passed, t.case, figures))
    if report.tau:
        lines += ["", "golden τ (tokens per round)"]
    for f in report.tau:
        verdict = "" if f.judged else "; not judged, the range is for the shipped prompts"
        lines.append(line(f.passed, f.case, f"{f.tau:.2f}, expected {f.low:g} to {f.high:g}{verdict}"))
    if (found := report.drafting) is not None:
        shares = " ".join(f"{share:.0%}" for share in found.by_position)
        lines += ["", f"drafter: {len(found.accepted)} greedy rounds of {found.case}"]
        lines += [f"        τ {found.tau:.2f}; accepted up to position 1, 2, …: {shares}"]
        lines += [f"        contexts up to {b.longest} tokens: τ {1 + b.accepted:.2f}" for b in found.by_context]
        lines += [f"  note  {hint}" for hint in found.hints]
    return [*lines, "", "passed" if report.passed else "FAILED"]
