"""The official client and curl against a real server: the same text as LLM.generate, in OpenAI's shapes."""

import json
import re
import sys
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from engine_builds import ROWS
from pacing import wait_for
from pydantic import BaseModel, Field
from serving import ThreadServer, events_of
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from ddtree_trt import LLM, RequestOutput, SamplingParams
from ddtree_trt.runtime.text.codec import TextCodec, TextStream
from ddtree_trt.serve.openai.tokens import TextOffsets, TokenTexts

QUESTIONS = [row["prompt"] for row in ROWS][:6]
UNICODE = "héllo 🙂 你好 "


def messages(question: str) -> list[Any]:
    return [{"role": "user", "content": question}]


def reference(llm: LLM, prompt: Any, **params: Any) -> RequestOutput:
    return llm.generate([prompt], SamplingParams(**params))[0]


def ask(client: openai.OpenAI, question: str = QUESTIONS[0], **fields: Any) -> Any:
    """The answer to a question; fields that the client does not know go into its extra body."""
    own = {"method", "include_stop_str_in_output", "stop_token_ids", "ignore_eos"}
    if more := {k: fields.pop(k) for k in own & set(fields)}:
        fields["extra_body"] = more
    create: Any = client.chat.completions.create
    return create(model="tiny", messages=messages(question), **fields)


@pytest.mark.parametrize("method", ["ddtree", "dflash", "ar"])
def test_chat_text_equals_generate(client: openai.OpenAI, llm: LLM, method: str) -> None:
    for question in QUESTIONS[:3]:
        expected = reference(llm, messages(question), max_tokens=48)
        answer = ask(client, question, max_completion_tokens=48, method=method)
        (choice,) = answer.choices
        assert answer.object == "chat.completion" and choice.message.role == "assistant"
        assert choice.message.content == expected.outputs[0].text
        assert choice.finish_reason == expected.outputs[0].finish_reason
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert getattr(answer.usage, name) == getattr(expected.usage, name)
        assert answer._request_id == answer.id


def test_chat_stream_joins_to_the_whole(server: ThreadServer, client: openai.OpenAI, llm: LLM) -> None:
    expected = reference(llm, messages(QUESTIONS[1]), max_tokens=60)
    chunks: list[Any] = []
    server.passes.in_step_with(lambda: len(chunks), 3)
    chunks.extend(ask(client, QUESTIONS[1], max_tokens=60, stream=True, stream_options={"include_usage": True}))
    server.passes.release()
    *parts, last = chunks
    deltas = [c.choices[0].delta for c in parts]
    assert deltas[0].role == "assistant" and not any(d.role for d in deltas[1:])
    assert "".join(d.content or "" for d in deltas) == expected.outputs[0].text
    reasons = [c.choices[0].finish_reason for c in parts]
    assert reasons == [None] * (len(parts) - 1) + [expected.outputs[0].finish_reason]
    assert len({c.id for c in chunks}) == 1 and all(c.usage is None for c in parts)
    assert last.choices == [] and last.usage.completion_tokens == expected.usage.completion_tokens
    figures = parts[-1].model_extra["metrics"]
    assert figures["rounds"] > 0 and figures["accepted_tokens"] <= figures["drafted_tokens"]
    assert len(parts) > 3, "several parts, not one late answer"


def test_stops_and_ends(client: openai.OpenAI, llm: LLM) -> None:
    whole = reference(llm, messages(QUESTIONS[0]), max_tokens=40).outputs[0].text
    stop = whole[10:13]
    (choice,) = ask(client, stop=stop).choices
    assert (choice.message.content, choice.finish_reason) == (whole[: whole.index(stop)], "stop")
    kept = ask(client, stop=[stop, "never"], include_stop_str_in_output=True)
    assert kept.choices[0].message.content == whole[: whole.index(stop) + len(stop)]
    assert ask(client, stop_token_ids=[llm.codec.encode(whole)[0]]).usage.completion_tokens == 1
    past_the_end = ask(client, max_tokens=100, ignore_eos=True)
    assert (past_the_end.choices[0].finish_reason, past_the_end.usage.completion_tokens) == ("length", 100)


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(client: openai.OpenAI, llm: LLM, stream: bool) -> None:
    expected = reference(llm, messages(QUESTIONS[0]), max_tokens=12, logprobs=3).outputs[0]
    answer = ask(client, max_tokens=12, logprobs=True, top_logprobs=3, stream=stream)
    choices = [c.choices[0] for c in (answer if stream else [answer])]
    tokens = [t for c in choices for t in (c.logprobs.content if c.logprobs else [])]
    assert expected.logprobs is not None and len(tokens) == len(expected.token_ids)
    for token, want in zip(tokens, expected.logprobs, strict=True):
        assert token.logprob == pytest.approx(want.logprob, abs=1e-4)
        assert [t.logprob for t in token.top_logprobs] == pytest.approx([p for _, p in want.top], abs=1e-4)
        assert token.top_logprobs[0].token == token.token, "greedy takes the most probable one"
    assert b"".join(bytes(t.bytes) for t in tokens).decode() == expected.text


