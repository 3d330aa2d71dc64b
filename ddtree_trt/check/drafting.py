"""What a drafter's chains are worth, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddtree_trt.artifact.manifest import Manifest
from ddtree_trt.bench.session import Session
from ddtree_trt.check.agreement import Agreement, Text
from ddtree_trt.runtime.decoding.methods import AUTOREGRESSIVE
from ddtree_trt.runtime.params import SamplingParams

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
class DraftingFinding:
    """What a drafter's chains are worth, and why."""

    agreement: Agreement
    wiring: dict[str, str]  # what the engine was built with, to be compared with the drafter's config.json
    low: bool  # whether few drafted tokens are accepted

    @property
    def faults(self) -> list[str]:
        """What is wrong for certain."""
        a = self.agreement
        return [
            f"overflow: {what} are not numbers at {broken} of {len(a.accepted)} places; rebuild with --precision bf16 "
            "or fp32"
            for what, broken in (
                ("the target's logits", a.broken_rows),
                ("the drafter's probabilities", a.broken_drafts),
            )
            if broken
        ]

    @property
    def hints(self) -> list[str]:
        """What may be wrong, or is the nature of the drafter."""
        a, found = self.agreement, []
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
