"""The torch backend's weight file: which tensors it holds, under which names and in which order.

Each is one part of an architecture: tensors of a checkpoint joined along their first axis, so that joining is writing
one after another.
"""

from dataclasses import dataclass
from typing import Literal

from ddtree_trt.drafters.registry import kind_of
from ddtree_trt.models.decoder import Part, TransformerDims, language_model_stored

Network = Literal["target", "drafter"]
TARGET, DRAFTER = "target.", "drafter."  # prefixes


@dataclass(frozen=True)
class StoredWeight:
    name: str
    shape: tuple[int, ...]
    network: Network  # whose checkpoint the sources are in
    sources: tuple[str, ...]  # Hugging Face names, in order
    dtype: str = ""  # instead of the precision's


def stored_weights(
    target: TransformerDims, drafter: TransformerDims, *, target_tied: bool, drafter_tied: bool
) -> list[StoredWeight]:
    """All tensors of the file in order. A language model without `head` uses its embedding, another drafter the
    target's tables unless it has its own."""
    networks: dict[Network, list[Part]] = {
        "target": list(language_model_stored(target, tied=target_tied)),
        "drafter": list(kind_of(drafter).stored(tied=drafter_tied)),
    }
    return [
        StoredWeight(f"{network}.{part.name}", part.shape, network, part.sources, part.dtype)
        for network, parts in networks.items()
        for part in parts
    ]
