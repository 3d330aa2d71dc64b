"""Requests: checking a call against the engine, making its sequences, and collecting their outputs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from uuid import uuid4

from ddtree_trt.drafters.kind import LEVELS
from ddtree_trt.errors import UsageError, shown
from ddtree_trt.runtime.chat.formats import MARKS
from ddtree_trt.runtime.decoding.budget.policy import AutoBudget, AutoBudgets, Budget, FixedBudget
from ddtree_trt.runtime.decoding.loop import Watcher
from ddtree_trt.runtime.decoding.methods import METHODS, resolve_method
from ddtree_trt.runtime.decoding.routing import request_host_reason
from ddtree_trt.runtime.decoding.sampling import Sampler
from ddtree_trt.runtime.engines.base import Engine
from ddtree_trt.runtime.options import DeviceRoundsMode
from ddtree_trt.runtime.outputs import CompletionOutput, RequestOutput, Usage
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.sequence import Sequence
from ddtree_trt.runtime.stats import merge
from ddtree_trt.runtime.structured.compiler import GrammarCompiler
from ddtree_trt.runtime.text.codec import Prompt, TextCodec, TextStream, Tools

SEEDED_DRAFT = 4  # tokens that a method which draws its drafts drafts with a seed, where the budget is `auto`


class DoesNotFit(UsageError):
    """A prompt, or one with the output that is asked for, is longer than the engine's sequences."""


@dataclass
class Request:
    """A prompt with its n sequences."""

    request_id: str
    prompt: str | None
    prompt_ids: list[int]  # the reader's own, who may change them
    params: SamplingParams
    sequences: list[Sequence]

    @property
    def finished(self) -> bool:
        return all(s.finished for s in self.sequences)

    @property
    def released(self) -> bool:
        """Whether it has finished, and nobody will change it."""
        return all(s.released for s in self.sequences)

    @property
    def error(self) -> Exception | None:
        return next((s.error for s in self.sequences if s.error is not None), None)

    def raise_error(self, *, but: type[Exception] | tuple[()] = ()) -> None:
        """Raise the error that ended one of the sequences, if any, `but` those of a kind."""
        for s in self.sequences:
            if s.error is not None and not isinstance(s.error, but):
                raise s.error

    def output(self) -> RequestOutput:
        return self._output([s.output_so_far() for s in self.sequences], self.released)

    def take(self) -> RequestOutput | None:
        """The output since the last call, or None when nothing is new. Any thread may call it, one at a time."""
        parts = [p for s in self.sequences if (p := s.take()) is not None]
        return self._output(parts, all(s.shown_end for s in self.sequences)) if parts else None

    def _output(self, outputs: list[CompletionOutput], finished: bool) -> RequestOutput:
        metrics = merge(s.metrics for s in self.sequences)
        wanted = self.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            outputs=outputs,
            finished=finished,
            metrics=metrics,
            usage=Usage(metrics.prompt_tokens, metrics.output_tokens, metrics.cached_tokens),
            prompt_logprobs=list(self.sequences[0].prompt_logprobs) if wanted else None,
        )


