"""The codec of text and tokens: tokenizer, chat template, incremental detokenisation, stop strings."""

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cached_property
from numbers import Integral
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, cast

from ddtree_trt.artifact.template_arguments import KEYWORD, check_arguments, template_variables
from ddtree_trt.artifact.tokenizer_files import load_tokenizer
from ddtree_trt.errors import ArtifactError, UsageError, shown
from ddtree_trt.reading import Source
from ddtree_trt.runtime.chat.tools import template_messages
from ddtree_trt.runtime.text import chat_template
from ddtree_trt.runtime.values import as_integer, check_text

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]  # as OpenAI's API has them
Prompt = str | Sequence[int] | Messages
_NAME_OF_MESSAGE = re.compile(r"\b(message|msg|m)(\.name\b|\[['\"]name['\"]\])|['\"]name['\"] in (message|msg|m)\b")
INCOMPLETE = "\ufffd"  # the decoded text of a cut UTF-8 sequence


def as_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or several, as a list of prompts. Raises UsageError for what is neither."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping | bytes | bytearray | Set) or not isinstance(prompts, Iterable):
        raise UsageError(
            "prompts must be a text, a list of token ids, a list of chat messages {role, content}, or a list of such "
            f"prompts, not {shown(prompts)}"
        )
    items = list(prompts)
    single = items and (all(isinstance(p, Integral) for p in items) or all(isinstance(p, Mapping) for p in items))
    return [items] if single else items


