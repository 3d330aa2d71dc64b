"""Byte-level BPE tokenizer with single digits, and the corpus as token arrays."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .settings import EOS, SPECIAL_TOKENS

CHAT_TEMPLATE = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# A line break with the indentation after it, a word, one digit, underscores, punctuation: each may have a space before.
PIECES = r"\n *| ?[A-Za-z]+| ?[0-9]| ?_+| ?[^\sA-Za-z0-9_]+|\s"
TRAINED_ON = 40_000
"""Conversations the merges are learned from; more change nothing."""


def request_text(request: str, first: bool) -> str:
    """The text before an answer; the first turn has no line break left over from a turn before."""
    return f"{'' if first else chr(10)}<|im_start|>user\n{request}<|im_end|>\n<|im_start|>assistant\n"


def read_corpus(path: Path) -> Iterator[tuple[str, list[list[str]]]]:
    """(part, turns) of every conversation."""
    with path.open() as file:
        for line in file:
            part, _, turns = json.loads(line)
            yield part, turns


def train(corpus: Path, vocabulary: int, folder: Path) -> Tokenizer:
    """Learn the merges and write the three files that transformers reads."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    turns = itertools.chain.from_iterable(turns for _, turns in itertools.islice(read_corpus(corpus), TRAINED_ON))
    tokenizer.train_from_iterator(itertools.chain.from_iterable(turns), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    end_of_text, _, eos, pad, mask = SPECIAL_TOKENS
    settings: dict[str, Any] = {
        "backend": "tokenizers",
        "clean_up_tokenization_spaces": False,
        "eos_token": eos,
        "extra_special_tokens": [end_of_text, SPECIAL_TOKENS[1], eos],
        "mask_token": mask,
        "model_max_length": 2048,
        "pad_token": pad,
        "tokenizer_class": "TokenizersBackend",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return tokenizer


@dataclass(frozen=True)
class TokenSet:
    """Conversations end to end.

    ids [total] uint16; is_answer [total] bool, True on answers and their EOS; starts, lengths and prompts
    [conversations]; prompts counts the tokens before the first answer.
    """

    ids: NDArray[Any]
    is_answer: NDArray[Any]
    starts: NDArray[Any]
    lengths: NDArray[Any]
    prompts: NDArray[Any]

    @staticmethod
    def load(path: Path) -> TokenSet:
        with np.load(path) as arrays:
            return TokenSet(**{name: arrays[name] for name in arrays.files})

    def conversation(self, index: int) -> NDArray[Any]:
        start = int(self.starts[index])
        return self.ids[start : start + int(self.lengths[index])]

    def prompt(self, index: int) -> list[int]:
        return self.conversation(index)[: int(self.prompts[index])].tolist()


def encode(tokenizer: Tokenizer, conversations: list[list[list[str]]]) -> TokenSet:
    """Token arrays of conversations by their turns; every turn's request and answer are encoded apart."""
    texts: list[str] = []
    for turns in conversations:
        for index, (request, answer) in enumerate(turns):
            texts += [request_text(request, first=index == 0), answer + SPECIAL_TOKENS[EOS]]
    encoded = iter(tokenizer.encode_batch(texts, add_special_tokens=False))
    ids: list[int] = []
    is_answer: list[bool] = []
    lengths, prompts = [], []
    for turns in conversations:
        pieces = [next(encoded).ids for _ in range(2 * len(turns))]
        for index, piece in enumerate(pieces):
            ids += piece
            is_answer += [index % 2 == 1] * len(piece)
        prompts.append(len(pieces[0]))
        lengths.append(sum(map(len, pieces)))
    return TokenSet(
        ids=np.array(ids, np.uint16),
        is_answer=np.array(is_answer),
        starts=np.cumsum(lengths) - np.array(lengths),
        lengths=np.array(lengths),
        prompts=np.array(prompts),
    )


def build(corpus: Path, vocabulary: int, folder: Path, arrays: dict[str, Path]) -> dict[str, Any]:
    """Tokenizer, unless `folder` has one, and token arrays of both parts ("train", "hold"); returns sizes to report."""
    stored = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(stored)) if stored.exists() else train(corpus, vocabulary, folder)
    report: dict[str, Any] = {"vocabulary": tokenizer.get_vocab_size()}
    for part, path in arrays.items():
        tokens = encode(tokenizer, [turns for in_part, turns in read_corpus(corpus) if in_part == part])
        np.savez(path, **vars(tokens))
        report[part] = {"conversations": len(tokens.lengths), "tokens": len(tokens.ids)}
    return report
