"""Text in and out: tokenizer, chat template, incremental detokenisation, stop strings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddtree_trt.errors import ArtifactError, UsageError

Messages = Sequence[Mapping[str, str]]
Prompt = str | Sequence[int] | Messages
INCOMPLETE = "\ufffd"  # what a tokenizer decodes a cut UTF-8 sequence to


class TextCodec:
    """The engine's tokenizer with the chat template its drafter was trained for."""

    def __init__(self, directory: Path, chat_template_args: Mapping[str, Any]) -> None:
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it advises installing torch
        from transformers import AutoTokenizer, logging

        logging.set_verbosity_error()
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        except Exception as error:  # transformers raises whatever its parsers raise
            raise ArtifactError(f"no usable tokenizer in {directory}: {error}; rebuild the engine") from error
        self._template_args = dict(chat_template_args)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: text as it is, chat messages through the template, ids unchanged.

        Raises UsageError for anything else and for ids outside the vocabulary's range of integers.
        """
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt, add_special_tokens=False))
        if not isinstance(prompt, Sequence):
            raise UsageError(f"a prompt is text, token ids or chat messages, not {type(prompt).__name__}")
        if all(isinstance(item, Mapping) for item in prompt) and prompt:
            return self._encode_chat(prompt)  # type: ignore[arg-type]
        if all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
            return [int(i) for i in prompt]  # type: ignore[arg-type, call-overload]
        raise UsageError("a prompt is text, a list of token ids, or a list of chat messages {role, content}")

    def _encode_chat(self, messages: Messages) -> list[int]:
        for message in messages:
            if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
                raise UsageError(f"a chat message needs a role and a content, both text: {dict(message)!r}")
        if not self.tokenizer.chat_template:
            raise UsageError("this engine's tokenizer has no chat template; give the prompt as text")
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(m) for m in messages], tokenize=False, add_generation_prompt=True, **self._template_args
            )
        except Exception as error:  # a template is a program of its own and raises what it likes
            raise UsageError(f"the chat template refused the messages: {error}") from error
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


class TextStream:
    """The text of a growing token sequence, cut before the first stop string.

    Text is settled token by token and never ends inside a UTF-8 character: a token that leaves one open settles with
    the token that closes it. `ends[i]` is the length of the settled text after token i.
    """

    def __init__(
        self,
        codec: TextCodec,
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        keep_stop: bool = False,
    ) -> None:
        self._codec, self._skip = codec, skip_special_tokens
        self._stop, self._keep_stop = tuple(stop), keep_stop
        self._tokens: list[int] = []
        self._window = self._settled = 0  # tokens before _window no longer influence how later ones decode
        self.text = ""
        self.ends: list[int] = []

    def push(self, token: int, *, silent: bool = False, may_stop: bool = True) -> str | None:
        """Add a token; returns the stop string it completes, if any. A silent token adds no text."""
        if silent:
            self.ends.append(len(self.text))
            return None
        self._tokens.append(token)
        before = len(self.text)
        window = self._decode(self._window, self._settled)
        grown = self._decode(self._window, len(self._tokens))
        if len(grown) > len(window) and not grown.endswith(INCOMPLETE):
            self.text += grown[len(window) :]
            self._window, self._settled = self._settled, len(self._tokens)
        self.ends.append(len(self.text))
        return self._cut(before) if may_stop else None

    def _decode(self, start: int, end: int) -> str:
        return self._codec.decode(self._tokens[start:end], skip_special_tokens=self._skip)

    def _cut(self, before: int) -> str | None:
        """Find the earliest stop string that ends behind `before` and cut the text at it."""
        found: tuple[int, str] | None = None
        for stop in self._stop:
            at = self.text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0 and (found is None or at < found[0]):
                found = (at, stop)
        if found is None:
            return None
        at, stop = found
        self.text = self.text[: at + len(stop) if self._keep_stop else at]
        return stop

    def kept_tokens(self) -> int:
        """Tokens needed to cover the text after a cut: those that lie wholly behind it are dropped."""
        size = len(self.text)
        if size == 0:
            return 0
        return next((i + 1 for i, end in enumerate(self.ends) if end >= size), len(self.ends))

    def flush(self) -> None:
        """At the end of the sequence, settle what an unfinished character left open."""
        window = self._decode(self._window, self._settled)
        self.text += self._decode(self._window, len(self._tokens))[len(window) :]
        self._settled = len(self._tokens)
        if self.ends:
            self.ends[-1] = len(self.text)

    def safe_length(self) -> int:
        """Characters that can be shown now: those that cannot turn out to be the start of a stop string."""
        held = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self.text)), held, -1):
                if self.text.endswith(stop[:size]):
                    held = size
                    break
        return len(self.text) - held
