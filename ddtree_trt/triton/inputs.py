"""The table of input tensors that the exported model declares, with their types and their use.

A row either sets a sampling parameter, and is then made from the table in `runtime/params.py`, or is read by `requests`
under its name, or is refused with a reason. The order is that of `config.pbtxt`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddtree_trt.runtime.params import PARAMETERS, Parameter
from ddtree_trt.triton.layouts import LayoutName


@dataclass(frozen=True)
class Input:
    """An input tensor.

    Attributes:
        dtype: Triton's name of the data type, without TYPE_.
        dims: lengths without the batch; -1 is any.
        bare: whether the tensor has the batch dimension only, by `reshape`.
        optional: whether a request may omit it.
        field: the field of SamplingParams that it sets.
        refused: the reason, for an input that is refused.
        harmless: values without effect that are accepted nevertheless, since many clients send all inputs.
    """

    name: str
    dtype: str
    dims: tuple[int, ...] = (1,)
    bare: bool = False
    optional: bool = True
    field: str | None = None
    refused: str | None = None
    harmless: tuple[Any, ...] = ()

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


_TEXT_ONLY = "the model reads text only"
_NO_LORA = "LoRA adapters are not supported; build an engine from the merged checkpoint"
_NO_TUNING = "prompt tuning is not supported"
_NO_BEAMS = "beam search is not supported; a tree of drafts is verified for one sequence at a time"
_NO_LOGITS = "logits stay in the engine; ask for log-probabilities with return_log_probs"
_NO_BIAS = "biased words are not supported; bias single tokens with logit_bias in sampling_parameters"
_NO_BANS = "banned words are not supported; ban single tokens with logit_bias in sampling_parameters"
_NO_DRAFT_LOGITS = "the drafter runs inside the engine and takes no logits from outside"
_DECODER_ONLY = "the model has a decoder only; put the whole prompt into text_input"

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
    Input("bad_words", "STRING", (-1,), refused=_NO_BANS, harmless=("",)),
    Input("beam_width", "INT32", refused=_NO_BEAMS, harmless=(1,)),
    Input("length_penalty", "FP32", refused=_NO_BEAMS, harmless=(0.0, 1.0)),
    Input("return_context_logits", "BOOL", bare=True, refused=_NO_LOGITS, harmless=(False,)),
    Input("return_generation_logits", "BOOL", bare=True, refused=_NO_LOGITS, harmless=(False,)),
    Input("use_draft_logits", "BOOL", bare=True, refused=_NO_DRAFT_LOGITS, harmless=(False,)),
    Input("decoder_text_input", "STRING", refused=_DECODER_ONLY),
    Input("image_input", "FP16", (-1, 3, -1, -1), refused=_TEXT_ONLY),
    Input("image_bytes_input", "UINT8", (-1, -1, -1, -1), refused=_TEXT_ONLY),
    Input("image_url_input", "STRING", refused=_TEXT_ONLY),
    Input("video_bytes_input", "UINT8", (-1, -1, -1, -1), refused=_TEXT_ONLY),
    Input("prompt_embedding_table", "FP16", (-1, -1), refused=_NO_TUNING),
    Input("prompt_vocab_size", "INT32", refused=_NO_TUNING),
    Input("prompt_table_extra_id", "UINT64", refused=_NO_TUNING),
    Input("embedding_bias_words", "STRING", (-1,), refused=_NO_BIAS, harmless=("",)),
    Input("embedding_bias_weights", "FP32", (-1,), refused=_NO_BIAS),
    Input("lora_task_id", "UINT64", bare=True, refused=_NO_LORA),
    Input("lora_weights", "FP16", (-1, -1), refused=_NO_LORA),
    Input("lora_config", "INT32", (-1, 3), refused=_NO_LORA),
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
    Input("image", "STRING", (-1,), refused=_TEXT_ONLY),
    Input("embedding_request", "STRING", refused="the model generates text, it makes no embeddings"),
)
INPUTS: dict[LayoutName, tuple[Input, ...]] = {"trtllm": _TRTLLM, "vllm": _VLLM}

_ALL = {row.name: row for rows in INPUTS.values() for row in rows}
# Input → field of SamplingParams. Two names for one field may not be given together.
FIELDS = {name: row.field for name, row in _ALL.items() if row.field is not None}
# Unsupported input → the reason, and the values without effect.
REFUSED = {name: (row.refused, row.harmless) for name, row in _ALL.items() if row.refused is not None}
# Inputs that `requests` reads by name.
OTHERS = _ALL.keys() - FIELDS.keys() - REFUSED.keys()


def config(layout: LayoutName) -> str:
    """The entries of `input [ ]` in a layout's `config.pbtxt`."""
    taken = [row.config for row in INPUTS[layout] if row.refused is None]
    refused = [row.config for row in INPUTS[layout] if row.refused is not None]
    why = "  # What follows is declared so that a request with it is refused with a sentence, not ignored.\n"
    return ",\n".join([*taken, why + refused[0], *refused[1:]])
