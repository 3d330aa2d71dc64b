"""Options of the server, with their defaults and ranges. Imports little: the command line reads the defaults."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ddtree_trt.artifact.template_arguments import check_template
from ddtree_trt.errors import MAX_COUNT, MAX_RANKS, MAX_THREADS, UsageError, check_range, shown
from ddtree_trt.runtime.chat.parsers import REASONING_PARSERS, TOOL_PARSERS, check_parser
from ddtree_trt.runtime.params import DeviceRoundsMode


@dataclass(frozen=True)
class ServeOptions:
    """How to serve an engine. Raises UsageError for a value out of range."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one, named in the line printed when the server is ready
    model_name: str | None = None  # what clients call the model; None: the engine's name
    api_key: str | None = None  # what clients must send as a bearer token; None: anyone may call
    max_requests: int = 512  # open HTTP requests, those with slow readers included; more are answered 429
    max_waiting: int = 256  # sequences waiting for a slot; more are answered 429
    max_body_bytes: int = 4 << 20
    request_timeout_s: float = 600.0  # from the request's first byte to the answer's last; 0: none
    stall_timeout_s: float = 30.0  # a client that reads nothing for this long is disconnected
    drain_timeout_s: float = 30.0  # after SIGTERM, before the requests that still run are ended
    default_max_tokens: int | None = None  # of a chat that states no limit; None: the rest of the context
    device_rounds: DeviceRoundsMode = "auto"  # whether rounds stay on the device; on: other requests are refused
    exact: bool | None = None  # every method gives the tokens of `ar`, bit for bit; None: the engine's default
    tensor_parallel_size: int = 1  # GPUs, or processes, over which the target is split
    threads: int = 0  # CPU threads of the engine; 0 chooses
    request_log: bool = True  # a line about every request that ended
    access_log: bool = False  # a line about every HTTP exchange
    allowed_origins: str = ""  # whose pages may call from browsers, with commas between; *: any
    playground: bool = False  # whether /playground is served: a page to chat on and to watch trees
    tool_parser: str = "auto"  # how the model writes calls of tools; auto: recognised by its chat template
    chat_template: str | None = None  # the text of one in place of the engine's own
    reasoning_parser: str = "auto"  # how it writes its reasoning; none: it stays in the content
    vllm_metrics: bool = False  # whether /metrics has the figures under vLLM's names too

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            check_range(name, getattr(self, name), low, high)
        if self.default_max_tokens is not None:
            check_range("default_max_tokens", self.default_max_tokens, 1, MAX_COUNT)
        for origin in self.origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise UsageError(
                    "allowed_origins must be * or origins such as https://app.example:8443 with commas between, not "
                    f"{shown(origin)}"
                )
        if self.api_key is not None and not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise UsageError("the API key must be printable ASCII text that is not empty")
        if self.chat_template is not None:
            check_template(self.chat_template, "chat_template")
        check_parser("tool_parser", self.tool_parser, TOOL_PARSERS)
        check_parser("reasoning_parser", self.reasoning_parser, REASONING_PARSERS)
        if self.model_name == "":
            raise UsageError("model_name must not be empty; leave it out for the engine's own name")

    @property
    def origins(self) -> list[str]:
        return [origin.strip() for origin in self.allowed_origins.split(",")] if self.allowed_origins else []


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/,]+")
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("port", 0, 65535),
    ("max_requests", 1, MAX_COUNT),
    ("max_waiting", 0, MAX_COUNT),
    ("max_body_bytes", 1024, 1 << 30),
    ("request_timeout_s", 0, 86400),
    ("stall_timeout_s", 1, 3600),
    ("drain_timeout_s", 0, 86400),
    ("tensor_parallel_size", 1, MAX_RANKS),
    ("threads", 0, MAX_THREADS),
)
