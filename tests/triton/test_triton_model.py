"""The exported model.py on a double of the server: what it takes, what it answers, and that slots come back."""

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_triton import InferenceResponse, Instance, Request, TritonError, loaded
from pacing import WAIT_S, Passes, wait_for

from ddtree_trt import LLM, SamplingParams, StructuredOutput
from ddtree_trt.errors import UsageError
from ddtree_trt.triton.export import export_triton
from ddtree_trt.triton.layouts import TRTLLM, VLLM, Layout
from ddtree_trt.triton.requests import parse

PROMPT = "def fib(n):"
LONG: dict[str, Any] = {"max_tokens": 1900, "ignore_eos": True, "method": "ar"}


def strings(*texts: str, batched: bool = True) -> np.ndarray:
    array = np.array([text.encode() for text in texts], dtype=object)
    return array[None] if batched else array


def trtllm(prompt: str = PROMPT, *, stream: bool = False, **sampling: Any) -> dict[str, np.ndarray]:
    return {
        "text_input": strings(prompt),
        "stream": np.array([[stream]]),
        "sampling_parameters": strings(json.dumps(sampling)),
    }


def vllm(prompt: str = PROMPT, *, stream: bool = False, **sampling: Any) -> dict[str, np.ndarray]:
    return {name: array[0] for name, array in trtllm(prompt, stream=stream, **sampling).items()}


