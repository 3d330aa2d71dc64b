"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response

from ddtree_trt.serve.errors import ApiError
from ddtree_trt.serve.openai.chat import check_names, tool_use
from ddtree_trt.serve.openai.protocol import DetokenizeRequest, TokenizeRequest
from ddtree_trt.serve.service import Service


async def tokenize(service: Service, body: TokenizeRequest) -> Response:
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give one of prompt and messages", param="prompt", code="invalid_value")
    text, param = body.prompt or "", "prompt"
    if body.messages is not None:
        use = tool_use(service, body.tools, None, None)
        check_names(service, body.messages)
        messages, param = [message.for_template() for message in body.messages], "messages"
        text = await service.render(messages, body.chat_template_kwargs, use.descriptions or None)
    elif body.tools or body.chat_template_kwargs:
        raise ApiError(400, "tools and chat_template_kwargs need messages", param="messages", code="invalid_value")
    ids = await service.tokens(text, param)
    names = await service.token_names(ids) if body.return_token_strs else None
    return JSONResponse({"count": len(ids), "max_model_len": service.max_seq_len, "tokens": ids, "token_strs": names})


async def detokenize(service: Service, body: DetokenizeRequest) -> Response:
    service.check_model(body.model)
    return JSONResponse({"prompt": await service.detokenize(body.tokens)})
