"""Reading an inference request: tensors and parameters to a prompt and `SamplingParams`.

Every input in the tables of `layouts` is honoured, or has no effect by its value; none is dropped.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree_trt.errors import UsageError, check_range, shown
from ddtree_trt.reading import Source, parse_json
from ddtree_trt.runtime.decoding.sampling import TokenLogprob
from ddtree_trt.runtime.outputs import RequestOutput
from ddtree_trt.runtime.params import PARAMETERS, SamplingParams
from ddtree_trt.runtime.structured.record import STRUCTURED, StructuredOutput, without_aliases
from ddtree_trt.triton.layouts import TIMES, Layout

Inputs = Mapping[str, NDArray[Any]]

_LONGEST_US = 10**15  # thirty years
# Request parameters for the server or the client, not for the model.
_RESERVED = {"id", "priority", "sequence_id", "sequence_start", "sequence_end", "binary_data_output"}
_LOG_PROBS = ("return_log_probs", "return_logprobs", "return_cumulative_logprob")
# Optional output → the input that asks for it.
_SWITCHES = {
    "num_input_tokens": "return_num_input_tokens",
    "num_output_tokens": "return_num_output_tokens",
    **dict.fromkeys(TIMES, "return_perf_metrics"),
}
_JSON = Source("sampling_parameters", UsageError, "give an object of names and values")
# vLLM parameters that are not supported → the value without effect, which is accepted.
_NEUTRAL = {
    "best_of": 1,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "detokenize": True,
    "spaces_between_special_tokens": True,
}
# Parameters whose values are not text: where they are given as text, it is parsed.
_NOT_HERE = {
    "echo": "exclude_input_in_output=false puts the prompt in front", "prompt_logprobs": "no output would hold them"
}  # fmt: skip
_FROM_TEXT = {name for name, row in PARAMETERS.items() if row.type not in (str, tuple[str, ...], StructuredOutput)}


@dataclass(frozen=True)
class Call:
    prompt: str
    params: SamplingParams
    stream: bool
    echo: bool  # put the prompt in front of the text
    timeout_s: float | None
    outputs: frozenset[str]  # the outputs to send


def parse(
    inputs: Inputs,
    layout: Layout,
    *,
    parameters: Mapping[str, Any],
    timeout_us: int,
    requested: frozenset[str],
    declared: frozenset[str],
) -> Call:
    """Check a request. Raises UsageError, which names the input at fault.

    `parameters`, the request's, are sampling parameters like the input `sampling_parameters`, but `timeout`, which is
    `generate`'s form of `timeout_us`; 0 is none. `requested`: outputs the client listed, or all `declared` ones.
    """
    for name, array in inputs.items():
        if (row := layout.inputs.get(name)) is None:
            raise UsageError(f"input {shown(name)} is unknown; remove it from the request and from config.pbtxt")
        if row.only and not all(value in row.only for value in _values(name, array)):
            raise UsageError(f"{name} takes {' or '.join(map(repr, row.only))} only; leave it out")
    if "text_input" not in inputs:
        raise UsageError("text_input is missing; give the prompt as one string")
    stream = bool(_scalar(inputs, "stream", False))
    echo = not _scalar(inputs, "exclude_input_in_output", stream or not layout.echo)
    if echo and stream:
        raise UsageError("exclude_input_in_output=false needs stream=false: a stream holds the completion only")
    given = {k: v for k, v in parameters.items() if k not in _RESERVED and not k.startswith("triton_")}
    timeout_us = given.pop("timeout", timeout_us)
    check_range("timeout, in microseconds,", timeout_us, 0, _LONGEST_US)
    log_probs = any(_scalar(inputs, name, False) for name in _LOG_PROBS)
    if requested == declared:  # without the optional ones, where the client has listed none
        switches = _SWITCHES if log_probs else {**_SWITCHES, layout.cum_log_probs: "", layout.log_probs: ""}
        requested = frozenset(o for o in requested if o not in switches or _scalar(inputs, switches[o], False))
    return Call(
        prompt=_scalar(inputs, "text_input", ""),
        params=_sampling_params(inputs, layout, given, log_probs),
        stream=stream,
        echo=echo,
        timeout_s=timeout_us / 1e6 if timeout_us else None,
        outputs=requested,
    )


def _sampling_params(inputs: Inputs, layout: Layout, parameters: Mapping[str, Any], log_probs: bool) -> SamplingParams:
    sources: list[tuple[str, Any, str]] = []  # field, value, where it was given
    for name, row in layout.inputs.items():
        if name in inputs and row.field:
            several = PARAMETERS[row.field].type == tuple[str, ...]
            words = [word for word in _values(name, inputs[name]) if word] if several else None
            sources.append((row.field, _scalar(inputs, name, None) if words is None else words, name))
    if (guide := _guide(inputs)) is not None:
        sources.append((STRUCTURED, guide, "guided_decoding_guide"))
    if "end_id" in inputs:
        sources += [("stop_token_ids", [_scalar(inputs, "end_id", None)], "end_id"), ("ignore_eos", True, "end_id")]
    text = _scalar(inputs, "sampling_parameters", "")
    data = parse_json(text, _JSON) if text else {}
    if not isinstance(data, dict):
        raise _JSON.fault(f"it must be a JSON object, not {shown(data)}")
    for where, mapping in (("sampling_parameters", data), ("the request's parameters", parameters)):
        sources += [(field, value, where) for field, value in without_aliases(_normalised(mapping)).items()]
    fields: dict[str, Any] = {}
    for field, value, where in sources:
        if field in fields:
            raise UsageError(f"{field} is given twice, the second time by {where}; give it once")
        fields[field] = value
    for field, why in _NOT_HERE.items():
        if fields.get(field) is not None and fields[field] is not False:
            raise UsageError(f"{field} cannot be had: {why}; leave it out")
    if log_probs:
        fields.setdefault("logprobs", 0)
    return SamplingParams.from_mapping(fields)


def _guide(inputs: Inputs) -> StructuredOutput | None:
    """The constraint that TensorRT-LLM's two inputs state; None where they are not given, or empty."""
    kind, guide = (_scalar(inputs, f"guided_decoding_{name}", "") for name in ("guide_type", "guide"))
    if not kind and not guide:
        return None
    fields = {"json": "json_object", "json_schema": "json_schema", "regex": "regex", "ebnf_grammar": "grammar"}
    if kind not in fields:
        raise UsageError(f"guided_decoding_guide_type must be one of {', '.join(fields)}, not {shown(kind)}")
    try:
        given: dict[str, Any] = {fields[kind]: True if kind == "json" else guide}
        return StructuredOutput(**given)
    except UsageError as error:
        raise UsageError("guided_decoding_guide" + str(error).removeprefix(STRUCTURED)) from error