def test_completions_take_texts_and_token_ids(client: openai.OpenAI, llm: LLM) -> None:
    prompts = ["def fib(n):", UNICODE]
    ids = [llm.codec.encode(p) for p in prompts]
    expected = [reference(llm, p, max_tokens=12).outputs[0].text for p in prompts]
    for given in (prompts, ids):
        answer = client.completions.create(model="tiny", prompt=given, max_tokens=12)
        assert [(c.index, c.text) for c in answer.choices] == list(enumerate(expected))
        assert answer.usage is not None and answer.usage.prompt_tokens == sum(map(len, ids))
        assert answer.usage.completion_tokens == 24
    for one in (prompts[0], ids[0]):
        assert client.completions.create(model="tiny", prompt=one, max_tokens=12).choices[0].text == expected[0]
    for own, count in (({"ignore_eos": True}, 16), ({"min_tokens": 20}, 20)):
        by_default = client.completions.create(model="tiny", prompt=prompts[0], extra_body=own)
        assert by_default.usage is not None and by_default.usage.completion_tokens == count


@pytest.mark.parametrize("stream", [False, True])
def test_completions_echo_with_logprobs_over_several_prompts(client: openai.OpenAI, llm: LLM, stream: bool) -> None:
    prompts = ["def<|im_end|> fib(n):", UNICODE]
    common: dict[str, Any] = {"max_tokens": 6, "echo": True, "logprobs": 2, "n": 2, "temperature": 1, "seed": 5}
    answer: Any = client.completions.create(model="tiny", prompt=prompts, **common, stream=stream)
    texts, logprobs = [""] * 4, [dict[str, list[Any]]() for _ in range(4)]
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
            assert choice.logprobs is not None
            for name, values in choice.logprobs.to_dict().items():
                logprobs[choice.index].setdefault(name, []).extend(values)
    for place, prompt in enumerate(prompts):
        expected = reference(llm, prompt, **common, prompt_logprobs=2)
        assert expected.prompt_logprobs is not None
        for k, output in enumerate(expected.outputs):
            text, figures = texts[2 * place + k], logprobs[2 * place + k]
            assert text == output.text and text.startswith(prompt)
            assert output.logprobs is not None
            want = [None if t is None else t.logprob for t in [*expected.prompt_logprobs, *output.logprobs]]
            assert figures["token_logprobs"][0] is None and figures["top_logprobs"][0] is None
            assert figures["token_logprobs"][1:] == pytest.approx(want[1:], abs=1e-3)
            names = "tokens", "top_logprobs", "token_logprobs", "text_offset"
            for token, top, own, offset in zip(*(figures[name] for name in names), strict=True):
                assert top is None or (2 <= len(top) <= 3 and top[token] == pytest.approx(own))
                assert token.startswith("bytes:") or text[offset:].startswith(token) or token.startswith("<|")


