"""SamplingParams: what a caller may ask of one request, validated where it is made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, cast, get_args

from ddtree_trt.errors import UsageError, shown
from ddtree_trt.runtime.decoding.methods import AUTO, METHODS

DEFAULT_MAX_TOKENS = 256
MAX_LOGPROBS = 20
MAX_SEED = 2**64 - 1

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
    max_tokens: int | None = None  # None: DEFAULT_MAX_TOKENS, or as many as fit; more than fit is refused
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
    method: str = AUTO  # ddtree, or draft-model where the drafter is autoregressive
    tree_budget: int | Literal["auto"] = "auto"  # draft nodes per round at most; a chain's length for chain methods

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, _as_tuple(name, getattr(self, name)))
        for name, lowest, highest in _INTEGERS:
            if not (getattr(self, name) is None and name in _OPTIONAL):
                object.__setattr__(self, name, _integer(name, getattr(self, name), lowest, highest))
        for name, low, high in _REALS:
            object.__setattr__(self, name, _real(name, getattr(self, name), low, high))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} must be true or false, not {shown(getattr(self, name))}")
        if self.top_p == 0:
            raise UsageError("top_p must be above 0 and at most 1; for greedy decoding set temperature=0")
        if 0 < self.temperature < _COLDEST:
            raise UsageError(f"temperature must be 0, for greedy decoding, or from {_COLDEST} to 100")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UsageError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})")
        if not isinstance(self.method, str) or self.method not in (AUTO, *METHODS):
            raise UsageError(f"method must be auto or one of {', '.join(METHODS)}, not {shown(self.method)}")
        self._check_budget()
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise UsageError(f"stop must hold strings that are not empty, not {shown(self.stop)}")
        for text in self.stop:
            check_text("stop", text)
        self._check_token_ids()

    def _check_budget(self) -> None:
        budget = self.tree_budget
        if not (isinstance(budget, str) and budget == "auto"):
            if (number := as_integer(budget)) is None or number < 0:
                raise UsageError(f'tree_budget must be "auto" or an integer at least 0, not {shown(budget)}')
            object.__setattr__(self, "tree_budget", number)
        if self.method != AUTO and not METHODS[self.method].drafts and self.tree_budget not in ("auto", 0):
            raise UsageError(f"method {self.method!r} drafts nothing: tree_budget {shown(budget)} cannot be honoured")

    def _check_token_ids(self) -> None:
        tokens = tuple(as_integer(t) for t in self.stop_token_ids)
        if any(t is None or t < 0 for t in tokens):
            raise UsageError(f"stop_token_ids must hold token ids, not {shown(self.stop_token_ids)}")
        object.__setattr__(self, "stop_token_ids", tokens)
        if not isinstance(self.logit_bias, Mapping):
            raise UsageError(f"logit_bias must map token ids to biases, not {shown(self.logit_bias)}")
        biases: dict[int, float] = {}  # its own: the caller's may change
        for key, bias in self.logit_bias.items():
            token = as_integer(key)
            if token is None or token < 0:
                raise UsageError(f"logit_bias: {shown(key)} is not a token id")
            biases[token] = _real(f"logit_bias[{shown(token)}]", bias, -100, 100)
        object.__setattr__(self, "logit_bias", biases)

    @property
    def wanted_tokens(self) -> int:
        """Output tokens at most, if the engine has room for them."""
        return max(DEFAULT_MAX_TOKENS, self.min_tokens) if self.max_tokens is None else self.max_tokens

    @property
    def stochastic(self) -> bool:
        return self.temperature > 0

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Make params from keyword names; an unknown one is refused, never dropped."""
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(str(name) for name in values if name not in known):
            names = ", ".join(shown(name)[1:-1] for name in unknown[:5]) + ", ..." * (len(unknown) > 5)
            raise UsageError(f"unknown sampling parameter {names}; known are {', '.join(sorted(known))}")
        return cls(**values)


_MOST = 2**31 - 1  # of counts: more than any engine holds, and what device kernels count in
_INTEGERS: tuple[tuple[str, int, int], ...] = (
    ("n", 1, 64),
    ("max_tokens", 1, _MOST),
    ("min_tokens", 0, _MOST),
    ("top_k", 0, _MOST),
    ("seed", 0, MAX_SEED),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)
_COLDEST = 1e-30  # logits are divided by it; those of one below are infinite, in the float32 of a device or everywhere
_REALS: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0, 100),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    # Logits are divided by it: a smaller one makes infinities of them in float32, and means nothing long before.
    ("repetition_penalty", 0.01, 100),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
)
_FLAGS = ("include_stop_str_in_output", "ignore_eos", "echo", "skip_special_tokens")
_OPTIONAL = {"max_tokens", "seed", "logprobs", "prompt_logprobs"}


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    """One value or several, or None for none of them, as a tuple."""
    if value is None:
        return ()
    if isinstance(value, str | Integral):
        return (value,)
    if isinstance(value, Mapping | bytes | bytearray) or not isinstance(value, Iterable):
        raise UsageError(f"{name} must be one value or a list of them, not {shown(value)}")
    try:
        return tuple(value)
    except TypeError:  # a NumPy array of no dimensions says that it can be iterated over
        raise UsageError(f"{name} must be one value or a list of them, not {shown(value)}") from None


def as_integer(value: Any) -> int | None:
    """An integer of any library as Python's; None for everything else, booleans included."""
    return int(value) if not isinstance(value, bool) and isinstance(value, Integral) else None


def _integer(name: str, value: Any, low: int, high: int) -> int:
    number = as_integer(value)
    if number is None:
        bounds = f"at least {low}" if high == _MOST else f"from {low} to {high}"
        raise UsageError(f"{name} must be an integer {bounds}, not {shown(value)}")
    _check_range(name, number, low, high)
    return number


def _real(name: str, value: Any, low: float, high: float) -> float:
    """A finite number of any library: integers as they are, all others as Python's float."""
    integer = as_integer(value)
    number = _as_float(value) if integer is None else integer
    if number is None:
        raise UsageError(f"{name} must be a number from {low} to {high}, not {shown(value)}")
    _check_range(name, number, low, high)
    return number


def _as_float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # a fraction
        return None
    return number if math.isfinite(number) else None


def _check_range(name: str, number: float, low: float, high: float) -> None:
    if high == _MOST and not low <= number <= high:
        bounds = f"at least {low}" if number < low else f"at most {high}"
        raise UsageError(f"{name} must be {bounds}, not {shown(number)}")
    if not low <= number <= high:
        raise UsageError(f"{name} must be from {low} to {high}, not {shown(number)}")


def check_text(name: str, text: str) -> None:
    """Raise UsageError, naming `name`, where a text holds halves of surrogate pairs, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{name} is not valid Unicode: character {error.start} is half of a surrogate pair") from error


def check_device_rounds(mode: str) -> DeviceRoundsMode:
    """The mode. Raises UsageError when it is none."""
    if mode not in DEVICE_ROUNDS:
        raise UsageError(f"device_rounds must be one of {', '.join(DEVICE_ROUNDS)}, not {shown(mode)}")
    return cast(DeviceRoundsMode, mode)
