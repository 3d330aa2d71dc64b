"""The tokenizer's files: found beside a checkpoint or made from a GGUF file, and put into the engine."""

import json
import shutil
from pathlib import Path
from typing import Any

from ddtree_trt.artifact.files import CHAT_TEMPLATE, OPTIONAL_TOKENIZER_FILES, TOKENIZER_FILES
from ddtree_trt.artifact.tokenizer_files import load_tokenizer
from ddtree_trt.build.checkpoint.config import GENERATION_CONFIG
from ddtree_trt.build.checkpoint.gguf.files import open_gguf
from ddtree_trt.build.checkpoint.gguf.vocabulary import tokenizer_files
from ddtree_trt.build.sources import is_gguf
from ddtree_trt.errors import CheckpointError
from ddtree_trt.reading import Source

_VOCABULARY, _SETTINGS = "tokenizer.json", "tokenizer_config.json"
_TEMPLATES = "additional_chat_templates"  # a folder of more, by their names


def find_tokenizer(checkpoint: Path) -> Path:
    """Where the target's tokenizer is: in the checkpoint's directory, in `tokenizer` beside it, or in the GGUF file.
    Raises CheckpointError when a file is missing, and when a GGUF file's tokenizer is of a kind that is not
    supported."""
    if is_gguf(checkpoint):
        tokenizer_files(open_gguf(checkpoint).metadata)
        return checkpoint
    sibling = checkpoint.resolve().parent / "tokenizer"
    directory = next((d for d in (checkpoint, sibling) if (d / _VOCABULARY).is_file()), None)
    if directory is None:
        raise CheckpointError(f"{checkpoint} has no tokenizer: {_VOCABULARY} is missing; copy it and {_SETTINGS} too")
    if not (directory / _SETTINGS).is_file():
        raise CheckpointError(f"{directory} has no {_SETTINGS}; copy the tokenizer's files together")
    return directory


def copy_tokenizer(source: Path, checkpoint: Path, stop_token_ids: tuple[int, ...], destination: Path) -> None:
    """Copy the tokenizer's files, or write those that say what a GGUF file does; generation_config.json is the
    checkpoint's, or says where text ends. Raises OSError for the destination, CheckpointError for a template."""
    if is_gguf(source):
        for name, content in tokenizer_files(open_gguf(source).metadata).items():
            (destination / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    for name in (*TOKENIZER_FILES, *OPTIONAL_TOKENIZER_FILES):
        # generation_config.json belongs to the model, not to the tokenizer.
        path = (checkpoint if name == GENERATION_CONFIG else source) / name
        if path.is_file():
            shutil.copyfile(path, destination / name)
    if templates := sorted((source / _TEMPLATES).glob("*.jinja")):
        # An engine has no folders: as a list beside the settings, where transformers reads templates, too.
        default = destination / CHAT_TEMPLATE
        named = {path.stem: path for path in templates} | ({"default": default} if default.exists() else {})
        try:
            settings = json.loads((destination / _SETTINGS).read_text("utf-8"))
            listed = [{"name": name, "template": path.read_text("utf-8")} for name, path in named.items()]
        except ValueError as error:
            raise CheckpointError(f"{source} has a template or settings that cannot be read: {error}") from error
        settings["chat_template"] = listed
        default.unlink(missing_ok=True)
        (destination / _SETTINGS).write_text(json.dumps(settings, ensure_ascii=False), encoding="utf-8")
    if not (destination / GENERATION_CONFIG).exists():
        text = json.dumps({"eos_token_id": list(stop_token_ids)}, indent=1)
        (destination / GENERATION_CONFIG).write_text(text + "\n", encoding="utf-8")


def open_tokenizer(copied: Path, checkpoint: Path, vocab_size: int) -> Any:
    """The tokenizer of copied files, loaded as the runtime will load it. Raises CheckpointError when it does not load,
    or makes tokens the target has not."""
    source = Source(str(checkpoint), CheckpointError, "fetch the tokenizer again, that of the target")
    tokenizer = load_tokenizer(copied, source)
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest >= vocab_size:
        raise source.fault(f"the tokenizer has token {highest}, the target's vocab_size is {vocab_size}")
    return tokenizer