def test_texts_and_places_of_tokens_that_begin_with_a_space(tmp_path: Path) -> None:
    """Decoders of SentencePiece's kind drop the space at a text's beginning, and fall back to bytes. What is left out
    of the text takes no place in it, named in the tokenizer or not."""
    words = ["<unk>", "<tool>", "\u2581hello", "\u2581there", "!", "<0xC3>", "<0xA9>"]
    backend = Tokenizer(BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_tokens([AddedToken("<tool>", special=True)])
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    codec = TextCodec(tmp_path, {})
    ids = [2, 3, 1, 4, 5, 6, 3]
    assert codec.decode(ids) == "hello there!é there"
    offsets, texts = TextOffsets(codec, skip_special_tokens=True), TokenTexts(codec)
    assert [offsets.next(token) for token in ids] == [0, 5, 11, 11, 12, 12, 13]
    raw = [texts.of(token)[1] for token in ids]
    assert b"".join(map(bytes, raw)).decode() == " hello there<tool>!é there"  # type: ignore[arg-type]
    behind = TextOffsets(codec, skip_special_tokens=True, start=5).next
    assert list(map(behind, ids[1:])) == [5, 11, 11, 12, 12, 13]
    for parts in ([[3, 5, 6, 4, 5, 5]], [[3], [5], [6, 4, 5], [5]]):  # two bytes are a character, two are none
        stream = TextStream(codec)
        list(map(stream.push, parts))
        stream.flush()
        assert stream.text == " thereé!\ufffd\ufffd"


def test_a_completion_begins_with_the_space_in_front_of_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = reference(llm, messages(QUESTIONS[0]), max_tokens=40)
    ids = whole.prompt_token_ids + whole.outputs[0].token_ids
    cut = next(n for n in range(len(whole.prompt_token_ids) + 1, len(ids)) if llm.codec.decode(ids[n:])[0] == " ")
    steps = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    monkeypatch.setattr(llm.codec.tokenizer.backend_tokenizer, "decoder", steps)
    rest = reference(llm, ids[:cut], max_tokens=len(ids) - cut).outputs[0]
    assert rest.token_ids == ids[cut:] and llm.codec.decode(ids[cut:])[0] != " "
    assert llm.codec.decode(ids[:cut]) + rest.text == llm.codec.decode(ids)


def test_the_prefix_cache_shows_in_the_usage(client: openai.OpenAI) -> None:
    question = "What is 12 + 30? Think about it in steps, please, and give the answer."
    for cached in (False, True):
        usage = ask(client, question, max_tokens=4).usage
        assert ((usage.prompt_tokens_details.cached_tokens or 0) == usage.prompt_tokens - 1) == cached


def test_an_answer_can_be_sent_back_and_parts_are_one_text(client: openai.OpenAI, llm: LLM) -> None:
    first = ask(client, max_tokens=30).choices[0].message
    half = len(QUESTIONS[1]) // 2
    parts: Any = [{"type": "text", "text": t} for t in (QUESTIONS[1][:half], QUESTIONS[1][half:])]
    turn: list[Any] = [{"role": "developer", "content": "Be brief."}, *messages(QUESTIONS[0]), first, *messages(parts)]
    second = client.chat.completions.create(model="tiny", messages=turn, max_tokens=30)
    history = [
        {"role": "system", "content": "Be brief."},
        *messages(QUESTIONS[0]),
        {"role": "assistant", "content": first.content},
        *messages(QUESTIONS[1]),
    ]
    assert second.choices[0].message.content == reference(llm, history, max_tokens=30).outputs[0].text


def test_bookkeeping_fields_are_accepted_and_change_nothing(client: openai.OpenAI) -> None:
    bookkeeping: dict[str, Any] = {
        "user": "someone", "metadata": {"a": "b"}, "store": False, "safety_identifier": "x", "prompt_cache_key": "y",
        "service_tier": "auto", "response_format": {"type": "text"},
        "extra_body": {"tools": None, "top_logprobs": None},
    }  # fmt: skip
    texts = {ask(client, max_tokens=20, **extra).choices[0].message.content for extra in (bookkeeping, {})}
    assert len(texts) == 1


# Constraints on the output over HTTP: OpenAI's and vLLM's names, with the real client, whole and streamed


PROMPT = "There are 6 drawers, each with 32 cards. How many cards are there?"
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"cards": {"type": "integer", "minimum": 0, "maximum": 999}, "unit": {"enum": ["card", "drawer"]}},
    "required": ["cards", "unit"],
    "additionalProperties": False,
}


class Answer(BaseModel):
    unit: Literal["card", "drawer"]
    cards: int = Field(ge=0, le=999)


def is_json(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def test_the_clients_own_parser_of_a_pydantic_model(client: openai.OpenAI) -> None:
    common: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0.8, "seed": 3, "max_tokens": 300}
    answer = client.chat.completions.parse(**common, response_format=Answer).choices[0].message.parsed
    assert isinstance(answer, Answer)
    with client.chat.completions.stream(**common, response_format=Answer) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == answer