@pytest.fixture(scope="module")
def instance(llm: LLM, tiny_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    repository, before = tmp_path_factory.mktemp("models"), set(threading.enumerate())
    with loaded(export_triton(tiny_engine, repository, "m", max_queue=0, link=True)) as running:
        yield running
    left = set(threading.enumerate()) - before
    assert not [t for t in left if t.name.startswith("ddtree-")], "threads were left behind"


def eventually(instance: Instance, **metrics: float) -> None:
    wait_for(lambda: {name: instance.metrics[name] for name in metrics} == metrics)


def passes(instance: Instance) -> Passes:
    """The instance's engine, held by the test. What is put before it stays there, open."""
    return Passes(instance.model._service._llm.engine)


def joined(request: Any) -> str:
    return "".join(r.arrays["text_output"][0].decode() for r in request.responses())


@pytest.mark.parametrize("layout", [TRTLLM, VLLM], ids=lambda layout: layout.name)
def test_text_and_figures_equal_the_runtimes(
    instance: Instance, llm: LLM, tiny_engine: Path, tmp_path: Path, layout: Layout
) -> None:
    sampling: dict[str, Any] = {"max_tokens": 40, "tree_budget": 12, "stop": ["\n\n\n"], "n": 2, "seed": 3}
    sampling |= {"temperature": 2.0, "logprobs": 2}  # hot: two unlike texts
    truth = llm.generate(PROMPT, SamplingParams(**sampling))[0]
    assert truth.outputs[0].text != truth.outputs[1].text
    names = ("num_input_tokens", "num_output_tokens", "cumulative_logprob", "logprobs", "log_probs")
    wanted = {f"return_{name}": np.array([True]) for name in names if f"return_{name}" in layout.inputs}
    with contextlib.ExitStack() as stack:
        if layout is VLLM:
            model = export_triton(tiny_engine, tmp_path, "m", layout="vllm", link=True)
            instance = stack.enter_context(loaded(model))
        ask = trtllm if layout is TRTLLM else vllm
        exclude = {"exclude_input_in_output": np.array([True])}
        (whole,) = instance.start({**ask(**sampling), **wanted, **exclude}).responses()
        parts: list[InferenceResponse] = []
        passes(instance).in_step_with(lambda: len(parts), 2, slots=2)
        parts.extend(instance.start({**ask(stream=True, **sampling), **wanted}).responses())
    assert len(parts) > 2
    scalar = (1, 1) if layout.batched else (1,)
    for arrays in (whole.arrays, parts[-1].arrays):
        assert {name: arrays[name].dtype for name in arrays if arrays[name].dtype != object} == {
            tensor.name: np.dtype({"FP32": "f4"}.get(tensor.dtype, tensor.dtype.lower()))
            for tensor in layout.outputs.values()
            if tensor.dtype != "STRING" and tensor.name in arrays
        }
        figures = {name: array.item() for name, array in arrays.items() if array.shape == scalar}
        assert figures["total_draft_tokens"] == truth.metrics.drafted_tokens
        assert figures["total_accepted_draft_tokens"] == truth.metrics.accepted_tokens
        assert figures["acceptance_rate"] == pytest.approx(truth.metrics.acceptance_rate)
        assert figures["num_input_tokens"] == truth.usage.prompt_tokens
        sums = [o.cumulative_logprob for o in truth.outputs]
        assert arrays[layout.cum_log_probs].reshape(-1).tolist() == pytest.approx(sums, abs=1e-3)
    assert "acceptance_rate" not in parts[0].arrays  # of the whole request, so with its last response
    counts = [p.arrays["num_output_tokens"] for p in (whole, *parts)]
    assert counts[0].sum() == sum(count.sum() for count in counts[1:]) == truth.usage.completion_tokens
    assert {count.shape for count in counts} == {(1, 1) if layout.batched else (2,)}
    for i, output in enumerate(truth.outputs):
        texts = [p.arrays["text_output"][i].decode() for p in (whole, *parts)]
        assert texts[0] == "".join(texts[1:]) == output.text
        first, *_, last = reasons = [p.arrays["finish_reason"][i].decode() for p in (*parts, whole)]
        assert (first, last) == (layout.unfinished, output.finish_reason) and {*reasons} == {first, last}
        assert output.logprobs is not None
        truths, given = [token.logprob for token in output.logprobs], whole.arrays[layout.log_probs]
        if layout.batched:
            assert given[0, i, : len(truths)].tolist() == pytest.approx(truths, abs=1e-3)
            continue
        for token, found in zip(output.logprobs, json.loads(given[i]), strict=True):
            assert {*map(int, found)} == {token.token_id, *dict(token.top)}
            assert found[str(token.token_id)]["logprob"] == pytest.approx(token.logprob, abs=1e-3)


def test_metrics_add_up(instance: Instance) -> None:
    wait_for(lambda: not instance.metrics["vllm:num_requests_running"])
    before = dict(instance.metrics)
    responses = list(instance.start(trtllm(stream=True, max_tokens=50, ignore_eos=True, tree_budget=8)).responses())
    eventually(instance, length=before["length"] + 1, **{"vllm:num_requests_running": 0})
    grown, last = {name: value - before[name] for name, value in instance.metrics.items()}, responses[-1].arrays
    assert grown["vllm:generation_tokens_total"] == 50
    assert grown["vllm:spec_decode_num_draft_tokens_total"] == last["total_draft_tokens"].item()
    accepted, rounds = grown["vllm:spec_decode_num_accepted_tokens_total"], grown["ddtree_rounds_total"]
    assert accepted == last["total_accepted_draft_tokens"].item()
    assert rounds == 50 - 1 - accepted  # the prompt's pass gives the first token
    assert 0 < grown["vllm:spec_decode_num_drafts_total"] <= rounds
    assert 0 <= instance.metrics["vllm:kv_cache_usage_perc"] <= 1
    first_s, per_token_s = "vllm:time_to_first_token_seconds", "vllm:request_time_per_output_token_seconds"
    assert grown["vllm:e2e_request_latency_seconds"] == pytest.approx(grown[first_s] + 49 * grown[per_token_s])
    assert 0 < grown["vllm:request_queue_time_seconds"] < grown[first_s]


def test_a_cancelled_request_frees_its_slot(instance: Instance) -> None:
    before = instance.metrics["cancelled"]
    request = instance.start(trtllm(stream=True, **LONG))
    responses = request.responses()
    next(responses)
    engine = passes(instance)
    engine.hold()
    eventually(instance, **{"vllm:num_requests_running": 1})
    request.gone = True
    engine.release()
    with pytest.raises(TritonError, match="was cancelled") as caught:
        list(responses)
    assert caught.value.code == "CANCELLED"
    eventually(instance, **{"vllm:num_requests_running": 0}, cancelled=before + 1)


@pytest.mark.parametrize("options", [{"timeout_us": 50_000}, {"parameters": {"timeout": 50_000}}])
def test_a_timeout_frees_the_slot(instance: Instance, options: dict[str, Any]) -> None:
    with pytest.raises(TritonError, match=r"timeout of 50 ms passed after \d+ tokens") as caught:
        list(instance.start(trtllm(**LONG), **options).responses())
    assert caught.value.code == "UNAVAILABLE"
    eventually(instance, **{"vllm:num_requests_running": 0})


def test_a_full_queue_is_refused_and_the_others_go_on(instance: Instance, llm: LLM) -> None:
    slots, engine_llm = int(instance.metrics["ddtree_slots"]), instance.model._service._llm
    wait_for(lambda: engine_llm.running + engine_llm.waiting == 0)  # the gauges may be those of a moment ago
    sampling: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "method": "ar"}
    engine = passes(instance)
    engine.hold()
    running = [instance.start(trtllm(stream=True, **sampling)) for _ in range(slots)]
    with pytest.raises(TritonError, match="try again later") as caught:
        list(instance.start(trtllm()).responses())
    assert caught.value.code == "UNAVAILABLE"
    engine.release()
    truth = llm.generate(PROMPT, SamplingParams(**sampling))[0].outputs[0].text
    assert [joined(request) for request in running] == [truth] * slots


