"""The chat of `ddtree-trt run`: a conversation, and the commands that change how it goes on."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ddtree_trt.artifact.examples import Examples
from ddtree_trt.errors import DDTreeError, UsageError
from ddtree_trt.runtime.decoding.methods import METHODS, resolve_method
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.terminal import console
from ddtree_trt.terminal.examples import hint_if_far

_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?")  # a path, /like/this, is no command


class Chat:
    """A conversation with an engine. Its cache is reused from turn to turn."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        system: str | None,
        chat_template_kwargs: Mapping[str, Any],
        examples: Examples | None = None,
    ) -> None:
        self._llm = llm
        self._params = params
        self._template_kwargs = chat_template_kwargs
        self._hints = examples  # None once a hint was given
        self._beginning = [{"role": "system", "content": system}] if system else []
        self._history = list(self._beginning)

    def converse(self) -> None:
        """Answer line by line until /exit or the end of input. A refused line is reported and forgotten."""
        print(
            f"{self._llm.engine.manifest.name}, {self._params.method}. /help lists the commands, /exit ends the chat."
        )
        while True:
            try:
                text = input("\n> ").strip()
            except EOFError:
                print()
                return
            if text == "/exit":
                return
            try:
                self._take(text)
            except DDTreeError as error:
                print(f"error: {error}", file=sys.stderr)

    def _take(self, text: str) -> None:
        if command := _COMMAND.fullmatch(text):
            self._obey(command[1], (command[2] or "").strip())
        elif text:
            self._answer(text)

    def _answer(self, text: str) -> None:
        first = self._history == self._beginning
        asked = [*self._history, {"role": "user", "content": text}]
        ids = self._llm.codec.encode(asked, self._template_kwargs)
        answer = console.stream(self._llm, ids, self._params, show_tree=False)
        self._history = [*asked, {"role": "assistant", "content": answer}]
        if first and hint_if_far(text, self._hints, self._llm.codec):
            self._hints = None

    def _obey(self, name: str, value: str) -> None:
        if name not in _COMMANDS:
            raise UsageError(f"there is no command /{name}; /help lists them")
        _, _, run = _COMMANDS[name]
        run(self, value)

    def _help(self, value: str) -> None:
        rows = [(f"/{name} {argument}".rstrip(), help_) for name, (argument, help_, _) in _COMMANDS.items()]
        rows.append(("/exit", "End the chat."))
        width = max(len(shown) for shown, _ in rows)
        for shown, help_ in rows:
            print(f"{shown:<{width}}  {help_}")

    def _method(self, value: str) -> None:
        kind = self._llm.engine.manifest.drafter_kind
        if value:
            chosen = replace(self._params, method=value)  # refuses an unknown name
            self._params = replace(chosen, method=resolve_method(chosen.method, kind).name)
        able = [name for name, method in METHODS.items() if method.serves(kind)]
        print(f"method {self._params.method}; this engine can do {', '.join(able)}")

    def _budget(self, value: str) -> None:
        if value:
            budget: Any = int(value) if re.fullmatch(r"\d{1,9}", value) else value
            self._params = replace(self._params, tree_budget=budget)  # refuses what is no budget
        print(f"tree budget {self._params.tree_budget}")

    def _reset(self, value: str) -> None:
        self._history = list(self._beginning)
        print("The conversation is forgotten.")


# By name: the argument, the sentence of /help, and what it does.
_COMMANDS: Mapping[str, tuple[str, str, Callable[[Chat, str], None]]] = {
    "help": ("", "This list.", Chat._help),
    "method": (
        "[NAME]",
        "Show the method, or change it: the answers stay the same, their speed does not.",
        Chat._method,
    ),
    "budget": ("[NODES|auto]", "Show the tree budget, or change it.", Chat._budget),
    "reset": ("", "Forget the conversation.", Chat._reset),
}