@pytest.mark.parametrize(
    ("fields", "check"),
    [
        ({"guided_json": SCHEMA}, is_json),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, is_json),
        ({"guided_choice": ["many", "few"]}, re.compile("many|few").fullmatch),
        ({"structured_outputs": {"grammar": 'start: "<" /[a-f]{2}/ ">"'}}, re.compile("<[a-f]{2}>").fullmatch),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_vllms_names_on_both_endpoints(client: openai.OpenAI, fields: dict[str, Any], check: Any) -> None:
    common: dict[str, Any] = {"model": "tiny", "temperature": 1.0, "seed": 5, "max_tokens": 300, "extra_body": fields}
    chat = client.chat.completions.create(messages=MESSAGES, **common).choices[0]
    plain = client.completions.create(prompt=PROMPT, **common).choices[0]
    for text, reason in ((chat.message.content or "", chat.finish_reason), (plain.text, plain.finish_reason)):
        assert reason == "stop" and check(text)


def test_without_library_the_answer_says_what_to_install(server: ThreadServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from ddtree_trt.runtime.structured.compiler import GrammarCompiler

    core = server.llm.core
    fresh = GrammarCompiler(str, core.engine.manifest.target_dims.vocab_size, frozenset())
    monkeypatch.setattr(core.maker, "grammars", fresh)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    answer = server.chat(guided_regex="a")
    assert answer.status_code == 400
    assert "pip install --editable '.[structured]'" in answer.json()["error"]["message"]
    assert server.chat(max_tokens=2).status_code == 200


# Figures in answers, in streams and on /metrics


LONGEST = 15  # draft positions of the tiny pair
# Beside `speculative_decoding`, as vLLM's documentation lists them (docs/features/per_request_metrics.md).
TIMING = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"}


def expected(llm: LLM, **sampling: Any) -> dict[str, Any]:
    """vLLM's object for a request (docs/features/speculative_decoding/acceptance_metrics.md at level "summary"),
    counted round by round from the engine's own record of it."""
    (output,) = llm.generate([MESSAGES], SamplingParams(temperature=0.0, **sampling))
    rounds = zip(output.metrics.acceptance_lengths, output.metrics.budgets, strict=True)
    steps = [(length - 1, nodes) for length, nodes in rounds if nodes > 0]
    accepted, drafted = sum(a for a, _ in steps), sum(n for _, n in steps)
    return {
        "mean_acceptance_length": 1 + accepted / len(steps) if steps else 1,
        "draft_acceptance_rate": accepted / drafted if drafted else 0,
        "acceptance_histogram": [sum(a == j for a, _ in steps) for j in range(LONGEST + 1)],
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": LONGEST,
    }


@pytest.mark.parametrize(
    "sampling", [{"tree_budget": 8}, {"tree_budget": 40}, {"method": "dflash"}, {"method": "ar"}], ids=str
)
def test_answers_have_vllms_object(server: ThreadServer, llm: LLM, sampling: dict[str, Any]) -> None:
    answer = server.chat(PROMPT, max_tokens=40, **sampling).json()
    assert answer["metrics"]["speculative_decoding"] == expected(llm, max_tokens=40, **sampling)
    times = {name: answer["metrics"][name] for name in TIMING}
    assert all(value > 0 for value in times.values())
    tokens = answer["usage"]["completion_tokens"]
    assert times["mean_itl_ms"] == pytest.approx(times["generation_time_ms"] / (tokens - 1))
    seconds = (times["time_to_first_token_ms"] + times["generation_time_ms"]) / 1000
    assert times["tokens_per_second"] == pytest.approx(tokens / seconds)
    first_ms = times["queue_time_ms"] + times["time_to_first_token_ms"]
    assert answer["metrics"]["time_to_first_token_s"] == pytest.approx(first_ms / 1000)


AIPERF = json.loads((Path(__file__).resolve().parents[1] / "fixtures" / "aiperf" / "tiny.json").read_text("utf-8"))


@pytest.mark.parametrize("recorded", AIPERF["prompts"], ids=lambda r: r["prompt"][:20])
def test_answers_are_what_aiperf_reported(server: ThreadServer, recorded: dict[str, Any]) -> None:
    """The fixture is of a run of the real tool. The body is AIPerf's."""
    wanted = {"stream": True, "stream_options": {"include_usage": True}, "tree_budget": AIPERF["tree_budget"]}
    parts = events_of(server.chat(recorded["prompt"], model="tiny", **wanted).text)
    (stats,) = [s for p in parts if (s := (p.get("metrics") or {}).get("speculative_decoding"))]
    assert recorded == {
        "prompt": recorded["prompt"],
        "usage_prompt_tokens": parts[-1]["usage"]["prompt_tokens"],
        "usage_completion_tokens": parts[-1]["usage"]["completion_tokens"],
        "spec_decode_steps": stats["num_spec_steps"],
        "spec_decode_draft_tokens": stats["num_draft_tokens"],
        "spec_decode_accepted_draft_tokens": stats["num_accepted_draft_tokens"],
        "spec_decode_acceptance_length": pytest.approx(stats["mean_acceptance_length"]),
        "spec_decode_draft_acceptance_rate": pytest.approx(100 * stats["draft_acceptance_rate"]),
    }


def test_it_is_for_single_sequences_only(server: ThreadServer) -> None:
    several = server.chat(PROMPT, max_tokens=8, n=2, temperature=1, seed=3).json()["metrics"]
    prompts = server.http.post("/v1/completions", json={"prompt": ["def f(", "x ="], "max_tokens": 4}).json()["metrics"]
    for figures in (several, prompts):
        assert figures["rounds"] > 0, "the figures of this server are there"
        assert {figures[name] for name in ("speculative_decoding", *TIMING)} == {None}


def test_a_stream_has_it_once_in_the_part_with_the_usage(client: openai.OpenAI, server: ThreadServer, llm: LLM) -> None:
    options: Any = {"max_tokens": 40, "stream": True, "extra_body": {"tree_budget": 8}}
    options["stream_options"] = {"include_usage": True}
    chunks: list[Any] = list(client.chat.completions.create(model="tiny", messages=MESSAGES, **options))
    with_it = [c for c in chunks if (c.model_extra or {}).get("metrics", {}).get("speculative_decoding")]
    assert with_it == chunks[-1:] and chunks[-1].usage is not None and chunks[-1].choices == []
    found = chunks[-1].model_extra["metrics"]["speculative_decoding"]
    assert found == expected(llm, max_tokens=40, tree_budget=8)
    assert chunks[-2].model_extra["metrics"]["rounds"] == found["num_spec_steps"], "our own stay where they were"
    parts = events_of(server.chat(PROMPT, max_tokens=40, stream=True, tree_budget=8).text)
    assert [p["metrics"]["speculative_decoding"] for p in parts if p.get("metrics")] == [found], "without usage too"


def test_scrapes_add_up_with_the_answers(server: ThreadServer) -> None:
    wait_for(lambda: server.idle and not server.llm.running)
    before = server.figures()
    asked = [server.chat(PROMPT, max_tokens=40, tree_budget=b).json() for b in (4, 8, 0)]
    assert server.chat(temperature=-1).status_code == 400
    m = {k: v - before.get(k, 0) for k, v in server.figures().items()}
    for field in ("prompt_tokens", "completion_tokens"):
        counter = field.replace("completion", "generation")
        assert m[f"vllm:{counter}_total"] == sum(a["usage"][field] for a in asked)
    objects = [a["metrics"]["speculative_decoding"] for a in asked]
    for counter, field in (
        ("num_drafts", "num_spec_steps"),
        ("num_draft_tokens", "num_draft_tokens"),
        ("num_accepted_tokens", "num_accepted_draft_tokens"),
    ):
        assert m[f"vllm:spec_decode_{counter}_total"] == sum(o[field] for o in objects) > 0
    for position in range(LONGEST):
        name = f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}}'
        assert m[name] == sum(sum(o["acceptance_histogram"][position + 1 :]) for o in objects)
    assert sum(v for k, v in m.items() if k.startswith("vllm:request_success_total")) == 3
    assert m['ddtree_requests_refused_total{status="400"}'] == 1
    # A round commits its accepted drafts and one token more; the first token comes from the prompt's pass.
    rounds, length = m["ddtree_rounds_total"], "ddtree_acceptance_length"
    assert m[f"{length}_count"] == rounds and m[f"{length}_sum"] == m["vllm:generation_tokens_total"] - 3
    assert m[f"{length}_sum"] == rounds + m["vllm:spec_decode_num_accepted_tokens_total"]
