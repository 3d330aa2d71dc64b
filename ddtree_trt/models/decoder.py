"""A decoder-only transformer: its dimensions, and its tensors by their Hugging Face names.

Every network here has pre-norm layers of grouped-query attention with rotary embedding and SwiGLU; in a hybrid most
layers have a gated delta net in attention's place. Families differ in the fields of `TransformerDims`; `families.py`
lists them. Projections are [out, in], as in the checkpoints.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, Generic, Literal, TypeVar

from ddtree_trt.models.delta import DeltaNet
from ddtree_trt.models.rope_scaling import ROPE_BASE, RopeScaling, contradiction
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


# Far above any use, far below what hangs or overflows. Checkpoints and manifests are both read by these bounds.
VOCABULARY = Between(1, 1 << 24)
WIDTH = Between(1, 1 << 20)
LAYERS = Between(1, 1000)
HEADS = Between(1, 4096)
HEAD_DIM = Between(1, 4096)
EPSILON = Between(1e-30, 0.1)  # float32 holds both ends
POSITIONS = Between(2, 1 << 27)  # one for a prompt, one for what follows it
TOKEN = Between(0, (1 << 24) - 1)

Token = Annotated[int, TOKEN]
Shape = tuple[int, ...]
Shapes = dict[str, Shape]  # Hugging Face tensor name → shape

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
BODY = "model."  # prefix of a language model's layers and final norm
FINAL_NORM = "norm.weight"
ATTENTION, MLP = "attention", "mlp"  # the sublayers of a layer
BIAS = ".bias"  # suffix of the bias of a projection


@dataclass(frozen=True)
class TransformerDims:
    """Shape of a decoder-only transformer. Fields with a default are the switches checkpoints differ in."""

    vocab_size: Annotated[int, VOCABULARY]  # V
    hidden_size: Annotated[int, WIDTH]  # H
    num_layers: Annotated[int, LAYERS]
    num_heads: Annotated[int, HEADS]  # Hq
    num_kv_heads: Annotated[int, HEADS]  # Hkv
    head_dim: Annotated[int, HEAD_DIM]  # D
    intermediate_size: Annotated[int, WIDTH]  # of the MLP, or of each expert
    rms_norm_eps: Annotated[float, EPSILON]
    rope_theta: Annotated[float, ROPE_BASE]
    max_positions: Annotated[int, POSITIONS]  # positions the rotary embedding was made for
    qk_norm: bool = field(default=True, kw_only=True)  # every head of queries and keys is normed
    qkv_bias: bool = field(default=False, kw_only=True)  # the projections of queries, keys and values add a bias
    rope_scaling: RopeScaling | None = field(default=None, kw_only=True)  # None for plain rotary embedding
    experts: Experts | None = field(default=None, kw_only=True)  # None: every layer has one MLP
    rotary_dim: Annotated[int, HEAD_DIM] | None = field(default=None, kw_only=True)  # of a head; None: all is rotated
    delta: DeltaNet | None = field(default=None, kw_only=True)  # of a hybrid; None: every layer has attention

    @property
    def table(self) -> tuple[int, int]:
        """Shape [V, H] of the embedding, and of the language-model head."""
        return self.vocab_size, self.hidden_size

    @property
    def qkv_widths(self) -> tuple[int, int, int]:
        """Widths of queries, keys and values, which one product computes side by side."""
        kv = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, kv, kv

    @property
    def projected_widths(self) -> tuple[int, ...]:
        """Widths of what the product before attention computes: a hybrid's gates of its output follow queries."""
        query, *others = self.qkv_widths
        return (query, query, *others) if self.delta else self.qkv_widths

    @property
    def widest(self) -> int:
        """Width of the widest of a row's projections; those of a token's experts count together."""
        inner, mixture = self.intermediate_size, self.experts
        inner = mixture.per_token * inner + mixture.shared if mixture else inner
        return max(inner, sum(self.projected_widths), sum(self.delta.projected_widths) if self.delta else 0)

    @property
    def rotated(self) -> int:
        """Elements of a head, its first, that rotary embedding rotates."""
        return self.rotary_dim or self.head_dim

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers with attention, which keep keys and values."""
        return tuple(range(self.num_layers)) if self.delta is None else self.delta.attention_layers

    @property
    def delta_layers(self) -> tuple[int, ...]:
        """Layers with a gated delta net, which keep a state."""
        return tuple(sorted({*range(self.num_layers)} - {*self.attention_layers}))

    @property
    def state_bytes(self) -> int:
        """Of the states of all layers for one slot, in float32; 0 for a network without any."""
        return 4 * len(self.delta_layers) * self.delta.state_values if self.delta else 0

    def contradiction(self) -> str | None:
        """What of the dimensions cannot be true together, or None: each field is right by itself."""
        if self.num_heads % self.num_kv_heads:
            return f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
        if self.rotated > self.head_dim or self.rotated % 2:
            return f"rotary_dim {self.rotated} is not an even number up to head_dim {self.head_dim}"
        if problem := contradiction(self.rope_theta, self.rope_scaling):
            return f"rope_scaling: {problem}"
        if self.experts and self.experts.per_token > self.experts.count:
            return f"experts: per_token {self.experts.per_token} is more than the count {self.experts.count}"
        if self.delta and (problem := self.delta.contradiction(self.num_layers)):
            return f"delta: {problem}"
        return None

    def stated(self) -> dict[str, Any]:
        """Fields by name as JSON holds them, without the switches at their default: an engine that needs none is
        described as before there were any, and an older runtime reads it."""
        defaults = {f.name: f.default for f in fields(self)}
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}


@dataclass(frozen=True)
class BlockMask:
    """Which keys a row of a drafted block sees in one layer, by their distance to its own position."""

    window: int = 0  # only those less than so many positions away, itself counted; 0: all
    causal: bool = False  # none after it


@dataclass(frozen=True)
class Part:
    """One tensor of a network in use: tensors of the checkpoint, joined along their first axis."""

    name: str  # in our weight files
    shapes: Mapping[str, Shape]  # of the joined tensors, by Hugging Face name and in order
    stacked: int = 0  # where not 0, so many equal groups of them are stacked along an axis before
    dtype: Literal["", "int32", "float32"] = ""  # "": an engine's precision

    @property
    def shape(self) -> Shape:
        """Shape of the whole; a tensor of three dimensions counts as its rows."""
        first, *_ = shapes = [
            (math.prod(shape[:-1]), shape[-1]) if len(shape) > 2 else shape for shape in self.shapes.values()
        ]
        rows = sum(shape[0] for shape in shapes)
        return (self.stacked, rows // self.stacked, *first[1:]) if self.stacked else (rows, *first[1:])

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(self.shapes)


_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Layer(Generic[_T]):
    """The parts of one layer, or an engine's tensors of them; None for one that the network's family, or this layer,
    does not have."""

    input_norm: _T  # [H]
    qkv: _T  # [sum of `projected_widths`, H]: those of the dimensions, or in a delta-net layer of `DeltaNet`
    qkv_bias: _T | None = None  # [(Hq + 2·Hkv)·D]
    q_norm: _T | None = None  # [D]
    k_norm: _T | None = None  # [D]
    o: _T  # [H, Hq·D], or [H, Hv·Dv]
    post_norm: _T  # [H]
    router: _T | None = None  # [E, H]
    gate_up: _T  # [2·inner, H], or of all experts [E·2·inner, H], expert after expert
    down: _T  # [H, inner], or [E·H, inner]
    shared_gate_up: _T | None = None  # of the shared expert: [2·inner, H]
    shared_down: _T | None = None  # [H, inner]
    shared_gate: _T | None = None  # [1, H]
    # Of a delta-net layer:
    conv: _T | None = None  # [C, taps]
    decay: _T | None = None  # [Hv], negative: g is this times softplus(a + step_bias)
    step_bias: _T | None = None  # [Hv]
    head_norm: _T | None = None  # [Dv], of every head's output

    def __iter__(self) -> Iterator[_T]:
        """The parts it has, in the order of checkpoints."""
        return (part for part in vars(self).values() if part is not None)

    @property
    def projected(self) -> tuple[_T, ...]:
        """The parts that compute queries, keys and values."""
        return (self.qkv,) if self.qkv_bias is None else (self.qkv, self.qkv_bias)

    @property
    def others(self) -> Iterator[_T]:
        return (part for part in self if part not in self.projected)


def decoder_layer(dims: TransformerDims, index: int, body: str = BODY) -> Layer[Part]:
    """The parts of layer `index`; `body` is the prefix of layers in the checkpoint."""
    hidden, inner, experts = dims.hidden_size, dims.intermediate_size, dims.experts

    def part(name: str, shapes: Mapping[str, Shape]) -> Part:
        sources = {f"{body}layers.{index}.{source}": shape for source, shape in shapes.items()}
        return Part(name, sources, dtype=_dtype(dims, name))

    # Of an MLP, or of each expert.
    mlps = [f"mlp.experts.{e}" for e in range(experts.count)] if experts else ["mlp"]
    gate_up: Shapes = {f"{mlp}.{p}_proj.weight": (inner, hidden) for mlp in mlps for p in ("gate", "up")}
    down: Shapes = {f"{mlp}.down_proj.weight": (hidden, inner) for mlp in mlps}
    if experts and experts.stacked:
        gate_up = {"mlp.experts.gate_up_proj": (experts.count, 2 * inner, hidden)}
        down = {"mlp.experts.down_proj": (experts.count, hidden, inner)}
    found = _attention_shapes(dims) if index in dims.attention_layers else _delta_shapes(dims)
    if experts:
        found["router"] = {"mlp.gate.weight": (experts.count, hidden)}
    if experts and experts.shared:
        own, rows = "mlp.shared_expert.{}_proj.weight", experts.shared
        found["shared_gate_up"] = {own.format(p): (rows, hidden) for p in ("gate", "up")}
        found |= {"shared_down": {own.format("down"): (hidden, rows)}}
        found |= {"shared_gate": {"mlp.shared_expert_gate.weight": (1, hidden)}}
    return Layer(
        **{name: part(name, shapes) for name, shapes in found.items()},
        input_norm=part("input_norm", {"input_layernorm.weight": (hidden,)}),
        post_norm=part("post_norm", {"post_attention_layernorm.weight": (hidden,)}),
        gate_up=part("gate_up", gate_up),
        down=part("down", down),
    )


def _dtype(dims: TransformerDims, part: str) -> Literal["", "float32"]:
    """That of a part: of a hybrid what moves its states, and norms, which checkpoints have around 0, are float32."""
    single = part in ("conv", "decay", "step_bias") or part.endswith("norm")
    return "float32" if dims.delta and single else ""


def _attention_shapes(dims: TransformerDims) -> dict[str, Shapes]:
    """Of the parts of attention: names behind the layer's, and shapes."""
    hidden, head = dims.hidden_size, dims.head_dim
    widths = dict(zip("qkv", dims.qkv_widths, strict=True))
    rows = {**widths, "q": 2 * widths["q"]} if dims.delta else widths
    parts: dict[str, Shapes] = {
        "qkv": {f"self_attn.{p}_proj.weight": (rows[p], hidden) for p in widths},
        "o": {"self_attn.o_proj.weight": (hidden, widths["q"])},
    }
    if dims.qkv_bias:
        parts["qkv_bias"] = {f"self_attn.{p}_proj{BIAS}": (width,) for p, width in widths.items()}
    if dims.qk_norm:
        parts |= {f"{p}_norm": {f"self_attn.{p}_norm.weight": (head,)} for p in "qk"}
    return parts


