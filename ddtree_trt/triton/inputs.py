"""The table of input tensors that the exported model declares, with their types and their use.

A row either sets a sampling parameter, and is then made from the table in `runtime/params.py`, or is read by `requests`
under its name, or takes values without effect only. The order is that of `config.pbtxt`. The server refuses what is not
declared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from ddtree_trt.runtime.params import PARAMETERS, Parameter

LayoutName = Literal["trtllm", "vllm"]
LAYOUT_NAMES: tuple[str, ...] = get_args(LayoutName)


@dataclass(frozen=True)
class Input:
    """An input tensor.

    Attributes:
        dtype: Triton's name of the data type, without TYPE_.
        dims: lengths without the batch; -1 is any.
        bare: whether the tensor has the batch dimension only, by `reshape`.
        optional: whether a request may omit it.
        field: the field of SamplingParams that it sets.
        only: the values that are taken, of an input that many clients send and that has no effect here.
    """

    name: str
    dtype: str
    dims: tuple[int, ...] = (1,)
    bare: bool = False
    optional: bool = True
    field: str | None = None
    only: tuple[Any, ...] = ()

    @property
    def config(self) -> str:
        """Its entry of `config.pbtxt`."""
        lines = [
            f'name: "{self.name}"',
            f"data_type: TYPE_{self.dtype}",
            f"dims: [ {', '.join(map(str, self.dims))} ]",
            *(["reshape: { shape: [ ] }"] if self.bare else []),
            *(["optional: true"] if self.optional else []),
        ]
        return "  {\n" + "".join(f"    {line}\n" for line in lines) + "  }"


def _sets(*fields: str, bare: bool = False) -> list[Input]:
    """The tensors that set these sampling parameters."""
    return [
        Input(tensor, *_type(PARAMETERS[field]), bare=bare, field=field)
        for field in fields
        for tensor in PARAMETERS[field].tensors
    ]


def _type(row: Parameter) -> tuple[str, tuple[int, ...]]:
    """Data type and dimensions of a parameter's values."""
    if row.type is int and row.bounds is not None and row.bounds.highest >= 2**31:
        return "UINT64", (1,)
    if row.type == tuple[str, ...]:
        return "STRING", (-1,)
    return {int: "INT32", float: "FP32", bool: "BOOL", str: "STRING"}[row.type], (1,)


# Parameters with a separate place in TensorRT-LLM's order; all others that have a tensor stand together.
_PLACED = ("n", "max_tokens", "min_tokens", "stop", "tree_budget")
_TRTLLM = (
    Input("text_input", "STRING", optional=False),
    *_sets("max_tokens", "min_tokens"),
    Input("stream", "BOOL"),
    Input("exclude_input_in_output", "BOOL"),
    *_sets("stop"),
    Input("end_id", "INT32"),
    Input("pad_id", "INT32"),  # has no effect: nothing is padded here
    *_sets(*(name for name in PARAMETERS if name not in _PLACED)),
    *_sets("n", bare=True),
    *_sets("tree_budget"),
    Input("return_log_probs", "BOOL", bare=True),
    Input("return_num_input_tokens", "BOOL", bare=True),
    Input("return_num_output_tokens", "BOOL", bare=True),
    Input("return_perf_metrics", "BOOL", bare=True),
    Input("guided_decoding_guide_type", "STRING"),
    Input("guided_decoding_guide", "STRING"),
    Input("sampling_parameters", "STRING"),
    Input("bad_words", "STRING", (-1,), only=("",)),
    Input("embedding_bias_words", "STRING", (-1,), only=("",)),
    Input("beam_width", "INT32", only=(1,)),
    Input("length_penalty", "FP32", only=(0.0, 1.0)),
    Input("return_context_logits", "BOOL", bare=True, only=(False,)),
    Input("return_generation_logits", "BOOL", bare=True, only=(False,)),
    Input("use_draft_logits", "BOOL", bare=True, only=(False,)),
)
_VLLM = (
    Input("text_input", "STRING", optional=False),
    Input("stream", "BOOL"),
    Input("sampling_parameters", "STRING"),
    Input("exclude_input_in_output", "BOOL"),
    Input("return_finish_reason", "BOOL"),
    Input("return_cumulative_logprob", "BOOL"),
    Input("return_logprobs", "BOOL"),
    Input("return_num_input_tokens", "BOOL"),
    Input("return_num_output_tokens", "BOOL"),
)
INPUTS: dict[LayoutName, tuple[Input, ...]] = {"trtllm": _TRTLLM, "vllm": _VLLM}

_ALL = {row.name: row for rows in INPUTS.values() for row in rows}
# Input → field of SamplingParams. Two names for one field may not be given together.
FIELDS = {name: row.field for name, row in _ALL.items() if row.field is not None}
# Input without effect here, which clients send nevertheless → the values that are taken.
ONLY = {name: row.only for name, row in _ALL.items() if row.only}
# Inputs that `requests` reads by name.
OTHERS = _ALL.keys() - FIELDS.keys() - ONLY.keys()


def config(layout: LayoutName) -> str:
    """The entries of `input [ ]` in a layout's `config.pbtxt`."""
    return ",\n".join(row.config for row in INPUTS[layout])
