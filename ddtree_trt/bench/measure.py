"""The measurement: every case on every prompt, interleaved.

All cases of a prompt run right after one another, and the first one rotates, so that a slow moment of the machine, a
warm cache or a hot processor affects all of them alike. Every request starts from an empty cache.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.bench.settings import TINY, BenchSettings, Case
from ddtree_trt.doctor import diagnose
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.core import open_core
from ddtree_trt.runtime.decoding.methods import AUTOREGRESSIVE
from ddtree_trt.runtime.engines.base import Engine
from ddtree_trt.runtime.engines.profile import fingerprint
from ddtree_trt.runtime.options import DEFAULTS, DeviceRoundsMode, EngineOptions
from ddtree_trt.runtime.outputs import RequestOutput
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.text.codec import Prompt

Message = dict[str, str]

_SCHEMA = (
    'one of "prompt" (a user\'s message), "turns" (a user\'s messages, answered one by one), "messages" (a chat '
    'of {role, content}), "text" (continued as it is), "token_ids"'
)


@dataclass(frozen=True)
class BenchPrompt:
    """One conversation. Every turn is measured as a request of its own."""

    id: str  # source/number
    source: str
    opening: str | list[Message] | list[int]  # text as it is, a chat, or token ids
    follow_ups: tuple[str, ...] = ()  # the user's later messages


def load_prompts(specs: Sequence[str], limit: int | None = None) -> list[BenchPrompt]:
    """The prompts of all specs, each a file or `tiny`; of each at most `limit`, evenly spaced, since files are often
    sorted by domain. Raises UsageError for an unknown name, and for a line that is no prompt."""
    found: dict[str, BenchPrompt] = {}
    for spec in specs:
        path = Path(str(resources.files("ddtree_trt") / "assets/tiny/prompts.jsonl")) if spec == TINY else Path(spec)
        if not path.is_file():
            raise UsageError(f"no prompts called {spec!r}: it is neither a file nor {TINY}")
        source = TINY if spec == TINY else path.stem
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read prompts {path}: {error}") from error
        rows = [_read_line(line, f"{path}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]
        if not rows:
            raise UsageError(f"{path} has no prompts; expected JSON lines with {_SCHEMA}")
        count = min(limit or len(rows), len(rows))
        for number in range(count):
            prompt = BenchPrompt(f"{source}/{number}", source, *rows[number * len(rows) // count])
            if prompt.id in found:
                raise UsageError(f"two prompt sets are called {source!r}; rename one of the files")
            found[prompt.id] = prompt
    return list(found.values())


def _read_line(line: str, where: str) -> tuple[Any, tuple[str, ...]]:
    """(opening, follow-ups)."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}") from error
    kinds = ("prompt", "turns", "messages", "text", "token_ids") if isinstance(row, dict) else ()
    match [(kind, row[kind]) for kind in kinds if kind in row]:
        case [("prompt", str(text))] if text:
            return [{"role": "user", "content": text}], ()
        case [("text", str(text))] if text:
            return text, ()
        case [("turns", [str(first), *rest])] if all(isinstance(turn, str) for turn in rest):
            return [{"role": "user", "content": first}], tuple(rest)
        case [("token_ids", [_, *_] as ids)] if all(type(token) is int for token in ids):
            return ids, ()
        case [("messages", [_, *_] as chat)]:
            found = [(m["role"], m["content"]) for m in chat if isinstance(m, dict) and {"role", "content"} <= m.keys()]
            if len(found) == len(chat) and all(isinstance(text, str) for pair in found for text in pair):
                return [{"role": role, "content": content} for role, content in found], ()
    raise UsageError(f"{where}: expected an object with {_SCHEMA}; found {line[:80]}")


