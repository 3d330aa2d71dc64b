"""The tokenizer's files, loaded by one function in `build` and runtime: what one accepts the other can use."""

import os
from pathlib import Path
from typing import Any

from ddtree_trt.artifact.files import CHAT_TEMPLATE
from ddtree_trt.errors import ArtifactError
from ddtree_trt.reading import Source, read_object


def has_chat_template(directory: Path) -> bool:
    """Whether the tokenizer in a directory has a chat template, without loading it. False where it is unreadable."""
    if (directory / CHAT_TEMPLATE).is_file():
        return True
    path = directory / "tokenizer_config.json"
    try:
        return bool(read_object(path, Source(str(path), ArtifactError, "rebuild the engine")).get("chat_template"))
    except ArtifactError:
        return False


def load_tokenizer(directory: Path, source: Source) -> Any:
    """The transformers tokenizer of a directory. Raises the source's error for whatever keeps it from loading."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it advises installing torch
    # Not AutoTokenizer: it imports the model configurations, and with them torch where that is installed.
    from transformers import PreTrainedTokenizerFast, logging

    logging.set_verbosity_error()
    try:
        return PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)
    except BaseException as error:
        # transformers raises whatever its parsers raise; a panic of the Rust ones derives from BaseException alone.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:300]
        raise source.fault(f"no usable tokenizer ({type(error).__name__}: {reason})") from error
