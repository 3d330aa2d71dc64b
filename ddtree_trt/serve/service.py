"""The common part of both endpoints: encoding prompts, making parameters, submitting requests, and usage figures."""

import asyncio
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import Request

from ddtree_trt.artifact.template_arguments import KEYWORD
from ddtree_trt.errors import MissingDependency, UsageError
from ddtree_trt.runtime.async_llm import AsyncLLM, Submission
from ddtree_trt.runtime.chat.constraints import check_schemas
from ddtree_trt.runtime.chat.formats import ChatFormat
from ddtree_trt.runtime.chat.tools import ToolUse
from ddtree_trt.runtime.decoding.loop import Watcher
from ddtree_trt.runtime.params import PARAMETERS, SamplingParams
from ddtree_trt.runtime.request_maker import DoesNotFit
from ddtree_trt.runtime.structured.record import ALIASES, STRUCTURED, given_name
from ddtree_trt.runtime.text.codec import Tools
from ddtree_trt.serve.errors import ApiError, cut, invalid
from ddtree_trt.serve.openai.protocol import ChatRequest, CompletionRequest, Message
from ddtree_trt.serve.openai.tokens import TokenTexts
from ddtree_trt.serve.options import ServeOptions

# A text cannot have fewer tokens than its length over the longest token's. The factor allows for normalisation, which
# may turn several characters into one.
_NORMALISATION = 4
_Result = TypeVar("_Result")


class Service:
    """An engine served under a model name."""

    def __init__(self, llm: AsyncLLM, options: ServeOptions) -> None:
        self.llm = llm
        self.chat_format = ChatFormat(llm.codec, options.tool_parser, options.reasoning_parser)
        self.model_name = options.model_name or llm.engine.manifest.name
        self.texts = TokenTexts(llm.codec)
        self._default_max_tokens = options.default_max_tokens
        self.max_seq_len = llm.engine.manifest.limits.max_seq_len
        self.longest_draft = llm.engine.manifest.drafting.longest_draft
        # A thread each: the tokenizer is not thread-safe, and its long prompts must not block the event loop; templates
        # and grammars may take seconds, and must not delay prompts that need none.
        names = ("tokenizer", "template", "grammar")
        self._threads = {name: ThreadPoolExecutor(1, thread_name_prefix=f"ddtree-{name}") for name in names}
        llm.core.maker.grammars.isolated = True
        longest = max((len(token) for token in llm.tokenizer.get_vocab()), default=1)
        self._max_characters = self.max_seq_len * longest * _NORMALISATION

    def close(self) -> None:
        """End what is under way and release the engine, without waiting for what a thread is doing."""
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)
        self.llm.core.maker.grammars.close()
        self.llm.shutdown()

    def check(self, body: ChatRequest | CompletionRequest) -> None:
        """Raises ApiError for another model, and for stream_options of a request that does not stream."""
        self.check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise invalid("stream_options needs stream: true", "stream_options")

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            message = f"the model '{cut(name)}' does not exist here; this server serves '{self.model_name}'"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def encode(self, prompt: str | list[int], param: str) -> list[int]:
        """Token ids of a prompt. Raises ApiError, which names `param`; for too many characters at once."""
        if isinstance(prompt, str) and len(prompt) > self._max_characters:
            message = f"the prompt has {len(prompt)} characters, this model takes at most {self.max_seq_len - 1} tokens"
            raise _named(DoesNotFit(message), param, {})
        return await self.in_thread("tokenizer", self.llm.codec.encode, prompt, param=param)

    async def render(
        self, chat: list[Message], chat_template_kwargs: Mapping[str, Any] | None, tools: Tools | None = None
    ) -> str:
        """The text of a chat. Raises ApiError as `encode` does."""
        messages, codec = [message.for_template() for message in chat], self.llm.codec
        return await self.in_thread("template", codec.render, messages, chat_template_kwargs, tools, param="messages")

    async def in_thread(self, thread: str, work: Callable[..., _Result], *arguments: Any, param: str) -> _Result:
        """The result of `work`, called in the given thread. Raises ApiError, which names `param`, for UsageError."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads[thread], work, *arguments)
        except UsageError as error:
            raise _named(error, param, {STRUCTURED: param}) from error
        except MissingDependency as error:
            raise ApiError(400, str(error), param=param, code="unsupported_parameter") from error

    def params(
        self, given: Mapping[str, Any], room: int, names: Mapping[str, str], default: int | None = None
    ) -> SamplingParams:
        """SamplingParams of a client's values, for a completion of at most `room` tokens. Without a limit of
        theirs it is `default`, or the server's, unless `min_tokens` is more.

        `names` maps fields of SamplingParams to the client's names, where they differ; the constraint's other names are
        taken. Raises ApiError.
        """
        fewest = given.get("min_tokens", 0)  # which may be more than fit: the engine says so
        wanted = max(fewest, min(room, default or self._default_max_tokens or room))
        try:
            return SamplingParams.from_mapping({"max_tokens": max(1, wanted), **given})
        except UsageError as error:
            raise _named(error, None, names) from error

    async def compile(self, params: SamplingParams, given: Mapping[str, Any], use: ToolUse | None = None) -> None:
        """Try the constraint that a request's output has, if any. Raises ApiError, which has the reason why it cannot
        be used, and the name by which it was given: by the tools of `use`, if by none."""
        grammars, name = self.llm.core.maker.grammars, given_name(given) or "tools"
        if params.structured is not None and not grammars.passed(params.structured):
            try:
                await self.in_thread("grammar", grammars.check, params.structured, param=name)
            except ApiError:
                if use is not None:
                    await self.in_thread("grammar", check_schemas, use, grammars.check, param=name)
                raise

    def submit(
        self,
        request: Request,
        ids: list[int],
        params: SamplingParams,
        request_id: str,
        prompt_param: str,
        *,
        names: Mapping[str, str] | None = None,
        on_round: Watcher | None = None,
        text: str | None = None,
    ) -> Submission:
        """Submit a request, which the end of the exchange cancels; `names` are as for `params`, `text` for `echo`."""
        try:
            submission = self.llm.submit(ids, params, request_id, on_round=on_round, text=text)
        except UsageError as error:
            raise _named(error, prompt_param, names or {}) from error
        request.state.cleanup.enter_context(submission)
        return submission


def _named(error: UsageError, other: str | None, names: Mapping[str, str]) -> ApiError:
    """The error with its parameter: our texts' first word, or its name in `names`; `other` where that is none."""
    text, code = str(error), "context_length_exceeded" if isinstance(error, DoesNotFit) else "invalid_value"
    name = re.match(r"\w*", text)[0]  # type: ignore[index]
    if name in PARAMETERS or name in ALIASES or name == KEYWORD:
        other = {STRUCTURED: "structured_outputs", **names}.get(name, name)
        text = other + text[len(name) :]
    return ApiError(400, text, param=other, code=code)
