"""The chat of `ddtree-trt run`: in this process with messages from a list, and on a terminal with keys."""

import itertools
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest
from pacing import WAIT_S

from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.llm import LLM
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.terminal import chat as chats
from ddtree_trt.terminal.chat import Chat

QUESTION = "There are 6 drawers, each with 32 cards. How many cards are there?"
ANSWER = "Together: 180 + 12 = 192.\nAnswer: 192"
SECOND = "There are 8 boxes, each with 24 pens. How many pens are there?"
CONTEXT = 256  # of a small engine, in tokens

Said = tuple[str, str, list[str]]  # stdout, stderr, and the prompts as text
Converse = Callable[..., Said]


@pytest.fixture(scope="module")
def small(small_engine: Path) -> Iterator[LLM]:
    """The tiny pair with a short context."""
    with LLM(small_engine) as llm:
        yield llm


@pytest.fixture
def converse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Converse:
    """A chat in which the messages are said."""

    def run(llm: LLM, *messages: str, params: SamplingParams | None = None) -> Said:
        left, prompts = iter(messages), []
        stream = llm.stream

        def read() -> str:
            message = next(left, None)
            if message is None:
                raise EOFError
            return message

        def noted(prompt: Any, *rest: Any, **options: Any) -> Any:
            if prompt != [0]:  # which only tries params
                prompts.append(llm.codec.decode(prompt, skip_special_tokens=False))
            return stream(prompt, *rest, **options)

        monkeypatch.setattr(chats, "_reader", lambda: read)
        monkeypatch.setattr(llm, "stream", noted)
        try:
            Chat(llm, params or SamplingParams(method="ddtree", tree_budget=16), None, {}).converse()
        finally:
            monkeypatch.setattr(llm, "stream", stream)
        return (*capsys.readouterr(), prompts)

    return run


@pytest.mark.parametrize(("method", "passes"), [("ddtree", 2), ("ar", 5)])
def test_ctrl_c_ends_the_answer_alone(
    llm: LLM, converse: Converse, monkeypatch: pytest.MonkeyPatch, method: str, passes: int
) -> None:
    """What was written stays in the conversation, and later answers are those of an engine that nobody interrupted."""
    verify, count = llm.engine.verify, itertools.count(1)

    def interrupting(requests: Any) -> Any:
        result = verify(requests)
        if next(count) == passes:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(llm.engine, "verify", interrupting)
    params = SamplingParams(method=method, max_tokens=100)
    out, err, prompts = converse(llm, QUESTION, SECOND, "/reset", QUESTION, params=params)
    assert err == "" and next(count) > passes + 1
    written, figures = out.split("\n", 1)[1].split("\n[", 1)
    assert re.match(r"\d+ tokens · stopped · ", figures)
    assert ANSWER not in written and written.strip() in prompts[1] and QUESTION in prompts[1]
    assert ANSWER in out.rpartition("forgotten")[2] and prompts[2] == prompts[0]


def test_ctrl_c_before_the_answer_begins_forgets_the_question(
    llm: LLM, converse: Converse, monkeypatch: pytest.MonkeyPatch
) -> None:
    render, first = llm.codec.render, iter([True])

    def interrupted(*arguments: Any) -> Any:
        if next(first, False):
            signal.raise_signal(signal.SIGINT)
        return render(*arguments)

    monkeypatch.setattr(llm.codec, "render", interrupted)
    out, err, prompts = converse(llm, SECOND, QUESTION)
    assert err == "" and out.count("tokens/round") == 1 and ANSWER in out
    assert len(prompts) == 1 and SECOND not in prompts[0]


def test_a_full_context_drops_the_oldest_turns(small: LLM, converse: Converse) -> None:
    questions = [f"There are {n} drawers, each with 32 cards. How many cards are there?" for n in range(2, 14)]
    out, err, prompts = converse(small, *questions, "/reset", *questions)
    assert out.count("Answer: ") == 24
    assert err.count(f"fills the context of {CONTEXT} tokens; its oldest turns are left out") == 2 == err.count("\n")
    assert "/reset" in err
    held = [sum(q in prompt for q in questions) for prompt in prompts]
    assert all(question in prompt for question, prompt in zip(questions * 2, prompts, strict=True))
    assert held[:3] == [1, 2, 3] and max(held) < 12 and min(held[3:12]) > 1
    for prompt, number in zip(prompts[:12], held[:12], strict=True):  # the newest are kept, in their order
        found = sorted((prompt.index(q), q) for q in questions if q in prompt)
        last = questions.index(found[-1][1])
        assert [q for _, q in found] == questions[last + 1 - number : last + 1]