class Session:
    """Automatic budgets keep what they learn from one request to the next."""

    def __init__(self, directory: Path, options: EngineOptions = DEFAULTS, *, engine: Engine | None = None) -> None:
        """`engine`: an open engine, whose directory needs to hold a tokenizer only."""
        self.core = open_core(directory, options, engine=engine, warm=False)
        self.engine, self.codec = self.core.engine, self.core.codec
        self.manifest = self.engine.manifest

    def generate(
        self, prompt: Prompt, params: SamplingParams, *, device_rounds: DeviceRoundsMode = "auto"
    ) -> tuple[RequestOutput, float]:
        """(output, time of its completion by `perf_counter`). Raises as LLM.generate does."""
        request = self.core.maker.make(prompt, params, device_rounds=device_rounds)
        self.core.scheduler.reset_prefix_cache()
        self.core.run([request])
        ended_s = time.perf_counter()
        request.raise_error()
        return request.output(), ended_s

    def run(self, prompt: Prompt, case: Case, **params: Any) -> tuple[RequestOutput, float]:
        """`generate` as the case says, on the device or the host, whatever `auto` would choose."""
        budget = "auto" if case.budget is None else case.budget
        given = SamplingParams(method=case.method, tree_budget=budget, **params)
        return self.generate(prompt, given, device_rounds="on" if case.device else "off")

    def close(self) -> None:
        self.core.close()


BASELINE = AUTOREGRESSIVE.name
PAUSE_S = 0.02  # between two requests, in which the previous one's threads stop spinning
WARMUP_TOKENS = 24  # generated by every case before anything is measured
SCHEMA_VERSION = 2


@dataclass(frozen=True)
class Request:
    """The stop and sampling rules of one request, the same for every case."""

    max_tokens: int
    temperature: float
    seed: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """The output and times of one request. Seconds are wall-clock; nothing of the prompt was cached."""

    output_tokens: int
    first_token_s: float  # from the call to the end of the first step
    decode_s: float  # from the end of the first step to the end
    first_tokens: int = 1  # tokens of the first step: more than one where it already speculates
    token_ids: tuple[int, ...] | None = None  # None from a server that gives text only
    text: str | None = None
    acceptance_lengths: tuple[int, ...] | None = None  # tokens per round, bonus included; None: not reported
    mean_budget: float | None = None  # draft nodes verified per round
    automatic: Mapping[str, float] | None = None  # AutomaticRounds; None where no budget was chosen automatically
    stage_s: Mapping[str, float] = field(default_factory=dict)  # seconds per stage; empty: not reported

    @property
    def token_s(self) -> float | None:
        """Seconds per token after the first step; None where there was none."""
        decoded = self.output_tokens - self.first_tokens
        return self.decode_s / decoded if decoded > 0 else None


Run = Callable[[Sequence[int], Request], Outcome]  # of a prompt's token ids, from a cold cache


@dataclass(frozen=True)
class Sample:
    case: str
    source: str
    prompt: str  # prompt id, with the suffix #turn
    repeat: int
    order: int  # its place in the order of the prompt's cases, to tell order effects from others
    prompt_tokens: int
    outcome: Outcome


@dataclass(frozen=True)
class BenchResult:
    settings: BenchSettings
    engine: Mapping[str, Any]
    environment: Mapping[str, Any]
    skipped: tuple[str, ...]  # prompts too long for the engine
    samples: tuple[Sample, ...]
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        body = asdict(self)
        lines = ",\n  ".join(json.dumps(sample, ensure_ascii=False) for sample in body.pop("samples"))
        return f'{json.dumps(body, indent=1, ensure_ascii=False)[:-2]},\n "samples": [\n  {lines}\n ]\n}}\n'


def engine_runs(session: Session, settings: BenchSettings) -> dict[str, Run]:
    """The cases of the session's engine, by their labels. Raises UsageError for a method it cannot do."""
    rounds = session.engine.rounds
    if settings.device_rounds == "auto" and rounds is not None and rounds.by_default:
        settings = replace(settings, device_rounds="on")
    return {case.label: _run(session, case) for case in settings.cases(session.manifest.drafter_kind)}


