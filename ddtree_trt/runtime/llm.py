"""LLM: generate and stream from an engine directory."""

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from ddtree_trt.artifact.progress import Progress, no_progress
from ddtree_trt.errors import UsageError, shown
from ddtree_trt.runtime.core import Client, open_core
from ddtree_trt.runtime.decoding.loop import Watcher
from ddtree_trt.runtime.options import EngineOptions
from ddtree_trt.runtime.outputs import RequestOutput
from ddtree_trt.runtime.params import SamplingParams
from ddtree_trt.runtime.request_maker import Request
from ddtree_trt.runtime.text.codec import Messages, Prompt, Tools, as_prompts

_log = logging.getLogger(__name__)
T = TypeVar("T")


class LLM(Client):
    """A loaded engine for one thread at a time.

    Args:
        engine_dir: directory written by `ddtree-trt build`.
        options: how to open it; `fields` are fields of `EngineOptions` over these, as `LLM("engine", threads=4)`.
        progress: called with the passes that warm up an engine on a GPU: stage, passes made, passes in all.

    An engine of the torch backend on a GPU changes settings of PyTorch for the whole process and for good: products of
    matrices then sum in float32 (`torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction`,
    `allow_fp16_reduced_precision_reduction`, `allow_fp16_accumulation` and `allow_tf32` are False).

    Raises ArtifactError when the directory cannot be used. One thread at a time may call it, in the process that loaded
    it: every other call raises UsageError. AsyncLLM is for concurrent callers.
    """

    def __init__(
        self,
        engine_dir: str | Path,
        options: EngineOptions | None = None,
        *,
        progress: Progress = no_progress,
        **fields: Any,
    ) -> None:
        super().__init__(open_core(Path(engine_dir), options, progress=progress, **fields))
        self._lock = threading.Lock()  # held while the engine works
        self._left: deque[Request] = deque()  # of streams that were closed, perhaps while it did
        self._closed = self._warned = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Tools | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[RequestOutput]:
        """Complete one prompt or many together; results come in the prompts' order.

        A prompt is text, a list of token ids, or a list of chat messages, for which `chat_template_kwargs` are
        variables of the template, as `{"enable_thinking": False}`, over those that the engine was built with, and
        `tools` what the model may call, as OpenAI's API has them; `chat_format.messages` reads its calls from an
        output. `use_tqdm` draws a bar of the prompts where stderr is a terminal, or is what makes the bar, as
        `tqdm.notebook.tqdm`.

        A completion whose constraint cannot be kept while it runs ends with `finish_reason` "error" and says why in
        `error`; the others are not affected. The first output that the default of `max_tokens` cuts is warned of.
        Raises UsageError before anything runs when one of the calls is wrong, EngineError when the engine fails.
        """
        make = partial(self.core.maker.make, chat_template_kwargs=chat_template_kwargs, tools=tools)

        def work() -> list[Request]:
            requests = [make(prompt, params) for prompt, params in _pairs(prompts, sampling_params)]
            with _bar(use_tqdm, len(requests)) as progress:
                self.core.run(requests, progress)
            return requests

        requests = self._call(work)
        for request in requests:
            request.raise_error(but=UsageError)
        ended = [s for r in requests if r.params.max_tokens is None for s in r.sequences if s.finish_reason == "length"]
        cut = [s for s in ended if len(s.prompt) + s.max_tokens < s.capacity]
        if cut and not self._warned:
            self._warned = True
            _log.warning(
                "an output was cut at %d tokens, the default where max_tokens is not given; give it for longer ones",
                cut[0].max_tokens,
            )
        return [request.output() for request in requests]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Tools | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[RequestOutput]:
        """`generate` for a chat, or for a list of chats. Raises UsageError for prompts that are no chats, too."""
        chats = as_prompts(messages)
        for chat in chats:
            if isinstance(chat, str) or not isinstance(chat, Sequence) or not all(isinstance(m, Mapping) for m in chat):
                raise UsageError(
                    f"messages must be a list of chat messages {{role, content}}, or a list of such lists, not "
                    f"{shown(chat)}; generate takes text and token ids"
                )
        given: Any = {"chat_template_kwargs": chat_template_kwargs, "tools": tools, "use_tqdm": use_tqdm}
        return self.generate(chats, sampling_params, **given)

    def get_tokenizer(self) -> Any:
        """`tokenizer`, by vLLM's name."""
        return self.tokenizer

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        on_round: Watcher | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Tools | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """A generator of the new output after each round; the parts' texts joined are the whole text. A wrong call
        raises here, as in `generate`, not at the first part.

        Several streams may be read alternately. Closing or dropping one cancels its request. `on_round` is called with
        every verified tree; `chat_template_kwargs` and `tools` are as for `generate`.
        """
        params = sampling_params or SamplingParams()
        make = partial(self.core.maker.make, on_round=on_round, chat_template_kwargs=chat_template_kwargs, tools=tools)
        return self._parts(self._call(lambda: make(prompt, params)))

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix: later requests compute their whole prompts. Open streams are not affected."""
        self._call(self.core.scheduler.reset_prefix_cache)

    def _parts(self, request: Request) -> Generator[RequestOutput, None, None]:
        try:
            self._call(lambda: self.core.add(request))
            while (part := self._call(lambda: self._part(request))) is not None:
                yield part
        finally:
            self._left.append(request)
            if not self._forked and not self._closed and not self._lock.locked():
                with self._lock:
                    self._cancel_left()

    def _part(self, request: Request) -> RequestOutput | None:
        """The next part of a stream, or None at its end."""
        request.raise_error()  # another stream's step may have ended this one
        while not request.finished:
            self.core.scheduler.step()
            request.raise_error()
            if (part := request.take()) is not None:
                return part
        return request.take()

    def _call(self, work: Callable[[], T]) -> T:
        """The result of `work`, which has the engine to itself. Raises UsageError where it may not run."""
        self._check_process()
        if self._closed:
            raise UsageError("this LLM is closed; make another one")
        self._check_free()
        # By `with`, which an interrupt cannot leave between acquiring and releasing.
        with self._lock:
            try:
                self._cancel_left()
                return work()
            finally:
                self._cancel_left()

    def _check_free(self) -> None:
        if self._lock.locked():
            raise UsageError(
                "this LLM is in use by a call that has not returned; use AsyncLLM for concurrent callers, or one LLM "
                "for each thread"
            )

    def _cancel_left(self) -> None:
        """Cancel the requests whose streams were closed, on any thread and also within a call."""
        while self._left:
            self.core.cancel(self._left.popleft())

    def close(self) -> None:
        """Release the engine; open streams end with an error. Raises UsageError while a call is running."""
        if self._closed or self._forked:
            return
        self._check_free()
        with self._lock:
            self._closed = True
            self.core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pairs(
    prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> Iterator[tuple[Prompt, SamplingParams]]:
    items = as_prompts(prompts)
    each = params if isinstance(params, Sequence) else [SamplingParams() if params is None else params] * len(items)
    if len(each) != len(items):
        raise UsageError(f"{len(items)} prompts but {len(each)} sampling params; give one, or one per prompt")
    return zip(items, each, strict=True)


@contextmanager
def _bar(use_tqdm: bool | Callable[..., Any], total: int) -> Iterator[Progress]:
    """A `Progress` that draws a bar of so many prompts, as `use_tqdm` of `LLM.generate` says."""
    if not (callable(use_tqdm) or (use_tqdm and sys.stderr.isatty())):
        yield no_progress
        return
    from tqdm import tqdm

    with (use_tqdm if callable(use_tqdm) else tqdm)(total=total, desc="prompts") as bar:
        yield lambda stage, done, total: bar.update(done - bar.n)
