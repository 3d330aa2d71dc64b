"""LLM: generate and stream from an engine directory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ddtree_trt.errors import UsageError
from ddtree_trt.runtime.decode import Watcher
from ddtree_trt.runtime.load import open_engine
from ddtree_trt.runtime.outputs import RequestOutput
from ddtree_trt.runtime.params import DeviceRoundsMode, SamplingParams
from ddtree_trt.runtime.requests import Request, RequestMaker
from ddtree_trt.runtime.scheduler import Scheduler
from ddtree_trt.runtime.text import Prompt, TextCodec


class LLM:
    """An engine, loaded.

    Args:
        engine_dir: directory written by `ddtree-trt build`.
        threads: CPU threads of the engine; 0 chooses.
        profile: exact times of the stages in `metrics.stage_s`: each then waits for the GPU, so rounds take longer.
            Without it, work that a stage leaves on the GPU counts for the next one that waits.
        device_rounds: whether rounds stay on the device. `auto`: on a GPU, for every request that they can serve;
            `on`: refuse other requests; `off`: never. `metrics` of an output say what was done, and why.
        exact: of engines of the onnxruntime backend, whether a single token gets the same logits, bit for bit, as in a
            pass of several, so that outputs of chains are those of `ar`. Single tokens take longer then. None: for
            int8 engines.

    Raises ArtifactError when the directory cannot be used. Not thread-safe: use AsyncLLM for concurrent callers.
    """

    def __init__(
        self,
        engine_dir: str | Path,
        *,
        threads: int = 0,
        profile: bool = False,
        device_rounds: DeviceRoundsMode = "auto",
        exact: bool | None = None,
    ) -> None:
        directory = Path(engine_dir)
        self.engine = open_engine(directory, threads=threads, exact=exact)
        self.codec = TextCodec(directory, self.engine.manifest.chat_template_args)
        self._maker = RequestMaker(directory, self.engine, self.codec, device_rounds=device_rounds)
        self._scheduler = Scheduler(self.engine, profile=profile)

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer."""
        return self.codec.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many together; results come in the prompts' order.

        A prompt is text, a list of token ids, or a list of chat messages. Raises UsageError before anything runs when
        one of the calls is wrong, EngineError when the engine fails.
        """
        requests = self._make(prompts, sampling_params)
        try:
            for request in requests:
                for sequence in request.sequences:
                    self._scheduler.add(sequence)
            while not all(r.finished for r in requests):
                self._scheduler.step()
        finally:
            self._cancel(requests)
        for request in requests:
            request.raise_error()
        return [request.output() for request in requests]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        on_round: Watcher | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield what is new after each round; the parts' texts joined are the whole text. Several streams may be
        read side by side. Closing the iterator cancels the request. `on_round` sees every verified tree. Raises as
        `generate` does, at once."""
        request = self._maker.make(prompt, sampling_params or SamplingParams(), on_round=on_round)
        return self._stream(request)

    def _stream(self, request: Request) -> Iterator[RequestOutput]:
        for sequence in request.sequences:
            self._scheduler.add(sequence)
        try:
            while not request.finished:
                self._scheduler.step()
                request.raise_error()
                if part := request.take():
                    yield part
            request.raise_error()  # another stream's step may have ended this one
            if part := request.take():
                yield part
        finally:
            self._cancel([request])

    def _cancel(self, requests: list[Request]) -> None:
        for request in requests:
            for sequence in request.sequences:
                if not sequence.finished:
                    self._scheduler.cancel(sequence)

    def _make(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        items = _as_prompts(prompts)
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(items)
        else:
            each = list(params)
            if len(each) != len(items):
                raise UsageError(f"{len(items)} prompts but {len(each)} sampling params; give one, or one per prompt")
        return [self._maker.make(prompt, p) for prompt, p in zip(items, each, strict=True)]

    def close(self) -> None:
        """Release the engine."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _as_prompts(prompts: Any) -> list[Prompt]:
    """One prompt (text, token ids, messages) or a list of them, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if (items and all(isinstance(p, int) for p in items)) or (items and all(isinstance(p, dict) for p in items)):
        return [items]
    return items