class RequestMaker:
    def __init__(
        self, engine: Engine, codec: TextCodec, budgets: AutoBudgets, *, device_rounds: DeviceRoundsMode = "auto"
    ) -> None:
        """`budgets`: the state that automatic budgets of all requests share."""
        self.device_rounds = device_rounds
        self._codec, self._budgets = codec, budgets
        self._engine, self._manifest = engine, engine.manifest

    @cached_property
    def grammars(self) -> GrammarCompiler:
        vocab_size, stops = self._manifest.target_dims.vocab_size, frozenset(self._manifest.stop_token_ids)
        return GrammarCompiler(self._codec.tokenizer.backend_tokenizer.to_str, vocab_size, stops)

    def make(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        *,
        on_round: Watcher | None = None,
        device_rounds: DeviceRoundsMode | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Tools | None = None,
        text: str | None = None,
    ) -> Request:
        """The request of a prompt, with its n sequences. `device_rounds` overrides the mode of all requests;
        `chat_template_kwargs` and `tools` are for a prompt of chat messages, `text` is what one of token ids says.

        Raises UsageError for a prompt that is empty, out of vocabulary or too long, or params the engine cannot honour.
        """
        if not isinstance(params, SamplingParams):
            raise UsageError(
                f"sampling_params must be SamplingParams, not {shown(params)}; make them of names with "
                "SamplingParams.from_mapping"
            )
        manifest, codec = self._manifest, self._codec
        ids = codec.encode(prompt, chat_template_kwargs, tools)
        if tools:
            kept = {*params.keep_special_tokens, *codec.special_tokens(MARKS)}
            params = replace(params, keep_special_tokens=tuple(sorted(kept)))
        params = replace(params, method=resolve_method(params.method, manifest.drafter_kind).name)
        eos_ids = frozenset(() if params.ignore_eos else manifest.stop_token_ids)
        ending = eos_ids | set(params.stop_token_ids)  # the tokens that end the text, which min_tokens bans
        self._check(ids, params, ending)
        mode = device_rounds or self.device_rounds
        why_host = request_host_reason(mode, self._engine, params, watched=on_round is not None)
        text, echo = prompt if isinstance(prompt, str) else text, ""
        if params.echo:
            echo = text or codec.decode(ids, skip_special_tokens=params.skip_special_tokens)
        sequences = []
        for index in range(params.n):
            matcher = None if params.structured is None else self.grammars.prepare(params.structured, ending)
            stream = TextStream(
                codec,
                params.stop,
                skip_special_tokens=params.skip_special_tokens,
                keep_special_tokens=frozenset(params.keep_special_tokens),
                keep_stop=params.include_stop_str_in_output,
            )
            sequence = Sequence(
                index=index,
                prompt=ids,
                params=params,
                eos_ids=eos_ids,
                capacity=manifest.limits.max_seq_len,
                sampler=Sampler(params, manifest.target_dims.vocab_size, ids, ending, index, matcher),
                stream=stream,
                budget=self._budget(params),
                why_host=why_host,
                on_round=on_round,
                echo=echo,
            )
            sequences.append(sequence)
        return Request(request_id or f"req-{uuid4().hex}", text, list(ids), params, sequences)

    def _check(self, ids: list[int], params: SamplingParams, ending: frozenset[int]) -> None:
        limits, vocab = self._manifest.limits, self._manifest.target_dims.vocab_size
        if not ids:
            raise UsageError("the prompt has no tokens; give at least one")
        room = limits.max_seq_len - len(ids)
        if room <= 0:
            raise DoesNotFit(
                f"the prompt has {len(ids)} tokens, this engine takes at most {limits.max_seq_len - 1} "
                f"(max_seq_len {limits.max_seq_len}); shorten it or rebuild with a larger --max-seq-len"
            )
        for name, wanted in (("min_tokens", params.min_tokens), ("max_tokens", params.max_tokens or 0)):
            if wanted > room:
                raise DoesNotFit(
                    f"{name} {wanted} does not fit: the prompt leaves {room} of this engine's {limits.max_seq_len} "
                    "tokens; lower it, shorten the prompt or rebuild with a larger --max-seq-len"
                )
        named = {"the prompt": ids, "stop_token_ids": params.stop_token_ids, "logit_bias": params.logit_bias}
        for name, tokens in named.items():
            if tokens and not 0 <= min(tokens) <= max(tokens) < vocab:
                out = next(t for t in tokens if not 0 <= t < vocab)
                raise UsageError(f"{name}: token id {shown(out)} is outside the vocabulary of {vocab}")
        if len(ending) >= vocab:
            raise UsageError(f"stop_token_ids name the whole vocabulary of {vocab}, so no text could come; name fewer")
        if params.tree_budget != "auto" and params.tree_budget > limits.max_tree_budget:
            raise UsageError(
                f"tree_budget {shown(params.tree_budget)} is above this engine's {limits.max_tree_budget}; "
                "lower it or rebuild with a larger --max-tree-budget"
            )

    def _budget(self, params: SamplingParams) -> Budget:
        method = METHODS[params.method]
        if params.tree_budget != "auto":
            levels = LEVELS if self._manifest.drafting.drafts == "levels" else None
            return FixedBudget(params.tree_budget, levels)
        fixed = method.default_budget(self._manifest.drafting)
        if fixed is None and method.draws and params.stochastic and params.seed is not None:
            fixed = SEEDED_DRAFT  # what is drawn, and so the output, must depend neither on times nor on others
        if fixed is None:
            return AutoBudget(self._budgets)
        return FixedBudget(min(fixed, self._manifest.limits.max_tree_budget))
