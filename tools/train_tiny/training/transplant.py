"""Start from an earlier target whose tokenizer differs: keep the layers, carry the embedding rows over."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.train_tiny.model import Target, load_target
from tools.train_tiny.settings import SPECIAL_TOKENS


def carried_rows(old: Tokenizer, new: Tokenizer, rows: Tensor) -> Tensor:
    """Embedding rows [V, H] of the new vocabulary.

    A token of both vocabularies keeps its row; any other gets the mean of the rows that spell it, and some noise so
    that two tokens with the same pieces do not stay alike.
    """
    known = old.get_vocab()
    carried = torch.zeros(new.get_vocab_size(), rows.shape[1])
    spread = rows[len(SPECIAL_TOKENS) :].std()
    for token, index in new.get_vocab().items():
        if token in known:
            carried[index] = rows[known[token]]
            continue
        pieces = old.encode(new.decode([index]), add_special_tokens=False).ids or [len(SPECIAL_TOKENS)]
        carried[index] = rows[pieces].mean(0) + 0.3 * spread * torch.randn(rows.shape[1])
    return carried


def transplanted(source: Path, tokenizer_folder: Path) -> Target:
    """The target of `source`, whose tokenizer lies in the folder `tokenizer` next to it, for another tokenizer."""
    model = load_target(source)
    old, new = (
        Tokenizer.from_file(str(folder / "tokenizer.json"))
        for folder in (source.parent / "tokenizer", tokenizer_folder)
    )
    if old.get_vocab() != new.get_vocab():
        model.embed_tokens.weight.copy_(carried_rows(old, new, model.embed_tokens.weight))
    return model
