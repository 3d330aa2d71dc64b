"""SamplingParams, the sampling parameters of one request, and the table `PARAMETERS` with a row for each of its fields.

Every interface is generated from this table: the fields of HTTP bodies, Triton's input tensors, the options of the
command line, and the table in `docs/generation.md`. Routing to rounds on the device reads it too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ddtree_trt.errors import UsageError, shown
from ddtree_trt.runtime.decoding.methods import AUTO, METHODS
from ddtree_trt.runtime.decoding.policies import POLICIES
from ddtree_trt.runtime.structured.names import without_aliases
from ddtree_trt.runtime.structured.record import Structure, StructuredOutput
from ddtree_trt.runtime.values import Biases, Choice, Flag, Integer, Kind, NodeCount, Number, Texts, TokenIds

DEFAULT_MAX_TOKENS = 256
MAX_LOGPROBS = 20
MAX_SEED = 2**64 - 1

# Whether rounds stay on the device. auto: where the engine has a GPU, for requests they can serve; on: refuse others.

Endpoint = Literal["chat", "completions"]
BOTH: Mapping[Endpoint, str] = {"chat": "", "completions": ""}


@dataclass(frozen=True)
class Parameter:
    """A row of the table.

    Attributes:
        default: the field's value unless given; a field whose default is None may be None.
        kind: the kind of values it takes.
        help: one sentence for the command line and the documentation.
        more: further sentences for the documentation.
        device: when rounds on the device honour it or are not concerned by it: always, only in greedy requests (whose
            choices it does not affect), or never. Where they do not honour it, any value but the default sends the
            request to rounds on the host.
        http: the endpoints that take it, with the name of the body's field; "" is the parameter's name.
        tensors: input tensors of Triton's `trtllm` layout that set it. Both layouts take every parameter under its
            name in `sampling_parameters`.
        metavar: placeholder of the value in the help of the command line's option; None: the command has no option.
        name: the field's name.
    """

    default: Any
    kind: Kind
    help: str
    more: str = ""
    device: Literal["always", "greedy", "never"] = "never"
    http: Mapping[Endpoint, str] = dataclasses.field(default_factory=lambda: BOTH)
    tensors: tuple[str, ...] = ()
    metavar: str | None = None
    name: str = ""

    def http_name(self, endpoint: Endpoint) -> str | None:
        """The name of the parameter in an endpoint's body; None where the endpoint does not take it."""
        name = self.http.get(endpoint)
        return None if name is None else name or self.name

    @property
    def option(self) -> str:
        """The command line's option, for rows with a `metavar`."""
        return f"--{self.name.replace('_', '-')}"

    def field(self) -> Any:
        """A dataclass field with this row as its metadata."""
        if isinstance(self.default, dict):
            return dataclasses.field(default_factory=dict, metadata={"row": self})
        return dataclasses.field(default=self.default, metadata={"row": self})


