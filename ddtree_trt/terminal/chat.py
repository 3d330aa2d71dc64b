"""The chat of `ddtree-trt run`: a conversation, and the commands that change how it goes on."""

import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ddtree_trt.artifact.examples import Examples
from ddtree_trt.errors import DDTreeError, UsageError
from ddtree_trt.runtime.decoding.methods import METHODS, resolve_method
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.outputs import RequestOutput
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.terminal import console
from ddtree_trt.terminal.printing import print_error, print_fields, print_note

_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)  # a path, /like/this, is no command

Turn = tuple[str, str]  # a question and its answer


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
        """Raises UsageError for params that the engine cannot honour."""
        self._llm = llm
        self._template_kwargs = chat_template_kwargs
        self._hints = examples  # None after the first question
        self._system = system
        self._set(params)
        self._forget()

    def _forget(self) -> None:
        self._turns: list[Turn] = []
        self._told = False  # that turns are left out

    def converse(self) -> None:
        """Answer message by message until /quit or the end of input. Ctrl-C ends an answer or the chat."""
        name, method = self._llm.engine.manifest.name, self._params.method
        print(f"{name}, {method}. /help lists the commands; Ctrl-C ends an answer, Ctrl-D the chat.")
        read = _reader()
        while True:
            try:
                text = read().strip()
            except EOFError:
                print()
                return
            if text in ("/quit", "/exit"):
                return
            try:
                self._take(text)
            except KeyboardInterrupt:
                print()
            except DDTreeError as error:
                print_error(str(error))

    def _take(self, text: str) -> None:
        if not (command := _COMMAND.fullmatch(text)):
            if text:
                self._answer(text)
        elif command[1] not in _COMMANDS:
            raise UsageError(f"there is no command /{command[1]}; /help lists them")
        else:
            _COMMANDS[command[1]][2](self, (command[2] or "").strip())

    def _answer(self, question: str) -> None:
        turns, ids, params = self._fitted(question)
        output: RequestOutput | None = None
        try:
            for so_far in console.stream(self._llm, ids, params):
                output = so_far
        except KeyboardInterrupt:
            if output is None:
                raise
            print("\n" + console.closing_line(output.metrics, "stopped"))
        assert output is not None  # a request ends with a part
        self._turns = [*turns, (question, output.outputs[0].text)]
        console.hint(question, self._hints)
        self._hints = None

    def _fitted(self, question: str) -> tuple[list[Turn], list[int], SamplingParams]:
        """The turns that are kept, the prompt's tokens, and params with as many new tokens as there is room for.

        Where a quarter of the context, or the fewer tokens that are wanted, is not free, the oldest turns are left out
        until half of it is: to leave out one with every question would compute the whole prompt anew with every one.
        """
        capacity, wanted = self._llm.engine.manifest.limits.max_seq_len, self._params.wanted_tokens
        turns, ids = self._turns, self._encode(self._turns, question)
        if capacity - len(ids) < min(wanted, capacity // 4):
            while turns and capacity - len(ids) < capacity // 2:
                turns = turns[1:]
                ids = self._encode(turns, question)
        room = capacity - len(ids)
        if room < 1:
            return turns, ids, self._params  # refused, as a prompt too long
        if len(turns) < len(self._turns) and not self._told:
            self._told = True
            print_note(
                f"note: the conversation fills the context of {capacity} tokens; its oldest turns are left out from "
                "here on; /reset forgets all of it"
            )
        return turns, ids, replace(self._params, max_tokens=min(wanted, room))

    def _encode(self, turns: list[Turn], question: str) -> list[int]:
        said = [("system", self._system)] if self._system else []
        for asked, answered in turns:
            said += [("user", asked), ("assistant", answered)]
        messages = [{"role": role, "content": text} for role, text in [*said, ("user", question)]]
        return self._llm.codec.encode(messages, self._template_kwargs)

    def _set(self, params: SamplingParams) -> None:
        """Take these params from here on. Raises UsageError for what the engine cannot honour."""
        # A request that never begins; how many tokens fit is known with each question.
        self._llm.stream([0], replace(params, max_tokens=None, min_tokens=0)).close()
        self._params = params

    def _help(self, value: str) -> None:
        rows = [(f"/{name} {argument}".rstrip(), help_) for name, (argument, help_, _) in _COMMANDS.items()]
        print_fields([*rows, ("/quit", "End the chat, as /exit and Ctrl-D do.")])

    def _method(self, value: str) -> None:
        kind = self._llm.engine.manifest.drafter_kind
        if value:
            chosen = replace(self._params, method=value)  # refuses an unknown name
            self._set(replace(chosen, method=resolve_method(chosen.method, kind).name))
        able = [name for name, method in METHODS.items() if method.serves(kind)]
        print(f"method {self._params.method}; this engine can do {', '.join(able)}")

    def _budget(self, value: str) -> None:
        if value:
            self._set(replace(self._params, tree_budget=_number(value)))
        print(f"tree budget {self._params.tree_budget}")

    def _temperature(self, value: str) -> None:
        if value:
            self._set(replace(self._params, temperature=_number(value)))
        print(f"temperature {self._params.temperature:g}")

    def _set_system(self, value: str) -> None:
        if value:
            self._system = None if value == "none" else value
        print(f"system message: {self._system or 'none'}")

    def _reset(self, value: str) -> None:
        self._forget()
        print("The conversation is forgotten.")


def _number(value: str) -> Any:
    """The number that was typed; another text as it is, which SamplingParams refuses."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(value)
    return value


def _reader() -> Callable[[], str]:
    """What reads a message, with history and editing on a terminal. Raises EOFError and KeyboardInterrupt."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return lambda: input("\n> ")
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession("> ")

    def read() -> str:
        print()
        while True:
            try:
                return session.prompt()
            except KeyboardInterrupt:
                if not session.default_buffer.text:
                    raise

    return read


# By name: the argument, the sentence of /help, and what it does.
_COMMANDS: Mapping[str, tuple[str, str, Callable[[Chat, str], None]]] = {
    "help": ("", "This list.", Chat._help),
    "method": ("[NAME]", "Show the method, or change it: its speed changes, the answers do not.", Chat._method),
    "budget": ("[NODES|auto]", "Show the tree budget, or change it.", Chat._budget),
    "temperature": ("[T]", "Show the temperature, or change it; 0 is greedy.", Chat._temperature),
    "system": ("[TEXT|none]", "Show the system message, or change it.", Chat._set_system),
    "reset": ("", "Forget the conversation.", Chat._reset),
}
