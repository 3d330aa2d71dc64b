"""SamplingParams, the sampling parameters of one request, and the table `PARAMETERS` with a row for each of its fields.

Every interface is generated from the fields: those of HTTP bodies, the types of Triton's tensors, the options of the
command line, and the table in `docs/generation.md`. Routing to rounds on the device reads them too.
"""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from ddtree_trt.errors import UsageError, shown
from ddtree_trt.reading import After, Between, Expected, check_fields
from ddtree_trt.runtime.decoding.methods import AUTO, METHODS
from ddtree_trt.runtime.structured.record import StructuredOutput, without_aliases
from ddtree_trt.runtime.values import Biases, Count, Positive, Share, Texts, TokenIds, plain

DEFAULT_MAX_TOKENS = 256
MAX_SEED = 2**64 - 1
_LOWEST_TEMPERATURE = 1e-30  # logits are divided by it; a lower one overflows the float32 of a device, or float64

Endpoint = Literal["chat", "completions"]
BOTH: Mapping[Endpoint, str] = {"chat": "", "completions": ""}


@dataclass(frozen=True, eq=False)
class Parameter:
    """What is stated of a field beside its type and default."""

    help: str  # one sentence for the command line and the documentation
    more: str = ""  # further sentences for the documentation
    # When rounds on the device honour it or are not concerned by it, as greedy ones by filters of draws. Else any value
    # but the default sends the request to rounds on the host.
    device: Literal["always", "greedy", "never"] = "never"
    # The endpoints that take it, with the name of the body's field; "" is the parameter's name.
    http: Mapping[Endpoint, str] = dataclasses.field(default_factory=lambda: BOTH)
    metavar: str | None = None  # placeholder in the help of the command line's option; None: it has no option
    name: str = ""
    default: Any = None
    annotation: Any = None
    type: Any = None  # of its values, without None and "auto"

    @property
    def bounds(self) -> Between | None:
        """Those of its values, or of the values in it."""
        return next((each for each in _metadata(self.annotation) if isinstance(each, Between)), None)

    def http_name(self, endpoint: Endpoint) -> str | None:
        """The name of the parameter in an endpoint's body; None where the endpoint does not take it."""
        name = self.http.get(endpoint)
        return None if name is None else name or self.name


def parameter(default: Any, text: str, more: str = "", **fields: Any) -> Any:
    """A field of SamplingParams, whose help is `text`; `fields` are others of `Parameter`."""
    made: Any = {"default_factory": default} if callable(default) else {"default": default}
    return dataclasses.field(**made, metadata={"parameter": Parameter(text, more, **fields)})


# Kinds of values


def _temperature(value: float) -> float:
    if 0 < value < _LOWEST_TEMPERATURE:
        raise ValueError(f"must be 0, for greedy decoding, or from {_LOWEST_TEMPERATURE} to 100")
    return value


def _top_p(value: float) -> float:
    if value == 0:
        raise ValueError("must be above 0 and at most 1; for greedy decoding set temperature=0")
    return value


def _method(name: str) -> str:
    if name not in (AUTO, *METHODS):
        raise ValueError(f"must be {AUTO} or one of {', '.join(METHODS)}")
    return name


Penalty = Annotated[float, Between(-2, 2)]
Alternatives = Annotated[int, Between(0, 20)]
TreeBudget = Annotated[Count | Literal["auto"], Expected('"auto" or an integer at least 0')]