def _normalised(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Values as `SamplingParams` takes them: vLLM's clients send numbers as text, and keys in JSON are text."""
    result = {}
    for name, value in mapping.items():
        if isinstance(value, str) and (name in _FROM_TEXT or name in _NEUTRAL):
            with suppress(ValueError, RecursionError):
                value = json.loads(value.lower())
        if name == "logprobs" and isinstance(value, bool):
            value = 0 if value else None
        if value is None or (name in _NEUTRAL and value == _NEUTRAL[name]):
            continue
        result[name] = 0 if name == "top_k" and value == -1 else value  # in vLLM, all tokens
    return result


def _scalar(inputs: Inputs, name: str, default: Any) -> Any:
    if name not in inputs:
        return default
    values = _values(name, inputs[name])
    if len(values) != 1:
        raise UsageError(f"{name} must hold one value, not {len(values)}")
    return values[0]


def _values(name: str, array: NDArray[Any]) -> list[Any]:
    """The elements of a tensor as Python values; of a float32 what the client wrote: 0.7, not 0.699999988."""
    flat = array.reshape(-1)
    if array.dtype == object:
        try:
            return [item.decode() if isinstance(item, bytes) else str(item) for item in flat]
        except UnicodeDecodeError as error:
            raise UsageError(f"{name} is not valid UTF-8: {error}") from error
    if array.dtype == np.float32:
        return [float(str(item)) for item in flat]
    return list(flat.tolist())


Arrays = dict[str, NDArray[Any]]
_NUMPY = {"FP32": np.float32, "INT32": np.int32, "UINT32": np.uint32, "INT64": np.int64}


def response(call: Call, layout: Layout, part: RequestOutput, whole: RequestOutput) -> Arrays:
    """The wanted output tensors of a part; `whole` is all parts so far, this one included.

    Texts, finish reasons, token counts and log-probabilities are those of the part, so a client adds them up; a
    sequence without output in it has an empty text. Summed log-probabilities are those of the whole. Figures of the
    request come with its last part. Texts are object [n]; other tensors of each sequence are [1, n] or [n], and scalars
    [1, 1] or [1], by layout.
    """
    metrics, found = part.metrics, {output.index: output for output in part.outputs}
    outputs = [found.get(i) for i in range(call.params.n)]
    start, counts = call.prompt if call.echo else "", [len(o.token_ids) if o else 0 for o in outputs]
    values: dict[str, Sequence[Any]] = {
        "text_output": [start + o.text if o else start for o in outputs],
        "finish_reason": [(o and o.finish_reason) or layout.unfinished for o in outputs],
        "num_input_tokens": [len(part.prompt_token_ids)],
        "num_output_tokens": counts if layout.outputs["num_output_tokens"].dims == (-1,) else [sum(counts)],
    }
    if call.params.logprobs is not None and not call.outputs.isdisjoint((layout.cum_log_probs, layout.log_probs)):
        sums = {o.index: o.cumulative_logprob for o in whole.outputs}
        values[layout.cum_log_probs] = [sums.get(i) or 0.0 for i in range(call.params.n)]
        tokens = [(o and o.logprobs) or [] for o in outputs]
        values[layout.log_probs] = _padded(tokens) if layout.batched else _as_json(tokens)
    if part.finished:
        values["acceptance_rate"] = [metrics.acceptance_rate]
        values["total_accepted_draft_tokens"] = [metrics.accepted_tokens]
        values["total_draft_tokens"] = [metrics.drafted_tokens]
        times_s = (metrics.arrival_s, metrics.first_token_s, metrics.last_token_s)
        values |= {name: [int((time_s or 0) * 1e9)] for name, time_s in zip(TIMES, times_s, strict=True)}
    wanted = {name: each for name, each in values.items() if name in call.outputs}
    return {name: _array(layout.outputs[name].dtype, each, layout.batched) for name, each in wanted.items()}


def _array(dtype: str, values: Sequence[Any], batched: bool) -> NDArray[Any]:
    if dtype == "STRING":
        return np.array([text.encode() for text in values], dtype=object)
    array = np.array(values, _NUMPY[dtype])
    return array[None] if batched else array


def _padded(tokens: list[list[TokenLogprob]]) -> list[list[float]]:
    """[n, longest], zeros behind the shorter ones."""
    longest = max(map(len, tokens))
    return [[t.logprob for t in sequence] + [0.0] * (longest - len(sequence)) for sequence in tokens]


def _as_json(tokens: list[list[TokenLogprob]]) -> list[str]:
    """Per sequence a JSON list with, for each token, {token id: {logprob, rank}} of it and its alternatives."""

    def entry(t: TokenLogprob) -> dict[int, dict[str, float]]:
        top = {token: {"logprob": value, "rank": rank} for rank, (token, value) in enumerate(t.top, 1)}
        return {t.token_id: {"logprob": t.logprob, "rank": t.rank}, **top}

    return [json.dumps([entry(t) for t in sequence]) for sequence in tokens]
