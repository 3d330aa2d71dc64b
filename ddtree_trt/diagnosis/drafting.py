"""The examination of a drafter: its agreement with the target, and where that is low, what would make it better."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.artifact.progress import Progress
from ddtree_trt.bench.prompts import BenchPrompt
from ddtree_trt.bench.session import Session
from ddtree_trt.diagnosis.agreement import Agreement, Text, measure_agreement
from ddtree_trt.diagnosis.variants import Variant, open_variant
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.decoding.methods import AUTOREGRESSIVE
from ddtree_trt.runtime.options import EngineOptions
from ddtree_trt.runtime.params import SamplingParams

LOW_TAU = 4.0  # of the chain: published block drafters have more on the texts they were trained for
CHANCE = 0.2  # share of first drafted tokens accepted below which the drafter hardly sees its context
NEARLY = 0.95  # share of the best τ that is as good
SWITCHES = ("enable_thinking", "thinking")  # variables of chat templates that change what a drafter sees
FORMAT = "prompt format"
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
class Trial:
    """The agreement with one thing changed."""

    cause: str  # what is wrong with the engine if this is better
    setting: str
    tau: float | None  # of the chain; None where it could not be tried
    better: bool


@dataclass(frozen=True)
class DraftingFinding:
    """What a drafter's chains are worth, and why."""

    agreement: Agreement
    wiring: dict[str, str]  # what the engine was built with, to be compared with the drafter's config.json
    low: bool  # whether few drafted tokens are accepted
    trials: tuple[Trial, ...] = ()

    @property
    def faults(self) -> list[str]:
        """What is wrong for certain."""
        a = self.agreement
        found = []
        for what, broken in (("the target's logits", a.broken_rows), ("the drafter's probabilities", a.broken_drafts)):
            if broken:
                where = f"at {broken} of {len(a.accepted)} places"
                found.append(f"overflow: {what} are not numbers {where}; rebuild with --precision bf16 or fp32")
        return found + [
            f"{trial.cause}: τ is {trial.tau:.2f} with {trial.setting}; see the drafter's config.json"
            for trial in self._better
            if trial.cause != FORMAT
        ]

    @property
    def _better(self) -> list[Trial]:
        """Of every cause the first of the trials that are better than the engine as it is, and as good as the best of
        them: likelier settings are tried first."""
        found = []
        for cause in dict.fromkeys(t.cause for t in self.trials if t.better):
            of_cause = [t for t in self.trials if t.better and t.cause == cause]
            best = max(t.tau or 0 for t in of_cause)
            found.append(next(t for t in of_cause if (t.tau or 0) >= NEARLY * best))
        return found

    @property
    def hints(self) -> list[str]:
        """What may be wrong, or is the nature of the drafter."""
        a = self.agreement
        found = []
        found += [f"{t.cause}: τ is {t.tau:.2f} with {t.setting}" for t in self._better if t.cause == FORMAT]
        if (past := a.fails_past) is not None:
            found.append(
                f"drafts fail past {past} tokens of context: a window that is ignored, or contexts longer than the "
                "drafter was trained with"
            )
        if not self.faults and a.by_position[0] < CHANCE:
            found.append(
                f"even first tokens are accepted at {a.by_position[0]:.0%} of places only: a drafter of another "
                "target, or tensors in wrong places"
            )
        if self.low and not (self.faults or found):
            found += [f"usual cause: {cause}" for cause in CAUSES]
        return found

    @property
    def passed(self) -> bool:
        return not self.faults


def answers(session: Session, prompts: Sequence[list[int]], max_tokens: int) -> list[Text]:
    """The texts that the target makes of prompts, token by token."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, method=AUTOREGRESSIVE.name)
    outputs = [session.generate(ids, params, device_rounds="off")[0].outputs[0].token_ids for ids in prompts]
    return [Text((*ids, *output), len(ids)) for ids, output in zip(prompts, outputs, strict=True)]


def wiring(manifest: Manifest) -> dict[str, str]:
    """What an engine was built with that its drafter depends on, in words."""
    kind = manifest.drafting
    facts = {
        "drafter": manifest.drafter.name,
        "tapped layers": ", ".join(map(str, kind.tap_layers)),
        "mask token": "" if kind.mask_token_id is None else str(kind.mask_token_id),
        "block": "" if kind.block_size is None else str(kind.block_size),
        "precision": manifest.precision,
        "chat template arguments": ", ".join(f"{k}={v}" for k, v in manifest.chat_template_args.items()) or "none",
    }
    return {name: value for name, value in facts.items() if value}


def format_trials(
    session: Session, prompts: Sequence[BenchPrompt], max_tokens: int, progress: Progress
) -> tuple[Trial, ...]:
    """The agreement with the same prompts in other formats: other arguments of the chat template, and without it."""
    own = _format_agreement(session, [session.codec.encode(p.opening) for p in prompts], max_tokens)
    formats = list(_formats(session, prompts))
    trials = []
    for number, (setting, encoded) in enumerate(formats):
        progress("prompt formats", number, len(formats))
        found = _format_agreement(session, encoded, max_tokens)
        trials.append(Trial(FORMAT, setting, found.tau, found.better(own)))
    progress("prompt formats", len(formats), len(formats))
    return tuple(trials)


def _format_agreement(session: Session, encoded: Sequence[list[int]], max_tokens: int) -> Agreement:
    return measure_agreement(session.engine, answers(session, encoded, max_tokens))


def _formats(session: Session, prompts: Sequence[BenchPrompt]) -> Iterator[tuple[str, list[list[int]]]]:
    """(name, encoded prompts) of each format that differs from the engine's own."""
    chats = [chat for p in prompts if (chat := [m for m in p.opening if isinstance(m, dict)])]
    if not chats:
        return
    own = [session.codec.encode(chat) for chat in chats]
    for name, value in product(SWITCHES, (False, True)):
        try:
            encoded = [session.codec.encode(chat, {name: value}) for chat in chats]
        except UsageError:  # the template has no such variable
            continue
        if encoded != own:
            yield f"--chat-template-arg {name}={str(value).lower()}", encoded
    yield "no chat template", [session.codec.encode(chat[-1]["content"]) for chat in chats]


def wiring_trials(
    directory: Path,
    found: Sequence[Variant],
    texts: Sequence[Text],
    own: Agreement,
    engine: tuple[Manifest, EngineOptions],
    progress: Progress,
) -> tuple[Trial, ...]:
    """The agreement of every variant. `engine`: the manifest of the engine on disk, and how it was opened;
    it is closed, so that no two are in memory."""
    manifest, options = engine
    trials = []
    for number, variant in enumerate(found):
        progress("other wirings", number, len(found))
        try:
            with open_variant(directory, manifest, variant, options) as other:
                agreement = measure_agreement(other, texts)
        except OSError:
            trials.append(Trial(variant.cause, variant.setting, None, False))
            continue
        trials.append(Trial(variant.cause, variant.setting, agreement.tau, agreement.better(own)))
    progress("other wirings", len(found), len(found))
    return tuple(trials)