@dataclass(frozen=True)
class SamplingParams:
    """How to generate. Names and meanings are vLLM's; `method` and `tree_budget` are ours.

    Logits pass through repetition, presence and frequency penalties, `logit_bias`, `min_tokens`, temperature, `top_k`,
    `top_p` and `min_p`, in this order. Every value is checked on construction; UsageError names the one at fault.
    """

    n: Annotated[int, Between(1, 64)] = parameter(1, "Completions of one prompt.", device="always")
    max_tokens: Positive | None = parameter(
        None,
        "Most tokens to generate.",
        "More than the prompt leaves of the engine's `max_seq_len` is refused. Unless given: "
        f"{DEFAULT_MAX_TOKENS}, or as many as fit.",
        device="always",
        metavar="N",
    )
    min_tokens: Count = parameter(
        0, "Bans stop tokens and ignores stop strings until reached, but where a constraint allows only the end."
    )
    temperature: Annotated[float, Between(0, 100), After(_temperature)] = parameter(
        0.0, "0 is greedy.", device="always", metavar="T"
    )
    top_k: Count = parameter(0, "Sample among the K most probable.", "0 is all of them.", device="greedy", metavar="K")
    top_p: Annotated[Share, After(_top_p)] = parameter(
        1.0,
        "Sample within this mass.",
        "0 is refused: `temperature` makes a request greedy.",
        device="greedy",
        metavar="P",
    )
    min_p: Share = parameter(0.0, "Drop tokens below this share of the best.", device="greedy", metavar="P")
    seed: Annotated[int, Between(0, MAX_SEED)] | None = parameter(
        None,
        "Makes sampling repeatable.",
        "Requests are independent of each other either way.",
        device="always",
        metavar="N",
    )
    stop: Texts = parameter((), "End before this text.", device="always", metavar="TEXT")
    stop_token_ids: TokenIds = parameter((), "Token ids that end the output.", device="always")
    include_stop_str_in_output: bool = parameter(False, "Keep the stop string in the text.", device="always")
    ignore_eos: bool = parameter(False, "Go on past the model's own end.", device="always", metavar="")
    logprobs: Alternatives | None = parameter(
        None,
        "Log-probabilities of the output's tokens, with this many alternatives.",
        "The target's own, before penalties and temperature.",
        http={"chat": "top_logprobs", "completions": "logprobs"},
    )
    prompt_logprobs: Alternatives | None = parameter(
        None, "Log-probabilities of the prompt's tokens, with this many alternatives.", device="always", http={}
    )
    # Logits are divided by it: a smaller one overflows float32.
    repetition_penalty: Annotated[float, Between(0.01, 100)] = parameter(
        1.0, "Over prompt and output; above 1 discourages what they hold."
    )
    presence_penalty: Penalty = parameter(0.0, "Over the output: taken from the logit of every token in it.")
    frequency_penalty: Penalty = parameter(0.0, "Over the output: taken from a token's logit for each time it occurs.")
    logit_bias: Biases = parameter(dict, "Token id → number added to its logit.")
    echo: bool = parameter(
        False,
        "Put the prompt's text in front of the output's.",
        "Token ids stay the output's, and log-probabilities but those over HTTP.",
        device="always",
        http={"completions": "echo"},
    )
    skip_special_tokens: bool = parameter(True, "Leave special tokens out of the text.", device="always")
    keep_special_tokens: TokenIds = parameter(
        (),
        "Special tokens that stay in the text where the others are left out.",
        "Chats set it to the tokens that mark reasoning and calls of tools.",
        device="always",
        http={},
    )
    skip_reading_prefix_cache: bool = parameter(
        False,
        "Compute the whole prompt, whatever of it a slot's cache holds.",
        "For comparing times: of two runs of a prompt, the second would find it in the cache.",
        device="always",
    )
    structured: StructuredOutput | None = parameter(
        None,
        "What the output must be: JSON of a schema, a text that an expression matches, a choice, or one of a grammar.",
        "In bodies `structured_outputs`; also by OpenAI's name `response_format`, and by vLLM's `guided_json`, "
        "`guided_regex`, `guided_choice` and `guided_grammar`.",
        http={},
    )
    method: Annotated[str, After(_method)] = parameter(
        AUTO,
        "How drafts are made.",
        "`auto` is `ddtree`, `draft-model` where the drafter is autoregressive, or `eagle` where it is one of EAGLE-3.",
        device="always",
        metavar="NAME",
    )
    tree_budget: TreeBudget = parameter(
        "auto",
        "Draft nodes per round; auto chooses every round.",
        "It is a chain's length for the chain methods. `auto` chooses for `ddtree`, `eagle` and `draft-model` what "
        "makes most tokens per second, single tokens where drafting does not pay; it is the whole block for `dflash` "
        "and `dflash-sample`.",
        device="always",
        metavar="N|auto",
    )

    def __post_init__(self) -> None:
        self.__dict__.update({name: plain(value) for name, value in self.__dict__.items()})
        check_fields(self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UsageError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})")
        if self.method != AUTO and not METHODS[self.method].drafts and self.tree_budget not in ("auto", 0):
            raise UsageError(
                f"method {self.method!r} drafts nothing: tree_budget {self.tree_budget} cannot be honoured"
            )

    @property
    def wanted_tokens(self) -> int:
        """Most output tokens, before the engine's capacity is considered."""
        return max(DEFAULT_MAX_TOKENS, self.min_tokens) if self.max_tokens is None else self.max_tokens

    @property
    def stochastic(self) -> bool:
        return self.temperature > 0

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Params of values by field name, or by another name of `structured`. Raises UsageError for an unknown name."""
        values = without_aliases(values)
        if unknown := sorted(str(name) for name in values if name not in PARAMETERS):
            names = ", ".join(shown(name)[1:-1] for name in unknown[:5]) + ", ..." * (len(unknown) > 5)
            raise UsageError(f"unknown sampling parameter {names}; known are {', '.join(sorted(PARAMETERS))}")
        return cls(**values)


def _metadata(annotation: Any) -> Iterator[Any]:
    """What is stated in a type beside types, that of inner types last."""
    yield from getattr(annotation, "__metadata__", ())
    for inner in getattr(annotation, "__args__", ())[::-1]:
        yield from _metadata(inner)


def _rows() -> Iterator[Parameter]:
    annotated, bare = (typing.get_type_hints(SamplingParams, include_extras=extras) for extras in (True, False))
    for field in dataclasses.fields(SamplingParams):
        kind = bare[field.name]
        if typing.get_origin(kind) in (typing.Union, types.UnionType):
            kind = typing.get_args(kind)[0]
        default = {} if field.default is dataclasses.MISSING else field.default
        made = {"name": field.name, "default": default, "annotation": annotated[field.name], "type": kind}
        yield dataclasses.replace(field.metadata["parameter"], **made)


PARAMETERS: Mapping[str, Parameter] = {row.name: row for row in _rows()}
