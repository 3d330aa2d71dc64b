"""The tokenizer's files: found beside a checkpoint or made from a GGUF file, and put into the engine."""

from __future__ import annotations

import base64
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddtree_trt.artifact.files import OPTIONAL_TOKENIZER_FILES, TOKENIZER_FILES
from ddtree_trt.artifact.tokenizer_files import load_tokenizer
from ddtree_trt.build.checkpoint.config import GENERATION_CONFIG
from ddtree_trt.build.checkpoint.gguf.files import open_gguf
from ddtree_trt.build.checkpoint.gguf.vocabulary import read_vocabulary
from ddtree_trt.build.checkpoint.paths import is_gguf
from ddtree_trt.errors import CheckpointError
from ddtree_trt.reading import Fields, Source, read_object, shown

# Bytes that rules make of one byte of text; of rules whose replacements are replaced again, it may be terabytes.
# Published tokenizers stay below 50: compatibility forms of Unicode, 11, each letter of them
# in lower case, 1.5, each space of them a mark of three bytes.
_MOST_GROWTH = 64.0
_GROWTH = {  # of the rules that state no replacement; others do not lengthen a text
    "NFC": 3.0,
    "NFD": 3.0,
    "NFKC": 11.0,
    "NFKD": 11.0,
    "Lowercase": 1.5,
    "ByteLevel": 2.0,
    "BertNormalizer": 9.0,  # decomposes, lowers, puts spaces around ideographs
    "BPEDecoder": 2.0,  # a mark of no characters becomes a space
    "CTC": 2.0,
}


def check_growth(tokenizer: Fields, part: str) -> None:
    """Raises the fields' error where the rules of a part of tokenizer.json, `normalizer` or `decoder`, may make more
    than `_MOST_GROWTH` bytes of one byte of text."""
    rules = _rules(tokenizer.optional(part, dict[str, Any]))
    if untyped := [rule for rule in rules if rule.get("type") is None]:  # read by fields that other rules may have too
        raise tokenizer.fault(part, f"has a rule without a type: {shown(untyped[0])}")
    if (most := most_growth(rules)) > _MOST_GROWTH:
        limit = f"at most {_MOST_GROWTH:g} are supported"
        raise tokenizer.fault(part, f"may make {most:.3g} bytes of one byte of text, {limit}")


def most_growth(rules: Sequence[Mapping[str, Any]]) -> float:
    """A bound of the bytes that rules, applied one after the other, make of one byte, each the most it can of what
    those before it made."""
    return math.prod(map(_growth, rules))


def _growth(rule: Mapping[str, Any]) -> float:
    kind, table = str(rule["type"]), rule.get("precompiled_charsmap")
    if kind == "Replace":
        made, pattern = _bytes(rule.get("content")), rule.get("pattern")
        found = _bytes(pattern.get("String")) if isinstance(pattern, dict) else 0
        # An expression may match each character, and nothing behind it.
        return max(1.0, made / found) if found else max(1.0, made) + made
    if kind == "Prepend":  # once in a text
        return max(1.0, _bytes(rule.get("prepend")) / _MOST_GROWTH)
    if not isinstance(table, str):
        return _GROWTH.get(kind, 1.0)
    try:
        data = base64.b64decode(table)
    except ValueError:
        return 1.0  # the tokenizer does not load
    # SentencePiece's table: the bytes of its index, the index, and the replacements, each ending in a zero.
    return max(1.0, *map(len, data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")))


def _bytes(text: Any) -> int:
    return len(text.encode("utf-8", "surrogatepass")) if isinstance(text, str) else 0


def _rules(part: Any) -> list[dict[str, Any]]:
    """The rules in the order in which they are applied."""
    if not isinstance(part, dict):
        return []
    if part.get("type") != "Sequence":
        return [part]
    parts = [each for name in ("normalizers", "decoders") if isinstance(part.get(name), list) for each in part[name]]
    return [rule for each in parts for rule in _rules(each)]


_VOCABULARY, _SETTINGS = "tokenizer.json", "tokenizer_config.json"
_MAX_TOKENIZER_BYTES = 256 << 20  # Qwen3's has 11 MB, the largest published ones some 40


def find_tokenizer(checkpoint: Path) -> Path:
    """Where the target's tokenizer is: in the checkpoint's directory, in `tokenizer` beside it, or in the GGUF file.

    Raises CheckpointError when a file is missing, and when a GGUF file's tokenizer is of a kind that is not supported.
    """
    if is_gguf(checkpoint):
        read_vocabulary(open_gguf(checkpoint).metadata)
        return checkpoint
    sibling = checkpoint.resolve().parent / "tokenizer"
    directory = next((d for d in (checkpoint, sibling) if (d / _VOCABULARY).is_file()), None)
    if directory is None:
        raise CheckpointError(
            f"{checkpoint} has no tokenizer: {_VOCABULARY} is missing; copy it and {_SETTINGS} from where the "
            "checkpoint comes from"
        )
    if not (directory / _SETTINGS).is_file():
        raise CheckpointError(f"{directory} has no {_SETTINGS}; copy the tokenizer's files together")
    return directory


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

    Raises CheckpointError when it does not load, may make texts far longer, or makes tokens the target has not.
    """
    advice = "fetch the tokenizer again, that of the target"
    source = Source(str(checkpoint), CheckpointError, advice)
    rules = Source(str(checkpoint / _VOCABULARY), CheckpointError, advice)
    fields = Fields(read_object(copied / _VOCABULARY, rules, max_bytes=_MAX_TOKENIZER_BYTES), rules)
    for part in ("normalizer", "decoder"):  # before a library applies them
        check_growth(fields, part)
    tokenizer = load_tokenizer(copied, source)
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest >= vocab_size:
        raise source.fault(f"the tokenizer has token {highest}, the target's vocab_size is {vocab_size}")
    return tokenizer
