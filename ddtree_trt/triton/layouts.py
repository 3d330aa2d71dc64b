"""The two layouts of the exported model: the tensors that it declares, with their types and their use.

An input either sets a sampling parameter (`SETS`), or is read by `requests` under its name, or takes values without
effect only. The server refuses what is not declared.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ddtree_trt.runtime.params import PARAMETERS, Parameter

LayoutName = Literal["trtllm", "vllm"]


@dataclass(frozen=True)
class Tensor:
    """A tensor of a request or a response."""

    name: str
    dtype: str  # Triton's name of the data type, without TYPE_
    dims: tuple[int, ...] = (1,)  # without the batch; -1 is any
    bare: bool = False  # whether it has the batch dimension only, by `reshape`
    optional: bool = True  # whether a request may omit it
    field: str | None = None  # of SamplingParams that an input sets
    only: tuple[Any, ...] = ()  # values that are taken, of an input that many clients send and that has no effect here

    def entry(self, *, optional: bool) -> str:
        lines = [
            f'name: "{self.name}"',
            f"data_type: TYPE_{self.dtype}",
            f"dims: [ {', '.join(map(str, self.dims))} ]",
            *(["reshape: { shape: [ ] }"] if self.bare else []),
            *(["optional: true"] if optional else []),
        ]
        return "  {\n" + "".join(f"    {line}\n" for line in lines) + "  }"


@dataclass(frozen=True)
class Layout:
    """A convention of clients. n is the number of sequences of a request."""

    name: LayoutName
    convention: str  # whose it is
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    batched: bool  # scalars are [1, 1] and per-sequence numbers [1, n], instead of [1] and [n]
    echo: bool  # whether an unstreamed text begins with the prompt by default
    unfinished: str  # finish_reason of an unfinished sequence
    cum_log_probs: str  # name of the output
    log_probs: str  # name of the output; the vLLM one is JSON text

    def config(self) -> dict[str, str]:
        return {
            "convention": self.convention,
            "max_batch_size": str(int(self.batched)),
            "inputs": ",\n".join(tensor.entry(optional=tensor.optional) for tensor in self.inputs.values()),
            "outputs": ",\n".join(tensor.entry(optional=False) for tensor in self.outputs.values()),
        }


# Inputs of TensorRT-LLM that set a sampling parameter, and the parameter.
_ALIKE = "max_tokens min_tokens temperature top_k top_p seed repetition_penalty presence_penalty frequency_penalty"
SETS = {name: name for name in _ALIKE.split()} | {"min_length": "min_tokens", "stop_words": "stop"}
SETS |= {"num_draft_tokens": "tree_budget", "num_return_sequences": "n"}


def _type(row: Parameter) -> tuple[str, tuple[int, ...]]:
    """Data type and dimensions of a parameter's values."""
    if row.type is int and row.bounds is not None and row.bounds.highest >= 2**31:
        return "UINT64", (1,)
    if row.type == tuple[str, ...]:
        return "STRING", (-1,)
    return {int: "INT32", float: "FP32", bool: "BOOL", str: "STRING"}[row.type], (1,)


_COUNTS = ("num_input_tokens", "num_output_tokens")
_TRTLLM = (
    Tensor("text_input", "STRING", optional=False),
    Tensor("stream", "BOOL"),
    Tensor("exclude_input_in_output", "BOOL"),
    *(Tensor(name, *_type(PARAMETERS[field]), bare=field == "n", field=field) for name, field in SETS.items()),
    Tensor("end_id", "INT32"),
    Tensor("pad_id", "INT32"),  # has no effect: nothing is padded here
    *(Tensor(f"return_{name}", "BOOL", bare=True) for name in ("log_probs", *_COUNTS, "perf_metrics")),
    Tensor("guided_decoding_guide_type", "STRING"),
    Tensor("guided_decoding_guide", "STRING"),
    Tensor("sampling_parameters", "STRING"),
    Tensor("bad_words", "STRING", (-1,), only=("",)),
    Tensor("embedding_bias_words", "STRING", (-1,), only=("",)),
    Tensor("beam_width", "INT32", only=(1,)),
    Tensor("length_penalty", "FP32", only=(0.0, 1.0)),
    Tensor("return_context_logits", "BOOL", bare=True, only=(False,)),
    Tensor("return_generation_logits", "BOOL", bare=True, only=(False,)),
    Tensor("use_draft_logits", "BOOL", bare=True, only=(False,)),
)
_VLLM = (
    Tensor("text_input", "STRING", optional=False),
    Tensor("stream", "BOOL"),
    Tensor("sampling_parameters", "STRING"),
    Tensor("exclude_input_in_output", "BOOL"),
    *(Tensor(f"return_{name}", "BOOL") for name in ("finish_reason", "cumulative_logprob", "logprobs", *_COUNTS)),
)
TIMES = ("arrival_time_ns", "first_token_time_ns", "last_token_time_ns")


def _named(*tensors: Tensor) -> dict[str, Tensor]:
    return {tensor.name: tensor for tensor in tensors}


def _outputs(*others: Tensor) -> dict[str, Tensor]:
    """The outputs that both layouts have, and these."""
    texts = (Tensor(name, "STRING", (-1,)) for name in ("text_output", "finish_reason"))
    drafts = (Tensor(f"total_{name}draft_tokens", "INT32") for name in ("accepted_", ""))
    return _named(*texts, Tensor("acceptance_rate", "FP32"), *drafts, *others)


TRTLLM = Layout(
    "trtllm",
    "TensorRT-LLM's `tensorrt_llm_bls` model",
    _named(*_TRTLLM),
    _outputs(
        Tensor("num_input_tokens", "INT32"),
        Tensor("num_output_tokens", "INT32"),  # of all sequences
        Tensor("cum_log_probs", "FP32", (-1,)),
        Tensor("output_log_probs", "FP32", (-1, -1)),
        *(Tensor(name, "INT64") for name in TIMES),
    ),
    batched=True,
    echo=False,
    unfinished="",
    cum_log_probs="cum_log_probs",
    log_probs="output_log_probs",
)
VLLM = Layout(
    "vllm",
    "Triton's vLLM backend",
    _named(*_VLLM),
    _outputs(
        Tensor("num_input_tokens", "UINT32"),
        Tensor("num_output_tokens", "UINT32", (-1,)),  # of each sequence
        Tensor("cumulative_logprob", "FP32", (-1,)),
        Tensor("logprobs", "STRING", (-1,)),
    ),
    batched=False,
    echo=True,
    unfinished="None",
    cum_log_probs="cumulative_logprob",
    log_probs="logprobs",
)
LAYOUTS = {layout.name: layout for layout in (TRTLLM, VLLM)}