def test_an_engine_failure_is_told_and_the_next_request_runs(
    instance: Instance, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(instance.model._service._llm.engine, "verify", fails)
        with pytest.raises(TritonError, match="unexpected RuntimeError; the server's log says more") as caught:
            list(instance.start(trtllm()).responses())
    assert caught.value.code == "INTERNAL"
    truth = llm.generate(PROMPT, SamplingParams(max_tokens=9))[0].outputs[0].text
    assert joined(instance.start(trtllm(max_tokens=9))) == truth
    eventually(instance, **{"vllm:num_requests_running": 0}, ddtree_engine_failed=0)


def raw(text: str) -> dict[str, np.ndarray]:
    return {**trtllm(), "sampling_parameters": strings(text)}


class Unreadable(np.ndarray):
    """A tensor that cannot be read, in a way nobody foresaw."""

    def reshape(self, *_: Any, **__: Any) -> np.ndarray:  # type: ignore[override]
        raise MemoryError("/secret/path")


HOSTILE: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({}, "text_input is missing", {}),  # the server lets this through
    (trtllm(max_tokens=100_000), r"max_tokens 100000 does not fit: the prompt leaves \d+ of this engine's", {}),
    (trtllm(""), "the prompt has no tokens", {}),
    (raw('{"seed": 1' + "0" * 400 + "}"), "seed must be an integer from 0 to .* not 1000", {}),
    (raw('{"seed": ' + "9" * 5000 + "}"), "sampling_parameters: it is not valid JSON: number out of range", {}),
    (raw("[" * 100_000), "it is not valid JSON: recursion limit exceeded", {}),
    (raw('{"echo": true}'), "echo cannot be had: exclude_input_in_output=false puts the prompt in front", {}),
    (raw('{"prompt_logprobs": 0}'), "prompt_logprobs cannot be had: no output would hold them; leave it out", {}),
    (raw("{"), "it is not valid JSON: EOF while parsing an object .*; give an object of names and values", {}),
    (raw('["' + "x" * 5000 + '"]'), "must be a JSON object, not", {}),
    (trtllm(), "unknown sampling parameter", {"\ud800": 1}),
    (raw('{"' + "k" * 9000 + '": 1}'), "kkkkk", {"k" * 9000: 1}),
    (trtllm(), "timeout, in microseconds, must be from 0 to", {"timeout": 10**400}),
    ({"text_input": np.array([[b"\xff\xfe"]], object)}, "text_input is not valid UTF-8", {}),
    ({**trtllm(), "seed": np.zeros((0,))}, "seed must hold one value", {}),
    ({**trtllm(), "beam_width": np.array([[2]])}, "beam_width takes 1 only; leave it out", {}),
    ({**trtllm(), "seed": np.zeros(1).view(Unreadable)}, "unexpected MemoryError; the server's log", {}),
]


