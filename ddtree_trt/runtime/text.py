"""Text in and out: tokenizer, chat template, incremental detokenisation, stop strings."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddtree_trt.errors import ArtifactError, UsageError
from ddtree_trt.reading import Source
from ddtree_trt.tokenizer_files import load_tokenizer

Messages = Sequence[Mapping[str, str]]
Prompt = str | Sequence[int] | Messages
INCOMPLETE = "\ufffd"  # what a tokenizer decodes a cut UTF-8 sequence to


class TextCodec:
    """The engine's tokenizer with the chat template its drafter was trained for."""

    def __init__(self, directory: Path, chat_template_args: Mapping[str, Any]) -> None:
        self.tokenizer = load_tokenizer(directory, Source(str(directory), ArtifactError, "rebuild the engine"))
        self._template_args = dict(chat_template_args)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: text as it is, chat messages through the template, ids unchanged.

        Raises UsageError for anything else and for ids outside the vocabulary's range of integers.
        """
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt, add_special_tokens=False))
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise UsageError(f"a prompt is text, token ids or chat messages, not {type(prompt).__name__}")
        if all(isinstance(item, Mapping) for item in prompt) and prompt:
            return self._encode_chat(prompt)  # type: ignore[arg-type]
        if all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
            return [int(i) for i in prompt]  # type: ignore[arg-type]
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
        """The tokens' text exactly, with U+FFFD for bytes that are no UTF-8."""
        # Not the tokenizer's own decode: that one may tidy up spaces and costs ten times as much.
        return str(self.tokenizer.backend_tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


class TextStream:
    """The text of a growing token sequence, cut before the first stop string.

    A token adds the characters it completes: text never ends inside a UTF-8 character, whose bytes may be spread over
    several tokens. `starts[i]` is the character at which token i begins, be it the middle of that character's bytes.
    """

    _LONGEST_WINDOW = 4  # tokens decoded again with every new one

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
        # How a token decodes may depend on the one before it: a window of tokens is decoded, of which `_taken`
        # characters are in the text. `_boundary` is the last place before the newest tokens where no character is open.
        self._window = self._boundary = self._taken = 0
        self.text = ""
        self.starts: list[int] = []

    def push(self, token: int, *, silent: bool = False, may_stop: bool = True) -> str | None:
        """Add a token; returns the stop string it completes, if any. A silent token adds no text."""
        before = len(self.text)
        self.starts.append(before)
        if silent:
            return None
        self._tokens.append(token)
        grown = self._decode()
        complete = grown.rstrip(INCOMPLETE)
        self._take(complete)
        if len(complete) == len(grown):
            self._advance()
        return self._cut(before) if self._stop and may_stop else None

    def _decode(self) -> str:
        return self._codec.decode(self._tokens[self._window :], skip_special_tokens=self._skip)

    def _take(self, text: str) -> None:
        """Append what is new of the window's text."""
        if len(text) > self._taken:
            self.text += text[self._taken :]
            self._taken = len(text)

    def _advance(self) -> None:
        """No character is open: a long window may begin at the boundary before this one."""
        if len(self._tokens) - self._window > self._LONGEST_WINDOW:
            window, self._window = self._window, self._boundary
            taken = len(self._decode())
            if taken:
                self._taken = taken
            else:  # tokens without text tell nothing about how the next one decodes
                self._window = window
        self._boundary = len(self._tokens)

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

    def tokens_within(self, size: int) -> int:
        """Tokens that begin within the first `size` characters: those needed to cover them."""
        return bisect_left(self.starts, size)

    def flush(self) -> None:
        """At the end of the sequence, take what an unfinished character left open."""
        self._take(self._decode())

    def safe_length(self) -> int:
        """Characters that can be shown now: those that cannot turn out to be the start of a stop string."""
        held, last = 0, self.text[-1:]
        for stop in self._stop if last else ():
            end = min(len(stop) - 1, len(self.text))
            # Only a part of the stop string that ends in the text's last character can end the text.
            while (size := stop.rfind(last, 0, end) + 1) > held:
                if self.text.endswith(stop[:size]):
                    held = size
                    break
                end = size - 1
        return len(self.text) - held
