"""Methods, drafters and constraints that the lossless suites go through, over scripted engines."""

from functools import cache
from typing import Any

import numpy as np
from languages import Compiler, constrained, letters, texts_of
from scripted import ScriptedEngine
from scripted_models import Adversarial, Bilinear, Drafter, Good, Linked, MarkovTarget, Useless

from ddtree_trt.runtime.structured.record import StructuredOutput

V, END, PROMPT = 7, 6, (1, 2)
METHODS: dict[str, dict[str, Any]] = {
    "ar": {"method": "ar"},
    "dflash": {"method": "dflash"},
    **{f"ddtree-{budget}": {"method": "ddtree", "tree_budget": budget} for budget in (1, 4, 16, 32)},
    "dflash-sample": {"method": "dflash-sample"},
    "dflash-sample-2": {"method": "dflash-sample", "tree_budget": 2},
    "draft-model": {"method": "draft-model"},
    "draft-model-1": {"method": "draft-model", "tree_budget": 1},
}
FORMS = ("marginals", "linked", "bilinear", "two candidates")
QUALITIES = ("good", "useless", "adversarial")
PENALTIES = {
    "repetition_penalty": 1.4,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.5,
    "logit_bias": {0: 1.5, 3: -1.0},
}
FILTERS: dict[str, Any] = {"top_k": 4, "top_p": 0.9, "min_p": 0.05}


def drafter(form: str, quality: str, target: MarkovTarget) -> Drafter:
    marginals: dict[str, Drafter] = {
        "good": Good(target),
        "useless": Useless(target.vocab_size),
        "adversarial": Adversarial(target),
    }
    if form == "marginals":
        return marginals[quality]
    worst = 1 / (target.pairs + 1e-3) ** 2
    worst[np.arange(target.vocab_size), target.pairs.argmax(1)] = 0
    table = {"good": target.pairs, "useless": np.ones_like(worst), "adversarial": worst}[quality]
    pairs = table / table.sum(1, keepdims=True)
    if form == "linked":
        return Linked(pairs)
    return Bilinear(marginals[quality], pairs, 2 if form == "two candidates" else target.vocab_size - 1)


def engine(
    method: str, target: MarkovTarget, form: str = "marginals", quality: str = "good", **options: Any
) -> ScriptedEngine:
    """With the kind of drafter that the method needs."""
    kind: Any = "autoregressive" if method.startswith("draft-model") else "dflash"
    return ScriptedEngine(target, drafter(form, quality, target), kind=kind, **options)


# Constraints

EXPRESSION = "(a|b)(c(d|e)?|f{1,2}c)(a|e){0,3}"
TEXTS = texts_of(EXPRESSION, "abcdef", 7)
COMPILER = Compiler(letters(V), END)
CONSTRAINED = constrained(StructuredOutput(regex=EXPRESSION), COMPILER)
# Behind "acd" this one goes on, but no token of the vocabulary does: only the end is allowed.
NO_TOKEN_ON = constrained(StructuredOutput(regex="(a|b)cd(gg)?"), COMPILER)


def text(tokens: list[int]) -> str:
    return "".join("abcdef"[t] for t in tokens if t != END)


@cache
def allowed(before: str) -> frozenset[int]:
    """The tokens behind a beginning, by the list of all texts."""
    following = {"abcdef".index(t[len(before)]) for t in TEXTS if t.startswith(before) and len(t) > len(before)}
    return frozenset(following | ({END} if before in TEXTS else set()))