def test_a_message_too_long_forgets_nothing(small: LLM, converse: Converse) -> None:
    _, err, prompts = converse(small, QUESTION, "word " * CONTEXT, SECOND)
    assert err.startswith("error: the prompt has ") and err.count("\n") == 1
    assert QUESTION in prompts[-1] and SECOND in prompts[-1]


def test_the_footer_says_what_cut_an_answer(small: LLM, converse: Converse) -> None:
    few = converse(small, QUESTION, params=SamplingParams(max_tokens=4))[0]
    many = converse(small, QUESTION, params=SamplingParams(max_tokens=100_000, ignore_eos=True))[0]
    whole = converse(small, QUESTION)[0]
    assert "[4 tokens · cut by the limit --max-tokens · " in few
    assert f"tokens · cut at the end of the context of {CONTEXT} tokens · " in many
    assert "cut" not in whole and ANSWER in whole


def test_what_cannot_be_done_is_refused_at_once(llm: LLM, converse: Converse) -> None:
    refused = {
        "/helpme": "there is no command /helpme; /help lists them",
        "/budget 999999": "tree_budget 999999 is above this engine's 256; lower it or rebuild with a larger "
        "--max-tree-budget",
        "/budget few": "'few'",
        "/temperature hot": "temperature must be a number",
        "/temperature 200": "temperature must be a number from 0 to 100",
        "/method fast": "'fast'",
        "/method draft-model": "draft-model",
    }
    out, err, prompts = converse(llm, *refused, "/budget", "/etc/hosts is a file.")
    for line, reason in zip(err.splitlines(), refused.values(), strict=True):
        assert line.startswith("error: ") and reason in line
    assert "tree budget 16" in out and out.count("tokens/round") == len(prompts) == 1, "a path is a prompt"
    with pytest.raises(UsageError, match="tree_budget 999999 is above"):
        converse(llm, params=SamplingParams(tree_budget=999_999))


def test_methods_and_budgets_are_shown_and_changed(llm: LLM, converse: Converse) -> None:
    lines = ("/help", "/method ar", QUESTION, "/method", "/method ddtree", "/budget 3", QUESTION, "/exit", "never")
    out, err, prompts = converse(llm, *lines, params=SamplingParams(method="ddtree"))
    assert err == "" and len(prompts) == 2
    assert all(f"\n/{name} " in out for name in ("help", "method", "budget", "reset", "quit"))
    first, second = (line for line in out.splitlines() if "tokens/round" in line)
    assert "1.00 tokens/round" in first and "budget 3.0" in second
    assert "method ar; this engine can do ddtree, dflash, ar, dflash-sample" in out and "tree budget 3" in out


def test_commands_that_change_the_answers(llm: LLM, converse: Converse) -> None:
    lines = ("/system Be brief.\nVery.", "/temperature .5", QUESTION, "/system none", SECOND, "/quit", "never read")
    out, err, prompts = converse(llm, *lines)
    system = "system\nBe brief.\nVery."  # the words alone may come in an answer
    assert err == "" and system in prompts[0] and system not in prompts[1] and QUESTION in prompts[1]
    assert "temperature 0.5" in out and "system message: none" in out and "never read" not in "".join(prompts)


READS = re.escape("\x1b[?2004h")  # the line editor is ready, and knows where pasted text begins and ends
ENDLESS = ("--method", "ar", "--ignore-eos", "--max-tokens", "1900")


@pytest.fixture
def terminal(tiny_engine: Path) -> Iterator[pexpect.spawn]:
    """A chat that reads its first message. Answers go on for hundreds of passes."""
    environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}  # nobody answers where the cursor is
    child = pexpect.spawn(
        sys.executable,
        ["-m", "ddtree_trt", "run", str(tiny_engine), *ENDLESS],
        env=environment,
        timeout=WAIT_S,
        encoding="utf-8",
        dimensions=(24, 100),
    )
    child.expect(READS)
    yield child
    child.close(force=True)


def test_keys_of_a_chat(terminal: pexpect.spawn) -> None:
    keys = [  # what is sent, and what is then written
        (f"{QUESTION}\r", "First the tens"),  # of the answer
        ("\x03", r"\[\d+ tokens · stopped · .*?" + READS),
        ("dropped\x03", READS),
        ("/temperature 7\r", "temperature 7\r\n.*?" + READS),
        ("\x1b[A\r", "temperature 7\r\n.*?" + READS),  # the arrow up
        ("\x1b[200~/system one\ntwo\x1b[201~", "two"),  # as terminals send what is pasted
        ("\r", "system message: one\r\ntwo.*?" + READS),
        ("\x04", pexpect.EOF),
    ]
    for sent, written in keys:
        terminal.send(sent)
        terminal.expect(written)
    terminal.wait()
    assert terminal.exitstatus == 0