@pytest.mark.parametrize(("inputs", "message", "parameters"), HOSTILE, ids=lambda v: str(v)[:40])
def test_one_bad_request_touches_no_other_of_its_batch(
    instance: Instance, llm: LLM, inputs: dict[str, Any], message: str, parameters: dict[str, Any]
) -> None:
    good, before = trtllm(max_tokens=9), instance.metrics["refused"]
    batch = [Request(instance.declared, given) for given in (good, good)]
    batch.insert(1, Request(instance.declared, inputs, parameters=parameters))
    instance.model.execute(batch)
    with pytest.raises(TritonError, match=message) as caught:
        list(batch[1].responses())
    assert caught.value.code == ("INTERNAL" if "unexpected" in message else "INVALID_ARG")
    text = str(caught.value)
    assert len(text) <= 1000 and "\n" not in text and "/" not in text and "Traceback" not in text
    text.encode()
    truth = llm.generate(PROMPT, SamplingParams(max_tokens=9))[0].outputs[0].text
    assert [joined(batch[0]), joined(batch[2])] == [truth, truth]
    eventually(instance, **{"vllm:num_requests_running": 0}, refused=before + ("unexpected" not in message))


def test_closing_ends_what_is_under_way(tiny_engine: Path, tmp_path: Path) -> None:
    model = export_triton(tiny_engine, tmp_path, "m", layout="vllm", link=True)
    with loaded(model) as instance:
        requests = [instance.start(vllm(stream=True, **LONG)) for _ in range(10)]
        next(requests[0].responses())
    for request in requests:
        with pytest.raises(TritonError, match="is being unloaded"):
            list(request.responses())
    assert instance.metrics["vllm:num_requests_running"] == instance.metrics["vllm:num_requests_waiting"] == 0


def test_a_request_may_be_ended_before_it_begins(tiny_engine: Path, tmp_path: Path) -> None:
    model = export_triton(tiny_engine, tmp_path, "m", link=True)
    with loaded(model) as instance:
        service, closing = instance.model._service, threading.Event()
        end_all = service._end_all

        def told() -> Any:
            closing.set()
            return end_all()

        service._end_all = told
        service._loop.call_soon_threadsafe(closing.wait, WAIT_S)  # no request begins before it is ended
        request = instance.start(trtllm(**LONG))
    with pytest.raises(TritonError, match="is being unloaded"):
        list(request.responses())


def call(inputs: dict[str, Any], layout: Layout = TRTLLM, **options: Any) -> Any:
    declared = frozenset({"text_output", "num_output_tokens", layout.log_probs})
    plain: dict[str, Any] = {"parameters": {}, "timeout_us": 0, "requested": declared, "declared": declared}
    return parse({"text_input": strings("x"), **inputs}, layout, **plain | options)


def one(value: object, dtype: type | None = None) -> np.ndarray:
    return np.array([[value]], dtype)


def guide(kind: str, text: str | None = None) -> dict[str, np.ndarray]:
    given = {} if text is None else {"guided_decoding_guide": strings(text)}
    return {"guided_decoding_guide_type": strings(kind), **given}


def sampling(text: str) -> dict[str, np.ndarray]:
    return {"sampling_parameters": strings(text)}


