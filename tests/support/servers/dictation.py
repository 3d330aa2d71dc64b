"""Engines that write a given text, with other chat templates: what a server makes of a model's words."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from engine_files import vouch
from numpy.typing import NDArray

from ddtree_trt.runtime.engines.base import Verdict, VerifyRequest
from ddtree_trt.runtime.text.codec import TextCodec

# Templates of our own with what matters in those of the families: how tools, calls, results and reasoning are written.
QWEN3 = """
{%- if tools %}{{- '<|im_start|>system\\nTools:' }}
{%- for tool in tools %}{{- '\\n' + tool | tojson }}{% endfor %}
{{- '\\nCall one by <tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' }}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- '<tool_response>\\n' + message.content + '\\n</tool_response>' if message.role == 'tool' else message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

OPENS_THINKING = QWEN3.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'")

QWEN3_CODER = """
{%- if tools %}{{- '<|im_start|>system\\nTools:' }}
{%- for tool in tools %}{{- '\\n<function>' + tool.function.name + '</function>' }}{% endfor %}
{{- '\\nCall one by <tool_call>\\n<function=name>\\n<parameter=name>\\nvalue\\n</parameter>\\n</function>\\n' }}
{{- '</tool_call><|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>\\n' ~ value ~ '\\n</parameter>\\n' }}{% endfor %}
{{- '</function>\\n</tool_call>' }}{% endfor %}{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- if tools is not none %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\nEnvironment: ipython\\n' }}
{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
{%- for tool in tools %}{{- '\\n' + tool | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}
{%- if 'tool_calls' in message %}
{%- if message.tool_calls | length > 1 %}{{ raise_exception('only one call at a time') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- (call.arguments | tojson) + '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header_id|>\\n\\n' }}
{{- ((message['name'] + ': ') if message['name'] else '') + message.content + '<|eot_id|>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""


def with_template(engine: Path, copy: Path, template: str, rename: dict[str, str] | None = None) -> Path:
    """A copy of an engine with another chat template. `rename`: special tokens of its tokenizer and their new texts."""
    shutil.copytree(engine, copy)
    (copy / "chat_template.jinja").write_text(template, encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (copy / name).read_text(encoding="utf-8")
        for old, new in (rename or {}).items():
            text = text.replace(json.dumps(old), json.dumps(new))
        (copy / name).write_text(text, encoding="utf-8")
    vouch(copy)
    return copy


class Dictation:
    """Stands before an engine's passes and has its target want a given text, whatever the prompt; the rest is the
    engine's own work. Behind the text it wants to end."""

    def __init__(self, engine: Any, codec: TextCodec) -> None:
        self._engine, self._codec = engine, codec
        self._verify = engine.verify
        self._script: list[int] = []
        self._prompts: dict[int, int] = {}  # slot → tokens of its prompt
        self._end = min(engine.manifest.stop_token_ids)
        engine.verify = self.verify

    def say(self, text: str) -> None:
        """The text that requests get from now on."""
        self._script = self._codec.encode(text)

    def verify(self, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        verdicts = self._verify(requests)
        return [self._wanting(verdict, self._places(r)) for r, verdict in zip(requests, verdicts, strict=True)]

    def _places(self, request: VerifyRequest) -> NDArray[Any]:
        """Of the text: those that the rows of the verdict choose, which are the first behind a chunk of the prompt."""
        past = self._engine.length(request.slot)
        if request.rows != "all":
            self._prompts[request.slot] = past + len(request.tree)
            return np.zeros(len(request.tree) - request.first_row, np.int64)
        return past + 1 - self._prompts[request.slot] + request.tree.depths

    def _wanting(self, verdict: Verdict, places: NDArray[Any]) -> Verdict:
        """The verdict of a target that wants the tokens at these places of the text."""
        wanted = np.array([self._script[p] if p < len(self._script) else self._end for p in places.tolist()], np.int64)
        logits = np.array(verdict.logits)
        logits[np.arange(len(wanted)), wanted] = 1e4
        return Verdict(wanted, logits)
