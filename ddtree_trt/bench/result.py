"""The result of a benchmark: a frozen, versioned record that is kept as JSON, merged from shards, and replayed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ddtree_trt.bench.contender import Outcome
from ddtree_trt.bench.environment import EngineInfo, Environment
from ddtree_trt.bench.settings import BenchSettings, Case, Shard
from ddtree_trt.drafters.registry import KindName
from ddtree_trt.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Sample:
    """One request by one case."""

    case: str  # Case.label
    temperature: float
    source: str
    prompt: str  # prompt id, with the suffix #turn
    repeat: int
    order: int  # its place in the order of the prompt's cases, to tell order effects from others
    prompt_tokens: int
    output_tokens: int
    decoded_tokens: int  # those of them after the first step
    first_token_s: float
    decode_s: float
    acceptance_lengths: tuple[int, ...] | None
    mean_budget: float | None
    stage_s: dict[str, float]
    output_digest: str | None  # of the token ids: equal digests are equal outputs
    automatic: dict[str, Any] | None = None  # AutomaticRounds, of requests whose budgets were chosen automatically

    @property
    def token_s(self) -> float | None:
        """Seconds per token after the first step; None where there was none."""
        return self.decode_s / self.decoded_tokens if self.decoded_tokens > 0 else None


@dataclass(frozen=True)
class Part:
    """One run on one machine: the whole benchmark, or a shard of it."""

    shard: Shard
    environment: Environment
    contenders: dict[str, dict[str, str]]  # peer, or "" for this engine → its own description
    skipped: tuple[str, ...] = ()  # prompts too long for the engine


@dataclass(frozen=True)
class BenchResult:
    """Everything a benchmark measured, and its settings."""

    settings: BenchSettings
    engine: EngineInfo
    prompts_digest: str  # over the content of all prompts, of every shard
    prompt_count: int
    parts: tuple[Part, ...]
    samples: tuple[Sample, ...]
    schema_version: int = SCHEMA_VERSION

    @property
    def cases(self) -> tuple[Case, ...]:
        """All cases, in the order they were given."""
        return tuple(Case.parse(label) for label in dict.fromkeys(s.case for s in sorted_by_case(self)))


def sorted_by_case(result: BenchResult) -> list[Sample]:
    """Samples with the engine's cases first, in the settings' order, then the peers'."""
    kind: KindName = "autoregressive" if result.engine.block_size is None else "dflash"
    labels = [c.label for c in result.settings.cases(kind)]
    peers = sorted({s.case for s in result.samples} - set(labels), key=_peer_order)
    rank = {label: i for i, label in enumerate([*labels, *peers])}
    return sorted(result.samples, key=lambda s: rank[s.case])


def _peer_order(label: str) -> tuple[str, str, int]:
    case = Case.parse(label)
    return case.peer, case.method, -1 if case.budget in (None, "auto") else int(case.budget or 0)


def output_digest(outcome: Outcome) -> str | None:
    """A digest of the token ids, 16 hex digits, to compare outputs; None from a contender that returns no ids."""
    if outcome.token_ids is None:
        return None
    return hashlib.sha256(json.dumps(list(outcome.token_ids)).encode()).hexdigest()[:16]


def to_json(result: BenchResult) -> str:
    """JSON whose samples take a line each."""
    body = dataclasses.asdict(result)
    samples = body.pop("samples")
    head = json.dumps(body, indent=1, ensure_ascii=False)
    lines = ",\n  ".join(json.dumps(_rounded(sample), ensure_ascii=False) for sample in samples)
    return f'{head[:-2]},\n "samples": [\n  {lines}\n ]\n}}\n'


def _rounded(sample: dict[str, Any]) -> dict[str, Any]:
    """The sample with times to the nanosecond, since more digits are noise."""
    for name in ("stage_s", "automatic"):
        sample[name] = sample[name] and {k: round(v, 9) for k, v in sample[name].items()}
    return {k: round(v, 9) if isinstance(v, float) else v for k, v in sample.items()}


def read_result(path: Path) -> BenchResult:
    """The result in a file. Raises UsageError for one that is missing, no result, or of another schema version."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path} as a benchmark result: {error}") from error
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise UsageError(
            f"{path} is not a benchmark result of schema version {SCHEMA_VERSION}: its schema_version is {version!r}; "
            "measure again with: ddtree-trt bench --json FILE"
        )
    try:
        return BenchResult(
            settings=_record(BenchSettings, data["settings"]),
            engine=_record(EngineInfo, data["engine"]),
            prompts_digest=data["prompts_digest"],
            prompt_count=data["prompt_count"],
            parts=tuple(_part(p) for p in data["parts"]),
            samples=tuple(_record(Sample, s) for s in data["samples"]),
        )
    except (KeyError, TypeError) as error:
        raise UsageError(f"{path} is damaged: {error}; measure again with: ddtree-trt bench --json FILE") from error


def _part(data: dict[str, Any]) -> Part:
    environment = _record(Environment, data["environment"])
    return Part(_record(Shard, data["shard"]), environment, data["contenders"], tuple(data["skipped"]))


_T = TypeVar("_T", bound="DataclassInstance")


def _record(cls: type[_T], data: dict[str, Any]) -> _T:
    """A frozen record from its JSON; lists become tuples. Raises TypeError for unknown fields, and for missing ones
    without a default: a default is the value of older files, which lack the field."""
    fields = dataclasses.fields(cls)
    expected = {f.name for f in fields}
    needed = {f.name for f in fields if f.default is dataclasses.MISSING}
    if not needed <= data.keys() <= expected:
        raise TypeError(f"{cls.__name__} has fields {sorted(data)}, expected {sorted(expected)}")
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items()})


def merge(results: Sequence[BenchResult]) -> BenchResult:
    """The shards of one benchmark as one result. Raises UsageError when they are not shards of the same run."""
    if not results:
        raise UsageError("nothing to merge")
    first = results[0]
    for other in results[1:]:
        settings = dataclasses.replace(other.settings, engine=first.settings.engine)  # a path on another machine
        for what, same in (
            ("settings", settings == first.settings),
            ("prompts", (other.prompts_digest, other.prompt_count) == (first.prompts_digest, first.prompt_count)),
            ("engines", other.engine.networks == first.engine.networks),
        ):
            if not same:
                raise UsageError(
                    f"these results are not shards of one run: their {what} differ; "
                    "to show several runs side by side use: ddtree-trt bench report FILE FILE"
                )
    parts = sorted((p for r in results for p in r.parts), key=lambda p: p.shard.index)
    shards = [p.shard for p in parts]
    if len({s.count for s in shards}) > 1 or len(set(shards)) < len(shards):
        raise UsageError(f"these shards do not make one run: {', '.join(map(str, shards))}")
    missing = sorted(set(range(1, shards[0].count + 1)) - {s.index for s in shards})
    if missing:
        raise UsageError(f"shard {missing[0]}/{shards[0].count} is missing; merge all {shards[0].count} of them")
    samples = tuple(s for r in results for s in r.samples)
    return dataclasses.replace(first, parts=tuple(parts), samples=samples)
