"""The record of a kind of drafter: a package beside this module, and a subclass of `DrafterKind` in its `dims.py` that
`registry.py` lists. What builds and what runs the drafter are halves of the package, imported when they are called for.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

from ddtree_trt.models.decoder import Part, Shapes, TransformerDims, shapes_of

# What one pass proposes: all positions of a block, a level of a tree, or one token.
Drafts = Literal["block", "levels", "tokens"]
OF_BUILDS = {"dialects": "DIALECTS", "graph": "build"}  # halves, and what is taken from each
EMBEDDING, HEAD = "embedding", "head"  # names of tables
# Of a tree that is drafted level by level, as EAGLE is published: nodes that a pass expands, and children of each; and
# its levels, where its number of nodes is fixed.
EXPANDED, LEVELS = 10, 8
LONGEST_CHAIN = 16  # γ: most tokens an automatic budget has a drafter without a block draft per round


class DrafterKind(ABC):
    """A drafter of one kind and of given dimensions: what it needs of the target and offers to methods. A subclass
    states what differs from these defaults."""

    name: ClassVar[str]  # as manifest.json has it
    title: ClassVar[str]  # in messages: "a DFlash drafter"
    record: ClassVar[type[TransformerDims]]  # of its dimensions; those of two kinds differ
    drafts: ClassVar[Drafts]
    shifted_inputs: ClassVar[bool] = False  # a row of its cache is made of a token's states and of the token after it

    tap_layers: tuple[int, ...] = ()  # target layers whose output it is conditioned on, M of them
    target_layers: int | None = None  # layers of the target it was trained for; None where any will do
    mask_token_id: int | None = None  # the input at positions that are to be drafted; None where there are none
    block_size: int | None = None  # tokens of its one pass; None where it drafts no block
    windowed: bool = False  # some layer's rows see a window of the sequence only
    longest_draft: int = LONGEST_CHAIN  # L of a block, else the most tokens of a path that `auto` drafts in a round
    pairs: Any = None  # `PairHead`: scores each position's candidates by the one before; None: they have marginals

    def __init__(self, dims: Any) -> None:
        self.dims = dims  # of type `record`

    @classmethod
    def load(cls, half: str) -> Any:
        """What a half of its package is for: "dialects", a list of `Dialect`; "graph", a function of (Graph, the
        drafter's checkpoint, the target's, Limits); or by backend what makes its `Drafter`, in `on_BACKEND.py`."""
        return getattr(import_module(cls._module(half)), OF_BUILDS.get(half, "make"))

    @classmethod
    def has(cls, half: str) -> bool:
        return find_spec(cls._module(half)) is not None

    @classmethod
    def _module(cls, half: str) -> str:
        return f"{cls.__module__.rpartition('.')[0]}.{half if half in OF_BUILDS else f'on_{half}'}"

    @property
    def own_tables(self) -> tuple[Part, ...]:
        """EMBEDDING and HEAD, as far as it does not use the target's; a head may be tied."""
        return ()

    @property
    def borrowed_rows(self) -> Shapes:
        """The head that its checkpoint leaves out, because it is rows of the target's; {} where there is none."""
        return {}

    def shapes(self, *, tied: bool) -> Shapes:
        """Shapes of every tensor of its checkpoint; with `tied` its head is its embedding."""
        return shapes_of(self.stored(tied=tied))

    @abstractmethod
    def stored(self, *, tied: bool) -> Iterator[Part]:
        """All its tensors as a weight file of PyTorch's has them, in order."""

    @property
    def unrounded(self) -> frozenset[str]:
        """Names of the matrices that products in 8 bits leave as they are."""
        return frozenset()

    def fitted(self, target: TransformerDims) -> Any:
        """Its dimensions beside a target, which may decide what a config.json left open."""
        return self.dims

    def contradiction(self) -> str | None:
        """What of the dimensions cannot be true together, each of which is within its own range."""
        return None

    def misfit(self, target: TransformerDims) -> str | None:
        """Why it does not fit a target of these dimensions, in Hugging Face's names; None where it fits."""
        return differs("vocab_size", self.dims.vocab_size, "the target's", target.vocab_size)


def differs(name: str, found: int, whose: str, expected: int) -> str | None:
    """Words on a number that is not the expected one."""
    return None if found == expected else f"{name} is {found}, {whose} {expected}"
