"""POST /v1/completions, and /tokenize and /detokenize in vLLM's shapes."""

from functools import cache, partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ddtree_trt.errors import shown
from ddtree_trt.runtime.decoding.sampling import TokenLogprob
from ddtree_trt.runtime.outputs import CompletionOutput, RequestOutput
from ddtree_trt.serve.errors import invalid
from ddtree_trt.serve.openai.answers import Answer, finish_reason, json_logprob, new_id, respond
from ddtree_trt.serve.openai.chat import tool_use
from ddtree_trt.serve.openai.protocol import CompletionRequest, DetokenizeRequest, TokenizeRequest
from ddtree_trt.serve.openai.tokens import TextOffsets, TokenTexts
from ddtree_trt.serve.service import Service

DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this endpoint


async def complete(service: Service, request: Request, body: CompletionRequest) -> Response:
    service.check(body)
    given = body.sampling()
    n = max(given.get("n", 1), 1)
    _check_total(service, len(body.prompt) * n, "prompt" if n == 1 else "n")
    echo = given.get("echo", False)
    if echo:
        given["prompt_logprobs"] = given.get("logprobs")
    params = cache(lambda room: service.params(given, room, {}, DEFAULT_MAX_TOKENS))
    prompts = [(await service.encode(p, "prompt"), p if isinstance(p, str) else None) for p in body.prompt]
    calls = [(ids, params(service.max_seq_len - len(ids)), text) for ids, text in prompts]
    await service.compile(calls[0][1], given)
    request_id = new_id("cmpl")
    # No await between the first and the last: on QueueFull, those already submitted are cancelled at once.
    submissions = [
        service.submit(request, ids, p, f"{request_id}-{i}", "prompt", text=t) for i, (ids, p, t) in enumerate(calls)
    ]
    n, skip = calls[0][1].n, calls[0][1].skip_special_tokens
    choices = _Choices(service.texts, n, echo=echo, skip_special_tokens=skip)
    kinds = ("text_completion", "text_completion")
    return await respond(service, body, request_id, submissions, kinds, choices.whole, choices.parts)


def _check_total(service: Service, sequences: int, param: str) -> None:
    llm = service.llm
    if llm.max_waiting is not None and sequences > llm.slots + llm.max_waiting:
        message = f"{shown(sequences)} completions in one request; at most {llm.slots + llm.max_waiting} are taken"
        raise invalid(message, param)


class _Choices:
    """Converts outputs to choices, numbered prompt by prompt; keeps each choice's text offset from part to part."""

    def __init__(self, texts: TokenTexts, n: int, *, echo: bool, skip_special_tokens: bool) -> None:
        self._texts, self._n, self._echo = texts, n, echo
        self._skip_special_tokens = skip_special_tokens
        self._offsets: dict[int, TextOffsets] = {}

    def whole(self, place: int, part: RequestOutput, output: CompletionOutput) -> list[Answer]:
        index = place * self._n + output.index
        logprobs = self._logprobs(index, part, output)
        reason = finish_reason(output.finish_reason)
        return [{"index": index, "text": output.text, "logprobs": logprobs, "finish_reason": reason}]

    def parts(self, place: int, part: RequestOutput, output: CompletionOutput) -> list[Answer]:
        """The choice, where the part says something."""
        (choice,) = self.whole(place, part, output)
        logprobs = choice["logprobs"]
        says = choice["text"] or choice["finish_reason"] is not None or (logprobs and logprobs["tokens"])
        return [choice] if says else []

    def _logprobs(self, index: int, part: RequestOutput, output: CompletionOutput) -> Answer | None:
        if output.logprobs is None:
            return None
        tokens: list[tuple[int, TokenLogprob | None]] = []
        places: list[int] = []
        if index not in self._offsets:
            codec, skip, echo = self._texts.codec, self._skip_special_tokens, ""
            if self._echo:
                tokens += zip(part.prompt_token_ids, part.prompt_logprobs or [], strict=True)
                echo = part.prompt or codec.decode(part.prompt_token_ids, skip_special_tokens=skip)
                left_out = codec.decode(part.prompt_token_ids, skip_special_tokens=False) != echo
                places += map(TextOffsets(codec, skip_special_tokens=left_out).next, part.prompt_token_ids)
            self._offsets[index] = TextOffsets(codec, skip_special_tokens=skip, start=len(echo))
        tokens += zip(output.token_ids, output.logprobs, strict=True)
        places += map(self._offsets[index].next, output.token_ids)
        return {
            "tokens": [self._texts.of(token)[0] for token, _ in tokens],
            "token_logprobs": [None if t is None else json_logprob(t.logprob) for _, t in tokens],
            "top_logprobs": [None if t is None else self._top(t) for _, t in tokens],
            "text_offset": places,
        }

    def _top(self, token: TokenLogprob) -> dict[str, float]:
        """The best alternatives and the token itself. Of two tokens with one text the more probable one stays."""
        top: dict[str, float] = {}
        for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
            top.setdefault(self._texts.of(token_id)[0], json_logprob(logprob))
        return top


async def tokenize(service: Service, _: Request, body: TokenizeRequest) -> Response:
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give one of prompt and messages", "prompt")
    text, param = body.prompt or "", "prompt"
    if body.messages is not None:
        use = tool_use(service, body.tools, None, None)
        text = await service.render(body.messages, body.chat_template_kwargs, use.descriptions or None)
        param = "messages"
    elif body.tools or body.chat_template_kwargs:
        raise invalid("tools and chat_template_kwargs need messages", "messages")
    ids, names = await service.encode(text, param), None
    if body.return_token_strs:  # what the tokenizer's own vocabulary calls them
        names = await service.in_thread("tokenizer", service.llm.tokenizer.convert_ids_to_tokens, ids, param=param)
    return JSONResponse({"count": len(ids), "max_model_len": service.max_seq_len, "tokens": ids, "token_strs": names})


async def detokenize(service: Service, _: Request, body: DetokenizeRequest) -> Response:
    service.check_model(body.model)
    size = service.llm.engine.manifest.target_dims.vocab_size
    if (wrong := next((t for t in body.tokens if not 0 <= t < size), None)) is not None:
        message = f"tokens: token id {shown(wrong)} is outside the vocabulary of {size}"
        raise invalid(message, "tokens")
    decode = partial(service.llm.codec.decode, skip_special_tokens=False)
    return JSONResponse({"prompt": await service.in_thread("tokenizer", decode, body.tokens, param="tokens")})