class TextCodec:
    """The engine's tokenizer with the chat template its drafter was trained for."""

    def __init__(self, directory: Path, chat_template_args: Mapping[str, Any]) -> None:
        self._source = Source(str(directory), ArtifactError, "rebuild the engine")
        self.tokenizer = load_tokenizer(directory, self._source)
        self._template_args = dict(chat_template_args)

    def use_template(self, template: str) -> None:
        """Have another chat template, which `check_template` takes."""
        for name in ("template_text", "_template_variables"):
            self.__dict__.pop(name, None)
        self.tokenizer.chat_template = template

    def encode(
        self, prompt: Prompt, chat_template_kwargs: Mapping[str, Any] | None = None, tools: Tools | None = None
    ) -> list[int]:
        """Token ids of a prompt: text as it is, chat messages through the template, ids unchanged.

        `chat_template_kwargs` and `tools` are as for `render`, and for chat messages only. Raises UsageError for
        anything else. It does not check that ids are in the vocabulary.
        """
        is_chat = isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)
        for name, given in ((KEYWORD, chat_template_kwargs), ("tools", tools)):
            if given and not is_chat:
                raise UsageError(f"{name} are for chat messages, and this prompt is text or token ids; leave them out")
        if isinstance(prompt, str):
            check_text("the prompt", prompt)
            return list(self.tokenizer.encode(prompt, add_special_tokens=False))
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise UsageError(f"a prompt is text, token ids or chat messages, not {type(prompt).__name__}")
        chat = [item for item in prompt if isinstance(item, Mapping)]
        if chat and len(chat) == len(prompt):
            return self.encode(self.render(chat, chat_template_kwargs, tools))
        ids = [as_integer(item) for item in prompt]
        if (wrong := next((place for place, token in enumerate(ids) if token is None), None)) is not None:
            raise UsageError(
                "a prompt is text, a list of token ids, or a list of chat messages {role, content}, "
                f"not a list whose item {wrong} is {shown(prompt[wrong])}"
            )
        return cast(list[int], ids)

    def render(
        self, messages: Messages, chat_template_kwargs: Mapping[str, Any] | None = None, tools: Tools | None = None
    ) -> str:
        """Chat messages rendered by the engine's template; `chat_template_kwargs` are variables of the template over
        those that the engine was built with, `tools` those that the model may call. Raises UsageError for anything but
        messages, for variables and tools that the template never reads, and where the template refuses them or takes
        too much time or memory."""
        given = self.check_template_kwargs(chat_template_kwargs)
        prepared = template_messages(messages)
        try:
            template = self._template(tools)
        except ValueError as error:  # several templates, none of which is the default
            raise UsageError(f"this engine's chat templates cannot be used: {error}") from error
        if template is None:
            raise UsageError("this engine's tokenizer has no chat template; give the prompt as text")
        named = any("name" in message and message["role"] != "tool" for message in prepared)
        if named and not _NAME_OF_MESSAGE.search(self.template_text):
            raise UsageError("this engine's chat template has no place for the name of a message; leave it out")
        variables = {**self.tokenizer.special_tokens_map, **self._template_args, **given}
        if tools:
            self.check_takes_tools()
            variables["tools"] = [dict(tool) for tool in tools]
        return chat_template.render(template, prepared, variables)

    def _template(self, tools: Tools | None) -> str | None:
        """The chat template; of several, the one for tools where there are any. Raises ValueError without a default."""
        if not self.tokenizer.chat_template:
            return None
        return str(self.tokenizer.get_chat_template(tools=list(tools) if tools else None))

    @cached_property
    def template_text(self) -> str:
        """The chat template for chats with tools; empty where there is none that can be used."""
        try:
            return self._template([{}]) or ""
        except ValueError:
            return ""

    def check_takes_tools(self) -> None:
        """Raises UsageError where no chat template reads the tools of a chat."""
        template = self.tokenizer.chat_template
        one_for_tools = isinstance(template, dict) and "tool_use" in template
        if not one_for_tools and "tools" not in (self._template_variables or ()):
            raise UsageError("tools: this engine's chat template has no place for them; leave them out")

    def check_template_kwargs(self, given: Mapping[str, Any] | None, given_as: str = KEYWORD) -> Mapping[str, Any]:
        """A request's variables of the template. Raises UsageError for one that it never reads or that is taken."""
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            raise UsageError(f"{given_as} must be an object of names and values, not {shown(given)}")
        if given:
            check_arguments(self.tokenizer, self._template_variables, given, given_as)
        return given

    @cached_property
    def _template_variables(self) -> set[str] | None:
        return template_variables(self.tokenizer, self._source)

    @cached_property
    def added_tokens(self) -> frozenset[str]:
        """The texts that are a token each whatever stands beside them."""
        return frozenset(token.content for token in self.tokenizer.added_tokens_decoder.values())

    @cached_property
    def letter(self) -> list[int]:
        """A token whose text is a letter, to stand for any text; none where letters have no tokens."""
        return list(self.tokenizer.backend_tokenizer.encode("a", add_special_tokens=False).ids[-1:])

    @cached_property
    def bytes(self) -> frozenset[int]:
        """Tokens of a byte that are decoded together, so that one may spoil what those before it say."""
        vocabulary, decoder = self.tokenizer.get_vocab(), repr(self.tokenizer.backend_tokenizer.decoder)
        names = map("<0x{:02X}>".format, range(256 * ("ByteFallback" in decoder)))
        return frozenset(vocabulary[name] for name in names if name in vocabulary)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        """The tokens that `skip_special_tokens` leaves out."""
        return frozenset(i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special)

    def special_tokens(self, texts: Iterable[str]) -> frozenset[int]:
        """Those special tokens that stand for one of the texts."""
        wanted, added = set(texts), self.tokenizer.added_tokens_decoder
        return frozenset(i for i in self._special_ids if added[i].content in wanted)

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, keep: Set[int] = frozenset()
    ) -> str:
        """The tokens' text, with U+FFFD for bytes that are no UTF-8. `keep`: special tokens that are not left out."""
        if keep and skip_special_tokens:
            token_ids = [t for t in token_ids if t in keep or t not in self._special_ids]
            skip_special_tokens = False
        # Not `tokenizer.decode`, which may clean up spaces and takes ten times as long.
        return str(self.tokenizer.backend_tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


class Stop(NamedTuple):
    """A stop string that was met."""

    text: str
    tokens: int  # of the stream, up to the one that completes it
    kept: int  # of these, the ones that begin within the text that is left


class TextStream:
    """The text of a growing token sequence, cut before the first stop string.

    Text never ends inside a UTF-8 character, whose bytes may be spread over several tokens. Neither the text nor what a
    stop string cuts depends on how the tokens are divided into parts. While one thread adds tokens, others may read
    `text` and `settled`.
    """

    _LONGEST_WINDOW = 4  # tokens decoded again with every part

    def __init__(
        self,
        codec: TextCodec,
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        keep_special_tokens: Set[int] = frozenset(),
        keep_stop: bool = False,
        begins: bool = False,
    ) -> None:
        """`begins`: whether no text is in front of it: at a text's beginning, decoders may leave out a space."""
        self._codec = codec
        self._skip_special_tokens = skip_special_tokens
        self._keep_special_tokens = keep_special_tokens
        self._stop = tuple(stop)
        self._keep_stop = keep_stop
        self.tokens: list[int] = []
        # A token's text may depend on the token before it, so a window of the latest tokens is decoded each time.
        self._window = 0  # index of the window's first token
        self._boundary = 0  # latest token index before which no character is incomplete
        self._front = [] if begins else codec.letter  # of a window that begins with the first token
        self._taken = len(self._decode(0))  # characters of the window's text that are in `text`, or in front of it
        self.text = ""
        self._starts: list[int] = []  # with stop strings: in which character each token begins at the latest

    def push(self, tokens: Sequence[int], *, may_stop: bool = True) -> Stop | None:
        """Add tokens; returns the stop string that they complete first, if any, at which the text is cut."""
        if not self._stop:
            for part in [tokens] if self._codec.bytes.isdisjoint(tokens) else [[token] for token in tokens]:
                self.text += self._add(part)
            return None
        for token in tokens:
            before = len(self.text)
            self._starts.append(before)
            text = self.text + self._add([token])
            finds = [(at, s) for s in self._stop if (at := text.find(s, max(0, before - len(s) + 1))) >= 0]
            if may_stop and finds:
                at, stop = min(finds, key=itemgetter(0))
                self.text = text[: at + len(stop) if self._keep_stop else at]
                return Stop(stop, len(self.tokens), bisect_left(self._starts, len(self.text)))
            self.text = text  # at once: nobody sees a stop string that is to be cut
        return None

    def _add(self, tokens: Sequence[int]) -> str:
        """Add tokens; returns the text that is known by them."""
        if not tokens:
            return ""
        self.tokens += tokens
        grown = self._decode(self._window)
        complete = grown.rstrip(INCOMPLETE)
        added, self._taken = complete[self._taken :], max(self._taken, len(complete))
        if len(complete) == len(grown):
            self._advance()
        return added

    def _decode(self, start: int) -> str:
        tokens = self.tokens[start:] if start else self._front + self.tokens
        return self._codec.decode(tokens, skip_special_tokens=self._skip_special_tokens, keep=self._keep_special_tokens)

    def _advance(self) -> None:
        """Move the boundary behind the latest token, a long window's start to the one before."""
        if len(self.tokens) - self._window > self._LONGEST_WINDOW and (taken := len(self._decode(self._boundary))):
            # A window of tokens without text would not determine the next token's text.
            self._window, self._taken = self._boundary, taken
        self._boundary = len(self.tokens)

    def flush(self) -> None:
        """Add the replacement characters of an incomplete character, at the end of the sequence."""
        text = self._decode(self._window)
        self.text, self._taken = self.text + text[self._taken :], max(self._taken, len(text))

    def settled(self) -> tuple[int, int]:
        """How many characters of the text, and how many tokens, no later stop string can remove."""
        text, held = self.text, 0
        if not self._stop:
            return len(text), len(self.tokens)
        last = text[-1:]
        for stop in self._stop if last else ():
            end = min(len(stop) - 1, len(text))
            # Only a part of the stop string that ends in the text's last character can end the text.
            while (size := stop.rfind(last, 0, end) + 1) > held:
                if text.endswith(stop[:size]):
                    held = size
                    break
                end = size - 1
        return len(text) - held, bisect_left(self._starts, len(text) - held)
