"""Text, stops and limits against a plain statement on whole strings, with tokens committed in blocks of any size."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scripted import ScriptedEngine, completion
from scripted_models import Saying, SayingTarget

import ddtree_trt
from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.outputs import CompletionOutput
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.scheduler import Scheduler
from ddtree_trt.runtime.text.codec import INCOMPLETE, Stop, TextCodec, TextStream, as_prompts

CODEC = TextCodec(Path(ddtree_trt.__file__).parent / "assets" / "tiny" / "tokenizer", {})
VOCAB = len(CODEC.tokenizer)
EOS = CODEC.tokenizer.eos_token_id
PIECES = ["\n", " ", " the", "x" * 20, *"a b ab 0 é ß 日本 語 中 😀 👍🏽 👩‍👩‍👧 \u0301 \u200d".split()]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)
STOPS = st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map("".join), max_size=3)
WORDS = st.integers(0, VOCAB - 1)  # whatever the model may say: special tokens, halves of characters
BYTES = WORDS.map(lambda t: t % 300)  # mostly single bytes
SCRIPTS = st.one_of(TEXTS.map(CODEC.encode), st.lists(WORDS, max_size=20), st.lists(BYTES, max_size=20))


def test_token_ids_of_any_library_are_pythons() -> None:
    prompt = [1, 2, 3]
    assert CODEC.encode(prompt) == prompt and CODEC.encode(prompt) is not prompt, "the caller may change its own"
    tokens: list[Any] = [np.int64(5), np.uint16(6), 7]
    assert CODEC.encode(tokens) == [5, 6, 7] and all(type(token) is int for token in CODEC.encode(tokens))


FOUR = CODEC.encode("one two three four")


def settled(tokens: Sequence[int], skip: bool = True) -> str:
    """The text of the tokens as far as no character is open."""
    return CODEC.decode(tokens, skip_special_tokens=skip).rstrip(INCOMPLETE)


Truth = tuple[str, list[int], str, int | str | None]  # text, tokens, why it ended, and by what


def truth(script: Sequence[int], params: SamplingParams, eos: int) -> Truth:
    """What a completion must be that says the script and then `eos` for ever."""
    said: list[int] = []
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else (eos,))}
    skip = params.skip_special_tokens
    while True:
        said.append(script[len(said)] if len(said) < len(script) else eos)
        enough = len(said) >= params.min_tokens
        ends = enough and said[-1] in stops
        before, now = settled(said[:-1], skip), settled(said, skip)
        if ends and not params.include_stop_str_in_output:
            now = before
        finds = [(at, i) for i, stop in enumerate(params.stop) for at in places(now, stop)]
        finds = [(at, i) for at, i in finds if at + len(params.stop[i]) > len(before)]
        if finds and enough:
            at, which = min(finds)
            stop = params.stop[which]
            size = at + len(stop) if params.include_stop_str_in_output else at
            kept = [t for i, t in enumerate(said) if len(settled(said[:i], skip)) < size]
            return now[:size], kept, "stop", stop
        if ends:
            text = CODEC.decode(said if params.include_stop_str_in_output else said[:-1], skip_special_tokens=skip)
            by_eos = said[-1] == eos and not params.ignore_eos
            return text, said, "stop", None if by_eos else said[-1]
        if len(said) == params.max_tokens:
            return CODEC.decode(said, skip_special_tokens=skip), said, "length", None


def places(text: str, stop: str) -> list[int]:
    return [at for at in range(len(text)) if text.startswith(stop, at)]


def say(
    script: Sequence[int], params: SamplingParams, accepted: Sequence[int], eos: int = EOS, **limits: int
) -> tuple[CompletionOutput, list[CompletionOutput], Any]:
    """Run a script in rounds that accept `accepted` drafts in turn: the whole output, its streamed parts, metrics."""
    target = SayingTarget(script, VOCAB, end=eos)
    lengths = cycle(accepted)
    sizes: dict[str, Any] = {"max_seq_len": 1000, **limits}
    engine = ScriptedEngine(target, Saying(target, lambda: next(lengths)), block_size=8, **sizes)
    scheduler = Scheduler(engine)
    c = completion(engine, [1], params, codec=CODEC, eos=[eos])
    scheduler.add(c)
    parts: list[CompletionOutput] = []
    while not c.finished:
        scheduler.step()
        if part := c.take():
            parts.append(part)
    if c.error is not None:
        raise c.error
    return c.output_so_far(), parts, c.metrics


OPTIONS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 24), "stop": STOPS},
    optional={
        "min_tokens": st.integers(0, 6),
        "stop_token_ids": st.lists(BYTES, max_size=2),
        "ignore_eos": st.booleans(),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "logprobs": st.sampled_from([None, 0, 1]),
        "method": st.sampled_from(["ar", "dflash", "ddtree"]),
    },
)


@given(script=SCRIPTS, options=OPTIONS, accepted=st.lists(st.integers(0, 7), min_size=1, max_size=5))
@example(script=CODEC.encode("ab😀 end"), options={"max_tokens": 20, "stop": ["😀"]}, accepted=[7])
@example(script=CODEC.encode("😀"), options={"max_tokens": 2, "stop": []}, accepted=[0])
@example(script=CODEC.encode("a b"), options={"max_tokens": 9, "min_tokens": 2, "stop": ["b"]}, accepted=[3])
@example(script=CODEC.encode("a b"), options={"max_tokens": 9, "min_tokens": 3, "stop": ["b"]}, accepted=[3])
@example(script=FOUR, options={"max_tokens": len(FOUR), "stop": ["four"]}, accepted=[2, 5])
@example(script=FOUR, options={"max_tokens": len(FOUR), "stop": []}, accepted=[7])
@example(script=FOUR[:-1], options={"max_tokens": len(FOUR), "stop": []}, accepted=[7])
@example(script=CODEC.encode("stop"), options={"max_tokens": 8, "stop": ["stop"]}, accepted=[3])
@settings(max_examples=100)
def test_stops_and_limits_hold_at_any_boundary(script: list[int], options: dict[str, Any], accepted: list[int]) -> None:
    options["min_tokens"] = min(options.get("min_tokens", 0), options["max_tokens"])
    params = SamplingParams(**options)
    # Until min_tokens the sampler does not say stop tokens at all: such a script cannot be said.
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    while len(script) < params.min_tokens or stops & set(script[: params.min_tokens]):
        script = [t for t in script if t not in stops] + [next(t for t in range(5, 99) if t not in stops)]
    output, parts, metrics = say(script, params, accepted)
    assert (output.text, output.token_ids, output.finish_reason, output.stop_reason) == truth(script, params, EOS)
    assert params.max_tokens is not None
    assert metrics.output_tokens == len(output.token_ids) <= params.max_tokens
    assert "".join(part.text for part in parts) == output.text
    assert [t for part in parts for t in part.token_ids] == output.token_ids
    assert [part.finish_reason for part in parts][:-1] == [None] * (len(parts) - 1)
    assert parts[-1].finish_reason == output.finish_reason
    for part in parts:
        part.text.encode("utf-8")
        assert part.text or part.token_ids or part.finish_reason, "a part says something"
    if params.logprobs is not None:
        assert output.logprobs is not None
        assert [entry.token_id for entry in output.logprobs] == output.token_ids
        streamed = [entry for part in parts for entry in part.logprobs or []]
        assert streamed == output.logprobs
        assert all(len(entry.top) == params.logprobs for entry in output.logprobs)


@given(script=SCRIPTS, begins=st.booleans())
@settings(max_examples=100)
def test_text_grows_by_whole_characters_as_soon_as_they_are_known(script: list[int], begins: bool) -> None:
    stream = TextStream(CODEC, begins=begins)
    for i, token in enumerate(script, 1):
        stream.push([token])
        assert stream.text == settled(script[:i])
    stream.flush()
    assert stream.text == CODEC.decode(script)


@given(
    script=SCRIPTS,
    stops=STOPS,
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    keep_stop=st.booleans(),
    skip=st.booleans(),
)
@settings(max_examples=100)
def test_parts_of_any_size_are_cut_as_single_tokens_are(
    script: list[int], stops: list[str], sizes: list[int], keep_stop: bool, skip: bool
) -> None:
    def read(sizes: list[int]) -> tuple[str, Stop | None]:
        stream = TextStream(CODEC, stops, keep_stop=keep_stop, skip_special_tokens=skip)
        given, stop, promised, text = 0, None, (0, 0), ""
        for size in cycle(sizes):
            stop = stream.push(script[given : given + size])
            given += size
            assert stream.text[: promised[0]] == text[: promised[0]], "what was settled stays"
            if stop or given >= len(script):
                break
            promised, text = stream.settled(), stream.text
        assert promised[1] <= (stop.kept if stop else len(script))
        return stream.text, stop

    assert read(sizes) == read([1])


@given(text=TEXTS)
def test_a_codec_gives_back_any_text(text: str) -> None:
    assert CODEC.decode(CODEC.encode(text)) == text


def test_text_is_held_back_only_while_a_stop_string_may_follow() -> None:
    stream = TextStream(CODEC, ["END"])
    shown = []
    for token in CODEC.encode("E")[:1] + CODEC.encode("EN") + CODEC.encode("."):
        stream.push([token])
        shown.append(stream.settled()[0])
    assert stream.text == "EEN."
    assert shown[0] == 0 and shown[-1] == 4


def test_acceptance_counts_what_was_committed_even_if_a_stop_string_takes_it_back() -> None:
    script = CODEC.encode("1 2 3 4 5 6 7 8 9")
    output, _, metrics = say(script, SamplingParams(max_tokens=50, stop=("4 5",)), [3])
    assert output.text == "1 2 3 "
    assert all(size == 4 for size in metrics.acceptance_lengths[:-1])
    assert 1 + sum(metrics.acceptance_lengths) > len(output.token_ids)
    assert metrics.accepted_tokens == sum(metrics.acceptance_lengths) - metrics.rounds >= 0


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (b"abc", "not bytes"),
        (None, "not NoneType"),
        ("a\ud800", "the prompt must be valid Unicode .character 1 is half of a surrogate pair"),
        ([1, 2.0], "item 1 is 2.0"),
        ([7, True], "item 1 is True"),
        ([{"role": "user", "content": "x"}, "y"], "item 0 is {'content'"),
        ([{"role": "user", "content": "a\udfff"}], "must be valid Unicode"),
        ([1, "a"], "a prompt is text, a list of token ids, or a list of chat messages .* item 1 is 'a'"),
        ([{"role": "user", "content": 5}], "needs a role and a content"),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_refused(prompt: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        CODEC.encode(prompt)


@pytest.mark.parametrize("prompts", [None, 5, 0.5, b"x", {"role": "user", "content": "x"}, {"a"}], ids=str)
def test_what_is_neither_a_prompt_nor_several_is_refused(prompts: Any) -> None:
    with pytest.raises(UsageError, match="prompts must be a text, a list of token ids"):
        as_prompts(prompts)


def test_one_prompt_or_several() -> None:
    chat = [{"role": "user", "content": "x"}]
    for one in ("x", [1, 2], [np.int64(1)], chat):
        assert as_prompts(one) == [one]
        assert as_prompts([one, one]) == as_prompts(iter((one, one))) == [one, one]
    assert as_prompts([]) == []
