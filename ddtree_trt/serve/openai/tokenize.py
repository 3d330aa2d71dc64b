"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from functools import partial

from fastapi import Request
from starlette.responses import JSONResponse, Response

from ddtree_trt.errors import shown
from ddtree_trt.serve.errors import invalid
from ddtree_trt.serve.openai.chat import tool_use
from ddtree_trt.serve.openai.protocol import DetokenizeRequest, TokenizeRequest
from ddtree_trt.serve.service import Service


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
    ids, names = await service.tokens(text, param), None
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