@dataclass(frozen=True)
class SamplingParams:
    """How to generate. Names and meanings are vLLM's; `method` and `tree_budget` are ours.

    Logits pass through repetition, presence and frequency penalties, `logit_bias`, `min_tokens`, temperature, `top_k`,
    `top_p` and `min_p`, in this order. Every value is checked on construction; UsageError names the one at fault.
    """

    n: int = Parameter(
        1, Integer(1, 64), "Completions of one prompt.", device="always", tensors=("num_return_sequences",)
    ).field()
    max_tokens: int | None = Parameter(
        None,
        Integer(1),
        "Most tokens to generate.",
        "More than the prompt leaves of the engine's `max_seq_len` is refused. Unless given: "
        f"{DEFAULT_MAX_TOKENS}, or as many as fit.",
        device="always",
        tensors=("max_tokens",),
        metavar="N",
    ).field()
    min_tokens: int = Parameter(
        0,
        Integer(0),
        "Bans stop tokens and ignores stop strings until reached, but where a constraint allows only the end.",
        tensors=("min_tokens", "min_length"),
    ).field()
    temperature: float = Parameter(
        0.0,
        Number(0, 100),
        "0 is greedy.",
        device="always",
        tensors=("temperature",),
        metavar="T",
    ).field()
    top_k: int = Parameter(
        0,
        Integer(0),
        "Sample among the K most probable.",
        "0 is all of them.",
        device="greedy",
        tensors=("top_k",),
        metavar="K",
    ).field()
    top_p: float = Parameter(
        1.0,
        Number(0, 1),
        "Sample within this mass.",
        "0 is refused: `temperature` makes a request greedy.",
        device="greedy",
        tensors=("top_p",),
        metavar="P",
    ).field()
    min_p: float = Parameter(
        0.0, Number(0, 1), "Drop tokens below this share of the best.", device="greedy", metavar="P"
    ).field()
    seed: int | None = Parameter(
        None,
        Integer(0, MAX_SEED),
        "Makes sampling repeatable.",
        "Requests are independent of each other either way.",
        device="always",
        tensors=("seed",),
        metavar="N",
    ).field()
    stop: tuple[str, ...] = Parameter(
        (), Texts(), "End before this text.", device="always", tensors=("stop_words",), metavar="TEXT"
    ).field()
    stop_token_ids: tuple[int, ...] = Parameter(
        (), TokenIds(), "Token ids that end the output.", device="always"
    ).field()
    include_stop_str_in_output: bool = Parameter(
        False, Flag(), "Keep the stop string in the text.", device="always"
    ).field()
    ignore_eos: bool = Parameter(False, Flag(), "Go on past the model's own end.", device="always", metavar="").field()
    logprobs: int | None = Parameter(
        None,
        Integer(0, MAX_LOGPROBS),
        "Log-probabilities of the output's tokens, with this many alternatives.",
        "The target's own, before penalties and temperature.",
        http={"chat": "top_logprobs", "completions": "logprobs"},
    ).field()
    prompt_logprobs: int | None = Parameter(
        None,
        Integer(0, MAX_LOGPROBS),
        "Log-probabilities of the prompt's tokens, with this many alternatives.",
        device="always",
        http={},
    ).field()
    repetition_penalty: float = Parameter(
        # Logits are divided by it: a smaller one overflows float32.
        1.0,
        Number(0.01, 100),
        "Over prompt and output; above 1 discourages what they hold.",
        tensors=("repetition_penalty",),
    ).field()
    presence_penalty: float = Parameter(
        0.0,
        Number(-2, 2),
        "Over the output: taken from the logit of every token in it.",
        tensors=("presence_penalty",),
    ).field()
    frequency_penalty: float = Parameter(
        0.0,
        Number(-2, 2),
        "Over the output: taken from a token's logit for each time it occurs.",
        tensors=("frequency_penalty",),
    ).field()
    logit_bias: Mapping[int, float] = Parameter({}, Biases(-100, 100), "Token id → number added to its logit.").field()
    echo: bool = Parameter(
        False,
        Flag(),
        "Put the prompt's text in front of the output's.",
        "Token ids and log-probabilities stay the output's.",
        device="always",
        http={"completions": "echo"},
    ).field()
    skip_special_tokens: bool = Parameter(
        True, Flag(), "Leave special tokens out of the text.", device="always"
    ).field()
    keep_special_tokens: tuple[int, ...] = Parameter(
        (),
        TokenIds(),
        "Special tokens that stay in the text where the others are left out.",
        "Chats set it to the tokens that mark reasoning and calls of tools.",
        device="always",
        http={},
    ).field()
    skip_reading_prefix_cache: bool = Parameter(
        False,
        Flag(),
        "Compute the whole prompt, whatever of it a slot's cache holds.",
        "For comparing times: of two runs of a prompt, the second would find it in the cache.",
        device="always",
    ).field()
    structured: StructuredOutput | None = Parameter(  # noqa: RUF009 - it makes a field, as all others
        None,
        Structure(),
        "What the output must be: JSON of a schema, a text that an expression matches, a choice, or one of a grammar.",
        "Also by OpenAI's name `response_format`, and by vLLM's `guided_json`, `guided_regex`, `guided_choice` and "
        "`guided_grammar`.",
        http={"chat": "structured_outputs", "completions": "structured_outputs"},
    ).field()
    method: str = Parameter(
        AUTO,
        Choice(AUTO, METHODS),
        "How drafts are made.",
        "`auto` is `ddtree`, `draft-model` where the drafter is autoregressive, or `eagle` where it is one of EAGLE-3.",
        device="always",
        metavar="NAME",
    ).field()
    tree_budget: int | Literal["auto"] = Parameter(
        "auto",
        NodeCount(),
        "Draft nodes per round; auto chooses every round.",
        "It is a chain's length for the chain methods. `auto` chooses for `ddtree`, `eagle` and `draft-model` what "
        "makes most tokens per second, single tokens where drafting does not pay; it is the whole block for `dflash` "
        "and `dflash-sample`.",
        device="always",
        tensors=("num_draft_tokens",),
        metavar="N|auto",
    ).field()
    tree: str = Parameter(
        AUTO,
        Choice(AUTO, list(POLICIES)),
        "Policy that chooses the nodes of a method's trees.",
        "`auto` is "
        + " and ".join(f"`{m.own_policy.name}` for `{m.name}`" for m in METHODS.values() if m.branches)
        + ". "
        + "; ".join(f"`{policy.name}`: {policy.makes}" for policy in POLICIES.values())
        + ". Each works with any `tree_budget`.",
        metavar="NAME",
    ).field()
    tree_width: int | None = Parameter(
        None,
        Integer(1),
        "Width of a tree, as its policy means it.",
        "Unless given: "
        + ", ".join(f"{each.width or 'no limit'} for `{each.name}`" for each in POLICIES.values() if each.takes_width)
        + ".",
        metavar="N",
    ).field()
    max_tree_depth: int | None = Parameter(
        None, Integer(1), "Most tokens of a path in a tree.", "For methods that make trees.", metavar="N"
    ).field()
    draft_length: int | None = Parameter(
        None,
        Integer(1),
        "Most positions drafted per round.",
        "At most what the drafter drafts in a round; unless given, as much as that. A token by token drafter makes no "
        "more passes.",
        metavar="N",
    ).field()
    best_of: dataclasses.InitVar[None] = None  # vLLM's of before; refused

    def __post_init__(self, best_of: object) -> None:
        if best_of is not None:
            raise UsageError(
                "best_of is not supported; ask for n completions with logprobs=0, and take the one of the highest "
                "cumulative_logprob"
            )
        for name, row in PARAMETERS.items():
            value = getattr(self, name)
            if value is not None or row.default is not None:
                object.__setattr__(self, name, row.kind.check(name, value))
        if self.top_p == 0:
            raise UsageError("top_p must be above 0 and at most 1; for greedy decoding set temperature=0")
        if 0 < self.temperature < _LOWEST_TEMPERATURE:
            raise UsageError(f"temperature must be 0, for greedy decoding, or from {_LOWEST_TEMPERATURE} to 100")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UsageError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})")
        if self.method != AUTO and not METHODS[self.method].drafts and self.tree_budget not in ("auto", 0):
            budget = shown(self.tree_budget)
            raise UsageError(f"method {self.method!r} drafts nothing: tree_budget {budget} cannot be honoured")
        self._check_tree()

    def _check_tree(self) -> None:
        named = POLICIES.get(self.tree)  # None for AUTO
        if self.tree_width is not None and named is not None and not named.takes_width:
            raise UsageError(f"tree {self.tree!r} has one node at each depth: tree_width cannot be honoured")
        if self.method == AUTO:
            return
        method = METHODS[self.method]
        if self.draft_length is not None and not method.drafts:
            raise UsageError(f"method {self.method!r} drafts nothing: draft_length cannot be honoured")
        given = [name for name in ("max_tree_depth", "tree_width") if getattr(self, name) is not None]
        given += ["tree"] * (named is not None)
        if given and not method.branches:
            able = " or ".join(each.name for each in METHODS.values() if each.branches)
            raise UsageError(
                f"{given[0]} {shown(getattr(self, given[0]))} needs a method that makes trees, {able}; "
                f"{self.method!r} makes {'chains' if method.drafts else 'none'}"
                + ", whose length is draft_length or tree_budget"
                * method.drafts
            )

    @property
    def deepest(self) -> int | None:
        """Most tokens of a path in a round's tree; None for as many as the drafter has."""
        depth, length = self.max_tree_depth, self.draft_length
        if depth is None or length is None:
            return length if depth is None else depth
        return min(depth, length)

    @property
    def wanted_tokens(self) -> int:
        """Most output tokens, before the engine's capacity is considered."""
        return max(DEFAULT_MAX_TOKENS, self.min_tokens) if self.max_tokens is None else self.max_tokens

    @property
    def stochastic(self) -> bool:
        return self.temperature > 0

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Params of values by field name, or by another name of `structured`. Raises UsageError for an unknown name."""
        values = without_aliases(values)
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(str(name) for name in values if name not in {*known, "best_of"}):
            names = ", ".join(shown(name)[1:-1] for name in unknown[:5]) + ", ..." * (len(unknown) > 5)
            raise UsageError(f"unknown sampling parameter {names}; known are {', '.join(sorted(known))}")
        return cls(**values)


_LOWEST_TEMPERATURE = 1e-30  # logits are divided by it; a lower one overflows the float32 of a device, or float64

PARAMETERS: Mapping[str, Parameter] = {
    field.name: dataclasses.replace(field.metadata["row"], name=field.name)
    for field in dataclasses.fields(SamplingParams)
}