TITLE = StructuredOutput(json_schema={"title": "A"})
# Layout, tensors, request parameters, and what they mean.
CALLS: list[tuple[Layout, dict[str, Any], dict[str, Any], SamplingParams]] = [
    (
        TRTLLM,
        {
            "max_tokens": one(9, np.int32), "min_length": one(2, np.int32), "top_p": one(0.9, np.float32),
            "temperature": one(0.7, np.float32),  # not float32's 0.699999988
            "seed": one(2**63 + 1, np.uint64), "num_return_sequences": np.array([3], np.int32),
            "num_draft_tokens": one(8, np.int32), "stop_words": strings("a", "", "b"), "end_id": one(5, np.int32),
            "return_log_probs": np.array([True]),
            **sampling('{"method": "dflash", "logit_bias": {"4": -100}}'),
        },
        {},
        SamplingParams(
            max_tokens=9, min_tokens=2, top_p=0.9, temperature=0.7, seed=2**63 + 1, n=3, tree_budget=8, stop=("a", "b"),
            stop_token_ids=(5,), ignore_eos=True, logprobs=0, method="dflash", logit_bias={4: -100},
        ),
    ),
    (  # vLLM's clients send numbers as text, and defaults that change nothing
        VLLM,
        {},
        {
            "temperature": "0.5", "max_tokens": "7", "top_k": "-1", "ignore_eos": "True", "stop": "12",
            "logprobs": False, "best_of": 1, "use_beam_search": "false", "length_penalty": 1.0, "seed": None,
            "id": "x", "triton_final": 1,
        },
        SamplingParams(temperature=0.5, max_tokens=7, ignore_eos=True, stop=("12",)),
    ),
    (  # what clients send without need
        TRTLLM,
        {
            "beam_width": one(1, np.int32), "length_penalty": one(1.0, np.float32), "bad_words": strings("", ""),
            "use_draft_logits": np.array([False]), "pad_id": one(2), **guide(""),
        },
        {},
        SamplingParams(),
    ),
    *(
        (TRTLLM, inputs, parameters, SamplingParams(structured=structured))
        for inputs, parameters, structured in (
            (sampling('{"structured": {"regex": "A+"}}'), {}, StructuredOutput(regex="A+")),
            ({}, {"structured": '{"regex": "A+"}'}, StructuredOutput(regex="A+")),
            (sampling('{"guided_json": {"title": "A"}}'), {}, TITLE),
            (sampling('{"guided_choice": ["A", "b"]}'), {}, StructuredOutput(choice=("A", "b"))),
            (guide("json_schema", '{"title": "A"}'), {}, TITLE),
            (guide("json"), {}, StructuredOutput(json_object=True)),
            (guide("regex", "A"), {}, StructuredOutput(regex="A")),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "inputs", "parameters", "expected"), CALLS)
def test_requests_become_the_parameters_they_name(
    layout: Layout, inputs: dict[str, Any], parameters: dict[str, Any], expected: SamplingParams
) -> None:
    assert call(inputs, layout, parameters=parameters).params == expected


def test_outputs_are_those_listed_or_switched_on() -> None:
    assert call({}).outputs == {"text_output"}
    assert call({"return_num_output_tokens": np.array([True])}).outputs == {"text_output", "num_output_tokens"}
    assert call({"return_log_probs": np.array([True])}).outputs == {"text_output", "output_log_probs"}
    assert call({}, requested=frozenset({"num_output_tokens"})).outputs == {"num_output_tokens"}


def test_only_an_unstreamed_vllm_text_begins_with_the_prompt_by_default() -> None:
    stream = {"stream": np.array([True])}
    assert (call({}).echo, call({}, VLLM).echo, call(stream, VLLM).echo) == (False, True, False)
    assert call({"exclude_input_in_output": np.array([False])}).echo


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {**guide("json"), **sampling('{"guided_regex": "a"}')},
            "structured is given twice, the second time by sampling_parameters",
        ),
        (guide("json_schema", "{"), "guided_decoding_guide: the schema is no JSON"),
        ({"stream": np.array([True]), "exclude_input_in_output": np.array([False])}, "needs stream=false"),
        (guide("xml"), "guided_decoding_guide_type must be one of json, json_schema, regex"),
    ],
)
def test_what_is_refused(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call(inputs)
