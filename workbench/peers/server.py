"""Any OpenAI-compatible server, over its streamed completions endpoint with the prompt as token ids."""

from __future__ import annotations

import os
from collections.abc import Sequence
from urllib.parse import urlsplit

import openai

from ddtree_trt.bench.measure import Outcome, Request
from ddtree_trt.errors import DDTreeError, UsageError
from workbench.peers.base import PeerContext, TokenClock


class OpenAIPeer:
    """A server at URL (with or without /v1). Its own end-of-text tokens end a request, as ours do.

    Token counts are the server's `usage`; it reports nothing of speculation, so there is no acceptance length. Whether
    it keeps prompts in a cache is its own setting: it changes the time to the first token, not the decode speed.
    """

    def __init__(self, context: PeerContext, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise UsageError(f"--peer openai takes a URL such as http://localhost:8000/v1, not {url!r}")
        self._url = url if parts.path.strip("/") else f"{url.rstrip('/')}/v1"
        self._client = openai.OpenAI(base_url=self._url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
        try:
            self._model = self._client.models.list().data[0].id
        except (openai.OpenAIError, IndexError) as error:
            raise DDTreeError(f"no model is served at {self._url}: {error}; is the server up?") from error
        self.methods = [parts.netloc]

    def describe(self) -> dict[str, str]:
        return {"url": self._url, "model": self._model}

    def run(self, method: str, prompt_ids: Sequence[int], request: Request) -> Outcome:
        clock, text, tokens = TokenClock(), "", None
        try:
            stream = self._client.completions.create(
                model=self._model,
                prompt=list(prompt_ids),
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                seed=request.seed,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={} if request.stop_token_ids else {"ignore_eos": True},
            )
            for part in stream:
                if part.choices:
                    clock.arrived(1)
                    text += part.choices[0].text
                if part.usage is not None:
                    tokens = part.usage.completion_tokens
        except openai.OpenAIError as error:
            raise DDTreeError(f"{self._url} refused a request: {error}") from error
        if tokens is None:
            raise DDTreeError(f"{self._url} streams no usage (stream_options.include_usage): tokens cannot be counted")
        return clock.outcome(None, output_tokens=tokens, text=text)

    def close(self) -> None:
        self._client.close()
