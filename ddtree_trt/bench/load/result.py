"""What was measured under load, and its figures."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ddtree_trt.bench.environment import Environment
from ddtree_trt.bench.load.client import Sent
from ddtree_trt.bench.load.settings import Level, LoadSettings

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Percentiles:
    """p50, p90 and p99 of some times, in seconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Percentiles | None:
        """Those of the known values, linear between two of them; None where there is none."""
        known = [v for v in values if v is not None]
        return cls(*np.percentile(known, PERCENTILES).tolist()) if known else None


@dataclass(frozen=True)
class Run:
    """One method at one level."""

    level: Level
    method: str
    seconds: float  # from the first request's time to the last answer's end
    sent: tuple[Sent, ...]

    @property
    def answered(self) -> list[Sent]:
        return [s for s in self.sent if s.error is None]

    @property
    def tokens_per_s(self) -> float:
        return sum(s.tokens for s in self.answered) / self.seconds

    @property
    def requests_per_s(self) -> float:
        return len(self.answered) / self.seconds

    @property
    def first_token_s(self) -> Percentiles | None:
        return Percentiles.of(s.first_token_s for s in self.answered)

    @property
    def per_token_s(self) -> Percentiles | None:
        return Percentiles.of(s.per_token_s for s in self.answered)

    @property
    def whole_s(self) -> Percentiles | None:
        return Percentiles.of(s.whole_s for s in self.answered)

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens of a round that verified drafts, the bonus token included; None where the server drafted none, or
        says nothing of it."""
        rounds = sum(s.rounds for s in self.answered)
        return 1 + sum(s.accepted for s in self.answered) / rounds if rounds else None

    @property
    def errors(self) -> dict[str, int]:
        """The errors, by how many requests had each."""
        return dict(Counter(s.error for s in self.sent if s.error is not None))


@dataclass(frozen=True)
class LoadResult:
    """A whole measurement."""

    settings: LoadSettings
    url: str
    model: str
    environment: Environment  # of the client; the server's too where it was started here
    runs: tuple[Run, ...]

    def at(self, level: Level, method: str) -> Run:
        return next(run for run in self.runs if (run.level, run.method) == (level, method))


def to_json(result: LoadResult) -> str:
    """The result as JSON: settings, figures of each run, and every request."""
    runs = [{**_figures(run), "requests": [dataclasses.asdict(s) for s in run.sent]} for run in result.runs]
    whole = {
        "kind": "load",
        "settings": dataclasses.asdict(result.settings),
        "url": result.url,
        "model": result.model,
        "environment": dataclasses.asdict(result.environment),
        "runs": runs,
    }
    return json.dumps(whole, indent=1) + "\n"


def _figures(run: Run) -> dict[str, object]:
    times = {"time_to_first_token_s": run.first_token_s, "time_per_output_token_s": run.per_token_s}
    times["e2e_latency_s"] = run.whole_s
    return {
        "level": dataclasses.asdict(run.level),
        "method": run.method,
        "seconds": run.seconds,
        "answered": len(run.answered),
        "errors": run.errors,
        "output_tokens_per_s": run.tokens_per_s,
        "requests_per_s": run.requests_per_s,
        "acceptance_length": run.acceptance_length,
        **{name: None if p is None else dataclasses.asdict(p) for name, p in times.items()},
    }