def _run(session: Session, case: Case) -> Run:
    def run(prompt_ids: Sequence[int], request: Request) -> Outcome:
        started_s = time.perf_counter()
        output, ended_s = session.run(
            list(prompt_ids), case, max_tokens=request.max_tokens, temperature=request.temperature, seed=request.seed
        )
        metrics = output.metrics
        assert metrics.first_token_s is not None, "a finished request has emitted a token"
        return Outcome(
            output_tokens=metrics.output_tokens,
            first_token_s=metrics.first_token_s - started_s,
            decode_s=ended_s - metrics.first_token_s,
            token_ids=tuple(output.outputs[0].token_ids),
            text=output.outputs[0].text,
            acceptance_lengths=tuple(metrics.acceptance_lengths),
            mean_budget=metrics.mean_budget,
            automatic=asdict(metrics.automatic) if metrics.automatic.rounds else None,
            stage_s={} if metrics.on_device else dict(metrics.stage_s),  # one launch has no stages
        )

    return run


def measure(
    session: Session, settings: BenchSettings, runs: Mapping[str, Run], progress: Progress = no_progress
) -> BenchResult:
    """Run every case on every prompt; `runs` has the baseline. Raises UsageError for prompts that cannot be read or of
    which none fits; whatever a case raises ends the run."""
    prompts, manifest = load_prompts(settings.prompts, settings.limit), session.manifest
    longest = manifest.limits.max_seq_len - settings.max_tokens
    plain = Request(settings.max_tokens, settings.temperature, 0, manifest.stop_token_ids)
    environment = describe_environment()
    samples: list[Sample] = []
    skipped: list[str] = []
    turns, cases = 0, list(runs.items())
    for number, prompt in enumerate(prompts):
        progress("measure", number, len(prompts))
        history: Prompt = prompt.opening
        for turn, following in enumerate((*prompt.follow_ups, None)):
            name = f"{prompt.id}#{turn}" if prompt.follow_ups else prompt.id
            ids = session.codec.encode(history)
            if len(ids) > longest:
                skipped.append(name)
                break
            if not samples:  # kernels are chosen, memory is touched, code is compiled
                for _, run in cases:
                    run(ids, replace(plain, max_tokens=min(WARMUP_TOKENS, settings.max_tokens)))
            answer = ""
            for repeat in range(settings.repeats):
                request = replace(plain, seed=settings.seed + number * settings.repeats + repeat)
                first, turns = turns % len(cases), turns + 1
                for order, (case, run) in enumerate(cases[first:] + cases[:first]):
                    time.sleep(PAUSE_S)
                    outcome = run(ids, request)
                    samples.append(Sample(case, prompt.source, name, repeat, order, len(ids), outcome))
                    if case == BASELINE:
                        answer = outcome.text or ""
            if following is not None:  # behind the answer of `ar`, for every case
                assert isinstance(history, list), "only a chat has further turns"
                history = [*history, {"role": "assistant", "content": answer}, {"role": "user", "content": following}]
    progress("measure", len(prompts), len(prompts))
    if not samples:
        raise UsageError(
            f"no prompt of this run fits: with {settings.max_tokens} new tokens each is longer than the engine's "
            f"max_seq_len {manifest.limits.max_seq_len}; lower --max-tokens or rebuild with a larger --max-seq-len"
        )
    return BenchResult(settings, describe_engine(session), environment, tuple(skipped), tuple(samples))


def describe_engine(session: Session) -> dict[str, Any]:
    """The engine; its fingerprint is of its files, the machine, the runtime and the threads."""
    m, threads = session.manifest, session.engine.threads
    facts = {"name": m.name, "backend": m.backend, "precision": m.precision, "threads": threads}
    return facts | {"fingerprint": fingerprint(m, threads)}


def describe_environment() -> dict[str, Any]:
    found = diagnose()
    return {
        **{name: getattr(found, name) for name in ("version", "python", "platform", "packages")},
        "machine": ", ".join([str(found.cpu), *(f"{gpu.name}, driver {gpu.driver}" for gpu in found.gpus)]),
        "cores": found.cpu.cores,  # usable by this process
        "load_1min": round(os.getloadavg()[0], 2),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