def _delta_shapes(dims: TransformerDims) -> dict[str, Shapes]:
    assert dims.delta is not None, "a network of attention alone has no other layers"
    d, hidden = dims.delta, dims.hidden_size
    channels, gates, steps, decays = d.projected_widths
    projections = {"qkv": channels, "z": gates, "b": steps, "a": decays}
    if d.interleaved:
        projections = {"qkvz": channels + gates, "ba": steps + decays}
    shapes: dict[str, Shapes] = {
        "qkv": {f"in_proj_{name}.weight": (rows, hidden) for name, rows in projections.items()},
        "o": {"out_proj.weight": (hidden, gates)},
        "conv": {"conv1d.weight": (channels, 1, d.taps)},
        "decay": {"A_log": (d.value_heads,)},
        "step_bias": {"dt_bias": (d.value_heads,)},
        "head_norm": {"norm.weight": (d.value_dim,)},
    }
    return {part: {f"linear_attn.{name}": shape for name, shape in found.items()} for part, found in shapes.items()}


def decoder_layers(dims: TransformerDims, body: str = BODY) -> list[Layer[Part]]:
    return [decoder_layer(dims, index, body) for index in range(dims.num_layers)]


def final_norm(dims: TransformerDims, body: str = BODY) -> Part:
    return Part("norm", {body + FINAL_NORM: (dims.hidden_size,)}, dtype=_dtype(dims, "norm"))


def embedding(dims: TransformerDims) -> Part:
    """The table of token embeddings [V, H]."""
    return Part("embedding", {EMBEDDING: dims.table})


def head(dims: TransformerDims) -> Part:
    """The language-model head of a network whose head is not its embedding."""
    return Part("head", {HEAD: dims.table})


def language_model_stored(dims: TransformerDims, *, tied: bool) -> Iterator[Part]:
    """Tensors of a target or autoregressive drafter, in our weight files' order; `tied`: the head is the embedding."""
    yield embedding(dims)
    if not tied:
        yield head(dims)
    for index, layer in enumerate(decoder_layers(dims)):
        yield from within_layer(index, layer.projected, layer.others)
    yield final_norm(dims)


def within_layer(index: int, *parts: Iterable[Part]) -> Iterator[Part]:
    """The parts with names in our weight files that say whose layer they are."""
    return (replace(part, name=f"layers.{index}.{part.name}") for some in parts for part in some)


def shapes_of(parts: Iterable[Part]) -> Shapes:
    """Shapes of the checkpoint's tensors that parts are made of, in their order."""
    return {name: shape for part in parts for name, shape in part.shapes.items()}
