"""SamplingParams: what a caller may ask of one request, validated where it is made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from ddtree_trt.errors import UsageError

Method = Literal["ddtree", "dflash", "ar", "dflash-sample", "draft-model"]
METHODS: tuple[str, ...] = get_args(Method)
MAX_LOGPROBS = 20

# Whether rounds stay on the device. auto: where the engine has a GPU, for requests they can serve; on: refuse others.
DeviceRoundsMode = Literal["auto", "on", "off"]
DEVICE_ROUNDS: tuple[str, ...] = get_args(DeviceRoundsMode)


@dataclass(frozen=True)
class SamplingParams:
    """How to generate. Names and meanings are vLLM's; `method` and `tree_budget` are ours.

    Logits pass through repetition, presence and frequency penalties, `logit_bias`, `min_tokens`, temperature, `top_k`,
    `top_p` and `min_p`, in this order. Every value is checked on construction; UsageError names the one at fault.
    """

    n: int = 1  # completions of one prompt
    max_tokens: int = 256
    min_tokens: int = 0  # no stop token and no stop string before this many
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0  # relative to the most probable token
    seed: int | None = None  # None: fresh randomness; requests are independent either way
    stop: tuple[str, ...] = ()  # strings; the text before the first one is kept
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # the target's own, with this many alternatives
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0  # over prompt and output; > 1 discourages
    presence_penalty: float = 0.0  # over the output
    frequency_penalty: float = 0.0  # over the output
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    echo: bool = False  # put the prompt's text in front of the output's; token ids and logprobs stay the output's
    skip_special_tokens: bool = True
    method: str = "auto"  # ddtree, or draft-model where the drafter is autoregressive
    tree_budget: int | Literal["auto"] = "auto"  # draft nodes per round at most; a chain's length for chain methods

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if isinstance(value, Mapping) or not isinstance(value, str | int | Iterable | None):
                raise UsageError(f"{name} must be one value or a list of them, not {value!r}")
            values = () if value is None else (value,) if isinstance(value, str | int) else tuple(value)
            object.__setattr__(self, name, values)
        for name, lowest, highest in _INTEGERS:
            _check_number(name, getattr(self, name), lowest, highest, integral=True)
        for name, low, high in _REALS:
            _check_number(name, getattr(self, name), low, high, integral=False)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if self.top_p == 0:
            raise UsageError("top_p must be above 0 and at most 1; for greedy decoding set temperature=0")
        if self.repetition_penalty == 0:
            raise UsageError("repetition_penalty must be above 0")
        if self.min_tokens > self.max_tokens:
            raise UsageError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})")
        if self.method not in ("auto", *METHODS):
            raise UsageError(f"method must be auto or one of {', '.join(METHODS)}, not {self.method!r}")
        budget = self.tree_budget
        if budget != "auto" and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
            raise UsageError(f'tree_budget must be "auto" or an integer at least 0, not {budget!r}')
        if self.method == "ar" and self.tree_budget not in ("auto", 0):
            raise UsageError(f"method 'ar' drafts nothing: tree_budget {self.tree_budget} cannot be honoured")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise UsageError(f"stop must hold strings that are not empty, not {self.stop!r}")
        self._check_token_ids()

    def _check_token_ids(self) -> None:
        if any(isinstance(t, bool) or not isinstance(t, int) or t < 0 for t in self.stop_token_ids):
            raise UsageError(f"stop_token_ids must hold token ids, not {self.stop_token_ids!r}")
        if not isinstance(self.logit_bias, Mapping):
            raise UsageError(f"logit_bias must map token ids to biases, not {self.logit_bias!r}")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # the caller's may change
        for token, bias in self.logit_bias.items():
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise UsageError(f"logit_bias: {token!r} is not a token id")
            _check_number(f"logit_bias[{token}]", bias, -100, 100, integral=False)

    @property
    def stochastic(self) -> bool:
        return self.temperature > 0

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Make params from keyword names; an unknown one is refused, never dropped."""
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise UsageError(f"unknown sampling parameter {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        return cls(**values)


_INTEGERS: tuple[tuple[str, int, int | None], ...] = (
    ("n", 1, 64),
    ("max_tokens", 1, None),
    ("min_tokens", 0, None),
    ("top_k", 0, None),
    ("seed", 0, 2**64 - 1),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)
_REALS: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0, 100),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("repetition_penalty", 0, 100),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
)
_FLAGS = ("include_stop_str_in_output", "ignore_eos", "echo", "skip_special_tokens")
_OPTIONAL = {"seed", "logprobs", "prompt_logprobs"}


def _check_number(name: str, value: Any, low: float, high: float | None, *, integral: bool) -> None:
    if value is None and name in _OPTIONAL:
        return
    kind = int if integral else (int, float)
    bounds = f"at least {low}" if high is None else f"from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value):
        raise UsageError(f"{name} must be {'an integer' if integral else 'a number'} {bounds}, not {value!r}")
    if value < low or (high is not None and value > high):
        raise UsageError(f"{name} must be {bounds}, not {value}")


def check_device_rounds(mode: str) -> DeviceRoundsMode:
    """The mode. Raises UsageError when it is none."""
    if mode not in DEVICE_ROUNDS:
        raise UsageError(f"device_rounds must be one of {', '.join(DEVICE_ROUNDS)}, not {mode!r}")
    return cast(DeviceRoundsMode, mode)
