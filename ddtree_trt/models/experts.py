"""Mixtures of experts: how many there are, and how a token chooses among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ddtree_trt.reading import Between

EXPERTS = Between(1, 4096)
SHARED = Between(0, 1 << 20)


@dataclass(frozen=True)
class Experts:
    """The experts of every layer: each is a SwiGLU, and a token's result is the weighted sum of those it is routed to.

    Its weights are the largest of a softmax over the router's logits of all experts. A shared expert, where there is
    one, is every token's; its result is added times the sigmoid of a gate of its own.
    """

    count: Annotated[int, EXPERTS]  # E
    per_token: Annotated[int, EXPERTS]  # those with the largest weights
    normalised: bool  # the weights of a token's experts are divided by their sum
    shared: Annotated[int, SHARED] = 0  # width of the shared expert; 0: there is none
    stacked: bool = False  # checkpoints have all experts in one tensor


def expert_contradiction(experts: Experts | None) -> str | None:
    """What of a mixture cannot be true together, or None: each field is right by itself."""
    if experts is None or experts.per_token <= experts.count:
        return None
    return f"per_token {experts.per_token} is more than the count {experts.count}"
