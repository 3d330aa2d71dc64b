"""The tokenizer's files: found beside a checkpoint or made from a GGUF file, checked, and put into the engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ddtree_trt.artifact.files import OPTIONAL_TOKENIZER_FILES, TOKENIZER_FILES
from ddtree_trt.artifact.tokenizer_files import load_tokenizer
from ddtree_trt.build.checkpoint.config import GENERATION_CONFIG
from ddtree_trt.build.checkpoint.gguf.files import open_gguf
from ddtree_trt.build.checkpoint.gguf.vocabulary import read_vocabulary
from ddtree_trt.build.checkpoint.paths import is_gguf
from ddtree_trt.errors import CheckpointError
from ddtree_trt.models.decoder import TOKEN
from ddtree_trt.reading import Between, Fields, Source, read_object, shown

_MAX_TOKENIZER_BYTES = 256 << 20  # the largest published ones have some 40 MB
_TOKEN = Between(-1, TOKEN.highest)  # −1 is the last of an empty list
_VOCABULARY, _SETTINGS = "tokenizer.json", "tokenizer_config.json"


def find_tokenizer(checkpoint: Path, vocab_size: int) -> Path:
    """Where the target's tokenizer is: in the checkpoint's directory, in `tokenizer` beside it, or in the GGUF file.

    Raises CheckpointError when a file is missing or damaged, when a GGUF file's tokenizer is of a kind that is not
    supported, or when the tokenizer makes tokens the target has not.
    """
    if is_gguf(checkpoint):
        vocabulary_size = len(read_vocabulary(open_gguf(checkpoint).metadata).tokens)
        _check_highest(checkpoint, vocabulary_size - 1, vocab_size)
        return checkpoint
    sibling = checkpoint.resolve().parent / "tokenizer"
    directory = next((d for d in (checkpoint, sibling) if (d / _VOCABULARY).is_file()), None)
    if directory is None:
        raise CheckpointError(
            f"{checkpoint} has no tokenizer: {_VOCABULARY} is missing; copy it and {_SETTINGS} from where the "
            "checkpoint comes from"
        )
    vocabulary = _read(directory / _VOCABULARY)
    _read(directory / _SETTINGS)
    highest = _highest_token(directory / _VOCABULARY, vocabulary)
    _check_highest(directory / _VOCABULARY, highest, vocab_size)
    return directory


def _check_highest(path: Path, highest: int, vocab_size: int) -> None:
    if highest >= vocab_size:
        raise CheckpointError(
            f"{path} has token {highest}, the target's vocab_size is {vocab_size}; "
            "use the tokenizer that belongs to the target"
        )


def copy_tokenizer(source: Path, checkpoint: Path, stop_token_ids: tuple[int, ...], destination: Path) -> None:
    """Copy the tokenizer's files, or write those that say what a GGUF file does; generation_config.json is the
    checkpoint's, or says at least where text ends.

    Raises OSError when the destination cannot be written.
    """
    if is_gguf(source):
        for name, content in read_vocabulary(open_gguf(source).metadata).files().items():
            (destination / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    for name in (*TOKENIZER_FILES, *OPTIONAL_TOKENIZER_FILES):
        # generation_config.json belongs to the model, not to the tokenizer.
        path = (checkpoint if name == GENERATION_CONFIG else source) / name
        if path.is_file():
            shutil.copyfile(path, destination / name)
    if not (destination / GENERATION_CONFIG).exists():
        text = json.dumps({"eos_token_id": list(stop_token_ids)}, indent=1)
        (destination / GENERATION_CONFIG).write_text(text + "\n", encoding="utf-8")


def open_tokenizer(copied: Path, checkpoint: Path, vocab_size: int) -> Any:
    """The tokenizer of copied files, loaded as the runtime will load it.

    Raises CheckpointError when it does not load or makes tokens the target has not.
    """
    source = _source(checkpoint)
    tokenizer = load_tokenizer(copied, source)
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest >= vocab_size:
        raise source.fault(f"the tokenizer has token {highest}, the target's vocab_size is {vocab_size}")
    return tokenizer


def _source(path: Path) -> Source:
    return Source(str(path), CheckpointError, "fetch the tokenizer again")


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path.parent} has no {path.name}; copy the tokenizer's files together")
    return read_object(path, _source(path), max_bytes=_MAX_TOKENIZER_BYTES)


def _highest_token(path: Path, tokenizer: dict[str, Any]) -> int:
    """The highest token id in a tokenizer.json, or −1 when it lists none."""
    fields = Fields(tokenizer, _source(path))
    model = fields.section("model")
    vocabulary = model.data.get("vocab")
    if not isinstance(vocabulary, dict | list):
        raise model.fault("vocab", f"must be the vocabulary, found {shown(vocabulary)}")
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
    added = fields.optional("added_tokens", list[dict[str, Any]]) or []
    ids += [token.get("id") for token in added]
    if wrong := [i for i in ids if type(i) is not int or i not in _TOKEN]:
        raise fields.source.fault(f"a token's id must be an integer from {_TOKEN}, found {shown(wrong[0])}")
    return max(ids, default=-1)
