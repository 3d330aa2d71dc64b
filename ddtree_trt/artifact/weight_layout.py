"""The torch backend's weight file: which tensors it holds, under which names and in which order.

Each is one part of an architecture: tensors of a checkpoint joined along their first axis, so that joining is writing
one after another.
"""

from dataclasses import replace

from ddtree_trt.drafters.registry import kind_of
from ddtree_trt.models.decoder import Part, TransformerDims, language_model_stored

TARGET, DRAFTER = "target.", "drafter."  # prefixes of the network in whose checkpoint the sources are


def stored_weights(
    target: TransformerDims, drafter: TransformerDims, *, target_tied: bool, drafter_tied: bool
) -> list[Part]:
    """All tensors of the file in order. A language model without `head` uses its embedding, another drafter the
    target's tables unless it has its own."""
    networks = {
        TARGET: language_model_stored(target, tied=target_tied),
        DRAFTER: kind_of(drafter).stored(tied=drafter_tied),
    }
    return [replace(part, name=network + part.name) for network, parts in networks.items() for part in parts]
